"""Policy losses on per-token log-probs; every sum has one explicit global denominator.

Each returns (loss, metrics). Metrics are sums over the same denominator, so those of
micro-batches add up like the loss does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trsi_jax.losses.reduce import log_ratio, masked_sum, only, saturate

Metrics = dict[str, jax.Array]


def ppo_clip(
    logprob_t: jax.Array,
    old_logprob_t: jax.Array,
    advantage_t: jax.Array,
    acted_t: jax.Array,
    *,
    n_tokens: float | jax.Array,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    weight_t: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """PPO's clipped surrogate, with asymmetric and dual clip as options.

    rho_t = exp(log pi_t - log pi_old_t),
    J_t = min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t),
    for A_t < 0 with a dual clip c: J_t = max(J_t, c A_t),
    loss = -sum_{t acted} w_t J_t / n_tokens.

    Args:
      logprob_t: [...] float, log-prob of the sampled token under the policy being trained.
      old_logprob_t: [...] float, the same under the policy that the ratio is taken to.
      advantage_t: [...] float, treated as data.
      acted_t: [...] bool, true where the policy sampled the token; nothing else is read.
      n_tokens: number of action tokens of the whole global batch.
      clip_low: lower clip, in [0, 1].
      clip_high: upper clip, >= 0.
      dual_clip: bound c > 1 on the ratio at negative advantages; None for no bound.
      weight_t: [...] float, importance or aggregation weights, treated as data; None for 1.

    Returns:
      (loss, metrics): `clip_fraction`, `approx_kl` (k3 of old against new), `ratio`.

    Raises:
      ValueError: for a clip outside its range.

    Source: arXiv 1707.06347, eq. 7; dual clip arXiv 1912.09729, eq. 5; asymmetric clip arXiv
    2503.14476.
    """
    if not 0.0 <= clip_low <= 1.0 or clip_high < 0.0:
        raise ValueError(f"need 0 <= clip_low <= 1 and clip_high >= 0, got {clip_low}, {clip_high}")
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip must be > 1, got {dual_clip}")
    logprob_t, old_logprob_t, advantage_t, weight_t = _inputs(
        logprob_t, old_logprob_t, advantage_t, acted_t, weight_t
    )
    log_rho_t = log_ratio(logprob_t, old_logprob_t)
    rho_t = jnp.exp(log_rho_t)
    plain_t = rho_t * advantage_t
    clipped_t = jnp.clip(rho_t, 1.0 - clip_low, 1.0 + clip_high) * advantage_t
    objective_t = jnp.minimum(plain_t, clipped_t)
    if dual_clip is not None:
        bounded_t = jnp.maximum(objective_t, dual_clip * advantage_t)
        objective_t = jnp.where(advantage_t < 0, bounded_t, objective_t)
    loss = -masked_sum(weight_t * objective_t, acted_t, n_tokens=n_tokens)
    metrics = _metrics(log_rho_t, acted_t, n_tokens)
    metrics["clip_fraction"] = masked_sum(
        (clipped_t < plain_t).astype(jnp.float32), acted_t, n_tokens=n_tokens
    )
    return loss, metrics


def _inputs(
    logprob_t: jax.Array,
    old_logprob_t: jax.Array,
    advantage_t: jax.Array,
    acted_t: jax.Array,
    weight_t: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Masked inputs in float32; everything but the trained log-prob is data."""
    weight_t = jnp.ones_like(advantage_t) if weight_t is None else weight_t
    logprob_t, old_logprob_t, advantage_t, weight_t = only(
        acted_t, logprob_t, old_logprob_t, advantage_t, weight_t
    )
    data = jax.lax.stop_gradient((old_logprob_t, saturate(advantage_t), saturate(weight_t)))
    return logprob_t, *data


def _metrics(log_rho_t: jax.Array, acted_t: jax.Array, n_tokens: float | jax.Array) -> Metrics:
    log_rho_t = jax.lax.stop_gradient(log_rho_t)
    rho_t = jnp.exp(log_rho_t)
    return {
        "approx_kl": masked_sum(rho_t - 1.0 - log_rho_t, acted_t, n_tokens=n_tokens),
        "ratio": masked_sum(rho_t, acted_t, n_tokens=n_tokens),
    }
