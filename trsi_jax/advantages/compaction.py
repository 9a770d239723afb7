"""TB-GAE on the action tokens alone: observations are taken out before the scan.

Most of a terminal transcript is observation, so the recursion has a fraction of the steps. The
columns are aligned at their ends: in a backward scan the padding then comes last and needs no
mask inside the loop.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from trsi_jax.advantages.recursion import Scalar, check_unit


def action_index(acted_tb: npt.NDArray[np.bool_], *, multiple: int = 512) -> npt.NDArray[np.int32]:
    """Positions of the action tokens of each column, on the host.

    Args:
      acted_tb: [T, B] bool, true where the policy sampled the token.
      multiple: N is rounded up to it, so that few shapes are compiled.

    Returns:
      [N, B] int32, N the largest number of action tokens of a column, rounded up; a column that
      has fewer begins with T, which is no position.
    """
    acted_tb = np.asarray(acted_tb)
    length, width = acted_tb.shape
    count = int(acted_tb.sum(axis=0).max(initial=0))
    index = np.full((max(-(-count // multiple), 1) * multiple, width), length, np.int32)
    for b in range(width):
        here = np.flatnonzero(acted_tb[:, b])
        index[len(index) - len(here) :, b] = here
    return index


def compact(x_tb: jax.Array, index_nb: jax.Array) -> jax.Array:
    """Take the action tokens: [T, B] and [N, B] to [N, B], 0 (or false) where there are none.

    A mask compacted with itself is the mask of the compacted arrays.
    """
    columns = jnp.arange(index_nb.shape[1])
    return x_tb.at[index_nb, columns].get(mode="fill", fill_value=0)


def expand(x_nb: jax.Array, index_nb: jax.Array, *, length: int) -> jax.Array:
    """Undo `compact`: [N, B] to [length, B], 0 where not acted."""
    columns = jnp.arange(index_nb.shape[1])
    empty = jnp.zeros((length, x_nb.shape[1]), x_nb.dtype)
    return empty.at[index_nb, columns].set(x_nb, mode="drop")


def turn_starts(acted_nb: jax.Array, turn_nb: jax.Array) -> jax.Array:
    """Of compacted columns: true at the first action token of each turn, [N, B]."""
    before = jnp.roll(turn_nb, 1, axis=0) != turn_nb
    no_action_before = ~jnp.roll(acted_nb, 1, axis=0).at[0].set(False)
    return acted_nb & (before | no_action_before)


def tb_gae_compacted(
    reward_nb: jax.Array,
    value_nb: jax.Array,
    acted_nb: jax.Array,
    starts_nb: jax.Array,
    *,
    gamma: Scalar,
    lam: Scalar,
    lam_in: Scalar = 1.0,
    bootstrap_b: Scalar = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """`tb_gae` of compacted columns, as a recursion of the return alone.

    R_j = r_j + gamma ((1 - lam) V_{j+1} + lam R_{j+1}) if j + 1 is the first action token of its
    turn, else r_j + (1 - lam_in) V_{j+1} + lam_in R_{j+1}; V_{N+1} = R_{N+1} = bootstrap, which
    counts as another turn; A_j = R_j - V_j. What a step hands on is what it puts out, which
    XLA's CPU compiler makes one loop of; a caller that donates the rewards saves their copy.

    Args:
      reward_nb: [N, B] float, compacted rewards.
      value_nb: [N, B] float, compacted values.
      acted_nb: [N, B] bool, true where there is an action token.
      starts_nb: [N, B] bool, true at the first action token of each turn (`turn_starts`).
      gamma: discount from one turn to the next, in [0, 1].
      lam: mixing from one turn to the next, in [0, 1].
      lam_in: mixing inside a turn, in [0, 1].
      bootstrap_b: [] or [B], value after the last action token.

    Returns:
      (advantage_nb, return_nb), each [N, B] of at least float32, exactly 0 where not acted. No
      gradient flows through.
    """
    check_unit(gamma=gamma, lam=lam, lam_in=lam_in)
    chex.assert_rank([reward_nb, value_nb, acted_nb, starts_nb], 2)
    chex.assert_equal_shape([reward_nb, value_nb, acted_nb, starts_nb])
    dtype = jnp.promote_types(jnp.promote_types(reward_nb.dtype, value_nb.dtype), jnp.float32)
    reward_nb, value_nb = jax.lax.stop_gradient((reward_nb.astype(dtype), value_nb.astype(dtype)))
    g, l_out = (jnp.asarray(x, dtype) for x in (gamma, lam))
    end_b = jax.lax.stop_gradient(jnp.asarray(bootstrap_b, dtype))
    row = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)

    def back(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total_nb, later = state
        j = reward_nb.shape[0] - 2 - i
        value = row(value_nb, j + 1)
        across = g * (1.0 - l_out) * value + g * l_out * later
        if isinstance(lam_in, (int, float)) and lam_in == 1.0:
            inside = later
        else:
            l_in = jnp.asarray(lam_in, dtype)
            inside = (1.0 - l_in) * value + l_in * later
        total = row(total_nb, j) + jnp.where(row(starts_nb, j + 1), across, inside)
        return jax.lax.dynamic_update_index_in_dim(total_nb, total, j, 0), total

    # The returns take the rewards' place, and values and starts are read one row on: no column is
    # shifted or cleared beforehand. Padding comes last, so it may spoil what is carried; only its
    # output is blanked.
    total_nb = reward_nb.at[-1].add(g * end_b)
    start = (total_nb, total_nb[-1])
    return_nb, _ = jax.lax.fori_loop(0, reward_nb.shape[0] - 1, back, start)
    advantage_nb = jnp.where(acted_nb, return_nb - value_nb, 0.0)
    return advantage_nb, jnp.where(acted_nb, return_nb, 0.0)
