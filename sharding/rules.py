"""Rule tables: which pattern of a leaf's path gets which PartitionSpec, and their checker."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.mesh import AXES


@dataclass(frozen=True)
class Rule:
    """One line of a table.

    Attributes:
      pattern: regular expression that must match the end of a leaf's path ("a/b/c"), from the
        start of a name.
      spec: mesh axes of the last dimensions of the leaf; leading ones (a stack of layers) stay
        whole.
    """

    pattern: str
    spec: P

    def matches(self, path: str) -> bool:
        """Whether the rule speaks of the leaf at `path`."""
        return re.search(rf"(?:^|/)(?:{self.pattern})$", path) is not None


def path_of(keys: Sequence[Any]) -> str:
    """A leaf's path as names joined by "/"."""
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def specs(rules: Sequence[Rule], tree: Any, mesh: Mapping[str, int]) -> Any:
    """The PartitionSpec of every leaf, checked.

    Args:
      rules: a table in which exactly one rule matches each leaf.
      tree: pytree of arrays or of shapes.
      mesh: axis -> size.

    Returns:
      A pytree like `tree` of specs as long as the leaf's rank.

    Raises:
      ValueError: a leaf without a rule or with several, a rule longer than the leaf's rank, an
        unknown axis, an axis used twice, or a dimension that its axes do not divide; names the
        leaf, the axis and the numbers.
    """
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: _spec(rules, path_of(keys), np.shape(leaf), mesh), tree
    )


def _spec(rules: Sequence[Rule], path: str, shape: tuple[int, ...], mesh: Mapping[str, int]) -> P:
    found = [rule for rule in rules if rule.matches(path)]
    if not found:
        raise ValueError(f"no sharding rule matches {path} {list(shape)}")
    if len(found) > 1:
        patterns = ", ".join(repr(rule.pattern) for rule in found)
        raise ValueError(f"{len(found)} sharding rules match {path}: {patterns}")
    (rule,) = found
    lead = len(shape) - len(rule.spec)
    if lead < 0:
        raise ValueError(
            f"rule {rule.pattern!r} names {len(rule.spec)} dimensions, {path} has {list(shape)}"
        )
    spec = P(*([None] * lead), *rule.spec)
    used: list[str] = []
    for dimension, (size, entry) in enumerate(zip(shape, spec, strict=True)):
        axes = axes_of(entry)
        for axis in axes:
            if axis not in AXES:
                raise ValueError(
                    f"rule {rule.pattern!r}: unknown mesh axis {axis!r}; known: {', '.join(AXES)}"
                )
            if axis in used:
                raise ValueError(f"rule {rule.pattern!r} uses mesh axis {axis!r} twice")
            used.append(axis)
        ways = math.prod(mesh.get(axis, 1) for axis in axes)
        if size % ways:
            named = " x ".join(f"{axis} {mesh.get(axis, 1)}" for axis in axes)
            raise ValueError(
                f"{path}: dimension {dimension} of {list(shape)} is not divisible by {named}"
            )
    return spec


def axes_of(entry: Any) -> tuple[str, ...]:
    """Mesh axes of one entry of a spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def shardings(
    mesh: Mesh | AbstractMesh, tree_of_specs: Any, *, memory_kind: str | None = None
) -> Any:
    """A NamedSharding for every spec of a tree."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec, memory_kind=memory_kind),
        tree_of_specs,
        is_leaf=lambda x: isinstance(x, P),
    )


def place(tree: Any, tree_of_shardings: Any) -> Any:
    """Put host arrays on the mesh, each process its own part; works with one process or many.

    Args:
      tree: pytree of host arrays, the same in every process.
      tree_of_shardings: pytree like it.

    Returns:
      The pytree as global arrays.
    """

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        array = np.asarray(leaf)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put, tree, tree_of_shardings)


def device_bytes(tree: Any, tree_of_specs: Any, mesh: Mapping[str, int]) -> int:
    """Bytes of a pytree on one device.

    sum over leaves of size x itemsize / (ways it is cut).

    Args:
      tree: pytree of arrays or shapes with a dtype.
      tree_of_specs: of `specs`.
      mesh: axis -> size.

    Returns:
      Bytes.
    """
    total = 0
    found = jax.tree.leaves(tree_of_specs, is_leaf=lambda x: isinstance(x, P))
    for leaf, spec in zip(jax.tree.leaves(tree), found, strict=True):
        ways = math.prod(mesh.get(axis, 1) for entry in spec for axis in axes_of(entry))
        total += math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize // ways
    return total
