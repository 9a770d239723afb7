"""GAE whose mixing parameter grows with the number of action tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trsi_jax.advantages.recursion import Scalar, action_chain, check_unit, checked, with_return
from trsi_jax.advantages.registry import register


@register("length_adaptive_gae")
def length_adaptive_gae(
    reward_t: jax.Array,
    value_t: jax.Array,
    acted_t: jax.Array,
    turn_t: jax.Array,
    *,
    gamma: Scalar = 1.0,
    alpha: Scalar = 0.05,
    lam_critic: Scalar = 1.0,
    bootstrap: Scalar = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Skip-observation GAE with lambda = 1 - 1 / (alpha N), N the number of action tokens.

    The horizon over which credit mixes is thus alpha N tokens. lambda is cut to [0, 1]; returns
    are those of `lam_critic`.

    Args:
      reward_t: [T] float, reward at token t; read where acted.
      value_t: [T] float, the critic's value before token t; read where acted.
      acted_t: [T] bool, true where the policy sampled the token.
      turn_t: [T] int, turn of token t; changes nothing here.
      gamma: discount an action token, in [0, 1].
      alpha: horizon as a share of the length, > 0.
      lam_critic: mixing for the returns, in [0, 1].
      bootstrap: value after the last action token, 0 for an ended episode.

    Returns:
      (advantage_t, return_t), each [T], exactly 0 where not acted. No gradient flows through.

    Raises:
      ValueError: for an integer reward or value array, a mask that is not boolean, or a setting
        out of range.

    Source: arXiv 2504.05118 (VAPO), alpha = 0.05; arXiv 2607.07508 (SAO) uses alpha = 1.5.
    """
    check_unit(gamma=gamma, lam_critic=lam_critic)
    if isinstance(alpha, (int, float)) and not alpha > 0:
        raise ValueError(f"alpha must be > 0, got {alpha}")
    sequence = checked(reward_t, value_t, acted_t, turn_t)
    n = jnp.maximum(jnp.sum(sequence.acted_t), 1).astype(sequence.value_t.dtype)
    pair = (gamma, jnp.clip(1.0 - 1.0 / (alpha * n), 0.0, 1.0))
    target = (gamma, lam_critic)
    advantage_t = action_chain(sequence, inside=pair, between=pair, bootstrap=bootstrap)
    _, return_t = with_return(
        sequence, action_chain(sequence, inside=target, between=target, bootstrap=bootstrap)
    )
    return advantage_t, return_t
