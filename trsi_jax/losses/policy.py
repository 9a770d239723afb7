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
    _check_clip(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1.0:
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


def double_sided(
    logprob_t: jax.Array,
    behaviour_logprob_t: jax.Array,
    advantage_t: jax.Array,
    acted_t: jax.Array,
    *,
    n_tokens: float | jax.Array,
    low: float = 0.3,
    high: float = 5.0,
    weight_t: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """Importance weights with a hard mask on both sides, whatever the advantage's sign.

    f(rho) = rho if 1 - low < rho < 1 + high else 0, rho_t = exp(log pi_t - log pi_behaviour_t),
    loss = -sum_{t acted} w_t sg[f(rho_t)] A_t log pi_t / n_tokens, with sg the stop-gradient.

    Args:
      logprob_t: [...] float, log-prob of the sampled token under the policy being trained.
      behaviour_logprob_t: [...] float, the same as recorded when it was sampled.
      advantage_t: [...] float, treated as data.
      acted_t: [...] bool, true where the policy sampled the token; nothing else is read.
      n_tokens: number of action tokens of the whole global batch.
      low: width of the window below 1, in (0, 1].
      high: width of the window above 1, > 0.
      weight_t: [...] float, treated as data; None for 1.

    Returns:
      (loss, metrics): `clip_fraction` (share of tokens dropped), `approx_kl`, `ratio`.

    Raises:
      ValueError: for a window outside its range.

    Source: direct double-sided importance sampling, arXiv 2607.07508 (SAO): (0.3, 5.0) for
    mathematics, (0.8, 3.0) for code. The stop-gradient is our reading.
    """
    if not 0.0 < low <= 1.0 or not high > 0.0:
        raise ValueError(f"need 0 < low <= 1 and high > 0, got {low}, {high}")
    logprob_t, behaviour_logprob_t, advantage_t, weight_t = _inputs(
        logprob_t, behaviour_logprob_t, advantage_t, acted_t, weight_t
    )
    log_rho_t = jax.lax.stop_gradient(log_ratio(logprob_t, behaviour_logprob_t))
    rho_t = jnp.exp(log_rho_t)
    kept_t = (rho_t > 1.0 - low) & (rho_t < 1.0 + high)
    factor_t = jnp.where(kept_t, rho_t, 0.0) * advantage_t
    loss = -masked_sum(weight_t * factor_t * saturate(logprob_t), acted_t, n_tokens=n_tokens)
    metrics = _metrics(log_rho_t, acted_t, n_tokens)
    metrics["clip_fraction"] = masked_sum((~kept_t).astype(jnp.float32), acted_t, n_tokens=n_tokens)
    return loss, metrics


def gspo(
    logprob_t: jax.Array,
    old_logprob_t: jax.Array,
    advantage_t: jax.Array,
    acted_t: jax.Array,
    *,
    n_tokens: float | jax.Array,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    weight_t: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """Clipped surrogate with one ratio a sequence, the geometric mean of its token ratios.

    s = exp(mean_{t acted} (log pi_t - log pi_old_t)),  s_t = sg[s] pi_t / sg[pi_t],
    loss = -sum_{t acted} w_t min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t) / n_tokens.

    Args:
      logprob_t: [..., T] float, log-prob of the sampled token; the last axis is one sequence.
      old_logprob_t: [..., T] float, the same under the policy that the ratio is taken to.
      advantage_t: [..., T] float, treated as data.
      acted_t: [..., T] bool, true where the policy sampled the token; nothing else is read.
      n_tokens: number of action tokens of the whole global batch.
      clip_low: lower clip, in [0, 1].
      clip_high: upper clip, >= 0.
      weight_t: [..., T] float, treated as data; None for 1.

    Returns:
      (loss, metrics): `clip_fraction`, `approx_kl`, `ratio` (of sequences, weighted by length).

    Raises:
      ValueError: for a clip outside its range.

    Source: arXiv 2507.18071, GSPO-token, eq. 13-14, and its clip range.
    """
    _check_clip(clip_low, clip_high)
    logprob_t, old_logprob_t, advantage_t, weight_t = _inputs(
        logprob_t, old_logprob_t, advantage_t, acted_t, weight_t
    )
    n = jnp.maximum(jnp.sum(acted_t, axis=-1, keepdims=True), 1)
    log_rho_t = log_ratio(logprob_t, old_logprob_t)
    log_s = jax.lax.stop_gradient(jnp.sum(log_rho_t, axis=-1, keepdims=True) / n)
    # The value of s, the gradient of the token's own log-prob.
    s_t = jnp.exp(log_s + (logprob_t - jax.lax.stop_gradient(logprob_t)))
    plain_t = s_t * advantage_t
    clipped_t = jnp.clip(s_t, 1.0 - clip_low, 1.0 + clip_high) * advantage_t
    objective_t = weight_t * jnp.minimum(plain_t, clipped_t)
    loss = -masked_sum(objective_t, acted_t, n_tokens=n_tokens)
    metrics = _metrics(jnp.broadcast_to(log_s, acted_t.shape), acted_t, n_tokens)
    metrics["clip_fraction"] = masked_sum(
        (clipped_t < plain_t).astype(jnp.float32), acted_t, n_tokens=n_tokens
    )
    return loss, metrics


def truncated_weight(
    trainer_logprob_t: jax.Array,
    rollout_logprob_t: jax.Array,
    acted_t: jax.Array,
    *,
    cap: float = 2.0,
) -> jax.Array:
    """Truncated importance weights for what the rollout engine computed differently.

    w_t = min(exp(log pi_trainer_t - log pi_rollout_t), cap), under the same weights on both sides.

    Args:
      trainer_logprob_t: [...] float, log-prob by the trainer before the update.
      rollout_logprob_t: [...] float, log-prob as the engine recorded it.
      acted_t: [...] bool, true where the policy sampled the token.
      cap: largest weight, >= 1.

    Returns:
      [...] float, 0 where not acted; no gradient flows through. For a loss's `weight_t`.

    Raises:
      ValueError: for cap < 1.

    Source: truncated importance sampling, Ionides 2008, as RL frameworks use it against
    the mismatch of engine and trainer.
    """
    if cap < 1.0:
        raise ValueError(f"cap must be >= 1, got {cap}")
    trainer_logprob_t, rollout_logprob_t = only(acted_t, trainer_logprob_t, rollout_logprob_t)
    weight_t = jnp.minimum(jnp.exp(log_ratio(trainer_logprob_t, rollout_logprob_t)), cap)
    return jax.lax.stop_gradient(jnp.where(acted_t, weight_t, 0.0))


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not 0.0 <= clip_low <= 1.0 or not clip_high >= 0.0:
        raise ValueError(f"need 0 <= clip_low <= 1 and clip_high >= 0, got {clip_low}, {clip_high}")


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
