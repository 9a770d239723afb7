"""Recursions that are known to be wrong, restated to show what they do. Not for training.

Each treats observations as steps of the process: they discount what the policy did not decide.
"""

from __future__ import annotations

import chex
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


@register("gae_unmasked", study=True)
def gae_unmasked(
    reward_t: jax.Array,
    value_t: jax.Array,
    acted_t: jax.Array,
    turn_t: jax.Array,
    *,
    gamma: Scalar,
    lam: Scalar,
    bootstrap: Scalar = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Wrong on purpose: plain GAE over all slots, the critic's values on the log included.

    A_t = r_t + gamma V_{t+1} - V_t + gamma lam A_{t+1} for t = 1..T, prompt, observations and
    padding counted as steps.

    Args:
      reward_t: [T] float, reward at token t; read everywhere.
      value_t: [T] float, the critic's value before token t; read everywhere.
      acted_t: [T] bool, true where the policy sampled the token; only blanks the output.
      turn_t: [T] int, turn of token t; changes nothing here.
      gamma: discount a slot, in [0, 1].
      lam: mixing parameter, in [0, 1].
      bootstrap: value after the last slot.

    Returns:
      (advantage_t, return_t), each [T], exactly 0 where not acted.

    Raises:
      ValueError: for an integer reward or value array, a mask that is not boolean, or a setting
        outside [0, 1].

    Source: the form of arXiv 1506.02438 that several training frameworks apply to whole rows.
    """
    check_unit(gamma=gamma, lam=lam)
    sequence = checked(reward_t, value_t, acted_t, turn_t)
    advantage_t = _every_slot(sequence.reward_t, sequence.value_t, gamma, lam, bootstrap)
    return with_return(sequence, jnp.where(sequence.acted_t, advantage_t, 0.0))


@register("gae_zeroed", study=True)
def gae_zeroed(
    reward_t: jax.Array,
    value_t: jax.Array,
    acted_t: jax.Array,
    turn_t: jax.Array,
    *,
    gamma: Scalar,
    lam: Scalar,
    bootstrap: Scalar = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Wrong on purpose: GAE over all slots with the values of observations set to 0.

    As `gae_unmasked` with r_t = V_t = 0 where not acted: the recursion believes at each log token
    that nothing can be won any more, and still decays across it.

    Args:
      reward_t: [T] float, reward at token t; read where acted.
      value_t: [T] float, the critic's value before token t; read where acted.
      acted_t: [T] bool, true where the policy sampled the token.
      turn_t: [T] int, turn of token t; changes nothing here.
      gamma: discount a slot, in [0, 1].
      lam: mixing parameter, in [0, 1].
      bootstrap: value after the last slot.

    Returns:
      (advantage_t, return_t), each [T], exactly 0 where not acted.

    Raises:
      ValueError: for an integer reward or value array, a mask that is not boolean, or a setting
        outside [0, 1].

    Source: rewards and values multiplied by the mask before the recursion, as one training
    framework does.
    """
    check_unit(gamma=gamma, lam=lam)
    sequence = checked(reward_t, value_t, acted_t, turn_t)
    reward, value = (
        jnp.where(sequence.acted_t, x, 0.0) for x in (sequence.reward_t, sequence.value_t)
    )
    advantage_t = _every_slot(reward, value, gamma, lam, bootstrap)
    return with_return(sequence, jnp.where(sequence.acted_t, advantage_t, 0.0))


@register("gae_gap", study=True)
def gae_gap(
    reward_t: jax.Array,
    value_t: jax.Array,
    acted_t: jax.Array,
    turn_t: jax.Array,
    *,
    gamma: Scalar,
    lam: Scalar,
    charged: float | jax.Array = 0.0,
    bootstrap: Scalar = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Wrong on purpose: GAE on the action tokens with the log's length in the exponent.

    A_j = r_j + gamma^(1+n_j) V_{j+1} - V_j + (gamma lam)^(1+n_j) A_{j+1}, where n_j counts the
    slots between action tokens j and j + 1, plus `charged` where they are of different turns.

    Args:
      reward_t: [T] float, reward at token t; read where acted.
      value_t: [T] float, the critic's value before token t; read where acted.
      acted_t: [T] bool, true where the policy sampled the token.
      turn_t: [T] int, turn of token t; read where acted.
      gamma: discount a slot, in [0, 1].
      lam: mixing parameter, in [0, 1].
      charged: scalar or [T], further log tokens that an observation is taken to have had, read at
        the last action token before it: what longer logs would do, with the transcript as it is.
      bootstrap: value after the last action token.

    Returns:
      (advantage_t, return_t), each [T], exactly 0 where not acted.

    Raises:
      ValueError: for an integer reward or value array, a mask that is not boolean, or a setting
        outside [0, 1].

    Source: the time-stamp reading of discounting; our restatement.
    """
    check_unit(gamma=gamma, lam=lam)
    sequence = checked(reward_t, value_t, acted_t, turn_t)
    dtype = sequence.value_t.dtype
    g, gl = jnp.asarray(gamma, dtype), jnp.asarray(gamma, dtype) * jnp.asarray(lam, dtype)
    charged_t = jnp.broadcast_to(jnp.asarray(charged, dtype), sequence.value_t.shape)
    chex.assert_equal_shape([charged_t, sequence.value_t])

    def back(
        carry: tuple[jax.Array, ...], token: tuple[Sequence, jax.Array]
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        (reward, value, acted, turn), extra = token
        next_a, next_v, next_turn, gap = carry
        steps = 1 + gap + jnp.where((turn != next_turn) & (next_turn != NO_TURN), extra, 0.0)
        advantage = reward + g**steps * next_v - value + gl**steps * next_a
        after = (advantage, value, turn, jnp.zeros_like(gap))
        between = (next_a, next_v, next_turn, jnp.where(next_turn == NO_TURN, 0.0, gap + 1))
        kept = tuple(jnp.where(acted, x, y) for x, y in zip(after, between, strict=True))
        return kept, jnp.where(acted, advantage, 0.0)

    zero = jnp.zeros((), dtype)
    bootstrap = jax.lax.stop_gradient(jnp.asarray(bootstrap, dtype))
    start: tuple[jax.Array, ...] = (zero, bootstrap, jnp.asarray(NO_TURN, jnp.int32), zero)
    _, advantage_t = jax.lax.scan(back, start, (sequence, charged_t), reverse=True)
    return with_return(sequence, advantage_t)


def _every_slot(
    reward_t: jax.Array, value_t: jax.Array, gamma: Scalar, lam: Scalar, bootstrap: Scalar
) -> jax.Array:
    dtype = value_t.dtype
    g, gl = jnp.asarray(gamma, dtype), jnp.asarray(gamma, dtype) * jnp.asarray(lam, dtype)

    def back(
        carry: tuple[jax.Array, jax.Array], token: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        reward, value = token
        advantage = reward + g * carry[1] - value + gl * carry[0]
        return (advantage, value), advantage

    start = (jnp.zeros((), dtype), jax.lax.stop_gradient(jnp.asarray(bootstrap, dtype)))
    _, advantage_t = jax.lax.scan(back, start, (reward_t, value_t), reverse=True)
    return advantage_t
