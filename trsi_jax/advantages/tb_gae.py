"""Turn-boundary generalised advantage estimation, Terminal-RSI's estimator."""

from __future__ import annotations

import jax

from trsi_jax.advantages.recursion import Scalar, action_chain, check_unit, checked, with_return
from trsi_jax.advantages.registry import register


@register("tb_gae")
def tb_gae(
    reward_t: jax.Array,
    value_t: jax.Array,
    acted_t: jax.Array,
    turn_t: jax.Array,
    *,
    gamma: Scalar,
    lam: Scalar,
    lam_in: Scalar = 1.0,
    bootstrap: Scalar = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """TB-GAE: a baseline at every token, decay only where the turn changes.

    Over the action tokens j = 1..N alone,

      delta_j = r_j + g_j V_{j+1} - V_j,   A_j = delta_j + g_j l_j A_{j+1},   R_j = A_j + V_j,

    with (g_j, l_j) = (gamma, lam) if token j + 1 belongs to another turn than j, else
    (1, lam_in). V_{N+1} = bootstrap, which counts as the value of a turn that would have followed.
    With lam_in = 1 a turn telescopes: A_j = (rewards from j to the turn's end) + C - V_j, with one
    C a turn. One turn, or gamma = lam = 1: the undiscounted token estimator.

    Args:
      reward_t: [T] float, reward at token t; read where acted.
      value_t: [T] float, the critic's value before token t; read where acted.
      acted_t: [T] bool, true where the policy sampled the token.
      turn_t: [T] int, turn of token t; read where acted.
      gamma: discount from one turn to the next, in [0, 1].
      lam: mixing from one turn to the next, in [0, 1].
      lam_in: mixing inside a turn, in [0, 1].
      bootstrap: value after the last action token: 0 for an ended episode, the critic's value for
        a truncated one.

    Returns:
      (advantage_t, return_t), each [T] of at least float32, exactly 0 where not acted. No
      gradient flows through either.

    Raises:
      ValueError: for an integer reward or value array, a mask that is not boolean, or a setting
        outside [0, 1].

    Source: arXiv 2610.22192 describes it in words (token-level baseline kept, decay between
    turns, observations skipped); the recursion, the inner pair and the bootstrap are our reading.
    """
    check_unit(gamma=gamma, lam=lam, lam_in=lam_in)
    sequence = checked(reward_t, value_t, acted_t, turn_t)
    advantage_t = action_chain(
        sequence, inside=(1.0, lam_in), between=(gamma, lam), bootstrap=bootstrap
    )
    return with_return(sequence, advantage_t)
