"""`trsi doctor`: what this machine can run, and the command that mends what it can't."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer

GIB = 2**30
MEMORY_NEEDED = 3 * GIB
DISK_NEEDED = 1 * GIB
MARKS = {"ok": "[green]ok[/]", "note": "[yellow]--[/]", "blocks": "[red]no[/]"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
      subject: what was looked at.
      detail: what was found.
      mend: the one command or setting that mends it; empty where there is nothing to mend.
      level: "ok"; "note" for what `trsi run` works without; "blocks" for what it cannot.
    """

    subject: str
    detail: str
    mend: str = ""
    level: Literal["ok", "note", "blocks"] = "ok"


def doctor() -> None:
    """Check this machine; exit code 0 if `trsi run` will work here."""
    from trsi_jax.cli.console import console

    screen = console()
    blocked = False
    for finding in examine(Path.cwd()):
        blocked |= finding.level == "blocks"
        screen.print(f"{MARKS[finding.level]}  {finding.subject:<12}", end="")
        screen.print(finding.detail, markup=False, soft_wrap=True)
        if finding.mend:
            screen.print(f"      mend: {finding.mend}", markup=False, soft_wrap=True)
    if blocked:
        screen.print("\n`trsi run` will not work until every line marked no is mended.")
        raise typer.Exit(1)
    screen.print("\n`trsi run configs/tiny.toml` will work here.")


def examine(folder: Path) -> Iterator[Finding]:
    """Every finding, in the order that makes sense to mend them; runs go to `folder`."""
    yield _python()
    yield _installation()
    yield from _jax()
    yield _memory()
    yield _disk(folder)
    yield from _sandboxes()


def _python() -> Finding:
    system = f"{platform.system()} {platform.machine()}"
    return Finding("Python", f"{platform.python_version()} on {system} ({sys.executable})")


def _installation() -> Finding:
    from trsi_jax.cli.environment import clash

    problem = clash()
    if problem is None:
        return Finding("packages", "trsi_jax, sharding and rollout are of one installation")
    what, _, mend = problem.partition("; mend it with: ")
    return Finding("packages", what, mend, level="blocks")


def _jax() -> Iterator[Finding]:
    try:
        import flax
        import jax
        from flax import nnx
    except (ImportError, AttributeError) as error:
        mend = "sh requirements/install.sh (jax and flax must be of one of the locked pairs)"
        yield Finding("jax", f"cannot be imported: {error}", mend, level="blocks")
        return
    yield Finding("jax", f"{jax.__version__} with flax {flax.__version__} ({nnx.__name__})")
    try:
        devices = jax.devices()
    except RuntimeError as error:
        mend = "unset JAX_PLATFORMS"
        yield Finding("devices", " ".join(str(error).split()), mend, level="blocks")
        return
    kinds = sorted({device.device_kind for device in devices})
    found = f"{len(devices)} x {devices[0].platform} ({', '.join(kinds)})"
    idle = devices[0].platform == "cpu" and Path("/dev/nvidia0").exists()
    if idle:
        mend = f"{sys.executable} -m pip install 'trsi-jax[cuda]'"
        yield Finding("devices", f"{found}, but a GPU lies idle", mend, level="note")
    else:
        yield Finding("devices", found)


def _memory() -> Finding:
    free = available_memory()
    if free is None:
        return Finding("memory", "unknown: no /proc/meminfo here")
    detail = f"{free / GIB:.1f} GiB available"
    if free < MEMORY_NEEDED:
        need = f"{detail}; a run of configs/tiny.toml takes up to {MEMORY_NEEDED // GIB}"
        mend = "close other programs, or raise the container's limit"
        return Finding("memory", need, mend, level="note")
    return Finding("memory", detail)


def available_memory() -> int | None:
    """Bytes that a new process may use: of the machine, or of its cgroup if that is less."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    detail = f"{free / GIB:.1f} GiB free in {folder}"
    if not os.access(folder, os.W_OK):
        mend = "change to a folder of yours, or give one with --out"
        return Finding("disk", f"{folder} is not writable", mend, level="blocks")
    if free < DISK_NEEDED:
        need = f"{detail}; a run needs {DISK_NEEDED // GIB}"
        return Finding(
            "disk", need, "free some space, or give --out on another disk", level="blocks"
        )
    return Finding("disk", detail)


def _sandboxes() -> Iterator[Finding]:
    import asyncio

    from rollout.sandbox import probe

    found = asyncio.run(probe())
    works = any(backend.works for backend in found)
    for backend in found:
        if backend.works:
            limits = ", ".join(sorted(backend.enforced))
            detail = (
                f"a command ran in a sandbox after {1000 * backend.seconds:.0f} ms; "
                f"enforced: {limits}"
            )
            yield Finding(backend.name, detail, backend.hint, "note" if backend.hint else "ok")
        else:
            # One backend is enough for what `trsi run` does by default.
            needed = f"{backend.reason}; only tasks with an image of their own need it"
            detail = needed if works and backend.name == "docker" else backend.reason
            yield Finding(backend.name, detail, backend.hint, "note" if works else "blocks")
