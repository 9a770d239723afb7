"""Control groups, version 1 and 2: one reusable group for every sandbox slot of a backend.

A group is made once and used by one sandbox after the other, so a start costs one write a
controller. Where the kernel or the administrator doesn't permit groups, there are none and the
backend says which limits do not hold.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from rollout.sandbox.owner import remove_cgroup

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
WANTED = ("memory", "pids", "cpu")


@dataclass(slots=True)
class Slot:
    """The groups of one sandbox: controller -> directory (one and the same in version 2)."""

    dirs: dict[str, Path]
    version: int
    _limits: tuple[int, int, float] | None = None

    @property
    def join(self) -> list[str]:
        """Files that a process writes 0 into to enter."""
        # Version 1: moving one's own only thread skips the system-wide lock that a move by
        # process id takes, and with it a grace period of about 10 ms.
        name = "tasks" if self.version == 1 else "cgroup.procs"
        return sorted({str(path / name) for path in self.dirs.values()})

    def limit(self, *, memory_mb: int, pids: int, cpus: float) -> None:
        """Set the limits for the next sandbox."""
        if self._limits == (memory_mb, pids, cpus):
            return
        memory, quota = memory_mb << 20, round(cpus * PERIOD_US)
        if self.version == 2:
            values = {
                "memory": {"memory.max": str(memory), "memory.swap.max": "0"},
                "pids": {"pids.max": str(pids)},
                "cpu": {"cpu.max": f"{quota} {PERIOD_US}"},
            }
        else:
            values = {
                "memory": {"memory.limit_in_bytes": str(memory)},
                "pids": {"pids.max": str(pids)},
                "cpu": {"cpu.cfs_quota_us": str(quota)},
            }
        for controller, path in self.dirs.items():
            for name, value in values[controller].items():
                # No swap accounting: the file is missing, and the memory limit holds without it.
                if name != "memory.swap.max" or (path / name).exists():
                    (path / name).write_text(value)
        self._limits = (memory_mb, pids, cpus)

    def oom_kills(self) -> int:
        """How many processes the kernel has killed here for lack of memory."""
        if "memory" not in self.dirs:
            return 0
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        with open(f"{self.dirs['memory']}/{name}", "rb") as events:  # noqa: PTH123 (every start)
            for line in events:
                key, _, value = line.partition(b" ")
                if key == b"oom_kill":
                    return int(value)
        return 0


@dataclass(slots=True)
class Groups:
    """The control groups of one owner.

    Attributes:
      version: 1 or 2.
      bases: controller -> the owner's group.
      leave: files by which the launcher returns to its own groups after it has moved; None where
        a move is slow (version 2: a system-wide lock, and a grace period of about 10 ms).
    """

    version: int
    bases: dict[str, Path]
    leave: list[str] | None
    _slots: list[Slot] = field(default_factory=list)

    @property
    def controllers(self) -> frozenset[str]:
        """Which of memory, pids and cpu can be limited."""
        return frozenset(self.bases)

    def slot(self, index: int) -> Slot:
        """The groups of slot `index`, made at first use."""
        while len(self._slots) <= index:
            name = f"s{len(self._slots)}"
            dirs = {controller: base / name for controller, base in self.bases.items()}
            for path in set(dirs.values()):
                path.mkdir()
            self._slots.append(Slot(dirs, self.version))
        return self._slots[index]

    def remove(self) -> None:
        """Remove every group of this owner. They must be empty."""
        for base in set(self.bases.values()):
            remove_cgroup(base)
        self._slots.clear()


def _own_paths() -> dict[str, str]:
    """Controller (or "" for version 2) -> path of this process's group below the mount."""
    paths: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                paths[controller] = path.lstrip("/")
    return paths


def parents(root: Path = ROOT) -> tuple[int, dict[str, list[Path]]]:
    """Where an owner's groups may be made: version, and candidates by controller, best first."""
    own = _own_paths()
    if (root / "cgroup.controllers").exists():
        here = root / own.get("", "")
        candidates = [root] if os.geteuid() == 0 else []
        # A group with processes can't have children with limits, its parent can.
        candidates += [path for path in (here.parent, here) if path.is_relative_to(root)]
        return 2, dict.fromkeys(WANTED, candidates)
    found = {name: [root / name / own.get(name, ""), root / name] for name in WANTED}
    return 1, {name: [path for path in paths if path.is_dir()] for name, paths in found.items()}


def roots(root: Path = ROOT) -> list[Path]:
    """Directories below which every owner's groups lie."""
    if (root / "cgroup.controllers").exists():
        return [root]
    return [root / name for name in WANTED]


def mend(root: Path = ROOT) -> str:
    """What gives this process limits by control groups that it has not."""
    if os.geteuid() == 0 and (root / "cgroup.controllers").exists():
        wanted = " ".join(f"+{name}" for name in WANTED)
        return f"run: echo '{wanted}' >{root}/cgroup.subtree_control"
    return "run inside `systemd-run --user --scope`, or as root, for control groups"


def _make(base: Path, controllers: tuple[str, ...], version: int) -> frozenset[str]:
    """Make `base`; which of `controllers` limit its children."""
    base.mkdir()
    if version == 1:
        return frozenset(controllers)
    offered = set((base / "cgroup.controllers").read_text().split())
    usable = [name for name in controllers if name in offered]
    (base / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in usable))
    return frozenset(usable)


def open_groups(mark: str, pid: int, root: Path = ROOT) -> Groups | None:
    """Make the groups of owner `mark`; None where none are permitted.

    Args:
      mark: the owner's mark, the name of the groups.
      pid: the process that will start the sandboxes. In version 2 it is moved into a group of the
        owner: only then may its children enter the others.
      root: mount point of the control group file systems.

    Returns:
      Groups for the controllers that this process may use here.
    """
    version, candidates = parents(root)
    bases: dict[str, Path] = {}
    if version == 2:
        for parent in candidates["memory"]:
            base = parent / mark
            try:
                if usable := _make(base, WANTED, version):
                    (base / "launcher").mkdir()
                    (base / "launcher" / "cgroup.procs").write_text(str(pid))
                    return Groups(2, dict.fromkeys(usable, base), None)
            except OSError:
                pass
            remove_cgroup(base)
        return None
    for controller, paths in candidates.items():
        for parent in paths:
            with contextlib.suppress(OSError):
                _make(parent / mark, (controller,), version)
                bases[controller] = parent / mark
                break
    own = _own_paths()
    leave = [str(root / name / own.get(name, "") / "tasks") for name in bases]
    return Groups(1, bases, leave) if bases else None
