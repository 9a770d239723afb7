"""Whitening of advantages over the action tokens of a whole batch."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np


def whiten(advantage: jax.Array, acted: jax.Array, *, eps: float = 1e-8) -> jax.Array:
    """Zero mean and unit spread over the action tokens of the whole batch.

    out = (A - mean) / (std + eps), with mean and std (population form, divided by n) over all
    action tokens. With none or one of them, or with equal advantages, the result is 0: there is
    nothing to prefer.

    Args:
      advantage: [...] float, advantages of the whole global batch; read where acted.
      acted: [...] bool, true where the policy sampled the token.
      eps: added to the standard deviation, > 0.

    Returns:
      [...] of at least float32, exactly 0 where not acted, finite for finite input. No gradient
      flows through.

    Source: common practice; the population form is our choice because it is defined for n = 1.
    """
    chex.assert_equal_shape([advantage, acted])
    dtype = jnp.promote_types(advantage.dtype, jnp.float32)
    x = jax.lax.stop_gradient(jnp.where(acted, advantage, 0.0).astype(dtype))
    n = jnp.maximum(jnp.sum(acted), 1)
    # The largest magnitude is divided out first, so that no square overflows or vanishes.
    scale = jnp.maximum(jnp.max(jnp.abs(x), initial=0.0), float(np.finfo(dtype).tiny))
    x = x / scale
    centred = jnp.where(acted, x - jnp.sum(x) / n, 0.0)
    std = jnp.sqrt(jnp.sum(centred**2) / n)
    # Rounding leaves a spread of some ulps where all advantages are equal.
    noise = 4 * float(np.finfo(dtype).eps)
    return jnp.where(std > noise, centred / (std + eps / scale), 0.0)
