"""An OpenAI-compatible chat over the engine, in the layout that the policies are trained in.

Thinking is off and turns are appended, never rendered anew (`rollout.chat`): a later request of
the same conversation begins with the ids of the one before, as far as its assistant text encodes
to the ids that were sampled.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rollout.chat import USER_CLOSE, USER_OPEN, Chat
from rollout.errors import EngineError
from rollout.protocols import FinishKind, GenerateRequest, GenerateResult, SamplingSpec
from trsi_jax.serve import wire
from trsi_jax.serve.sglang import Server

_IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("parallel_tool_calls", "reasoning_effort", "verbosity"),
)
_NEUTRAL: dict[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_UNSURE = "\ufffd"


class ChatBody(BaseModel):
    """What of a chat completion's body is used."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str = ""
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    n: int = 1
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    logprobs: bool = False


class ChatRoutes:
    """`/v1/models` and `/v1/chat/completions`."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def models(self, request: Request) -> Response:
        """The one model."""
        card = {
            "id": self._server.served.name,
            "object": "model",
            "created": 0,
            "owned_by": "trsi-jax",
            "max_model_len": self._server.engine.caps.context_len,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def complete(self, request: Request) -> Response:
        """One assistant turn, or `n` of them."""
        content = _read(await wire.body(request))
        name = self._server.served.name
        if content.model not in ("", name):
            raise wire.refused(f"model {content.model!r} is not served here; this is {name!r}")
        chat = self._server.served.chat
        if chat is None:
            raise wire.refused("the model has no tokenizer; use /generate with input_ids")
        if not 1 <= content.n <= 128:
            raise wire.refused(f"n must be in 1..128, got {content.n}")
        ids = conversation(chat, content.messages)
        asks = self._asks(content, ids)
        stops = [content.stop] if isinstance(content.stop, str) else content.stop or []
        stops = [stop for stop in stops if stop]
        completion = f"chatcmpl-{uuid.uuid4().hex}"
        if content.stream:
            if content.n > 1:
                raise wire.refused("stream: only n = 1 is streamed")
            return self._stream(content, asks[0], stops, completion)
        choices = await self._server.until_gone(
            request, _all(self._choice(i, ask, stops, content) for i, ask in enumerate(asks))
        )
        made = sum(choice.pop("_tokens") for choice in choices)
        return JSONResponse(
            _envelope(completion, "chat.completion", name)
            | {"choices": choices, "usage": _usage(len(ids), made)}
        )

    def _asks(self, content: ChatBody, ids: tuple[int, ...]) -> list[GenerateRequest]:
        caps = self._server.engine.caps
        room = caps.context_len - len(ids)
        asked = content.max_completion_tokens or content.max_tokens
        if room < 1:
            raise wire.refused(
                f"the messages are {len(ids)} tokens; the context is {caps.context_len}"
            )
        spec = SamplingSpec(
            max_new_tokens=room if asked is None else asked,
            temperature=content.temperature,
            top_p=content.top_p,
            top_k=content.top_k,
            stop_token_ids=tuple(self._server.served.stop_ids),
            seed=content.seed,
        )
        rid = uuid.uuid4().hex
        return [GenerateRequest(f"{rid}_{i}", ids, wire.copied(spec, i)) for i in range(content.n)]

    async def _choice(
        self, index: int, ask: GenerateRequest, stops: Sequence[str], content: ChatBody
    ) -> dict[str, Any]:
        last: tuple[str, GenerateResult | None, str | None] = ("", None, None)
        async for said in self._texts(ask, stops):
            last = said
        text, result, reason = last
        assert result is not None
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": text},
            "finish_reason": reason,
            "logprobs": None,
            "_tokens": len(result.output_ids),
        }
        if content.logprobs:
            choice["logprobs"] = {"content": self._logprobs(result)}
        return choice

    def _logprobs(self, result: GenerateResult) -> list[dict[str, Any]]:
        assert self._server.served.chat is not None
        decode = self._server.served.chat.tokenizer.decode
        rows = []
        for token, logprob in zip(result.output_ids, result.logprobs, strict=True):
            text = decode([token])
            rows.append(
                {
                    "token": text,
                    "logprob": logprob,
                    "bytes": list(text.encode()),
                    "top_logprobs": [],
                }
            )
        return rows

    async def _texts(
        self, ask: GenerateRequest, stops: Sequence[str]
    ) -> AsyncIterator[tuple[str, GenerateResult | None, str | None]]:
        """The text so far, at last with the result and why it ended."""
        stopped = False
        async for output, _, result in self._server.progress(ask):
            text = self._server.text(output)
            cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)
            if cut >= 0:
                text = text[:cut]
                if not stopped and result is None:
                    await self._server.engine.abort([ask.request_id])
                stopped = True
            elif result is None:
                # Half of a character, or of a stop text, is not told yet.
                text = text.rstrip(_UNSURE)
                held = max((_overlap(text, stop) for stop in stops), default=0)
                text = text[: len(text) - held]
            if result is None:
                yield text, None, None
                continue
            length = result.finish is FinishKind.LENGTH and not stopped
            yield text, result, "length" if length else "stop"

    def _stream(
        self, content: ChatBody, ask: GenerateRequest, stops: Sequence[str], completion: str
    ) -> Response:
        head = _envelope(completion, "chat.completion.chunk", self._server.served.name)

        def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
            return wire.event(head | {"choices": [choice]})

        async def events() -> AsyncIterator[bytes]:
            said = 0
            try:
                yield chunk({"role": "assistant", "content": ""})
                async for text, result, reason in self._texts(ask, stops):
                    if len(text) > said:
                        yield chunk({"content": text[said:]})
                        said = len(text)
                    if result is not None:
                        yield chunk({}, reason)
                        if (content.stream_options or {}).get("include_usage"):
                            usage = _usage(len(ask.input_ids), len(result.output_ids))
                            yield wire.event(head | {"choices": [], "usage": usage})
            except EngineError as error:
                yield wire.event(wire.problem(error)[1])
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


def conversation(chat: Chat, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """The ids of a conversation up to the opening of the next assistant turn.

    An optional system message, a user message, and then in turn assistant messages and what
    answers them: "tool" for an observation as the harnesses lay it, "user" for a plain turn.

    Raises:
      HTTPException: 400 that names the first message that has another role or no text.
    """
    texts = []
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list):
            parts = [part for part in content if isinstance(part, dict)]
            if len(parts) != len(content) or any(part.get("type") != "text" for part in parts):
                raise wire.refused(f"messages[{index}]: only parts of text will do")
            content = "".join(str(part.get("text", "")) for part in parts)
        if not isinstance(content, str):
            raise wire.refused(f"messages[{index}]: content must be text, got {content!r}")
        texts.append((role, content))
    system = ""
    at = 0
    if texts and texts[0][0] in ("system", "developer"):
        system, at = texts[0][1], 1
    if at == len(texts) or texts[at][0] != "user":
        raise wire.refused(f"messages[{at}]: a user message must come first, after the system's")
    ids = chat.prompt(texts[at][1], system=system)
    for index in range(at + 1, len(texts), 2):
        answered = texts[index + 1] if index + 1 < len(texts) else ("nothing", "")
        if texts[index][0] != "assistant" or answered[0] not in ("user", "tool"):
            raise wire.refused(
                f"messages[{index}]: an assistant message and a user or tool message must follow,"
                f" got {texts[index][0]!r} and {answered[0]!r}"
            )
        ids += chat.action(texts[index][1])
        if answered[0] == "tool":
            ids += chat.observation(answered[1])
        else:
            words = chat.tokenizer
            opening, closing = words.control("\n" + USER_OPEN), words.control(USER_CLOSE)
            ids += (*opening, *words.encode(answered[1]), *closing)
    return ids


def _read(given: dict[str, Any]) -> ChatBody:
    kept = {}
    for key, value in given.items():
        if key in _IGNORED:
            continue
        if key in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[key]:
                raise wire.refused(f"field {key!r} is not implemented here, got {value!r}"[:400])
            continue
        if key not in ChatBody.model_fields:
            known = ", ".join(ChatBody.model_fields)
            raise wire.refused(f"unknown field {key!r}; known: {known}")
        kept[key] = value
    return wire.checked(ChatBody, kept)


def _envelope(completion: str, kind: str, name: str) -> dict[str, Any]:
    return {"id": completion, "object": kind, "created": int(time.time()), "model": name}


def _usage(prompt: int, made: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


async def _all(work: Any) -> list[Any]:
    return list(await asyncio.gather(*work))
