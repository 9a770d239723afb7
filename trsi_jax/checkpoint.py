"""Checkpoints with Orbax: a pytree of arrays a directory, published by rename."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

_STEP = re.compile(r"^\d{6}$")


def save(folder: Path, step: int, tree: Any) -> Path:
    """Write `tree` as `<folder>/<step>`, then drop the older steps.

    The directory appears by one rename, so a kill leaves the previous checkpoint whole.

    Args:
      folder: made if missing.
      step: in [0, 10^6).
      tree: pytree of arrays.

    Returns:
      The new checkpoint's path.

    Raises:
      OSError: the disk has no room for the arrays; nothing was written.
    """
    path = (folder / f"{step:06d}").absolute()
    if not path.exists():
        _check_room(path.parent, tree)
        # Its threads report each array's failure at length, and then the failure is raised.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)
    for older in _steps(folder):
        if older < step:
            shutil.rmtree(folder / f"{older:06d}", ignore_errors=True)
    return path


def _check_room(folder: Path, tree: Any) -> None:
    """Find a full disk before a dozen threads run into it."""
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free < sum(leaf.nbytes for leaf in jax.tree.leaves(tree)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def latest(folder: Path) -> int | None:
    """The newest complete step below `folder`, or None."""
    return max(_steps(folder), default=None)


def restore(folder: Path, step: int, like: Any) -> Any:
    """Read `<folder>/<step>` into the structure, shapes, dtypes and shardings of `like`.

    Args:
      folder: as given to `save`.
      step: a complete step.
      like: pytree of arrays or `jax.ShapeDtypeStruct`.

    Returns:
      The pytree of arrays, bit-equal to what was saved.
    """
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore((folder / f"{step:06d}").absolute(), target)
    return jax.tree.map(_placed_like, restored, like)


def _placed_like(array: Any, like: Any) -> Any:
    # Orbax pins arrays to a device. Where the original was not pinned, a step would compile
    # once more for the same shapes.
    pinned = like.committed if isinstance(like, jax.Array) else getattr(like, "sharding", None)
    return array if pinned or not isinstance(array, jax.Array) else jnp.array(np.asarray(array))


def _steps(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return [int(entry.name) for entry in folder.iterdir() if _STEP.match(entry.name)]
