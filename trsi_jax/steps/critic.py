"""The critic's step, of the warm-up and of PPO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trsi_jax import losses, model
from trsi_jax.batch import PackedBatch
from trsi_jax.state import TrainState, apply_gradients
from trsi_jax.steps.forward import token_values

Metrics = dict[str, jax.Array]

MIXER = "mixer"
"""Name of the part of a layer that mixes tokens: what `frozen_attention` leaves as it is."""


def critic_step(
    state: TrainState,
    batch: PackedBatch,
    learning_rate: jax.Array,
    *,
    config: model.ModelConfig,
    optimizer: optax.GradientTransformation,
    value_clip: float | None = None,
    value_high: float | None = None,
    frozen_attention: bool = False,
) -> tuple[TrainState, Metrics]:
    """One update of the critic towards the batch's `return_t`; the actor is not an argument.

    loss = sum_{t acted} (V_t - R_t)^2 / (2 n_acted), optionally clipped around the old values; or,
    with `value_high`, the cross-entropy of a head that says V_t = value_high sigmoid(z_t).

    Args:
      state: of the critic; donate it.
      batch: [R, L] packed rows with `acted` and the columns `return_t` and `value_t`.
      learning_rate: [] float32.
      config: of the critic.
      optimizer: as made by `optim.adamw`.
      value_clip: half-width of the trust region around the old values, or None.
      value_high: largest value of a sigmoid head trained by `losses.value_bce`, or None.
      frozen_attention: leave the parameters of the layers' token mixers as they are.

    Returns:
      (state, metrics): `loss`, `explained_variance` before the update, `grad_norm`.
    """
    n_tokens = jnp.sum(batch.acted)

    def loss_fn(params: object) -> tuple[jax.Array, jax.Array]:
        value_t = token_values(config, params, batch)
        if value_high is not None:
            target_t = batch.columns["return_t"]
            loss = losses.value_bce(
                value_t, target_t, batch.acted, n_tokens=n_tokens, high=value_high
            )
            said_t = losses.value_of_logit(value_t, high=value_high)
            return loss, losses.explained_variance(said_t, target_t, batch.acted)
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
    if frozen_attention:
        # Before clipping, so that what stays as it is takes no share of the norm.
        gradients = _at_mixer(lambda g, _: jnp.zeros_like(g), gradients, gradients)
    new = apply_gradients(state, gradients, optimizer=optimizer, learning_rate=learning_rate)
    if frozen_attention:
        # Weight decay moves what has no gradient.
        kept = _at_mixer(lambda _, old: old, new.params, state.params)
        new = replace(new, params=kept)
    return new, {
        "loss": loss,
        "explained_variance": explained,
        "grad_norm": optax.global_norm(gradients),
    }


def _at_mixer(fn: Callable[[jax.Array, jax.Array], jax.Array], tree: Any, other: Any) -> Any:
    """`tree` with fn(leaf, leaf of `other`) at the parameters of the token mixers."""

    def one(path: Any, leaf: jax.Array, beside: jax.Array) -> jax.Array:
        inside = any(getattr(key, "key", None) == MIXER for key in path)
        return fn(leaf, beside) if inside else leaf

    return jax.tree_util.tree_map_with_path(one, tree, other)
