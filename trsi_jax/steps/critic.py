"""The critic's step, of the warm-up and of PPO."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from trsi_jax import losses, model
from trsi_jax.batch import PackedBatch
from trsi_jax.state import TrainState, apply_gradients
from trsi_jax.steps.forward import token_values

Metrics = dict[str, jax.Array]


def critic_step(
    state: TrainState,
    batch: PackedBatch,
    learning_rate: jax.Array,
    *,
    config: model.ModelConfig,
    optimizer: optax.GradientTransformation,
    value_clip: float | None = None,
) -> tuple[TrainState, Metrics]:
    """One update of the critic towards the batch's `return_t`; the actor is not an argument.

    loss = sum_{t acted} (V_t - R_t)^2 / (2 n_acted), optionally clipped around the old values.

    Args:
      state: of the critic; donate it.
      batch: [R, L] packed rows with `acted` and the columns `return_t` and `value_t`.
      learning_rate: [] float32.
      config: of the critic.
      optimizer: as made by `optim.adamw`.
      value_clip: half-width of the trust region around the old values, or None.

    Returns:
      (state, metrics): `loss`, `explained_variance` before the update, `grad_norm`.
    """
    n_tokens = jnp.sum(batch.acted)

    def loss_fn(params: object) -> tuple[jax.Array, jax.Array]:
        value_t = token_values(config, params, batch)
        loss = losses.value_mse(
            value_t,
            batch.columns["return_t"],
            batch.acted,
            n_tokens=n_tokens,
            old_value_t=batch.columns["value_t"],
            clip=value_clip,
        )
        return loss, losses.explained_variance(value_t, batch.columns["return_t"], batch.acted)

    (loss, explained), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    new = apply_gradients(state, gradients, optimizer=optimizer, learning_rate=learning_rate)
    return new, {
        "loss": loss,
        "explained_variance": explained,
        "grad_norm": optax.global_norm(gradients),
    }
