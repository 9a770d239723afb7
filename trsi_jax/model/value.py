"""The critic: the actor's trunk with a scalar head."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trsi_jax.model.config import ModelConfig
from trsi_jax.model.decoder import Params, hidden_states


def init_value_params(config: ModelConfig, actor_params: Params) -> Params:
    """A critic that starts from an actor's trunk and says 0 everywhere.

    The trunk is copied, so that donating either tree's buffers leaves the other alone.

    Args:
      config: the model of the actor.
      actor_params: tree of `init_params`; its language-model head is left out.

    Returns:
      The trunk's tree and "value_head" with kernel [D] and bias [], float32 zeros.

    Source: our reading.
    """
    trunk: Params = jax.tree.map(
        jnp.copy, {name: tree for name, tree in actor_params.items() if name != "lm_head"}
    )
    head = {"kernel": jnp.zeros((config.hidden_size,), jnp.float32), "bias": jnp.zeros(())}
    return trunk | {"value_head": head}


def values(
    config: ModelConfig,
    params: Params,
    token_ids: jax.Array,
    segment_ids: jax.Array,
    position_ids: jax.Array,
) -> jax.Array:
    """V_t = w . h_t + b, the value after reading token t.

    Args:
      config: the model.
      params: tree of `init_value_params`.
      token_ids: [B, T] int.
      segment_ids: [B, T] int, 0 on padding.
      position_ids: [B, T] int, position inside the segment.

    Returns:
      [B, T] float32; float64 of such a model.

    Source: our reading.
    """
    hidden = hidden_states(config, params, token_ids, segment_ids, position_ids)
    head = params["value_head"]
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    product = hidden.astype(dtype) * head["kernel"].astype(dtype)
    bias: jax.Array = head["bias"].astype(dtype)
    return jnp.sum(product, axis=-1) + bias
