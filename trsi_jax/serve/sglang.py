"""SGLang's routes over one `JaxEngine`, for clients that know a fleet of SGLang servers.

Protocol of sglang 0.5.23. What differs is said in docs/engines.md: nothing is ever sampled from a
cache of older weights, requests that run go on with new weights, bad input is a 400 and never ends
the process, and `/health` answers while generation is paused.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, TypeVar

import jax
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from rollout.errors import EngineError
from rollout.protocols import (
    EngineState,
    FinishKind,
    GenerateRequest,
    GenerateResult,
    SamplingSpec,
    VersionSpan,
    WeightSnapshot,
)
from trsi_jax.engine import JaxEngine
from trsi_jax.serve import wire
from trsi_jax.serve.load import Served

T = TypeVar("T")

PROBE_S = 20.0
"""How long `/health_generate` waits for its token."""

_DISTRIBUTION_NUMBERS = 1 << 24
"""Most log-probs that one reply may hold."""


@dataclass(frozen=True, slots=True)
class _Ask:
    """One completion of a `/generate`."""

    request: GenerateRequest
    logprob_start: int
    logprobs: bool
    token_ids: tuple[int, ...] | None


class Server:
    """The state behind the routes: the engine, and what the weights are called."""

    def __init__(self, served: Served, engine: JaxEngine, *, weight_version: str) -> None:
        self.served = served
        self.engine = engine
        self.path = str(served.path)
        self._numbers = itertools.count(1)
        # The engine counts updates; clients name them.
        self._labels = {0: weight_version}
        self._updating = asyncio.Lock()

    @property
    def label(self) -> str:
        """What the newest weights are called."""
        return self._labels[max(self._labels)]

    async def generate(self, request: Request) -> Response:
        """`/generate`: one prompt or many, whole or as a stream."""
        content = wire.checked(wire.GenerateBody, await wire.body(request))
        asks, single = self._asks(content)
        if content.stream:
            if len(asks) > 1:
                raise wire.refused("stream: only one completion at a time is streamed")
            return self._stream(request, asks[0])
        results = await self._until_gone(request, [self._one(ask) for ask in asks])
        return JSONResponse(results[0] if single else results)

    def _asks(self, content: wire.GenerateBody) -> tuple[list[_Ask], bool]:
        if content.top_logprobs_num:
            raise wire.refused("top_logprobs_num is not implemented here; use token_ids_logprob")
        prompts, single = self._prompts(content)
        params = content.sampling_params or {}
        per_prompt = [params] * len(prompts) if isinstance(params, dict) else params
        rids = content.rid
        if isinstance(rids, str):
            rids = [rids] if len(prompts) == 1 else [f"{rids}_{i}" for i in range(len(prompts))]
        rids = rids or [uuid.uuid4().hex for _ in prompts]
        for name, given in (("sampling_params", per_prompt), ("rid", rids)):
            if len(given) != len(prompts):
                raise wire.refused(f"{name}: {len(given)} for {len(prompts)} prompts")
        asks = []
        for ids, settings, rid in zip(prompts, per_prompt, rids, strict=True):
            sampling = wire.sampling(settings)
            if sampling.n < 1:
                raise wire.refused(f"sampling_params.n must be positive, got {sampling.n}")
            spec = sampling.spec(self.served.stop_ids)
            if content.token_ids_logprob is not None and spec.max_new_tokens:
                raise wire.refused("token_ids_logprob: only with max_new_tokens 0 (scoring)")
            for copy in range(sampling.n):
                name = rid if sampling.n == 1 else f"{rid}_{copy}"
                asks.append(
                    _Ask(
                        GenerateRequest(name, tuple(ids), wire.copied(spec, copy)),
                        content.logprob_start_len,
                        content.return_logprob,
                        None
                        if content.token_ids_logprob is None
                        else tuple(content.token_ids_logprob),
                    )
                )
        return asks, single and len(asks) == 1

    def _prompts(self, content: wire.GenerateBody) -> tuple[list[list[int]], bool]:
        if (content.text is None) == (content.input_ids is None):
            raise wire.refused("give input_ids or text, one of the two")
        if content.text is not None:
            if self.served.chat is None:
                raise wire.refused("text: the model has no tokenizer; give input_ids")
            texts = [content.text] if isinstance(content.text, str) else content.text
            encode = self.served.chat.tokenizer.control
            return [encode(text) for text in texts], isinstance(content.text, str)
        ids: Any = content.input_ids
        single = not ids or isinstance(ids[0], int)
        return ([ids] if single else ids), single

    async def _one(self, ask: _Ask) -> dict[str, Any]:
        result = await self.engine.generate(ask.request)
        reply = self._reply(ask, result, result.output_ids, result.logprobs, result.spans)
        if ask.logprobs and ask.logprob_start >= 0:
            reply["meta_info"] |= await self._input_logprobs(ask)
        return reply

    async def _input_logprobs(self, ask: _Ask) -> dict[str, Any]:
        """Log-probs at temperature 1 of the prompt from a position on; the first has none."""
        ids, start = ask.request.input_ids, ask.logprob_start
        if start >= len(ids):
            raise wire.refused(f"logprob_start_len {start} is not below the {len(ids)} ids")
        scores = await self.engine.score(ids, start + 1, 1.0)
        found: dict[str, Any] = {
            "input_token_logprobs": [
                [score, token, None]
                for score, token in zip([None, *scores], ids[start:], strict=True)
            ]
        }
        if ask.token_ids is not None:
            bad = [t for t in ask.token_ids if not 0 <= t < self.engine.caps.vocab_size]
            if bad:
                raise wire.refused(f"token_ids_logprob: id {bad[0]} is outside the vocabulary")
            if len(ids) * self.engine.caps.vocab_size > _DISTRIBUTION_NUMBERS:
                raise wire.refused("token_ids_logprob: the prompt or the vocabulary is too large")
            whole = await self.engine.distributions(ids)
            found["input_token_ids_logprobs"] = [
                None,
                *(
                    [[float(row[token]), token, None] for token in ask.token_ids]
                    for row in whole[start:]
                ),
            ]
        return found

    def _reply(
        self,
        ask: _Ask,
        result: GenerateResult | None,
        output: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[VersionSpan],
    ) -> dict[str, Any]:
        ids = ask.request.input_ids
        meta: dict[str, Any] = {
            "id": ask.request.request_id,
            "finish_reason": None if result is None else _finish(result),
            "prompt_tokens": len(ids),
            "completion_tokens": len(output),
            "cached_tokens": 0 if result is None else result.cached_tokens,
            "weight_version": self._labels[spans[-1].version] if spans else self.label,
            "weight_versions": [
                {"version": self._labels[s.version], "start": s.start, "end": s.end} for s in spans
            ],
            "e2e_latency": None if result is None else result.latency_s,
        }
        if ask.logprobs:
            rows = [[x, token, None] for x, token in zip(logprobs, output, strict=True)]
            meta |= {"output_token_logprobs": rows, "output_token_logprobs_length": len(rows)}
        return {"text": self.text(output), "output_ids": list(output), "meta_info": meta}

    def text(self, ids: Sequence[int]) -> str:
        """The text of sampled ids without the stop id; empty where there is no tokenizer."""
        chat = self.served.chat
        return "" if chat is None else chat.command(tuple(ids))

    # --- streams and clients that leave -------------------------------------------------------

    def _stream(self, request: Request, ask: _Ask) -> Response:
        async def events() -> AsyncIterator[bytes]:
            try:
                async for output, logprobs, result in self.progress(ask.request):
                    spans = () if result is None else result.spans
                    yield wire.event(self._reply(ask, result, output, logprobs, spans))
            except (EngineError, HTTPException) as error:
                yield wire.event(wire.problem(error)[1])
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def progress(
        self, request: GenerateRequest
    ) -> AsyncIterator[tuple[list[int], list[float], GenerateResult | None]]:
        """All ids and log-probs so far, again and again, at last with the result."""
        news: asyncio.Queue[tuple[list[int], list[float]] | None] = asyncio.Queue()
        task = asyncio.ensure_future(
            self.engine.generate(
                request, on_tokens=lambda ids, scores: news.put_nowait((list(ids), list(scores)))
            )
        )
        task.add_done_callback(lambda _: news.put_nowait(None))
        try:
            while (said := await news.get()) is not None:
                yield *said, None
            result = task.result()
            yield list(result.output_ids), list(result.logprobs), result
        finally:
            # A client that left cancels this; the engine then frees the slot.
            task.cancel()

    async def _until_gone(
        self, request: Request, work: Sequence[Coroutine[Any, Any, T]]
    ) -> list[T]:
        """Do all of the work, or stop it when one fails or the client leaves."""
        tasks = [asyncio.ensure_future(part) for part in work]
        gone = asyncio.ensure_future(_gone(request))
        waiting: set[asyncio.Future[Any]] = {*tasks, gone}
        try:
            while not all(task.done() for task in tasks):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if gone in done:
                    raise HTTPException(499, "the client left")
                for task in done:
                    task.result()
            return [task.result() for task in tasks]
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def until_gone(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Do the work, or stop it when the client leaves."""
        (done,) = await self._until_gone(request, [work])
        return done

    # --- control ------------------------------------------------------------------------------

    async def update(self, request: Request) -> Response:
        """`/update_weights_from_disk`: all of it or nothing; caches are always dropped."""
        content = wire.checked(wire.UpdateBody, await wire.body(request))
        async with self._updating:
            if content.abort_all_requests:
                await self.engine.abort()
            number = next(self._numbers)
            label = self.label if content.weight_version is None else content.weight_version
            self._labels[number] = label
            try:
                await self.engine.update_weights(
                    WeightSnapshot(number, path=Path(content.model_path))
                )
            except EngineError as error:
                del self._labels[number]
                said = {"success": False, "message": str(error), "num_paused_requests": 0}
                return JSONResponse(said, 400)
            self.path = content.model_path
        said = {"success": True, "message": "Succeeded.", "num_paused_requests": 0}
        return JSONResponse(said)

    async def abort(self, request: Request) -> Response:
        """`/abort_request`: of one request or all; an unknown one is no error."""
        content = wire.checked(wire.AbortBody, await wire.body(request))
        if content.rid is None and not content.abort_all:
            raise wire.refused("give rid, or abort_all: true")
        await self.engine.abort(None if content.abort_all else [content.rid or ""])
        return Response()

    async def pause(self, request: Request) -> Response:
        """`/pause_generation`: what runs returns its part (abort), or is held."""
        content = wire.checked(wire.PauseBody, await wire.body(request))
        if content.mode not in ("abort", "in_place", "retract"):
            raise wire.refused(f"mode {content.mode!r} is not abort, in_place or retract")
        await self.engine.pause()
        if content.mode == "abort":
            await self.engine.abort()
        return JSONResponse({"status": "ok", "message": "Generation paused."})

    async def resume(self, request: Request) -> Response:
        """`/continue_generation`."""
        await self.engine.resume()
        return JSONResponse({"status": "ok", "message": "Generation continued."})

    async def flush(self, request: Request) -> Response:
        """`/flush_cache`: refused while requests run or wait."""
        if not await self.engine.flush_cache():
            return PlainTextResponse("Flush cache failed.\n", 400)
        return PlainTextResponse("Cache flushed.\n")

    # --- questions ----------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """`/health`: whether the engine lives; it answers while generation is paused."""
        (status,) = await self.engine.status()
        return Response(status_code=503 if status.state is EngineState.CLOSED else 200)

    async def ready(self, request: Request) -> Response:
        """`/ready`: whether a request would be served at once."""
        (status,) = await self.engine.status()
        return Response(status_code=200 if status.state is EngineState.READY else 503)

    async def probe(self, request: Request) -> Response:
        """`/health_generate`: whether a token comes in time; not while paused."""
        spec = SamplingSpec(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        asked = GenerateRequest(f"health-{uuid.uuid4().hex}", (0,), spec, deadline_s=PROBE_S)
        result = await self.until_gone(request, self.engine.generate(asked))
        return Response(status_code=200 if result.output_ids else 503)

    async def model_info(self, request: Request) -> Response:
        """`/model_info`."""
        model_type, architecture = self.served.kind
        return JSONResponse(
            {
                "model_path": self.path,
                "tokenizer_path": self.path if self.served.chat is not None else None,
                "is_generation": True,
                "weight_version": self.label,
                "model_type": model_type,
                "architectures": [architecture],
                "served_model_name": self.served.name,
            }
        )

    async def server_info(self, request: Request) -> Response:
        """`/server_info`."""
        caps = self.engine.caps
        return JSONResponse(
            {
                "server": "trsi-jax",
                "version": version_of("trsi-jax"),
                "device": jax.default_backend(),
                "model_path": self.path,
                "served_model_name": self.served.name,
                "weight_version": self.label,
                "vocab_size": caps.vocab_size,
                "context_length": caps.context_len,
                "max_running_requests": caps.max_sessions,
                "enable_deterministic_inference": caps.seeded_sampling,
                "skip_tokenizer_init": self.served.chat is None,
            }
        )

    async def loads(self, request: Request) -> Response:
        """`/v1/loads`: how many requests run and wait."""
        (status,) = await self.engine.status()
        load = {
            "dp_rank": 0,
            "num_running_reqs": status.running,
            "num_waiting_reqs": status.waiting,
            "num_total_reqs": status.running + status.waiting,
            "token_usage": min(1.0, status.running / self.engine.caps.max_sessions),
        }
        return JSONResponse({"timestamp": time.time(), "loads": [load]})


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _finish(result: GenerateResult) -> dict[str, Any]:
    if result.finish is FinishKind.STOP:
        return {"type": "stop", "matched": result.matched_stop}
    if result.finish is FinishKind.LENGTH:
        return {"type": "length", "length": len(result.output_ids)}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
