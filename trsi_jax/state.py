"""Train state: arrays only, replaced and never mutated."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What one trained network needs to go on.

    Attributes:
      step: [] int32, updates made.
      params: pytree of arrays.
      opt_state: the optimizer's pytree.
    """

    step: jax.Array
    params: Any
    opt_state: Any


def create(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """A state at step 0 with a fresh optimizer."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def apply_gradients(
    state: TrainState,
    gradients: Any,
    *,
    optimizer: optax.GradientTransformation,
    learning_rate: jax.Array,
) -> TrainState:
    """One update: p <- p - learning_rate * u, with u from the optimizer.

    Args:
      state: the state before.
      gradients: pytree like `state.params`.
      optimizer: as made by `optim.adamw`.
      learning_rate: [] float32.

    Returns:
      The state after, one step on.
    """
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = jax.tree.map(
        lambda p, u: (p - learning_rate * u).astype(p.dtype), state.params, updates
    )
    return TrainState(state.step + 1, params, opt_state)


def digest(params: Any) -> str:
    """SHA-256 over paths, dtypes, shapes and bytes of a pytree, as 16 hex digits."""
    sha = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        array = np.asarray(leaf)
        sha.update(f"{jax.tree_util.keystr(path)}|{array.dtype}|{array.shape}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()[:16]
