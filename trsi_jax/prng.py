"""Explicit randomness: one integer seed, and a key for every named purpose.

A key is a pure function of the seed and a path of names and counters, so a resumed run needs no
stored key and two purposes never share one.
"""

from __future__ import annotations

import zlib

import jax
import numpy as np


def stream(seed: int, *path: str | int) -> jax.Array:
    """Key of a purpose: fold each element of `path` into `jax.random.key(seed)`.

    key = fold_in(... fold_in(key(seed), h(path[0])) ..., h(path[-1])), with h(name) = crc32 of
    its UTF-8 bytes and h(counter) = counter.

    Args:
      seed: the run's seed, in [0, 2^32).
      path: names and non-negative counters, for example ("rpr-1", "minibatch", 3).

    Returns:
      A typed PRNG key, a scalar array.

    Raises:
      ValueError: for an empty path or a negative counter.
    """
    if not path:
        raise ValueError("a stream needs at least one name")
    key = jax.random.key(seed)
    for part in path:
        key = jax.random.fold_in(key, _word(part))
    return key


def integer(seed: int, *path: str | int) -> int:
    """A 31-bit integer seed of a purpose, for host code that keeps its own generator."""
    value = seed & 0xFFFFFFFF
    for part in path:
        value = zlib.crc32(_word(part).to_bytes(4, "little"), value)
    return value & 0x7FFFFFFF


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """A NumPy generator of a purpose, for shuffles and packing on the host."""
    return np.random.default_rng(integer(seed, *path))


def _word(part: str | int) -> int:
    if isinstance(part, str):
        return zlib.crc32(part.encode())
    if part < 0:
        raise ValueError(f"a counter in a stream must not be negative, got {part}")
    return part & 0xFFFFFFFF
