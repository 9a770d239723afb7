"""Whether this installation is whole: `sharding` and `rollout` must be ours.

Both names also belong to unrelated distributions; installing one into the same environment
overwrites our files without a word.
"""

from __future__ import annotations

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
