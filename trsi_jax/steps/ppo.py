"""The actor's PPO step; the critic's is `critic_step`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from trsi_jax import losses, model
from trsi_jax.batch import PackedBatch
from trsi_jax.state import TrainState, apply_gradients
from trsi_jax.steps.forward import token_logprobs

Metrics = dict[str, jax.Array]


def actor_step(
    state: TrainState,
    batch: PackedBatch,
    learning_rate: jax.Array,
    *,
    config: model.ModelConfig,
    optimizer: optax.GradientTransformation,
    clip: float,
    temperature: float,
) -> tuple[TrainState, Metrics]:
    """One update of the actor on the clipped surrogate.

    The ratio is taken to the recorded behaviour log-probs, at the temperature of the rollout.

    Args:
      state: of the actor; donate it.
      batch: [R, L] packed rows with `acted`, `logprob` (behaviour) and the column `advantage_t`.
      learning_rate: [] float32.
      config: of the actor.
      optimizer: as made by `optim.adamw`.
      clip: half-width of the ratio's trust region.
      temperature: at which the batch was sampled, > 0.

    Returns:
      (state, metrics): `loss`, `entropy` (nats a token), `approx_kl`, `clip_fraction`, `ratio`,
      `grad_norm`.
    """
    n_tokens = jnp.sum(batch.acted)

    def loss_fn(params: object) -> tuple[jax.Array, Metrics]:
        logprob_t, entropy_t = token_logprobs(config, params, batch, temperature=temperature)
        loss, metrics = losses.ppo_clip(
            logprob_t,
            batch.logprob,
            batch.columns["advantage_t"],
            batch.acted,
            n_tokens=n_tokens,
            clip_low=clip,
            clip_high=clip,
        )
        metrics["entropy"] = losses.masked_sum(entropy_t, batch.acted, n_tokens=n_tokens)
        return loss, metrics

    (loss, metrics), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    new = apply_gradients(state, gradients, optimizer=optimizer, learning_rate=learning_rate)
    return new, {**metrics, "loss": loss, "grad_norm": optax.global_norm(gradients)}
