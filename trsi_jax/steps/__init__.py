"""Train steps: pure functions (state, batch, rate) -> (state, metrics), and their jitted forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import optax

from trsi_jax import model
from trsi_jax.steps.compiled import CompiledStep
from trsi_jax.steps.critic import critic_step
from trsi_jax.steps.forward import token_logprobs, token_values
from trsi_jax.steps.ppo import actor_step
from trsi_jax.steps.sft import sft_step

__all__ = [
    "CompiledStep",
    "Steps",
    "actor_step",
    "compile_steps",
    "critic_step",
    "sft_step",
    "token_logprobs",
    "token_values",
]


@dataclass(frozen=True)
class Steps:
    """The compiled steps of one model and optimizer; rates are traced, so stages share them.

    Attributes:
      optimizer: makes the states.
      sft: (state, batch, rate) -> (state, metrics); donates the state, like `critic` and `actor`.
      critic: (state, batch, rate, *, value_clip, value_high, frozen_attention) -> (state, metrics);
        what is left out has the default of `critic_step`.
      actor: (state, batch, rate, *, clip, temperature) -> (state, metrics).
      values: (critic's params, batch) -> [R, L] float32.
    """

    optimizer: optax.GradientTransformation
    sft: CompiledStep
    critic: CompiledStep
    actor: CompiledStep
    values: CompiledStep


def compile_steps(config: model.ModelConfig, optimizer: optax.GradientTransformation) -> Steps:
    """Bind a model and an optimizer to the steps.

    Args:
      config: of the actor; the critic has the same trunk.
      optimizer: as made by `optim.adamw`.

    Returns:
      Steps that compile at their first call, or ahead of it, once for each batch shape.
    """

    def bound(step: Callable[..., Any], settings: tuple[str, ...] = ()) -> CompiledStep:
        function = partial(step, config=config, optimizer=optimizer)
        return CompiledStep(function, donate=True, settings=settings)

    return Steps(
        optimizer=optimizer,
        sft=bound(sft_step),
        critic=bound(critic_step, ("value_clip", "value_high", "frozen_attention")),
        actor=bound(actor_step, ("clip", "temperature")),
        values=CompiledStep(partial(token_values, config), donate=False),
    )
