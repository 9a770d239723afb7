"""`trsi serve` in a process of its own, and a small client that makes it a `RolloutEngine`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rollout.errors import EngineError, InvalidRequest
from rollout.protocols import (
    EngineCaps,
    EngineState,
    EngineStatus,
    FinishKind,
    GenerateRequest,
    GenerateResult,
    UpdateReport,
    VersionSpan,
    WeightSnapshot,
)

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def serving(model: Path, *options: str, limit_s: float = 180.0) -> Iterator[str]:
    """A running server; gives its URL, and ends it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trsi_jax.cli.main", "serve", str(model), "--port", "0", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [_path()])])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said: list[str] = []
    try:
        assert process.stdout is not None
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        for line in process.stdout:
            said.append(line)
            found = re.search(r"serving .* at (http://\S+)", line)
            if found:
                timer.cancel()
                yield found[1]
                break
        else:
            timer.cancel()
            raise AssertionError("".join(said) or "the server said nothing")
    finally:
        process.terminate()
        process.wait(30)


def _path() -> str:
    return os.environ.get("PYTHONPATH", "")


class ServeClient:
    """The engine behind a URL, by SGLang's routes; what it refuses is `InvalidRequest`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)
        info = httpx.get(f"{url}/server_info", trust_env=False).json()
        self._caps = EngineCaps(
            seeded_sampling=info["enable_deterministic_inference"],
            hybrid=True,
            vocab_size=info["vocab_size"],
            context_len=info["context_length"],
            max_sessions=info["max_running_requests"],
        )
        self._closed = False

    @property
    def caps(self) -> EngineCaps:
        return self._caps

    async def open_sessions(self, session_ids: Sequence[str]) -> None:
        """The server knows contexts, not sessions."""

    async def close_session(self, session_id: str) -> None:
        """The server knows contexts, not sessions."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        began = time.monotonic()
        spec = request.sampling
        sampling = {
            "max_new_tokens": spec.max_new_tokens,
            "temperature": spec.temperature,
            "top_p": spec.top_p,
            "top_k": spec.top_k,
            "stop_token_ids": list(spec.stop_token_ids),
            "ignore_eos": spec.ignore_eos,
            "sampling_seed": spec.seed,
        }
        body = {
            "rid": request.request_id,
            "input_ids": list(request.input_ids),
            "sampling_params": sampling,
            "return_logprob": True,
        }
        call = asyncio.create_task(self._post("/generate", body))
        try:
            if request.deadline_s is not None:
                await asyncio.wait({call}, timeout=request.deadline_s)
            while request.deadline_s is not None and not call.done():
                # The request may still be on its way.
                await self.abort([request.request_id])
                await asyncio.wait({call}, timeout=0.05)
            reply = await call
        finally:
            call.cancel()
        meta = reply["meta_info"]
        assert [row[1] for row in meta["output_token_logprobs"]] == reply["output_ids"]
        reason = meta["finish_reason"]
        return GenerateResult(
            request_id=meta["id"],
            output_ids=tuple(reply["output_ids"]),
            logprobs=tuple(row[0] for row in meta["output_token_logprobs"]),
            finish=FinishKind(reason["type"]),
            matched_stop=reason.get("matched"),
            spans=tuple(
                VersionSpan(int(span["version"]), span["start"], span["end"])
                for span in meta["weight_versions"]
            ),
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
            engine_id=self._url,
            latency_s=time.monotonic() - began,
        )

    async def score(self, ids: Sequence[int], start: int, temperature: float) -> tuple[float, ...]:
        if not 1 <= start <= max(1, len(ids)):
            raise InvalidRequest(f"start {start}")
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
            "token_ids_logprob": list(range(self._caps.vocab_size)),
        }
        meta = (await self._post("/generate", body))["meta_info"]
        rows = meta["input_token_ids_logprobs"][1:]
        if not rows:
            return ()
        whole = np.asarray([[entry[0] for entry in row] for row in rows]) / (temperature or 1.0)
        whole -= np.log(np.exp(whole).sum(axis=1, keepdims=True))
        return tuple(float(row[token]) for row, token in zip(whole, ids[start:], strict=True))

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        if request_ids is None:
            await self._post("/abort_request", {"abort_all": True})
        for request_id in request_ids or ():
            await self._post("/abort_request", {"rid": request_id})

    async def pause(self) -> None:
        await self._post("/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def update_weights(self, snapshot: WeightSnapshot) -> UpdateReport:
        began = time.monotonic()
        body = {"model_path": str(snapshot.path), "weight_version": str(snapshot.version)}
        reply = await self._http.post("/update_weights_from_disk", json=body)
        if not reply.json()["success"]:
            raise EngineError(reply.json()["message"])
        return UpdateReport(snapshot.version, time.monotonic() - began, (self._url,))

    async def status(self) -> tuple[EngineStatus, ...]:
        (load,) = (await self._http.get("/v1/loads")).json()["loads"]
        info = (await self._http.get("/model_info")).json()
        ready = (await self._http.get("/ready")).status_code == 200
        return (
            EngineStatus(
                engine_id=self._url,
                state=EngineState.READY if ready else EngineState.PAUSED,
                version=int(info["weight_version"]),
                running=load["num_running_reqs"],
                waiting=load["num_waiting_reqs"],
            ),
        )

    async def aclose(self) -> None:
        self._closed = True
        await self._http.aclose()

    async def _post(self, route: str, body: dict[str, Any]) -> Any:
        if self._closed:
            raise EngineError(f"{self._url}: closed")
        # Not httpx's own JSON, which refuses what is not finite before the server can.
        reply = await self._http.post(route, content=json.dumps(body))
        if reply.status_code == 400:
            raise InvalidRequest(reply.json()["error"]["message"])
        if reply.status_code != 200:
            raise EngineError(reply.text)
        return reply.json() if reply.content else None
