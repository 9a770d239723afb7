"""What every backend asks of a `SandboxSpec`."""

from __future__ import annotations

from pathlib import PurePosixPath

from rollout.errors import LimitUnsupported, SandboxUnavailable
from rollout.protocols import SandboxSpec

SYSTEM = frozenset(
    {"usr", "etc", "proc", "sys", "dev", "tmp", "bin", "sbin", "lib", "lib32", "lib64", ".trsi"}
)


def check_directories(spec: SandboxSpec) -> None:
    """Refuse working and further directories that can't be mounted.

    Raises:
      SandboxUnavailable: one is not absolute, or the system's.
    """
    for name in (spec.workdir, *spec.directories):
        path = PurePosixPath(name)
        if not path.is_absolute() or ".." in path.parts or path.parts[1:2][:1] == ():
            raise SandboxUnavailable(f"working directory {name!r} is not an absolute path")
        if path.parts[1] in SYSTEM:
            raise SandboxUnavailable(f"working directory {name!r} is one of the system's")


def check_required(backend: str, spec: SandboxSpec, enforced: frozenset[str], hint: str) -> None:
    """Refuse a limit that was asked for and does not hold.

    Raises:
      LimitUnsupported: naming each, with `hint`.
    """
    missing = sorted(spec.require - enforced)
    if missing:
        raise LimitUnsupported(f"{backend} cannot limit {', '.join(missing)} here", hint)
