"""One SGLang server over HTTP: its routes, its replies, and what each failure means.

Protocol of sglang 0.5.23, token ids in and out (`/generate`), and its control routes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

from rollout.errors import EngineError
from rollout.protocols import FinishKind, GenerateRequest, VersionSpan

ANY = httpx.Timeout(None, connect=10.0)


class Trouble(StrEnum):
    """What went wrong with one call, and so what may be done about it.

    Attributes:
      REFUSED: the server says the request is wrong (4xx); the same again would be refused again.
      BUSY: it has too much to do (429); it is well.
      UNAVAILABLE: it, or something before it, can't serve now (502, 503, 504).
      BROKEN: it failed at this request (any other 5xx).
      UNREACHED: no connection; nothing was sent.
      LOST: a connection that ended before the whole reply.
      GARBLED: a whole reply that is none: no JSON, lengths that differ, numbers that aren't finite.
      LATE: no reply in the time given.
    """

    REFUSED = "refused"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    BROKEN = "broken"
    UNREACHED = "unreached"
    LOST = "lost"
    GARBLED = "garbled"
    LATE = "late"


class ServerTrouble(EngineError):
    """One call to one server failed; `trouble` says how."""

    kind = "engine-server"

    def __init__(self, url: str, trouble: Trouble, detail: str, wait_s: float = 0.0) -> None:
        super().__init__(f"{url}: {trouble}: {detail}")
        self.trouble = trouble
        self.detail = detail
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class Piece:
    """What one `/generate` gave.

    Attributes:
      labels: the server's own weight versions as text, with [start, end) of the output tokens.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishKind
    labels: tuple[tuple[str, int, int], ...]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that a server has."""

    running: int
    waiting: int


class Server:
    """The routes of one server. Every method raises `ServerTrouble` and nothing else."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self.url = url.rstrip("/")
        self._http = http

    async def generate(self, request: GenerateRequest, rid: str, timeout_s: float | None) -> Piece:
        """Sample one completion; every sampling field is sent, so no server default decides."""
        spec = request.sampling
        sampling: dict[str, Any] = {
            "max_new_tokens": spec.max_new_tokens,
            "temperature": spec.temperature,
            "top_p": spec.top_p,
            "top_k": spec.top_k,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(spec.stop_token_ids),
            "ignore_eos": spec.ignore_eos,
            "skip_special_tokens": False,
        }
        if spec.seed is not None:
            sampling["sampling_seed"] = spec.seed
        body = {
            "rid": rid,
            "input_ids": list(request.input_ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        return self._piece(await self._post("/generate", body, timeout_s))

    async def score(
        self, ids: Sequence[int], rid: str, timeout_s: float | None, *, vocab_size: int = 0
    ) -> tuple[list[float], list[list[float]]]:
        """Log-probs of ids[1:] at temperature 1.

        Args:
          ids: the sequence.
          rid: of the request.
          timeout_s: of the call.
          vocab_size: when given, the log-probs of all these ids are asked for too.

        Returns:
          N - 1 log-probs, and N - 1 rows of `vocab_size` each (empty without it).
        """
        body = {
            "rid": rid,
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": False,
        }
        if vocab_size:
            body["token_ids_logprob"] = list(range(vocab_size))
        reply = await self._post("/generate", body, timeout_s)
        try:
            meta = reply["meta_info"]
            rows = meta["input_token_logprobs"]
            if [row[1] for row in rows] != list(ids):
                raise ValueError("log-probs of other ids than were sent")
            whole = []
            for row in meta["input_token_ids_logprobs"][1:] if vocab_size else ():
                if [entry[1] for entry in row] != list(range(vocab_size)):
                    raise ValueError("log-probs of another vocabulary")
                whole.append([float(entry[0]) for entry in row])
            return [float(row[0]) for row in rows[1:]], whole
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._trouble(Trouble.GARBLED, f"/generate: {_say(error)}") from error

    async def abort(self, rid: str | None) -> None:
        """Stop one request, or all; an unknown one is no error."""
        body: dict[str, Any] = {"abort_all": True} if rid is None else {"rid": rid}
        await self._post("/abort_request", body, 10.0)

    async def pause(self) -> None:
        """Stop everything that runs (its callers get the partial output) and hold what comes."""
        await self._post("/pause_generation", {"mode": "abort"}, 30.0)

    async def resume(self) -> None:
        """Serve again. Idempotent."""
        await self._post("/continue_generation", {}, 30.0)

    async def update(self, path: str, version: str, timeout_s: float) -> None:
        """Load weights from a directory and drop every cache."""
        body = {
            "model_path": path,
            "weight_version": version,
            "flush_cache": True,
            "abort_all_requests": True,
        }
        reply = await self._post("/update_weights_from_disk", body, timeout_s)
        if not isinstance(reply, dict) or reply.get("success") is not True:
            raise self._trouble(Trouble.REFUSED, f"/update_weights_from_disk: {reply}")

    async def label(self, timeout_s: float = 5.0) -> str:
        """The weight version that the server claims; answers while paused too."""
        reply = await self._get("/model_info", timeout_s)
        if not isinstance(reply, dict):
            raise self._trouble(Trouble.GARBLED, "/model_info is no object")
        return str(reply.get("weight_version"))

    async def load(self, timeout_s: float = 5.0) -> Load:
        """Running and waiting requests; answers while paused too."""
        reply = await self._get("/v1/loads", timeout_s)
        try:
            rows = reply["loads"] if isinstance(reply, dict) else reply
            return Load(
                sum(int(row["num_running_reqs"]) for row in rows),
                sum(int(row["num_waiting_reqs"]) for row in rows),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._trouble(Trouble.GARBLED, f"/v1/loads: {error!r}") from error

    async def checksums(self, timeout_s: float) -> dict[str, str]:
        """A checksum of each tensor as the server holds it."""
        reply = await self._post("/weights_checker", {"action": "checksum"}, timeout_s)
        try:
            ranks = reply["ranks"]
            return {
                name if len(ranks) == 1 else f"{rank}/{name}": str(checksum)
                for rank, entry in enumerate(ranks)
                for name, checksum in entry["checksums"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise self._trouble(Trouble.GARBLED, f"/weights_checker: {error!r}") from error

    async def info(self) -> Mapping[str, Any]:
        """What `/server_info` says; empty where the route is missing."""
        try:
            reply = await self._get("/server_info", 10.0)
        except ServerTrouble as error:
            if error.trouble is Trouble.REFUSED:
                return {}
            raise
        return reply if isinstance(reply, dict) else {}

    # --- one call -----------------------------------------------------------------------------

    async def _get(self, route: str, timeout_s: float | None) -> Any:
        return await self._call("GET", route, None, timeout_s)

    async def _post(self, route: str, body: Mapping[str, Any], timeout_s: float | None) -> Any:
        return await self._call("POST", route, body, timeout_s)

    async def _call(
        self, method: str, route: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> Any:
        # The deadline is of the whole call: httpx's own read timeout starts anew at every byte.
        timeout = ANY if timeout_s is None else httpx.Timeout(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._http.request(
                    method, self.url + route, json=body, timeout=timeout
                )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise self._trouble(Trouble.UNREACHED, f"{route}: {_say(error)}") from error
        except (TimeoutError, httpx.TimeoutException) as error:
            raise self._trouble(Trouble.LATE, f"{route}: no reply in {timeout_s} s") from error
        except (httpx.TransportError, httpx.DecodingError, httpx.StreamError) as error:
            raise self._trouble(Trouble.LOST, f"{route}: {_say(error)}") from error
        if reply.status_code != 200:
            raise self._of_status(route, reply)
        if not reply.content:
            return None
        try:
            return reply.json()
        except ValueError as error:
            if route in ("/abort_request", "/flush_cache"):
                return reply.text
            raise self._trouble(Trouble.GARBLED, f"{route}: the reply is no JSON") from error

    def _of_status(self, route: str, reply: httpx.Response) -> ServerTrouble:
        status, wait_s = reply.status_code, 0.0
        if status == 429:
            trouble = Trouble.BUSY
        elif status in (502, 503, 504):
            trouble = Trouble.UNAVAILABLE
        elif status >= 500:
            trouble = Trouble.BROKEN
        else:
            trouble = Trouble.REFUSED
        after = reply.headers.get("retry-after", "")
        if after.isdigit():
            wait_s = min(float(after), 60.0)
        return self._trouble(trouble, f"{route}: {status} {_message(reply)}", wait_s)

    def _trouble(self, trouble: Trouble, detail: str, wait_s: float = 0.0) -> ServerTrouble:
        return ServerTrouble(self.url, trouble, detail, wait_s)

    def _piece(self, reply: Any) -> Piece:
        try:
            ids = tuple(int(token) for token in reply["output_ids"])
            meta = reply["meta_info"]
            rows = meta.get("output_token_logprobs") or []
            if [row[1] for row in rows] != list(ids):
                raise ValueError(f"{len(ids)} ids, and log-probs of {len(rows)} others")
            logprobs = tuple(float(row[0]) for row in rows)
            if not all(map(math.isfinite, logprobs)):
                raise ValueError("a log-prob is not finite")
            reason = meta["finish_reason"] or {}
            if reason.get("status_code"):
                # The scheduler gave the request up; that is no abort that anyone asked for.
                status = int(reason["status_code"])
                trouble = Trouble.REFUSED if 400 <= status < 500 else Trouble.BROKEN
                raise self._trouble(trouble, f"/generate: {status} {reason.get('message')}")
            finish = FinishKind(reason["type"])
            if finish is FinishKind.STOP and not ids:
                raise ValueError("stopped without a token")
            spans = meta.get("weight_versions") or [
                {"version": meta.get("weight_version"), "start": 0, "end": len(ids)}
            ]
            labels = tuple((str(s["version"]), int(s["start"]), int(s["end"])) for s in spans)
            return Piece(
                output_ids=ids,
                logprobs=logprobs,
                finish=finish,
                labels=labels,
                prompt_tokens=int(meta["prompt_tokens"]),
                cached_tokens=int(meta.get("cached_tokens") or 0),
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise self._trouble(Trouble.GARBLED, f"/generate: {_say(error)}") from error


def spans_of(labels: Sequence[tuple[str, int, int]], n: int, offset: int) -> list[VersionSpan]:
    """Spans over n output tokens, moved by `offset`.

    Raises:
      ValueError: for a label that is no version of ours, or labels that leave gaps.
    """
    spans, at = [], 0
    for label, start, end in labels:
        if start == end:
            continue
        if not label.isdecimal():
            raise ValueError(f"tokens of weights {label!r}, which are no version of this run")
        if start != at or end > n:
            raise ValueError(f"weight versions {labels} do not cover {n} tokens")
        spans.append(VersionSpan(int(label), offset + start, offset + end))
        at = end
    if at != n:
        raise ValueError(f"weight versions {labels} do not cover {n} tokens")
    return spans


def _message(reply: httpx.Response) -> str:
    """The server's own words; it wraps them in two ways."""
    try:
        said = reply.json()
        said = said.get("error", said.get("message", said)) if isinstance(said, dict) else said
        said = said.get("message", said) if isinstance(said, dict) else said
    except ValueError:
        said = reply.text
    return " ".join(str(said).split())[:300]


def _say(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
