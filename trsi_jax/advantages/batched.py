"""TB-GAE over a batch: three forms of one recursion.

Arrays are time-major, [T, B]: a scan over time then needs no transposition. All forms give the
advantages of `tb_gae` up to rounding; which is fastest depends on the machine:

scan        one step a token; on a CPU the whole loop is one kernel.
turns       one step a turn; cumulative sums do the rest. Needs lam_in = 1 and a bound on turns.
associative log2(T) parallel steps, for any lam_in.

On an accelerator a step costs microseconds whatever it does, so the number of steps decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, get_args

import chex
import jax
import jax.numpy as jnp

from trsi_jax.advantages.recursion import Scalar, check_unit, checked, with_return
from trsi_jax.advantages.tb_gae import tb_gae

Form = Literal["auto", "scan", "turns", "associative"]


def tb_gae_batch(
    reward_tb: jax.Array,
    value_tb: jax.Array,
    acted_tb: jax.Array,
    turn_tb: jax.Array,
    *,
    gamma: Scalar,
    lam: Scalar,
    lam_in: Scalar = 1.0,
    bootstrap_b: Scalar = 0.0,
    max_turns: int | None = None,
    form: Form = "auto",
) -> tuple[jax.Array, jax.Array]:
    """`tb_gae` of each column, in the form that suits the backend.

    Args:
      reward_tb: [T, B] float, reward at token t; read where acted.
      value_tb: [T, B] float, the critic's value before token t; read where acted.
      acted_tb: [T, B] bool, true where the policy sampled the token.
      turn_tb: [T, B] int, turn of token t; read where acted.
      gamma: discount from one turn to the next, in [0, 1].
      lam: mixing from one turn to the next, in [0, 1].
      lam_in: mixing inside a turn, in [0, 1].
      bootstrap_b: [] or [B], value after the last action token.
      max_turns: bound on the turn ids of action tokens, which then lie in [0, max_turns).
      form: "auto" takes "scan" on a CPU; elsewhere "turns" where max_turns is given and lam_in is
        1, else "associative".

    Returns:
      (advantage_tb, return_tb), each [T, B], exactly 0 where not acted.

    Raises:
      ValueError: for an unknown form, or "turns" without max_turns or with lam_in != 1.
    """
    chex.assert_rank([reward_tb, value_tb, acted_tb, turn_tb], 2)
    one_pass = isinstance(lam_in, (int, float)) and lam_in == 1.0 and max_turns is not None
    if form == "auto":
        if jax.default_backend() == "cpu":
            form = "scan"
        else:
            form = "turns" if one_pass else "associative"
    if form == "turns" and not one_pass:
        raise ValueError(
            f"form 'turns' needs max_turns and lam_in = 1, got {max_turns} and {lam_in}"
        )
    common = functools.partial(_FORMS[_known(form)], gamma=gamma, lam=lam)
    if form == "turns":
        column = functools.partial(common, max_turns=max_turns)
    else:
        column = functools.partial(common, lam_in=lam_in)

    def run(
        reward_t: jax.Array,
        value_t: jax.Array,
        acted_t: jax.Array,
        turn_t: jax.Array,
        bootstrap: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        return column(reward_t, value_t, acted_t, turn_t, bootstrap=bootstrap)

    bootstrap_b = jnp.broadcast_to(jnp.asarray(bootstrap_b, jnp.float32), acted_tb.shape[1:])
    mapped = jax.vmap(run, in_axes=(1, 1, 1, 1, 0), out_axes=1)
    return mapped(reward_tb, value_tb, acted_tb, turn_tb, bootstrap_b)


def tb_gae_turns(
    reward_t: jax.Array,
    value_t: jax.Array,
    acted_t: jax.Array,
    turn_t: jax.Array,
    *,
    gamma: Scalar,
    lam: Scalar,
    max_turns: int,
    bootstrap: Scalar = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """TB-GAE at lam_in = 1 with as many sequential steps as turns.

    A turn telescopes: A_t = (rewards from t to the end of its turn) + C_k - V_t. With F_k the
    first action token of turn k and k' the next turn that has any,
    C_k = gamma V(F_k') + gamma lam A(F_k'),  A(F_k) = r_k + C_k - V(F_k).

    Args:
      reward_t: [T] float, reward at token t; read where acted.
      value_t: [T] float, the critic's value before token t; read where acted.
      acted_t: [T] bool, true where the policy sampled the token.
      turn_t: [T] int, turn of token t, in [0, max_turns) and not decreasing where acted.
      gamma: discount from one turn to the next, in [0, 1].
      lam: mixing from one turn to the next, in [0, 1].
      max_turns: bound on the turn ids of action tokens.
      bootstrap: value after the last action token.

    Returns:
      (advantage_t, return_t), each [T], exactly 0 where not acted. No gradient flows through.
    """
    check_unit(gamma=gamma, lam=lam)
    sequence = checked(reward_t, value_t, acted_t, turn_t)
    dtype = sequence.value_t.dtype
    length = acted_t.shape[0]
    g, lam = jnp.asarray(gamma, dtype), jnp.asarray(lam, dtype)
    # What is not acted goes to an extra turn that nobody reads.
    turn_t = jnp.where(acted_t, sequence.turn_t, max_turns)
    value_t = jnp.where(acted_t, sequence.value_t, 0.0)
    reward_t = jnp.where(acted_t, sequence.reward_t, 0.0)
    reward_k = jnp.zeros(max_turns + 1, dtype).at[turn_t].add(reward_t)
    first_k = jnp.full(max_turns + 1, length).at[turn_t].min(jnp.arange(length))
    value_k = value_t.at[first_k].get(mode="fill", fill_value=0.0)

    def back(
        carry: jax.Array, turn: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        reward, value, present = turn
        # The carry is C of the turn at hand.
        next_c = g * (value + lam * (reward + carry - value))
        return jnp.where(present, next_c, carry), carry

    start = g * jax.lax.stop_gradient(jnp.asarray(bootstrap, dtype))
    turns = (reward_k[:-1], value_k[:-1], first_k[:-1] < length)
    _, later_k = jax.lax.scan(back, start, turns, reverse=True)
    # Rewards from t to the end of its turn: what has been paid in the turn before t is taken off.
    paid_t = jnp.cumsum(reward_t) - reward_t
    paid_k = paid_t.at[first_k].get(mode="fill", fill_value=0.0)
    later_k = jnp.append(later_k, jnp.zeros((), dtype))
    total_k = reward_k + later_k + paid_k
    advantage_t = total_k[turn_t] - paid_t - value_t
    return with_return(sequence, jnp.where(acted_t, advantage_t, 0.0))


def tb_gae_associative(
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
    """TB-GAE as a reverse associative scan of the affine maps A -> delta_j + g_j l_j A.

    A token that is not acted is the identity. Arguments and results as in `tb_gae`.
    """
    check_unit(gamma=gamma, lam=lam, lam_in=lam_in)
    sequence = checked(reward_t, value_t, acted_t, turn_t)
    dtype = sequence.value_t.dtype
    length = acted_t.shape[0]
    index_t = jnp.arange(length)
    # Position of the next action token, `length` after the last.
    at_or_after = jax.lax.cummin(jnp.where(acted_t, index_t, length), reverse=True)
    next_t = jnp.append(at_or_after[1:], length)
    value_t = jnp.where(acted_t, sequence.value_t, 0.0)
    bootstrap = jax.lax.stop_gradient(jnp.asarray(bootstrap, dtype))
    next_value_t = jnp.append(value_t, bootstrap)[next_t]
    same_t = (next_t < length) & (sequence.turn_t[next_t - (next_t == length)] == sequence.turn_t)
    g_t = jnp.where(same_t, 1.0, jnp.asarray(gamma, dtype))
    l_t = jnp.where(same_t, jnp.asarray(lam_in, dtype), jnp.asarray(lam, dtype))
    delta_t = sequence.reward_t + g_t * next_value_t - value_t
    offset_t = jnp.where(acted_t, delta_t, 0.0)
    slope_t = jnp.where(acted_t, g_t * l_t, 1.0)

    def compose(
        later: tuple[jax.Array, jax.Array], earlier: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

    advantage_t, _ = jax.lax.associative_scan(compose, (offset_t, slope_t), reverse=True)
    return with_return(sequence, jnp.where(acted_t, advantage_t, 0.0))


_FORMS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "scan": tb_gae,
    "turns": tb_gae_turns,
    "associative": tb_gae_associative,
}


def _known(form: str) -> str:
    if form not in _FORMS:
        raise ValueError(f"form must be one of {', '.join(get_args(Form))}, got {form!r}")
    return form
