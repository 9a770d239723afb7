"""GAE for rollouts that were compacted into several segments."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trsi_jax.advantages.recursion import Scalar, action_chain, check_unit, checked, with_return
from trsi_jax.advantages.registry import register


@register("cross_segment_gae")
def cross_segment_gae(
    reward_t: jax.Array,
    value_t: jax.Array,
    acted_t: jax.Array,
    turn_t: jax.Array,
    *,
    gamma: Scalar,
    lam: Scalar,
    n_later: int | jax.Array = 0,
    bootstrap: Scalar = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Skip-observation GAE in one segment, damped by how much of the rollout still followed.

    A_(s, j) = (gamma lam)^(N_later(s)) A^local_(s, j), with A^local the skip-observation GAE of
    segment s alone and N_later(s) the action tokens of the segments after it (`later_tokens`).
    Returns are the segment's own, A^local + V. With one segment it is `gae`. The reward of the
    rollout stands on the last action token of each segment.

    Args:
      reward_t: [T] float, reward at token t; read where acted.
      value_t: [T] float, the critic's value before token t; read where acted.
      acted_t: [T] bool, true where the policy sampled the token, its own summaries included.
      turn_t: [T] int, turn of token t; changes nothing here.
      gamma: discount an action token, in [0, 1].
      lam: mixing parameter, in [0, 1].
      n_later: [] int, action tokens in later segments of the same rollout.
      bootstrap: value after the last action token, 0 for an ended episode.

    Returns:
      (advantage_t, return_t), each [T], exactly 0 where not acted. No gradient flows through.

    Raises:
      ValueError: for an integer reward or value array, a mask that is not boolean, or a setting
        outside [0, 1].

    Source: arXiv 2607.05378 (CompactionRL); the undamped return is our reading.
    """
    check_unit(gamma=gamma, lam=lam)
    sequence = checked(reward_t, value_t, acted_t, turn_t)
    pair = (gamma, lam)
    local_t = action_chain(sequence, inside=pair, between=pair, bootstrap=bootstrap)
    dtype = local_t.dtype
    damping = jnp.power(jnp.asarray(gamma, dtype) * jnp.asarray(lam, dtype), n_later)
    advantage_t = jnp.where(sequence.acted_t, damping * local_t, 0.0)
    return advantage_t, with_return(sequence, local_t)[1]


def later_tokens(n_acted_s: jax.Array) -> jax.Array:
    """Action tokens after each segment, for [S] counts of one rollout's segments in order."""
    return jnp.cumsum(n_acted_s[::-1])[::-1] - n_acted_s
