"""REINFORCE++: the discounted return to go, no critic."""

from __future__ import annotations

import jax

from trsi_jax.advantages.recursion import Scalar, check_unit, checked, return_to_go
from trsi_jax.advantages.registry import register


@register("reinforce_pp", critic=False)
def reinforce_pp(
    reward_t: jax.Array,
    value_t: jax.Array,
    acted_t: jax.Array,
    turn_t: jax.Array,
    *,
    gamma: Scalar = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """A_j = R_j = r_j + gamma R_{j+1} over the action tokens; the baseline is the whitening.

    An observation neither resets nor discounts the return: turns before it keep their credit.

    Args:
      reward_t: [T] float, reward at token t, a per-token KL penalty included; read where acted.
      value_t: [T] float, not read.
      acted_t: [T] bool, true where the policy sampled the token.
      turn_t: [T] int, turn of token t; changes nothing here.
      gamma: discount an action token, in [0, 1].

    Returns:
      (advantage_t, return_t), equal, each [T], exactly 0 where not acted.

    Raises:
      ValueError: for an integer reward array, a mask that is not boolean, or gamma outside [0, 1].

    Source: arXiv 2501.03262.
    """
    check_unit(gamma=gamma)
    sequence = checked(reward_t, value_t, acted_t, turn_t)
    return_t = return_to_go(sequence, gamma=gamma, bootstrap=0.0)
    return return_t, return_t
