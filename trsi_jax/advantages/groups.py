"""Baselines from the other rollouts of the same task.

Written for ONE group: [G] scores in, [G] advantages out; `spread` lays one on the action tokens of
its rollout. A rollout that is masked (a fault) is no member of its group.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from trsi_jax.advantages.registry import register


@register("rloo", kind="group", critic=False)
def rloo(score_g: jax.Array, valid_g: jax.Array) -> jax.Array:
    """Leave-one-out baseline: A_i = R_i - mean_{k != i} R_k.

    Args:
      score_g: [G] float, undiscounted return of each rollout of one task.
      valid_g: [G] bool, false for a masked rollout.

    Returns:
      [G] float, 0 where not valid, and all 0 with fewer than two valid rollouts.

    Source: arXiv 2402.14740, section 3.
    """
    centred_g, n = _centred(score_g, valid_g)
    return jnp.where(n > 1, centred_g * n / jnp.maximum(n - 1, 1), 0.0)


@register("grpo", kind="group", critic=False)
def grpo(score_g: jax.Array, valid_g: jax.Array, *, eps: float = 1e-4) -> jax.Array:
    """Standardised in the group: A_i = (R_i - mean R) / (std R + eps), the deviation by n - 1.

    Args:
      score_g: [G] float, undiscounted return of each rollout of one task.
      valid_g: [G] bool, false for a masked rollout.
      eps: added to the standard deviation, > 0.

    Returns:
      [G] float, 0 where not valid, and all 0 with fewer than two valid rollouts.

    Source: arXiv 2402.03300, section 4.1.2.
    """
    centred_g, n = _centred(score_g, valid_g)
    std = jnp.sqrt(jnp.sum(centred_g**2) / jnp.maximum(n - 1, 1))
    return centred_g / (std + eps)


@register("dr_grpo", kind="group", critic=False)
def dr_grpo(score_g: jax.Array, valid_g: jax.Array) -> jax.Array:
    """Centred in the group and not scaled: A_i = R_i - mean R.

    Its other half, a constant in place of each rollout's length, is a choice of denominator
    (`losses.token_weight`).

    Args:
      score_g: [G] float, undiscounted return of each rollout of one task.
      valid_g: [G] bool, false for a masked rollout.

    Returns:
      [G] float, 0 where not valid.

    Source: arXiv 2503.20783.
    """
    return _centred(score_g, valid_g)[0]


def spread(advantage: jax.Array, acted_t: jax.Array) -> jax.Array:
    """One advantage on every action token of its rollout: [T] float, 0 where not acted."""
    chex.assert_rank(acted_t, 1)
    return jnp.where(acted_t, advantage, 0.0)


def _centred(score_g: jax.Array, valid_g: jax.Array) -> tuple[jax.Array, jax.Array]:
    chex.assert_rank([score_g, valid_g], 1)
    chex.assert_equal_shape([score_g, valid_g])
    if not jnp.issubdtype(score_g.dtype, jnp.floating):
        raise ValueError(f"score_g must be floating point, got {score_g.dtype}")
    score_g = jax.lax.stop_gradient(jnp.where(valid_g, score_g, 0.0))
    n = jnp.sum(valid_g)
    return jnp.where(valid_g, score_g - jnp.sum(score_g) / jnp.maximum(n, 1), 0.0), n
