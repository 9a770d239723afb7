"""What a command needs of the process it runs in.

The installation must be whole: the names `sharding` and `rollout` also belong to unrelated
distributions; installing one into the same environment overwrites our files without a word.

Training wants huge pages: a step of XLA's takes its temporaries (167 MB in the tiny preset) from
the system anew, 43,000 page faults with pages of 4 KiB and 500 with huge ones, a fifth of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path

import trsi_jax

SIBLINGS = ("sharding", "rollout")


def clash() -> str | None:
    """What is wrong with the installation and the command that mends it, or None."""
    root = Path(trsi_jax.__file__).resolve().parent.parent
    for name in SIBLINGS:
        try:
            foreign = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            pass
        else:
            return _message(f"the unrelated distribution {name} {foreign.version}", name)
        spec = util.find_spec(name)
        if spec is None or spec.origin is None:
            return f"the package {name} of trsi-jax is missing; mend it with: {_REINSTALL}"
        found = Path(spec.origin).resolve().parent
        if found != root / name:
            return _message(f"another package {name} ({found})", name)
    return None


_REINSTALL = "pip install --force-reinstall --no-deps trsi-jax"


def _message(what: str, name: str) -> str:
    return (
        f"{what} shadows the one of trsi-jax; mend it with:"
        f" pip uninstall --yes {name} && {_REINSTALL}"
    )


_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"


def with_huge_pages(
    environment: Mapping[str, str], *, setting: Path = _THP
) -> dict[str, str] | None:
    """The environment in which glibc's `malloc` asks for transparent huge pages.

    glibc reads it only at the start of a process. Other C libraries, and glibc before 2.35, ignore
    it; no value that a program computes depends on it.

    Args:
      environment: of this process; a `glibc.malloc.hugetlb` of the person's own is left alone.
      setting: the kernel's file. Only under "madvise" must a process ask.

    Returns:
      A new environment for this program to start again in, or None where that changes nothing.
    """
    tunables = environment.get(_TUNABLES, "")
    if _HUGE_PAGES in tunables:
        return None
    try:
        if "[madvise]" not in setting.read_text():
            return None
    except OSError:
        return None
    ours = f"{_HUGE_PAGES}=1"
    return {**environment, _TUNABLES: f"{tunables}:{ours}" if tunables else ours}
