"""Train steps: pure functions (state, batch, rate) -> (state, metrics), and their jitted forms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import optax

from trsi_jax import model
from trsi_jax.batch import PackedBatch
from trsi_jax.state import TrainState
from trsi_jax.steps.critic import critic_step
from trsi_jax.steps.forward import token_logprobs, token_values
from trsi_jax.steps.ppo import actor_step, ppo_step
from trsi_jax.steps.sft import sft_step

__all__ = [
    "Steps",
    "actor_step",
    "critic_step",
    "jit_steps",
    "ppo_step",
    "sft_step",
    "token_logprobs",
    "token_values",
]

Metrics = dict[str, jax.Array]


class UpdateStep(Protocol):
    """A jitted step; the state's buffers are donated."""

    def __call__(
        self, state: TrainState, batch: PackedBatch, learning_rate: float
    ) -> tuple[TrainState, Metrics]:
        """The state after one update, and metrics."""
        ...


class ActorStep(Protocol):
    """The jitted PPO step of the actor; the state's buffers are donated."""

    def __call__(
        self,
        state: TrainState,
        batch: PackedBatch,
        learning_rate: float,
        *,
        clip: float,
        temperature: float,
    ) -> tuple[TrainState, Metrics]:
        """The state after one update, and metrics."""
        ...


class ValueStep(Protocol):
    """The jitted critic."""

    def __call__(self, params: Any, batch: PackedBatch) -> jax.Array:
        """Values before every token, [R, L] float32."""
        ...


@dataclass(frozen=True)
class Steps:
    """The jitted steps of one model and optimizer; rates are traced, so stages share them."""

    optimizer: optax.GradientTransformation
    sft: UpdateStep
    critic: UpdateStep
    actor: ActorStep
    values: ValueStep


def jit_steps(config: model.ModelConfig, optimizer: optax.GradientTransformation) -> Steps:
    """Bind a model and an optimizer, jit, and donate the states.

    Args:
      config: of the actor; the critic has the same trunk.
      optimizer: as made by `optim.adamw`.

    Returns:
      Steps that compile at their first call for each batch shape.
    """
    bound = {"config": config, "optimizer": optimizer}
    return Steps(
        optimizer=optimizer,
        sft=jax.jit(partial(sft_step, **bound), donate_argnums=0),
        critic=jax.jit(partial(critic_step, **bound), donate_argnums=0),
        actor=jax.jit(
            partial(actor_step, **bound), donate_argnums=0, static_argnames=("clip", "temperature")
        ),
        values=jax.jit(partial(token_values, config)),
    )
