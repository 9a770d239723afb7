"""Sums over action tokens with one explicit denominator, and saturation of extreme inputs."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

MAX_LOG_RATIO = 20.0
"""Log-ratios beyond this are cut (e^20 is about 5e8): such a token has nothing left to say."""

MAX_MAGNITUDE = 1e9
"""Advantages, weights and errors beyond this are cut, so that products and squares stay finite."""


def masked_sum(x_t: jax.Array, acted_t: jax.Array, *, n_tokens: float | jax.Array) -> jax.Array:
    """Sum over action tokens divided by the token count of the whole global batch.

    sum_{t acted} x_t / max(n_tokens, 1). Parts of a batch (micro-batches, devices) that pass the
    same denominator add up to the whole; a fully masked row counts for nothing.

    Args:
      x_t: [...] float, any shape; read where acted.
      acted_t: [...] bool, true where the term counts.
      n_tokens: number of action tokens of the global batch (or another denominator > 0).

    Returns:
      A float scalar.
    """
    chex.assert_equal_shape([x_t, acted_t])
    return jnp.sum(jnp.where(acted_t, x_t, 0.0)) / jnp.maximum(n_tokens, 1)


def only(acted_t: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays in at least float32, with 0 where not acted: no NaN there reaches a gradient."""
    chex.assert_equal_shape([acted_t, *arrays])
    return tuple(
        jnp.where(acted_t, x, 0.0).astype(jnp.promote_types(x.dtype, jnp.float32)) for x in arrays
    )


def saturate(x: jax.Array) -> jax.Array:
    """Cut to +-`MAX_MAGNITUDE`; the gradient beyond is 0."""
    return jnp.clip(x, -MAX_MAGNITUDE, MAX_MAGNITUDE)


def log_ratio(logprob_t: jax.Array, old_logprob_t: jax.Array) -> jax.Array:
    """log pi - log pi_old, cut to +-`MAX_LOG_RATIO`; the gradient beyond is 0."""
    return jnp.clip(logprob_t - old_logprob_t, -MAX_LOG_RATIO, MAX_LOG_RATIO)
