"""Token-level generalised advantage estimation that skips observations."""

from __future__ import annotations

import jax

from trsi_jax.advantages.recursion import Scalar, action_chain, check_unit, checked, with_return
from trsi_jax.advantages.registry import register


@register("gae")
def gae(
    reward_t: jax.Array,
    value_t: jax.Array,
    acted_t: jax.Array,
    turn_t: jax.Array,
    *,
    gamma: Scalar,
    lam: Scalar,
    bootstrap: Scalar = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Skip-observation GAE: decay at every action token, observations are no steps.

    Over the action tokens j = 1..N alone,

      A_j = delta_j + gamma lam A_{j+1},   delta_j = r_j + gamma V_{j+1} - V_j,   R_j = A_j + V_j,

    with V_{N+1} = bootstrap and A_{N+1} = 0.

    Args:
      reward_t: [T] float, reward at token t; read where acted.
      value_t: [T] float, the critic's value before token t; read where acted.
      acted_t: [T] bool, true where the policy sampled the token.
      turn_t: [T] int, turn of token t; changes nothing here.
      gamma: discount an action token, in [0, 1].
      lam: mixing parameter, in [0, 1].
      bootstrap: value after the last action token, 0 for an ended episode.

    Returns:
      (advantage_t, return_t), each [T], exactly 0 where not acted. No gradient flows through.

    Raises:
      ValueError: for an integer reward or value array, a mask that is not boolean, or a setting
        outside [0, 1].

    Source: arXiv 1506.02438, eq. 11 and 16, on the subsequence of action tokens (arXiv
    2607.07508 calls that skip-observation).
    """
    check_unit(gamma=gamma, lam=lam)
    sequence = checked(reward_t, value_t, acted_t, turn_t)
    pair = (gamma, lam)
    return with_return(
        sequence, action_chain(sequence, inside=pair, between=pair, bootstrap=bootstrap)
    )
