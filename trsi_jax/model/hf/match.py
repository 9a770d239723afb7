"""A checkpoint against the model it is read into: every name, shape and dtype, before any byte."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.errors import UserError
from trsi_jax.model.config import ModelConfig
from trsi_jax.model.hf import names
from trsi_jax.model.hf.files import DTYPES, Checkpoint, Stored


@dataclass(frozen=True, slots=True)
class Match:
    """What a checkpoint holds.

    Attributes:
      trained: tensors of the text model, by name, with how they lie in the parameter tree.
      copied: names of the tensors that are only passed on.
      where: name -> file and place of every tensor.
    """

    trained: dict[str, names.Tensor]
    copied: frozenset[str]
    where: dict[str, tuple[Path, Stored]]


def match(checkpoint: Checkpoint, config: ModelConfig, description: Any) -> Match:
    """Account for every tensor of a checkpoint.

    Args:
      checkpoint: headers of the directory.
      config: the model to read or write.
      description: the directory's `transformers` configuration object.

    Raises:
      UserError: names the first tensor that is missing, unknown, or of a wrong shape or dtype.
    """
    where = {stored.name: (path, stored) for path, stored in checkpoint.tensors()}
    vlm = any(name.startswith(names.VLM_PREFIX) for name in where)
    trained = names.text_tensors(config, names.VLM_PREFIX if vlm else names.TEXT_PREFIX)
    if config.tie_embeddings and names.HEAD in where:
        trained[names.HEAD] = names.tied_head(config)
    copied = names.untrained_tensors(description)
    # `transformers` drops the prediction block on load, so a directory that it has saved lacks the
    # whole of it; a text-only one lacks the vision tower. Half of either is a broken checkpoint.
    for part in ("mtp.", "model.visual."):
        if not any(name.startswith(part) for name in where):
            copied = {name: shape for name, shape in copied.items() if not name.startswith(part)}
    expected = {name: tensor.shape for name, tensor in trained.items()} | copied
    for name, shape in expected.items():
        if name not in where:
            raise UserError(f"{checkpoint.directory}: tensor {name} is missing")
        path, stored = where[name]
        if stored.shape != shape:
            raise UserError(
                f"{path}: tensor {name} has shape {list(stored.shape)}, the model needs "
                f"{list(shape)}"
            )
        if name in trained and stored.dtype not in DTYPES:
            raise UserError(
                f"{path}: tensor {name} has dtype {stored.dtype}; allowed: {', '.join(DTYPES)}"
            )
    for name, (path, _) in where.items():
        if name not in expected:
            raise UserError(f"{path}: tensor {name} is not one of model {config.name!r}")
    return Match(trained, frozenset(copied), where)
