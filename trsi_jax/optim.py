"""The optimizer of every step, and learning-rate schedules.

The learning rate is no part of the transformation: a step takes it as an argument, so stages
with different rates share one compiled step and a schedule is a function of the step count.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax


def adamw(
    *, b1: float, b2: float, eps: float, weight_decay: float, max_grad_norm: float
) -> optax.GradientTransformation:
    """AdamW with clipping by global norm, without the learning rate.

    g' = g min(1, c / ||g||);  u = m_hat / (sqrt(v_hat) + eps) + w p.
    The caller applies p <- p - learning_rate * u (`state.apply_gradients`).

    Source: arXiv 1711.05101, algorithm 2; clipping: arXiv 1211.5063.
    """
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(weight_decay),
    )


def stored_as(optimizer: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """The same optimizer with its floating-point state stored in `dtype`.

    Each update reads the state in float32 and rounds it once to the nearest when it is written.
    In bfloat16 a moment stops moving where (1 - b) |g - m| < |m| / 512, so b2 of .99 or less.

    Args:
      optimizer: with a float32 state.
      dtype: such as "bfloat16".

    Returns:
      The transformation.

    Source: our reading.
    """

    def cast(tree: Any, to: Any) -> Any:
        return jax.tree.map(
            lambda x: x.astype(to) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )

    def init(params: Any) -> Any:
        return cast(optimizer.init(params), dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)


def linear_warmup(step: int, *, peak: float, warmup_steps: int) -> float:
    """Rate that rises linearly and then stays: lr(s) = peak min(1, (s + 1) / warmup).

    Args:
      step: 0-based update index.
      peak: the rate after the warm-up.
      warmup_steps: updates until `peak`; 0 for none.

    Returns:
      The rate of update `step`.
    """
    return peak * min(1.0, (step + 1) / max(warmup_steps, 1))


def warmup_cosine(
    step: int, *, peak: float, warmup_steps: int, total_steps: int, final_fraction: float
) -> float:
    """Linear warm-up to `peak`, then cosine decay to `final_fraction * peak` at `total_steps`.

    lr(s) = peak (s + 1) / warmup for s < warmup, else
    lr(s) = peak (f + (1 - f) (1 + cos(pi x)) / 2), x = (s - warmup) / (total - warmup).

    Args:
      step: 0-based update index.
      peak: largest rate.
      warmup_steps: updates until `peak`.
      total_steps: updates in all.
      final_fraction: share of `peak` at the end.

    Returns:
      The rate of update `step`.

    Source: arXiv 1608.03983, eq. 5, with one cycle.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    x = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return peak * (final_fraction + (1.0 - final_fraction) * (1.0 + math.cos(math.pi * x)) / 2.0)
