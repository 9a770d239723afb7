"""Separate mixing parameters for the actor's advantages and the critic's targets."""

from __future__ import annotations

from typing import Any

import jax

from trsi_jax.advantages.recursion import Scalar
from trsi_jax.advantages.registry import get, options


def decoupled(
    name: str,
    reward_t: jax.Array,
    value_t: jax.Array,
    acted_t: jax.Array,
    turn_t: jax.Array,
    *,
    lam: Scalar,
    lam_critic: Scalar,
    **settings: Any,
) -> tuple[jax.Array, jax.Array]:
    """Advantages of the estimator `name` at `lam`, returns of the same at `lam_critic`.

    Args:
      name: a registered estimator that takes `lam`.
      reward_t: [T] float, reward at token t.
      value_t: [T] float, the critic's value before token t.
      acted_t: [T] bool, true where the policy sampled the token.
      turn_t: [T] int, turn of token t.
      lam: mixing for the advantages, in [0, 1].
      lam_critic: mixing for the returns, in [0, 1]; 1 gives targets without the critic's bias.
      settings: the estimator's other settings.

    Returns:
      (advantage_t, return_t), each [T], exactly 0 where not acted.

    Raises:
      ValueError: for an unknown estimator, or one that has no `lam`.

    Source: decoupled GAE, arXiv 2503.01491 (VC-PPO).
    """
    if "lam" not in options(name):
        raise ValueError(f"estimator {name!r} has no lam to decouple; it takes {options(name)}")
    estimator = get(name)
    arrays = (reward_t, value_t, acted_t, turn_t)
    advantage_t, _ = estimator(*arrays, lam=lam, **settings)
    _, return_t = estimator(*arrays, lam=lam_critic, **settings)
    return advantage_t, return_t
