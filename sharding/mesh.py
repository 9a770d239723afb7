"""Device meshes with four named axes, and the topologies that are known by name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh

AXES = ("data", "fsdp", "tensor", "sequence")
"""data: rows, parameters whole. fsdp: rows, parameters cut. tensor: heads, channels, vocabulary.
sequence: tokens of a row, parameters cut as by fsdp."""

GIB = 2**30


@dataclass(frozen=True)
class Generation:
    """One kind of accelerator.

    Attributes:
      platform: as JAX names it.
      dimensions: extents in a topology's name, "AxB" or "AxBxC".
      devices_per_chip: what JAX counts as devices.
      hbm_bytes: memory of one device; None for host memory, which has no fixed limit.
      compilable: whether a program can be compiled for it with no device present.
    """

    platform: str
    dimensions: int
    devices_per_chip: int
    hbm_bytes: int | None
    compilable: bool


GENERATIONS: Mapping[str, Generation] = {
    "v5e": Generation("tpu", 2, 1, 16 * GIB, True),
    "v5p": Generation("tpu", 3, 1, 95 * GIB, True),
    "v6e": Generation("tpu", 2, 1, 32 * GIB, True),
    "tpu7x": Generation("tpu", 3, 2, 96 * GIB, True),
    "h200": Generation("cuda", 1, 1, 141 * 10**9, False),
    "cpu": Generation("cpu", 1, 1, None, True),
}


@dataclass(frozen=True)
class Topology:
    """A named set of devices, such as "v5p:4x4x4"; none of them need be present.

    Attributes:
      name: "GENERATION:EXTENTS".
      generation: what one device is.
      devices: how many there are.
    """

    name: str
    generation: Generation
    devices: int


def topology(name: str) -> Topology:
    """The topology of a name.

    Args:
      name: "v5e:AxB", "v6e:AxB", "v5p:AxBxC", "tpu7x:AxBxC", "h200:N" or "cpu:N".

    Returns:
      The topology.

    Raises:
      ValueError: for an unknown generation or extents of the wrong form; names the known ones.
    """
    kind, _, extents = name.partition(":")
    known = ", ".join(_form(k, g) for k, g in GENERATIONS.items())
    if kind not in GENERATIONS:
        raise ValueError(f"unknown topology {name!r}; known: {known}")
    generation = GENERATIONS[kind]
    form = "x".join([r"[1-9][0-9]*"] * generation.dimensions)
    if not re.fullmatch(form, extents):
        raise ValueError(f"topology {name!r} is not of the form {_form(kind, generation)}")
    chips = math.prod(int(n) for n in extents.split("x"))
    return Topology(name, generation, chips * generation.devices_per_chip)


def _form(kind: str, generation: Generation) -> str:
    return f"{kind}:{'x'.join('ABC'[: generation.dimensions])}"


def mesh_shape(shape: Mapping[str, int]) -> dict[str, int]:
    """All four axes in their order, 1 where not given.

    Raises:
      ValueError: for an unknown axis or a size below 1.
    """
    for axis, size in shape.items():
        if axis not in AXES:
            raise ValueError(f"unknown mesh axis {axis!r}; known: {', '.join(AXES)}")
        if size < 1:
            raise ValueError(f"mesh axis {axis!r} has size {size}, must be at least 1")
    return {axis: shape.get(axis, 1) for axis in AXES}


def make_mesh(shape: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the four axes.

    Neighbours in the list are neighbours in the machine, so the axes that talk most vary fastest:
    tensor, then sequence, then fsdp, then data.

    Args:
      shape: axis -> size; 1 where not given.
      devices: in the order of the machine; those of the process if None.

    Returns:
      The mesh, its axes in the order of `AXES`.

    Raises:
      ValueError: for an unknown axis, or another number of devices than the sizes multiply to.
    """
    sizes = mesh_shape(shape)
    found = list(jax.devices() if devices is None else devices)
    wanted = math.prod(sizes.values())
    if wanted != len(found):
        shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(f"mesh {shown} needs {wanted} devices, there are {len(found)}")
    order = ("data", "fsdp", "sequence", "tensor")
    grid = np.array(found, dtype=object).reshape([sizes[axis] for axis in order])
    return Mesh(np.transpose(grid, [order.index(axis) for axis in AXES]), AXES)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which a value inside `jax.shard_map` differs; empty elsewhere."""
    axes: frozenset[str] = jax.typeof(x).mat.varying
    return axes


def vary_over(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """`x`, marked as varying over the axes too; the transpose sums over those that it did not."""
    missing = tuple(sorted(frozenset(axes) - varying_axes(x)))
    varying: jax.Array = lax.pcast(x, missing, to="varying") if missing else x
    return varying


def vary_like(x: jax.Array, *others: jax.Array) -> jax.Array:
    """`x`, marked as varying over every mesh axis that one of the others varies over.

    Inside `jax.shard_map` the carry of a scan must enter as it leaves; elsewhere nothing happens.
    """
    return vary_over(x, frozenset[str]().union(*map(varying_axes, others)))
