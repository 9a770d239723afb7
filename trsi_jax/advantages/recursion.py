"""What the estimators share: checked inputs and the recursion over action tokens."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

Scalar = float | jax.Array

NO_TURN = -(2**31)
"""Turn id of the end of a sequence; differs from that of every token."""


class Sequence(NamedTuple):
    """Checked inputs of one sequence, each [T]; `value_t` and `reward_t` of one float type."""

    reward_t: jax.Array
    value_t: jax.Array
    acted_t: jax.Array
    turn_t: jax.Array


def checked(
    reward_t: jax.Array, value_t: jax.Array, acted_t: jax.Array, turn_t: jax.Array
) -> Sequence:
    """Check shapes and types, promote to at least float32 and cut gradients.

    Raises:
      ValueError: for integer rewards or values (a fraction would be truncated), for a mask that
        is not boolean, for turns that are not integers.
      AssertionError: for arrays that are not of one shape [T].
    """
    sequence = Sequence(*map(jnp.asarray, (reward_t, value_t, acted_t, turn_t)))
    chex.assert_rank(list(sequence), 1)
    chex.assert_equal_shape(list(sequence))
    for name in ("reward_t", "value_t"):
        dtype = getattr(sequence, name).dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, got {dtype}")
    if sequence.acted_t.dtype != jnp.bool_:
        raise ValueError(f"acted_t must be bool, got {sequence.acted_t.dtype}")
    if not jnp.issubdtype(sequence.turn_t.dtype, jnp.integer):
        raise ValueError(f"turn_t must be an integer array, got {sequence.turn_t.dtype}")
    dtype = jnp.promote_types(
        jnp.promote_types(sequence.reward_t.dtype, sequence.value_t.dtype), jnp.float32
    )
    return Sequence(
        jax.lax.stop_gradient(sequence.reward_t.astype(dtype)),
        jax.lax.stop_gradient(sequence.value_t.astype(dtype)),
        sequence.acted_t,
        sequence.turn_t.astype(jnp.int32),
    )


def check_unit(**settings: Scalar) -> None:
    """Each setting lies in [0, 1]; traced ones can't be checked and pass.

    Raises:
      ValueError: that names the setting and shows its value.
    """
    for name, value in settings.items():
        if isinstance(value, (int, float)) and not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must lie in [0, 1], got {value}")


def action_chain(
    sequence: Sequence,
    *,
    inside: tuple[Scalar, Scalar],
    between: tuple[Scalar, Scalar],
    bootstrap: Scalar,
) -> jax.Array:
    """Advantages of the two-pair recursion over the action tokens alone.

    A_j = r_j + g_j V_{j+1} - V_j + g_j l_j A_{j+1}, where j + 1 is the next action token and
    (g_j, l_j) = `between` if it belongs to another turn, else `inside`. V_{N+1} = `bootstrap`,
    A_{N+1} = 0, and what follows the last action counts as another turn.

    An observation leaves the carry as it is, so neither how many there are nor what stands on
    them (NaN included) changes a bit of the result.

    Returns:
      [T] advantages, 0 where not acted.
    """
    dtype = sequence.value_t.dtype
    g_in, l_in = (jnp.asarray(x, dtype) for x in inside)
    g_out, l_out = (jnp.asarray(x, dtype) for x in between)
    gl_in, gl_out = g_in * l_in, g_out * l_out

    def back(
        carry: tuple[jax.Array, jax.Array, jax.Array], token: Sequence
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
        advantage_next, value_next, turn_next = carry
        same = token.turn_t == turn_next
        g = jnp.where(same, g_in, g_out)
        gl = jnp.where(same, gl_in, gl_out)
        advantage = token.reward_t + g * value_next - token.value_t + gl * advantage_next
        carry = (
            jnp.where(token.acted_t, advantage, advantage_next),
            jnp.where(token.acted_t, token.value_t, value_next),
            jnp.where(token.acted_t, token.turn_t, turn_next),
        )
        return carry, jnp.where(token.acted_t, advantage, 0.0)

    start = (
        jnp.zeros((), dtype),
        jax.lax.stop_gradient(jnp.asarray(bootstrap, dtype)),
        jnp.asarray(NO_TURN, jnp.int32),
    )
    # unroll=1: XLA's CPU compiler turns the whole loop into one kernel; unrolling undoes that.
    _, advantage_t = jax.lax.scan(back, start, sequence, reverse=True, unroll=1)
    return advantage_t


def with_return(sequence: Sequence, advantage_t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(advantage_t, return_t) with R_j = A_j + V_j on action tokens and 0 elsewhere."""
    return advantage_t, jnp.where(sequence.acted_t, advantage_t + sequence.value_t, 0.0)


def return_to_go(sequence: Sequence, *, gamma: Scalar, bootstrap: Scalar) -> jax.Array:
    """R_j = r_j + gamma R_{j+1} over the action tokens, R_{N+1} = `bootstrap`; 0 elsewhere."""
    blind = sequence._replace(value_t=jnp.zeros_like(sequence.value_t))
    pair = (gamma, 1.0)
    return action_chain(blind, inside=pair, between=pair, bootstrap=bootstrap)
