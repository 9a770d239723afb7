"""Per-token estimates of the divergence from a reference policy."""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from trsi_jax.losses.reduce import log_ratio, only

KlKind = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprob_t: jax.Array, ref_logprob_t: jax.Array, acted_t: jax.Array, *, kind: KlKind
) -> jax.Array:
    """Single-sample estimates of KL(pi || pi_ref) at tokens drawn from pi.

    With d_t = log pi_t - log pi_ref_t: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.
    k1 and k3 are unbiased in value, k2 and k3 are never negative; the gradient of k2 is that of
    the divergence.

    Args:
      logprob_t: [...] float, log-prob of the sampled token under the trained policy.
      ref_logprob_t: [...] float, the same under the reference, treated as data.
      acted_t: [...] bool, true where the policy sampled the token.
      kind: "k1", "k2" or "k3".

    Returns:
      [...] float, 0 where not acted.

    Raises:
      ValueError: for another kind.

    Source: J. Schulman, "Approximating KL divergence", 2020.
    """
    logprob_t, ref_logprob_t = only(acted_t, logprob_t, ref_logprob_t)
    d_t = log_ratio(logprob_t, jax.lax.stop_gradient(ref_logprob_t))
    if kind == "k1":
        return d_t
    if kind == "k2":
        return 0.5 * d_t**2
    if kind == "k3":
        return jnp.exp(-d_t) - 1.0 + d_t
    raise ValueError(f"kind must be one of {', '.join(get_args(KlKind))}, got {kind!r}")
