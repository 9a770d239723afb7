"""Finds what a person wants served: a run, one of its stages, or a Hugging Face directory."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from rollout import tokenizer
from rollout.chat import Chat
from rollout.errors import UserError
from trsi_jax import checkpoint, config, model
from trsi_jax.model import ModelConfig
from trsi_jax.model.decoder import Params
from trsi_jax.model.hf.description import read_description
from trsi_jax.model.hf.load import load_params

MAX_CONTEXT = 8192
"""Tokens of a slot where nobody says otherwise and the model has more positions."""

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
_CHECKPOINTS, _CONFIG = "checkpoints", "config.toml"


@dataclass(frozen=True)
class Served:
    """A model to serve.

    Attributes:
      name: for clients.
      path: what was loaded.
      chat: text and markup of the model; None where there is no tokenizer.
      stop_ids: that end an output unless a request ignores them.
      context: tokens of a slot unless a person says otherwise.
      kind: `model_type` and architecture for clients that ask.
    """

    name: str
    path: Path
    config: ModelConfig
    params: Params
    chat: Chat | None
    stop_ids: tuple[int, ...]
    context: int
    kind: tuple[str, str]


def load(path: Path, *, stage: str | None = None, dtype: str | None = None) -> Served:
    """Load what `path` names.

    Args:
      path: the folder of a run, `RUN/checkpoints/STAGE`, or a Hugging Face directory.
      stage: of a run; None: the last that is finished.
      dtype: "float32" or "bfloat16" for parameters and compute; None: the model's own.

    Returns:
      Configuration, parameters, and chat.

    Raises:
      UserError: names what is missing and what there is.
    """
    if not path.is_dir():
        raise UserError(f"no directory {path}; give a run, a checkpoint or a model directory")
    if (path / "config.json").is_file():
        if stage is not None:
            raise UserError(f"--stage {stage}: {path} is a model directory and has no stages")
        return _hugging_face(path, dtype)
    for run in (path, *path.resolve().parents[:3]):
        if (run / _CONFIG).is_file():
            inside = path.resolve().relative_to(run.resolve()).parts
            if inside[:1] == (_CHECKPOINTS,) and len(inside) > 1:
                stage = inside[1]
            elif inside:
                break
            return _run(run, stage, dtype)
    raise UserError(
        f"{path} holds no {_CONFIG} of a run and no config.json of a model; give a run, its"
        f" {_CHECKPOINTS}/STAGE, or a Hugging Face directory"
    )


def _run(run: Path, stage: str | None, dtype: str | None) -> Served:
    settings = config.load(run / _CONFIG, [])
    folder = run / _CHECKPOINTS
    finished = [s.name for s in settings.stages if checkpoint.latest(folder / s.name) is not None]
    if not finished:
        raise UserError(f"{run}: no stage is finished yet")
    name = finished[-1] if stage is None else stage
    if name not in finished:
        raise UserError(f"{run}: no checkpoint of stage {name!r}; finished: {', '.join(finished)}")
    words = tokenizer.load(run / "tokenizer")
    architecture = _cast(model.preset(settings.model.preset, vocab_size=words.vocab_size), dtype)
    pair: Any = {"actor": model.abstract_params(architecture)}
    index = [stage.name for stage in settings.stages].index(name)
    if any(isinstance(stage, config.RprStage) for stage in settings.stages[: index + 1]):
        pair["critic"] = jax.eval_shape(
            lambda actor: model.init_value_params(architecture, actor), pair["actor"]
        )
    params: Params = checkpoint.restore(folder / name, 0, pair)["actor"]
    return Served(
        name=f"{settings.name}-{name}",
        path=folder / name,
        config=architecture,
        params=params,
        chat=Chat(words),
        stop_ids=words.stop_ids,
        context=settings.engine.context,
        kind=("qwen3_5_text", "Qwen3_5ForCausalLM"),
    )


def _hugging_face(directory: Path, dtype: str | None) -> Served:
    architecture = _cast(replace(ModelConfig.from_hf(directory), remat=False), dtype)
    description = read_description(directory)
    chat = None
    if any((directory / name).is_file() for name in _TOKENIZER_FILES):
        chat = Chat(tokenizer.load(directory))
    kinds = getattr(description, "architectures", None) or ["unknown"]
    return Served(
        name=architecture.name,
        path=directory,
        config=architecture,
        params=load_params(directory, architecture),
        chat=chat,
        stop_ids=_end_ids(directory, description),
        context=min(architecture.max_position, MAX_CONTEXT),
        kind=(description.model_type, kinds[0]),
    )


def _end_ids(directory: Path, description: Any) -> tuple[int, ...]:
    """Ids that end a text: of `generation_config.json`, else of `config.json`."""
    path = directory / "generation_config.json"
    found: Any = None
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise UserError(f"{path}: {error}") from error
    if found is None:
        found = getattr(description.get_text_config(), "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def _cast(architecture: ModelConfig, dtype: str | None) -> ModelConfig:
    if dtype is None:
        return architecture
    return replace(architecture, param_dtype=dtype, compute_dtype=dtype)
