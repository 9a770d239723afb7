"""Sums over action tokens with one explicit denominator, and saturation of extreme inputs."""

from __future__ import annotations

from typing import Literal, get_args

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


Aggregation = Literal["token", "sequence", "constant"]
"""How tokens of a batch are weighed against one another."""


def token_weight(
    acted_bt: jax.Array, *, kind: Aggregation, constant: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Weights and denominator of one way to average a loss over a whole global batch.

    "token": every action token counts the same; w = 1, n = number of action tokens.
    "sequence": every sequence that has action tokens counts the same, w = 1 / its number of them,
    n = number of such sequences. "constant": w = 1, n = `constant` x number of such sequences
    (Dr.GRPO: no preference by length; the constant is the longest allowed answer).

    Args:
      acted_bt: [B, T] bool, true where the policy sampled the token, of the whole global batch.
      kind: "token" (the default of every config), "sequence" or "constant".
      constant: tokens a sequence, > 0, for "constant" only.

    Returns:
      (weight_bt, n): [B, T] float32, 0 where not acted, for a loss's `weight_t`; and the float32
      scalar for its `n_tokens`.

    Raises:
      ValueError: for another kind, or a constant that is missing or out of place.

    Source: arXiv 2503.14476 (token), 2402.03300 (sequence), 2503.20783 (constant).
    """
    chex.assert_rank(acted_bt, 2)
    if (kind == "constant") != (constant is not None and constant > 0):
        raise ValueError(
            f"kind 'constant', and only it, needs constant > 0; got {kind}, {constant}"
        )
    weight_bt = acted_bt.astype(jnp.float32)
    length_b = jnp.sum(weight_bt, axis=1)
    sequences = jnp.sum(length_b > 0).astype(jnp.float32)
    if kind == "token":
        return weight_bt, jnp.sum(length_b)
    if kind == "sequence":
        return weight_bt / jnp.maximum(length_b, 1)[:, None], sequences
    if kind == "constant" and constant is not None:
        return weight_bt, constant * sequences
    raise ValueError(f"kind must be one of {', '.join(get_args(Aggregation))}, got {kind!r}")
