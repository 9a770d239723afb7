"""Bodies of SGLang's routes as this server reads them, and how it says no.

Field names and defaults are those of sglang 0.5.23. A sampling field that would change the tokens
and is not implemented is refused, never ignored; its neutral value is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from rollout.errors import InvalidRequest
from rollout.protocols import SamplingSpec

M = TypeVar("M", bound=BaseModel)

_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "stop": ("", []),
    "stop_regex": ("", []),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "logit_bias": ({},),
    "custom_params": ({},),
    "beam_width": (1,),
    "watermark": (False,),
    "choice": ([],),
}
"""Sampling fields that are known and not implemented, with the values that change nothing."""

_HARMLESS = (
    *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
    *("stream_interval",),
)


class Sampling(BaseModel):
    """`sampling_params` of one prompt."""

    model_config = ConfigDict(strict=True, extra="forbid")

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int = 1
    sampling_seed: int | None = None

    def spec(self, stop_ids: Sequence[int]) -> SamplingSpec:
        """For the engine; `stop_ids` are the model's own."""
        return SamplingSpec(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=tuple(dict.fromkeys([*(self.stop_token_ids or ()), *stop_ids])),
            ignore_eos=self.ignore_eos,
            seed=self.sampling_seed,
        )


class GenerateBody(BaseModel):
    """`/generate`; unknown keys beside these are ignored, as SGLang does."""

    model_config = ConfigDict(strict=True)

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    stream: bool = False


class UpdateBody(BaseModel):
    """`/update_weights_from_disk`."""

    model_config = ConfigDict(strict=True)

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False


class AbortBody(BaseModel):
    """`/abort_request`."""

    model_config = ConfigDict(strict=True)

    rid: str | None = None
    abort_all: bool = False


class PauseBody(BaseModel):
    """`/pause_generation`."""

    model_config = ConfigDict(strict=True)

    mode: str = "abort"


def sampling(given: Mapping[str, Any]) -> Sampling:
    """Read `sampling_params`.

    Raises:
      HTTPException: 400 for a key that SGLang has not, or one that this server has not.
    """
    kept = {}
    for key, value in given.items():
        if key in _HARMLESS:
            continue
        if key in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[key]:
                raise refused(f"sampling field {key!r} is not implemented here, got {value!r}")
            continue
        if key not in Sampling.model_fields:
            known = ", ".join([*Sampling.model_fields, *_NEUTRAL, *_HARMLESS])
            raise refused(f"unknown sampling field {key!r}; known: {known}")
        if value is not None:
            kept[key] = value
    return checked(Sampling, kept, "sampling_params.")


def checked(kind: type[M], content: Any, prefix: str = "") -> M:
    """`content` as a body.

    Raises:
      HTTPException: 400 that names the first wrong field and its value.
    """
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if value is not None}
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        where = prefix + ".".join(str(part) for part in problem["loc"])
        raise refused(f"{where}: {problem['msg']}, got {problem['input']!r}"[:400]) from error


async def body(request: Request) -> dict[str, Any]:
    """The JSON object of a request; an empty body is an empty object.

    Raises:
      HTTPException: 400 for anything else.
    """
    raw = await request.body()
    if not raw:
        return {}
    try:
        content = await request.json()
    except ValueError as error:
        raise refused(f"the body is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise refused("the body is no JSON object")
    return content


def refused(message: str) -> HTTPException:
    """A 400 with a message."""
    return HTTPException(400, message)


def copied(spec: SamplingSpec, copy: int) -> SamplingSpec:
    """The sampling of the copies of one prompt: each has a seed of its own."""
    return spec if spec.seed is None or copy == 0 else replace(spec, seed=spec.seed + copy)


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def problem(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of an error."""
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, InvalidRequest):
        status, message = 400, str(error)
    else:
        status, message = 503, str(error)
    kind = "BadRequestError" if status == 400 else "Error"
    return status, {"error": {"message": message, "type": kind, "code": status}}
