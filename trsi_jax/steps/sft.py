"""The supervised step: the actor towards given tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from trsi_jax import losses, model
from trsi_jax.batch import PackedBatch
from trsi_jax.state import TrainState, apply_gradients
from trsi_jax.steps.forward import token_logprobs

Metrics = dict[str, jax.Array]


def sft_step(
    state: TrainState,
    batch: PackedBatch,
    learning_rate: jax.Array,
    *,
    config: model.ModelConfig,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Metrics]:
    """One update on the weighted negative log-likelihood.

    loss = -sum_t w_t log pi(x_t | x_<t) / sum_t w_t, over tokens with w_t > 0.

    Args:
      state: of the actor; donate it.
      batch: [R, L] packed rows with `loss_weight`.
      learning_rate: [] float32.
      config: of the actor.
      optimizer: as made by `optim.adamw`.

    Returns:
      (state, metrics): `loss`, and `grad_norm` before clipping.
    """
    weight_t = batch.loss_weight
    n_tokens = jnp.sum(weight_t)

    def loss_fn(params: object) -> jax.Array:
        logprob_t, _ = token_logprobs(config, params, batch, temperature=1.0)
        return losses.sft_nll(logprob_t, weight_t > 0, n_tokens=n_tokens, weight_t=weight_t)

    loss, gradients = jax.value_and_grad(loss_fn)(state.params)
    new = apply_gradients(state, gradients, optimizer=optimizer, learning_rate=learning_rate)
    return new, {"loss": loss, "grad_norm": optax.global_norm(gradients)}
