"""GAE over whole turns: one value, one advantage a turn."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trsi_jax.advantages.recursion import NO_TURN, Scalar, Sequence, check_unit, checked
from trsi_jax.advantages.registry import register


@register("turn_gae")
def turn_gae(
    reward_t: jax.Array,
    value_t: jax.Array,
    acted_t: jax.Array,
    turn_t: jax.Array,
    *,
    gamma: Scalar,
    lam: Scalar,
    bootstrap: Scalar = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Macro-step GAE: a turn is one action, and all of its tokens share one advantage.

    Over the turns k = 1..K that have action tokens, V_k the value before the first of them and
    r_k the sum of their rewards,

      A_k = delta_k + gamma lam A_{k+1},   delta_k = r_k + gamma V_{k+1} - V_k,   R_k = A_k + V_k,

    with V_{K+1} = bootstrap. Every action token of turn k gets A_k and the return R_k. Values at
    later tokens of a turn are not read.

    Args:
      reward_t: [T] float, reward at token t; read where acted.
      value_t: [T] float, the critic's value before token t; read at the first token of a turn.
      acted_t: [T] bool, true where the policy sampled the token.
      turn_t: [T] int, turn of token t; read where acted.
      gamma: discount from one turn to the next, in [0, 1].
      lam: mixing parameter, in [0, 1].
      bootstrap: value after the last turn, 0 for an ended episode.

    Returns:
      (advantage_t, return_t), each [T], exactly 0 where not acted. No gradient flows through.

    Raises:
      ValueError: for an integer reward or value array, a mask that is not boolean, or a setting
        outside [0, 1].

    Source: the turn level of arXiv 2512.17008, as AReaL's turn estimator has it.
    """
    check_unit(gamma=gamma, lam=lam)
    sequence = checked(reward_t, value_t, acted_t, turn_t)
    dtype = sequence.value_t.dtype
    g = jnp.asarray(gamma, dtype)
    gl = g * jnp.asarray(lam, dtype)
    zero = jnp.zeros((), dtype)
    end = jnp.asarray(NO_TURN, jnp.int32)

    def back(
        carry: tuple[jax.Array, ...], token: Sequence
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, jax.Array]]:
        # (advantage, value) of the turn after; of the turn at hand as if it began at the token
        # seen last; its rewards so far; its id.
        later_a, later_v, here_a, here_v, rewards, turn = carry
        new = token.turn_t != turn
        first = turn == NO_TURN
        later_a = jnp.where(new & ~first, here_a, later_a)
        later_v = jnp.where(new & ~first, here_v, later_v)
        rewards = jnp.where(new, 0.0, rewards) + token.reward_t
        here_a = rewards + g * later_v - token.value_t + gl * later_a
        after = (later_a, later_v, here_a, token.value_t, rewards, token.turn_t)
        kept = tuple(jnp.where(token.acted_t, x, y) for x, y in zip(after, carry, strict=True))
        return kept, (here_a, token.value_t)

    start: tuple[jax.Array, ...] = (
        zero,
        jax.lax.stop_gradient(jnp.asarray(bootstrap, dtype)),
        zero,
        zero,
        zero,
        end,
    )
    _, (candidate_t, first_value_t) = jax.lax.scan(back, start, sequence, reverse=True)

    def forth(
        carry: tuple[jax.Array, ...], token: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, jax.Array]]:
        candidate, value, acted, turn = token
        fresh = acted & (turn != carry[2])
        advantage = jnp.where(fresh, candidate, carry[0])
        value = jnp.where(fresh, value, carry[1])
        kept = (advantage, value, jnp.where(acted, turn, carry[2]))
        return kept, (jnp.where(acted, advantage, 0.0), jnp.where(acted, advantage + value, 0.0))

    tokens: tuple[jax.Array, ...] = (
        candidate_t,
        first_value_t,
        sequence.acted_t,
        sequence.turn_t,
    )
    before: tuple[jax.Array, ...] = (zero, zero, end)
    _, result = jax.lax.scan(forth, before, tokens)
    return result
