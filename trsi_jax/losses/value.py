"""Value losses and how well a critic explains its returns."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trsi_jax.losses.reduce import masked_sum, only, saturate


def value_mse(
    value_t: jax.Array,
    return_t: jax.Array,
    acted_t: jax.Array,
    *,
    n_tokens: float | jax.Array,
    old_value_t: jax.Array | None = None,
    clip: float | None = None,
    weight_t: jax.Array | None = None,
) -> jax.Array:
    """Half the squared error to the returns, optionally clipped around the old values.

    e_t = (V_t - R_t)^2; with a clip c: e_t = max(e_t, (V_old + clip(V_t - V_old, -c, c) - R_t)^2),
    loss = sum_{t acted} w_t e_t / (2 n_tokens).

    Args:
      value_t: [...] float, the critic's value before token t.
      return_t: [...] float, target, treated as data.
      acted_t: [...] bool, true where the policy sampled the token; nothing else is read.
      n_tokens: number of action tokens of the whole global batch.
      old_value_t: [...] float, values that the targets were made with; needed with `clip`.
      clip: half-width > 0 of the trust region, or None.
      weight_t: [...] float, treated as data; None for 1.

    Returns:
      A float scalar.

    Raises:
      ValueError: for a clip without old values, or one that is not positive.

    Source: arXiv 1506.02438; the clip as in the reference code of arXiv 1707.06347.
    """
    if clip is not None and (clip <= 0.0 or old_value_t is None):
        raise ValueError(f"clip must be > 0 and needs old_value_t, got clip={clip}")
    weight_t = jnp.ones_like(return_t) if weight_t is None else weight_t
    value_t, return_t, weight_t = only(acted_t, value_t, return_t, weight_t)
    return_t, weight_t = jax.lax.stop_gradient((return_t, saturate(weight_t)))
    error_t = saturate(value_t - return_t) ** 2
    if clip is not None and old_value_t is not None:
        (old_value_t,) = only(acted_t, old_value_t)
        old_value_t = jax.lax.stop_gradient(old_value_t)
        near_t = old_value_t + jnp.clip(value_t - old_value_t, -clip, clip)
        error_t = jnp.maximum(error_t, saturate(near_t - return_t) ** 2)
    return 0.5 * masked_sum(weight_t * error_t, acted_t, n_tokens=n_tokens)


def value_bce(
    logit_t: jax.Array,
    return_t: jax.Array,
    acted_t: jax.Array,
    *,
    n_tokens: float | jax.Array,
    low: float = 0.0,
    high: float = 1.0,
    weight_t: jax.Array | None = None,
) -> jax.Array:
    """Binary cross-entropy of a sigmoid value head, V = low + (high - low) sigmoid(z).

    y_t = clip((R_t - low) / (high - low), 0, 1),
    loss = sum_{t acted} w_t (log(1 + e^z_t) - y_t z_t) / n_tokens.
    Its optimum is the mean of y, as for the squared error, but its gradient sigmoid(z) - y does
    not die at a confident mistake.

    Args:
      logit_t: [...] float, z before token t.
      return_t: [...] float, target, treated as data; cut to [low, high].
      acted_t: [...] bool, true where the policy sampled the token; nothing else is read.
      n_tokens: number of action tokens of the whole global batch.
      low: smallest return that the head can say.
      high: largest one, > low.
      weight_t: [...] float, treated as data; None for 1.

    Returns:
      A float scalar.

    Raises:
      ValueError: for bounds out of order.

    Source: the soft-label head of arXiv 2609.26355 (PACT); the affine range is our addition.
    """
    _check_range(low, high)
    weight_t = jnp.ones_like(return_t) if weight_t is None else weight_t
    logit_t, return_t, weight_t = only(acted_t, logit_t, return_t, weight_t)
    y_t = jnp.clip((saturate(return_t) - low) / (high - low), 0.0, 1.0)
    y_t, weight_t = jax.lax.stop_gradient((y_t, saturate(weight_t)))
    z_t = saturate(logit_t)
    return masked_sum(weight_t * (jax.nn.softplus(z_t) - y_t * z_t), acted_t, n_tokens=n_tokens)


def value_of_logit(logit_t: jax.Array, *, low: float = 0.0, high: float = 1.0) -> jax.Array:
    """V = low + (high - low) sigmoid(z): the value that a head trained by `value_bce` says.

    Raises:
      ValueError: for bounds out of order.
    """
    _check_range(low, high)
    return low + (high - low) * jax.nn.sigmoid(logit_t)


def _check_range(low: float, high: float) -> None:
    if not low < high:
        raise ValueError(f"need low < high, got {low}, {high}")


def explained_variance(value: jax.Array, target: jax.Array, acted: jax.Array) -> jax.Array:
    """EV = 1 - Var(R - V) / Var(R) over the action tokens.

    1 for a perfect critic, 0 for a constant one, negative for one that adds variance; 0 by
    definition where the targets have no variance (there is nothing to explain).

    Args:
      value: [...] float, values; read where acted.
      target: [...] float, returns; read where acted.
      acted: [...] bool, true where the policy sampled the token.

    Returns:
      A float scalar.
    """
    value, target = only(acted, value, target)
    n = jnp.maximum(jnp.sum(acted), 1)

    def variance(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(acted, x - jnp.sum(x) / n, 0.0) ** 2) / n

    total = variance(target)
    return jnp.where(
        total > 0, 1.0 - variance(target - value) / jnp.where(total > 0, total, 1), 0.0
    )
