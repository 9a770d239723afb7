"""Kill -9 in each stage, run again: the end is that of a run nobody disturbed.

One run is killed five times, once in each stage, and goes on after each; another is left alone.
The killed run's processes are descendants of this one whatever becomes of their parents, for this
process is their subreaper.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from rollout.store.reader import SegmentReader
from tests.small_recursion import CONFIG, OVERRIDES, ROOT, STAGES, without_seconds
from trsi_jax import checkpoint

PR_SET_CHILD_SUBREAPER = 36
STAGE_LIMIT_S = 300.0
GONE_LIMIT_S = 15.0


def start(out: Path) -> subprocess.Popen[bytes]:
    """The command, in a process group of its own."""
    options = [part for override in OVERRIDES for part in ("-o", override)]
    with (out.parent / f"{out.name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "trsi_jax.cli.main", "run", CONFIG, "--out", out, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )


def log_of(out: Path) -> str:
    return (out.parent / f"{out.name}.log").read_text()[-3000:]


def finish(out: Path) -> None:
    process = start(out)
    assert process.wait(2 * STAGE_LIMIT_S) == 0, log_of(out)


def descendants() -> dict[int, str]:
    """Pid -> command line of every process below this one; zombies of ours are collected."""
    parent_of = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(errors="replace").rpartition(") ")[2].split()
            except OSError:
                continue
            parent_of[int(entry.name)] = (int(fields[1]), fields[0])
    below = {os.getpid()}
    while True:
        more = {pid for pid, (parent, _) in parent_of.items() if parent in below} - below
        if not more:
            break
        below |= more
    found = {}
    for pid in below - {os.getpid()}:
        if parent_of[pid][1] == "Z":
            if parent_of[pid][0] == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            continue
        try:
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


@lru_cache
def reader_of(out: Path) -> SegmentReader:
    return SegmentReader(out / "store")


def segments(out: Path, stage: str) -> tuple[str, ...]:
    names = reader_of(out).segments()
    return tuple(n for n in names if n.startswith((f"{stage}/", f"evaluation/{stage}.")))


def traces(out: Path, stage: str) -> int:
    """How many things a stage has committed so far; it grows while the stage works."""
    partial = out / "checkpoints" / f"{stage}.partial"
    steps = len(list(partial.iterdir())) if partial.is_dir() else 0
    return steps + len(segments(out, stage))


def finished(out: Path, stage: str) -> bool:
    return (out / "stages" / f"{stage}.json").exists()


def last_part(out: Path, stage: str) -> bool:
    """Whether nothing but the last training and the evaluation is left to do."""
    if stage == "base":
        return checkpoint.latest(out / "checkpoints" / "base.partial") is not None
    if stage.startswith("rsr"):
        return f"{stage}/replay" in segments(out, stage)
    return any(name.startswith(f"{stage}/iteration-001") for name in segments(out, stage))


def kill_inside(out: Path, stage: str, seconds: float) -> set[int]:
    """Run until `stage` has been under way for `seconds`, then kill the whole process group.

    Returns:
      The processes that the run had.
    """
    before = STAGES[: STAGES.index(stage)]
    process = start(out)
    limit = time.monotonic() + STAGE_LIMIT_S
    while not (all(finished(out, name) for name in before) and (out / "config.toml").exists()):
        assert process.poll() is None, log_of(out)
        assert time.monotonic() < limit, log_of(out)
        time.sleep(0.05)
    moment = time.monotonic() + seconds
    # On a machine that has become faster the drawn moment may come too late.
    while time.monotonic() < moment and not last_part(out, stage):
        assert process.poll() is None, log_of(out)
        time.sleep(0.1)
    inside = not finished(out, stage)
    had = set(descendants())
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert inside, f"{stage} was over before {seconds:.1f} s\n{log_of(out)}"
    return had


def nothing_left() -> dict[int, str]:
    limit = time.monotonic() + GONE_LIMIT_S
    while (left := descendants()) and time.monotonic() < limit:
        time.sleep(0.1)
    return left


@pytest.mark.kill
@pytest.mark.timeout(1800)
def test_a_run_killed_in_every_stage_ends_like_one_that_was_not(tmp_path: Path) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began = time.perf_counter()
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    finish(undisturbed)
    assert nothing_left() == {}
    expected = without_seconds(undisturbed)
    # The moment is drawn from the middle of the stage's own duration.
    seed = int.from_bytes(os.urandom(4), "little")
    rng = np.random.default_rng(seed)
    print(f"seed of the moments {seed}; undisturbed {time.perf_counter() - began:.0f} s")
    for stage in STAGES:
        seconds = float(rng.uniform(0.1, 0.7)) * seconds_of(undisturbed, stage)
        had = kill_inside(killed, stage, seconds)
        kept = traces(killed, stage)
        assert nothing_left() == {}, f"left by the run killed in {stage}"
        print(f"killed in {stage} after {seconds:.1f} s: {len(had)} processes, {kept} commits kept")
        assert not (killed / "summary.json").exists()
    finish(killed)
    assert nothing_left() == {}
    assert without_seconds(killed) == expected
    print(f"all {time.perf_counter() - began:.0f} s")


def seconds_of(run: Path, stage: str) -> float:
    record = json.loads((run / "stages" / f"{stage}.json").read_text())
    return float(record["row"]["seconds"])
