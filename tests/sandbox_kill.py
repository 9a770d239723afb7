"""Kills owners of sandboxes at random moments, and looks for what they left behind.

    python -m tests.sandbox_kill --backend bubblewrap --rounds 200

Some owners at a time start sandboxes, run commands, move files and close them, without end. Each is
killed with SIGKILL at a moment of its own. Then nothing that carries its mark may be left: no
processes, containers, mounts, control groups, directories. An owner that lives on keeps its sandbox
and the state in it all the while.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

from rollout.errors import SandboxError
from rollout.protocols import SandboxSpec
from rollout.sandbox import cgroups, make_backend, owner
from rollout.sandbox.docker import OWNER_LABEL, reap
from rollout.sandbox.engine import Engine, default_host

SETTLE_S = 60.0
OWNER_S = 120.0


async def work(name: str) -> None:
    """What an owner does until it is killed."""
    backend = make_backend(name)
    while True:
        # A busy machine may miss a start.
        with contextlib.suppress(SandboxError):
            box = await backend.start(SandboxSpec())
            await box.put_files({"a/b": b"x" * 1000})
            await box.exec("setsid sleep 77 & sleep 78 & echo $RANDOM >c")
            await box.snapshot()
            await box.close()


def owner_main(name: str) -> None:
    """An owner's process, which ends by itself where nobody kills it."""
    with contextlib.suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(work(name), OWNER_S))


class Search:
    """Looks for what carries an owner's mark, on this machine and in the engine."""

    def __init__(self, engine: Engine | None) -> None:
        self.engine = engine

    def containers(self, pid: int) -> dict[str, str]:
        """Id -> state of the containers of the owner with this process id."""
        if self.engine is None:
            return {}
        found = self.engine.client.containers(all=True, filters={"label": OWNER_LABEL})
        return {
            c["Id"]: c["State"] for c in found if c["Labels"][OWNER_LABEL].split(".")[2] == str(pid)
        }

    def left(self, pid: int, known: set[str]) -> list[str]:
        """Everything that is left of the owner, `known` being ids of containers it had."""
        here = f"{owner.PREFIX}.{Path('/proc/self/ns/pid').stat().st_ino}.{pid}."
        left = [f"process {p}" for p, mark in owner._marked_processes() if mark.startswith(here)]
        left += [str(path) for home in owner.homes() for path in home.glob(f"{here}*")]
        named = list(groups())
        left += [path for path in named if f"/{here}" in path]
        containers = self.containers(pid)
        left += [f"container {c[:12]} ({state})" for c, state in containers.items()]
        for container in known | set(containers):
            mounts = Path("/proc/self/mounts").read_text()
            left += [f"mount {line}" for line in mounts.splitlines() if container in line]
            left += [path for path in named if container in path]
        return left

    def reap(self) -> None:
        """What every start and every end of an owner does."""
        owner.reap(cgroups.roots())
        if self.engine is not None:
            reap(self.engine)


def groups() -> Iterator[str]:
    """Every control group, while others come and go."""
    for root in cgroups.roots():
        for folder, names, _ in os.walk(root):
            yield from (f"{folder}/{name}" for name in names)


async def kill_one(process: BaseProcess, delay_s: float, search: Search) -> bool:
    """Kill an owner and wait until nothing of it is left; whether it had anything.

    Raises:
      AssertionError: something stayed, or the owner had ended by itself.
    """
    await asyncio.sleep(delay_s)
    assert process.is_alive(), "an owner ended by itself"
    pid = process.pid
    known = set(search.containers(pid))
    had = bool(known or search.left(pid, set()))
    process.kill()
    process.join()
    deadline = time.monotonic() + SETTLE_S
    while left := search.left(pid, known):
        assert time.monotonic() < deadline, f"owner {pid} left {left}"
        await asyncio.sleep(0.3)
        search.reap()
    return had


async def rounds(name: str, total: int, at_once: int, longest_s: float, seed: int) -> None:
    """Kill `total` owners; raises AssertionError for the first that left something."""
    engine = Engine(default_host()) if name == "docker" else None
    if engine is not None:
        engine.connect()
    search = Search(engine)
    spawn = multiprocessing.get_context("forkserver")
    spawn.set_forkserver_preload(["rollout.sandbox"])
    dice = random.Random(seed)
    backend = make_backend(name)
    survivor = await backend.start(SandboxSpec(lifetime_s=3600.0))
    await survivor.exec("cd /tmp; kept=1; sleep 3000 & child=$!")
    begun = time.monotonic()
    gate = asyncio.Semaphore(at_once)

    async def one() -> bool:
        async with gate:
            process = spawn.Process(target=owner_main, args=(name,), daemon=True)
            process.start()
            return await kill_one(process, dice.uniform(0.0, longest_s), search)

    found = 0
    for batch in range(0, total, 4 * at_once):
        count = min(4 * at_once, total - batch)
        found += sum(await asyncio.gather(*(one() for _ in range(count))))
        said = await survivor.exec("pwd; echo $kept; kill -0 $child && echo lives")
        assert said.output == b"/tmp\n1\nlives\n", said
        print(f"{name}: {batch + count} of {total} killed", flush=True)
    assert found > total // 4, f"only {found} owners had anything when they were killed"
    await survivor.close()
    await backend.aclose()
    if engine is not None:
        engine.close()
    print(
        f"{name}: killed {total} owners in {time.monotonic() - begun:.0f} s, {found} of them with "
        "sandboxes; nothing is left of any, and the survivor kept its state",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("bubblewrap", "docker"), default="bubblewrap")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--longest", type=float, default=1.0, help="seconds until the last kill")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    asyncio.run(
        rounds(options.backend, options.rounds, options.at_once, options.longest, options.seed)
    )


if __name__ == "__main__":
    main()
