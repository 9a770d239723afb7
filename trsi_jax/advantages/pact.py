"""Credit by differences of conditional expectation, the actor updated before the critic."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trsi_jax.advantages.monte_carlo import monte_carlo
from trsi_jax.advantages.recursion import Scalar
from trsi_jax.advantages.registry import register


@register("pact")
def pact(
    reward_t: jax.Array,
    value_t: jax.Array,
    acted_t: jax.Array,
    turn_t: jax.Array,
    *,
    bootstrap: Scalar = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """A_j = R_j - V_j: the lambda = 1 estimate of what token j and its successors add.

    The token credits C_i = V_{i+1} - V_i of an exact critic telescope to it; the errors of an
    inexact one cancel but for the baseline's. The arrays equal `monte_carlo`; the method differs
    in its order: the actor is updated first, then the critic towards the same returns with the
    tokens weighted by `pact_weight` under the updated actor.

    Args:
      reward_t: [T] float, reward at token t; read where acted.
      value_t: [T] float, the critic's value before token t; read where acted.
      acted_t: [T] bool, true where the policy sampled the token.
      turn_t: [T] int, turn of token t; changes nothing here.
      bootstrap: value after the last action token, 0 for an ended episode.

    Returns:
      (advantage_t, return_t), each [T], exactly 0 where not acted. No gradient flows through.

    Raises:
      ValueError: for an integer reward or value array, or a mask that is not boolean.

    Source: arXiv 2609.26355 (PACT).
    """
    return monte_carlo(reward_t, value_t, acted_t, turn_t, bootstrap=bootstrap)


def pact_weight(
    logprob_t: jax.Array,
    behaviour_logprob_t: jax.Array,
    acted_t: jax.Array,
    *,
    low: float = 0.0,
    high: float = 6.0,
) -> jax.Array:
    """Weights of the critic's targets after the actor's update; tokens far off are dropped.

    w_t = rho_t if low <= rho_t <= high else 0, rho_t = exp(log pi_new - log pi_behaviour).

    Args:
      logprob_t: [...] float, log-prob of the sampled token under the updated actor.
      behaviour_logprob_t: [...] float, the same under the policy that sampled it.
      acted_t: [...] bool, true where the policy sampled the token.
      low: smallest ratio kept, >= 0.
      high: largest ratio kept, > low.

    Returns:
      [...] float, 0 where not acted. No gradient flows through.

    Raises:
      ValueError: for bounds out of order.

    Source: arXiv 2609.26355 (PACT), bounds [0, 6].
    """
    if not 0.0 <= low < high:
        raise ValueError(f"need 0 <= low < high, got low={low}, high={high}")
    difference_t = jnp.where(acted_t, logprob_t - behaviour_logprob_t, 0.0)
    rho_t = jnp.exp(jax.lax.stop_gradient(difference_t))
    return jnp.where(acted_t & (rho_t >= low) & (rho_t <= high), rho_t, 0.0)
