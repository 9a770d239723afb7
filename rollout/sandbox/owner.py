"""Marks of an owner, and the removal of what dead owners left behind.

A mark names a process beyond doubt: its pid namespace, its pid and its start time. Everything an
owner makes carries its mark: directories and control groups in their name, sandboxes in the
arguments of their process 1. Marks of another pid namespace are never judged.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "trsi-sandbox"
REMOVE_TRIES = 50

_MARK = re.compile(rf"{PREFIX}\.(\d+)\.(\d+)\.(\d+)\.[0-9a-f]+")


def start_time(pid: int) -> int | None:
    """Start of process `pid` in clock ticks since boot; None if there is none."""
    stat = process_stat(pid)
    return None if stat is None else int(stat[19])


def parent_of(pid: int) -> int | None:
    """Parent of process `pid`; None if there is no such process."""
    stat = process_stat(pid)
    return None if stat is None else int(stat[1])


def process_stat(pid: int) -> list[str] | None:
    """Fields 3 and on of /proc/PID/stat; None for a process that is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(") ")[2].split()
    return None if fields[0] in "ZX" else fields


def _pid_namespace(pid: int | str = "self") -> int:
    return Path(f"/proc/{pid}/ns/pid").stat().st_ino


def new_mark() -> str:
    """A fresh mark of the calling process."""
    pid = os.getpid()
    return f"{PREFIX}.{_pid_namespace()}.{pid}.{start_time(pid)}.{os.urandom(4).hex()}"


def is_orphaned(mark: str) -> bool:
    """Whether `mark` is well formed, of this pid namespace, and its owner is gone."""
    match = _MARK.fullmatch(mark)
    if match is None:
        return False
    namespace, pid, started = map(int, match.groups())
    return namespace == _pid_namespace() and start_time(pid) != started


def homes() -> list[Path]:
    """Where owners keep their directory, best first: in memory, else on disk."""
    shared = Path("/dev/shm")
    usable = shared.is_dir() and os.access(shared, os.W_OK | os.X_OK)
    # Programs are run from it.
    usable = usable and not os.statvfs(shared).f_flag & os.ST_NOEXEC
    return [shared] * usable + [Path(tempfile.gettempdir())]


def _marked_processes() -> Iterator[tuple[int, str]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                arguments = Path(entry.path, "cmdline").read_bytes().rstrip(b"\0")
                mark = arguments.rpartition(b"\0")[2].decode(errors="replace")
                if _MARK.fullmatch(mark):
                    yield int(entry.name), mark


def reap(cgroup_roots: list[Path]) -> int:
    """Remove processes, control groups and directories of dead owners.

    Args:
      cgroup_roots: directories below which owners may have made control groups.

    Returns:
      How many of them were removed.
    """
    removed = 0
    here = _pid_namespace()
    for pid, mark in _marked_processes():
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                # A sandbox's first process lives in a namespace of its own; nothing else is hit.
                if is_orphaned(mark) and _pid_namespace(pid) != here:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    removed += 1
            finally:
                os.close(pidfd)
    for root in cgroup_roots:
        for directory, names, _ in os.walk(root):
            for name in [name for name in names if name.startswith(PREFIX)]:
                names.remove(name)
                if is_orphaned(name):
                    removed += remove_cgroup(Path(directory, name))
    for path in (path for home in homes() for path in home.glob(f"{PREFIX}.*")):
        # Another owner may be removing it, too.
        with contextlib.suppress(FileNotFoundError):
            mine = not path.is_symlink() and path.stat().st_uid == os.geteuid()
            if mine and is_orphaned(path.name):
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
    return removed


def remove_cgroup(group: Path) -> bool:
    """Remove a control group and its children, if empty of processes."""
    for _ in range(REMOVE_TRIES):
        try:
            for child in group.iterdir():
                if child.is_dir():
                    child.rmdir()
            group.rmdir()
        except FileNotFoundError:
            return False
        except OSError:
            # A process that is dead for its parent is counted here a little longer.
            time.sleep(0.01)
        else:
            return True
    return False
