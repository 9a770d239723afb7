"""Our side of the comparison with `transformers`: load the reference checkpoint and run it."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests import reference
from trsi_jax.model import ModelConfig, hidden_states, load_params, logits
from trsi_jax.model.decode import Rows, advance, init_cache
from trsi_jax.model.hf import names


def directory(case: str, folder: Path, dtype: str) -> Path:
    """The reference checkpoint of a case as a Hugging Face directory."""
    config = reference.description(case)
    config.dtype = dtype
    config.save_pretrained(str(folder))
    shapes = {n: t.shape for n, t in names.text_tensors(ModelConfig.from_hf(folder)).items()}
    tensors = reference.weights(shapes, offset_norms=case == "hybrid")
    return reference.write_directory(
        folder, config, {n: t.astype(dtype) for n, t in tensors.items()}, shards=2
    )


def load(folder: Path, **changes: Any) -> tuple[ModelConfig, Any]:
    """Configuration and parameters of a directory."""
    config = dataclasses.replace(ModelConfig.from_hf(folder), remat=False, **changes)
    return config, load_params(folder, config)


@partial(jax.jit, static_argnums=0)
def scores(config: ModelConfig, params: Any, tokens: Any) -> Any:
    """Logits of whole rows."""
    segments = jnp.ones_like(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return logits(config, params, hidden_states(config, params, tokens, segments, positions))


@partial(jax.jit, static_argnums=0)
def logits_and_gradients(config: ModelConfig, params: Any, tokens: Any) -> tuple[Any, Any, Any]:
    """Logits, mean next-token negative log-likelihood, and its gradient."""

    def loss(params: Any) -> tuple[Any, Any]:
        out = scores(config, params, tokens)
        logprob = jax.nn.log_softmax(out[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logprob, tokens[:, 1:, None], axis=-1)), out

    (value, out), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return out, value, gradients


def by_tensor(config: ModelConfig, tree: Any) -> dict[str, np.ndarray]:
    """A tree like the parameters as the checkpoint would hold it, by plain numpy."""
    leaves = names.flatten(tree)
    found = {}
    for tensor in names.text_tensors(config).values():
        blocks = []
        for part in tensor.parts:
            piece = np.asarray(leaves[part.path])[part.layer]
            ins = len(part.in_shape)
            turned = np.moveaxis(piece, range(ins), range(-ins, 0)) if ins else piece
            blocks.append(turned.reshape(part.rows[1] - part.rows[0], *tensor.shape[1:]))
        found[tensor.name] = np.concatenate(blocks)
    return found


def greedy(config: ModelConfig, params: Any, prompt: np.ndarray, new_tokens: int) -> np.ndarray:
    """The tokens behind a prompt by cached decoding at temperature 0."""
    total = len(prompt) + new_tokens
    tokens = np.zeros((1, total), np.int32)
    tokens[0, : len(prompt)] = prompt
    rows = Rows(
        tokens=jnp.asarray(tokens),
        logprobs=jnp.zeros((1, total), jnp.float32),
        known=jnp.asarray([len(prompt)], jnp.int32),
        limit=jnp.asarray([total], jnp.int32),
        done=jnp.asarray([False]),
        key_data=jnp.zeros((1, 2), jnp.uint32),
        temperature=jnp.zeros(1, jnp.float32),
        top_p=jnp.ones(1, jnp.float32),
        top_k=jnp.full(1, -1, jnp.int32),
        stop=jnp.full((1, 1), -1, jnp.int32),
    )
    cache = init_cache(config, 1, total)
    _, rows = advance(config, params, cache, rows, jnp.asarray([False]), steps=total)
    return np.asarray(rows.tokens[0, len(prompt) :])


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest entry of the expected array."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())
