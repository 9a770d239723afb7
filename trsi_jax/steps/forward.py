"""Forward passes aligned to tokens: what the policy and the critic say about each token.

The network at position p predicts token p + 1, so log-prob and value of a token are read at its
predecessor (`batch.to_token`). The first token of a segment has none and gets 0.
"""

from __future__ import annotations

from typing import Any

import jax

from trsi_jax import model
from trsi_jax.batch import PackedBatch, to_predictor, to_token
from trsi_jax.losses import linear_logprob


def token_logprobs(
    config: model.ModelConfig, params: Any, batch: PackedBatch, *, temperature: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of every token under the policy, and the entropy of the choice.

    log pi(x_p | x_<p) and H(pi(. | x_<p)), under softmax(logits / temperature).

    Args:
      config: of the policy.
      params: of the policy.
      batch: [R, L] packed rows.
      temperature: of the softmax, > 0.

    Returns:
      (logprob, entropy), each [R, L] float32, token-aligned; 0 at the first token of a segment.
    """
    hidden = model.hidden_states(
        config, params, batch.token_ids, batch.segment_ids, batch.position_ids
    )
    target = to_predictor(batch.token_ids, batch.segment_ids)
    kernel = model.head_kernel(config, params)
    logprob, entropy = linear_logprob(hidden, kernel, target, temperature=temperature)
    return to_token(logprob, batch.segment_ids), to_token(entropy, batch.segment_ids)


def token_values(config: model.ModelConfig, params: Any, batch: PackedBatch) -> jax.Array:
    """The critic's value before every token.

    Args:
      config: of the critic.
      params: of the critic.
      batch: [R, L] packed rows.

    Returns:
      [R, L] float32, token-aligned; 0 at the first token of a segment.
    """
    value = model.values(config, params, batch.token_ids, batch.segment_ids, batch.position_ids)
    return to_token(value, batch.segment_ids)
