"""Bi-level GAE: a pass over turns sets what a pass inside each turn starts from."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trsi_jax.advantages.recursion import (
    NO_TURN,
    Scalar,
    Sequence,
    check_unit,
    checked,
    with_return,
)
from trsi_jax.advantages.registry import register


@register("bilevel_gae")
def bilevel_gae(
    reward_t: jax.Array,
    value_t: jax.Array,
    acted_t: jax.Array,
    turn_t: jax.Array,
    *,
    gamma: Scalar,
    lam: Scalar,
    gamma_in: Scalar = 1.0,
    lam_in: Scalar = 1.0,
    bootstrap: Scalar = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Two nested recursions: over the last tokens of the turns, then over the tokens of each.

    With e_k the last action token of turn k and rho_k the rewards of turn k before e_k,

      A(e_k) = r(e_k) + gamma (rho_{k+1} + V(e_{k+1})) - V(e_k) + gamma lam A(e_{k+1}),

    and inside a turn A_j = r_j + gamma_in V_{j+1} - V_j + gamma_in lam_in A_{j+1}, started from
    A(e_k). V(e_{K+1}) = bootstrap. With lam = gamma_in = lam_in = 1 it equals TB-GAE.

    Args:
      reward_t: [T] float, reward at token t; read where acted.
      value_t: [T] float, the critic's value before token t; read where acted.
      acted_t: [T] bool, true where the policy sampled the token.
      turn_t: [T] int, turn of token t; read where acted.
      gamma: discount from one turn to the next, in [0, 1].
      lam: mixing over turns, in [0, 1].
      gamma_in: discount an action token inside a turn, in [0, 1].
      lam_in: mixing inside a turn, in [0, 1].
      bootstrap: value after the last action token, 0 for an ended episode.

    Returns:
      (advantage_t, return_t), each [T], exactly 0 where not acted. No gradient flows through.

    Raises:
      ValueError: for an integer reward or value array, a mask that is not boolean, or a setting
        outside [0, 1].

    Source: arXiv 2510.16907 (VAGEN). There rewards stand on the last token of a turn; rho, for
    rewards inside a turn, is our reading.
    """
    check_unit(gamma=gamma, lam=lam, gamma_in=gamma_in, lam_in=lam_in)
    sequence = checked(reward_t, value_t, acted_t, turn_t)
    dtype = sequence.value_t.dtype
    g_out, l_out, g_in, l_in = (jnp.asarray(x, dtype) for x in (gamma, lam, gamma_in, lam_in))

    def back(
        carry: tuple[jax.Array, ...], token: Sequence
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        # Of the turn after the token's, or its own once its last token is passed: the advantage
        # and value of its last token, and its rewards before that. Then the next token.
        end_a, end_v, rewards, next_a, next_v, next_turn = carry
        last = token.turn_t != next_turn
        over_turns = token.reward_t - token.value_t + g_out * (rewards + end_v + l_out * end_a)
        inside = token.reward_t - token.value_t + g_in * (next_v + l_in * next_a)
        advantage = jnp.where(last, over_turns, inside)
        after = (
            jnp.where(last, advantage, end_a),
            jnp.where(last, token.value_t, end_v),
            jnp.where(last, 0.0, rewards + token.reward_t),
            advantage,
            token.value_t,
            token.turn_t,
        )
        kept = tuple(jnp.where(token.acted_t, x, y) for x, y in zip(after, carry, strict=True))
        return kept, jnp.where(token.acted_t, advantage, 0.0)

    zero = jnp.zeros((), dtype)
    bootstrap = jax.lax.stop_gradient(jnp.asarray(bootstrap, dtype))
    start: tuple[jax.Array, ...] = (
        zero,
        bootstrap,
        zero,
        zero,
        zero,
        jnp.asarray(NO_TURN, jnp.int32),
    )
    _, advantage_t = jax.lax.scan(back, start, sequence, reverse=True)
    return with_return(sequence, advantage_t)
