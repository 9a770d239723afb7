"""The routes of an SGLang server without a model: upstream of fault cases, and of nothing else.

What it "samples" is a function of version, context and place, so a test can tell which weights
made a token. That real servers speak like this is what the tests on real ones show.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout import snapshots
from tests.fault_proxy import Call, HttpServer, Reply, as_json

VOCAB = 97


def token_of(version: str, context: tuple[int, ...], vocab: int = VOCAB) -> tuple[int, float]:
    """The token after `context`, and its log-prob."""
    digest = hashlib.sha256(f"{version} {context}".encode()).digest()
    return digest[0] % vocab, -1.0 - digest[1] / 256


@dataclass
class Running:
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    aborted: bool = False


class FakeSGLang(HttpServer):
    """One server; `start` again on the same port is a restart, with weights "default" or given."""

    def __init__(
        self, *, version: str = "default", token_s: float = 0.0, vocab: int = VOCAB
    ) -> None:
        super().__init__(self._handle)
        self.version = version
        self.held = version
        self.token_s = token_s
        self.vocab = vocab
        self.probe: snapshots.Probe | None = None
        self.running: dict[str, Running] = {}
        self.paused = False
        self.dies_of: set[str] = set()
        self.wrong_weights = False
        self.reads_probe = False
        self.sampled_other = 0

    async def _handle(self, call: Call) -> Reply:
        body = call.body or {}
        if call.route == "/model_info":
            return as_json({"weight_version": self.version})
        if call.route == "/server_info":
            return as_json({"device": "fake"})
        if call.route == "/v1/loads":
            # A real server does not count what waits at its door while it is paused.
            counted = [r for r in self.running.values() if r.aborted or not self.paused]
            waiting = sum(not r.ids for r in counted)
            running = len(counted) - waiting
            return as_json({"loads": [{"num_running_reqs": running, "num_waiting_reqs": waiting}]})
        if call.route == "/pause_generation":
            self.paused = True
            self._abort(None)
            return as_json({})
        if call.route == "/continue_generation":
            self.paused = False
            return as_json({})
        if call.route == "/abort_request":
            self._abort(None if body.get("abort_all") else body["rid"])
            return Reply()
        if call.route == "/update_weights_from_disk":
            return await self._update(body)
        if call.route == "/weights_checker":
            return as_json({"success": True, "ranks": [{"checksums": {"weights": self.held}}]})
        if call.route == "/generate":
            return await self._generate(body)
        return as_json({"error": "Not Found"}, 404)

    def _abort(self, rid: str | None) -> None:
        for name, request in self.running.items():
            if rid in (None, name):
                request.aborted = True

    async def _update(self, body: dict[str, Any]) -> Reply:
        path = Path(body["model_path"])
        if path.name in self.dies_of:
            await self.stop()
            return Reply(cut_at=-1)
        if not path.is_dir():
            return as_json({"success": False, "message": f"no {path}"}, 400)
        manifest = snapshots.read_manifest(path)
        self.probe = snapshots.open_snapshot(path)[1] if self.reads_probe else None
        self.version = body["weight_version"]
        self.held = "other" if self.wrong_weights else f"{self.version} {sorted(manifest)}"
        return as_json({"success": True, "message": "", "num_paused_requests": 0})

    async def _generate(self, body: dict[str, Any]) -> Reply:
        rid, sampling = body["rid"], body["sampling_params"]
        if rid in self.running:
            return as_json({"error": {"message": "duplicate"}}, 400)
        prompt = tuple(body["input_ids"])
        if self.probe and prompt == self.probe.ids and not sampling["max_new_tokens"]:
            rows = [[x, t, None] for x, t in zip((None, *self.probe.logprobs), prompt, strict=True)]
            return as_json({"output_ids": [], "meta_info": {"input_token_logprobs": rows}})
        request = self.running[rid] = Running()
        try:
            while len(request.ids) < sampling["max_new_tokens"]:
                await asyncio.sleep(self.token_s)
                if request.aborted:
                    break
                if self.paused:
                    await asyncio.sleep(0.005)
                    continue
                weights = "other" if self.held == "other" else self.version
                token, logprob = token_of(weights, prompt + tuple(request.ids), self.vocab)
                if request.spans and request.spans[-1][0] == self.version:
                    request.spans[-1][2] += 1
                else:
                    request.spans.append([self.version, len(request.ids), len(request.ids) + 1])
                self.sampled_other += self.held == "other"
                request.ids.append(token)
                request.logprobs.append(logprob)
        finally:
            del self.running[rid]
        reason = {"type": "abort", "message": "Aborted", "status_code": None}
        if not request.aborted:
            reason = {"type": "length", "length": len(request.ids)}
        meta = {
            "id": rid,
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "cached_tokens": 0,
            "weight_version": self.version,
            "weight_versions": [
                dict(zip(("version", "start", "end"), span, strict=True)) for span in request.spans
            ],
            "output_token_logprobs": [
                [x, t, None] for x, t in zip(request.logprobs, request.ids, strict=True)
            ],
        }
        return as_json({"output_ids": request.ids, "meta_info": meta})
