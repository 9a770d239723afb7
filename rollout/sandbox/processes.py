"""The processes of a sandbox as the host sees them."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from rollout.sandbox.owner import process_stat


def descendants(pid: int) -> list[int]:
    """Host ids of every process below `pid`.

    Process 1 of a pid namespace adopts every orphan in it, so below it is the whole namespace.
    """
    found: list[int] = []
    pending = [pid]
    while pending:
        parent = pending.pop()
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                children = [int(child) for child in (thread / "children").read_text().split()]
                found += children
                pending += children
    return found


def started_since(pids: list[int], ticks: int) -> list[int]:
    """Those of `pids` that live and were started at `ticks` after boot, or later."""
    stats = {pid: process_stat(pid) for pid in pids}
    return [pid for pid, stat in stats.items() if stat is not None and int(stat[19]) >= ticks]


def inner_pid(pid: int) -> int | None:
    """The id of process `pid` in its own innermost pid namespace."""
    # Not by pathlib: this is on the path of every start.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as status:  # noqa: PTH123
        for line in status:
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1])
    return None


def send_signal(pid: int, number: signal.Signals, namespace: int) -> None:
    """Signal process `pid` if it is of pid namespace `namespace` (an inode number)."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            # Looked up after the descriptor is open: an id taken over by a stranger is seen.
            if Path(f"/proc/{pid}/ns/pid").stat().st_ino == namespace:
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


def offer_for_memory(pid: int) -> None:
    """Have `pid` and what it starts from now on killed first when memory runs out."""
    # The file of a program that can't be read belongs to root, so this takes root.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "wb") as score:  # noqa: PTH123
        score.write(b"500")
