"""The undiscounted Monte-Carlo return against the critic's baseline."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trsi_jax.advantages.recursion import Scalar, checked, return_to_go
from trsi_jax.advantages.registry import register


@register("monte_carlo")
def monte_carlo(
    reward_t: jax.Array,
    value_t: jax.Array,
    acted_t: jax.Array,
    turn_t: jax.Array,
    *,
    bootstrap: Scalar = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Undiscounted return to go, minus the value before the token.

    R_j = sum_{i >= j} r_i + bootstrap over the action tokens,   A_j = R_j - V_j.

    Args:
      reward_t: [T] float, reward at token t; read where acted.
      value_t: [T] float, the critic's value before token t; read where acted.
      acted_t: [T] bool, true where the policy sampled the token.
      turn_t: [T] int, turn of token t; changes nothing here.
      bootstrap: value after the last action token, 0 for an ended episode.

    Returns:
      (advantage_t, return_t), each [T], exactly 0 where not acted. The return does not depend on
      the values. No gradient flows through either.

    Raises:
      ValueError: for an integer reward or value array, or a mask that is not boolean.

    Source: the limit gamma = lambda = 1 of arXiv 1506.02438, eq. 18.
    """
    sequence = checked(reward_t, value_t, acted_t, turn_t)
    return_t = return_to_go(sequence, gamma=1.0, bootstrap=bootstrap)
    return jnp.where(acted_t, return_t - sequence.value_t, 0.0), return_t
