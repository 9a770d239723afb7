"""The supervised loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trsi_jax.losses.reduce import masked_sum, only, saturate


def sft_nll(
    logprob_t: jax.Array,
    acted_t: jax.Array,
    *,
    n_tokens: float | jax.Array,
    weight_t: jax.Array | None = None,
) -> jax.Array:
    """Mean negative log-likelihood of the action tokens.

    loss = -sum_{t acted} w_t log pi_t / n_tokens.

    Args:
      logprob_t: [...] float, log-prob of token t.
      acted_t: [...] bool, true where the token is a target.
      n_tokens: number of target tokens of the whole global batch.
      weight_t: [...] float, treated as data; None for 1.

    Returns:
      A float scalar.
    """
    weight_t = jnp.ones_like(logprob_t) if weight_t is None else weight_t
    logprob_t, weight_t = only(acted_t, logprob_t, weight_t)
    weighted_t = saturate(logprob_t) * jax.lax.stop_gradient(saturate(weight_t))
    return -masked_sum(weighted_t, acted_t, n_tokens=n_tokens)
