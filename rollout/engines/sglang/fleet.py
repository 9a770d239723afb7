"""Many SGLang servers as one engine: where a request goes, and what happens when one fails.

A server is in one of the states of `EngineState`; POISONED is also one that failed the current
weights and gets no other try before the next ones. Requests go to READY servers alone: a session's
requests to the one that has its cache, other ones to the one with the least to do. Weights,
aborts and questions go to every server itself. What a server sampled before it was paused, or
its request was aborted, is kept, and the rest is asked for again: no token is lost, and each
carries the version of the weights that sampled it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import time
import zlib
from collections import OrderedDict
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from rollout import snapshots
from rollout.engines.sglang.client import Piece, Server, ServerTrouble, Trouble, spans_of
from rollout.errors import EngineError, FleetUnavailable, InvalidRequest, SnapshotRefused
from rollout.protocols import (
    EngineCaps,
    EngineState,
    EngineStatus,
    FinishKind,
    GenerateRequest,
    GenerateResult,
    SamplingSpec,
    TensorSpec,
    UpdateReport,
    VersionSpan,
    WeightSnapshot,
)

_MAX_RESCALED_VOCABULARY = 4096
_STRIKES = 3
_FUSED = {
    ".qkv_proj.": (".q_proj.", ".k_proj.", ".v_proj."),
    ".gate_up_proj.": (".gate_proj.", ".up_proj."),
}
"""Tensors that a server holds as one."""
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Bounds of everything that a fleet waits for or does again.

    Attributes:
      min_servers: fewer that serve, for longer than `recovery_s`, end the run.
      recovery_s: how long requests wait for servers to come back.
      max_outstanding: requests that a server has at once; more wait here.
      request_timeout_s: of one attempt of a request that has no deadline of its own.
      retries: further attempts of a request that a server failed.
      max_deaths: servers that may die while they have the same request; then it is taken for
        the cause, and no other server gets it.
      busy_s: how long a request is held off by servers that are busy or unavailable.
      backoff_s, backoff_max_s: bounds of the jittered, doubling waits.
      poll_s: between two looks at a server.
      update_timeout_s: of loading weights.
      drain_s: how long a paused server may take to end what runs.
      abort_grace_s: how long the partial output of an aborted request is waited for.
      checksums: compare the servers' own checksums of their tensors after an update.
    """

    min_servers: int = 1
    recovery_s: float = 60.0
    max_outstanding: int = 256
    request_timeout_s: float = 3600.0
    retries: int = 3
    max_deaths: int = 2
    busy_s: float = 120.0
    backoff_s: float = 0.2
    backoff_max_s: float = 10.0
    poll_s: float = 5.0
    update_timeout_s: float = 600.0
    drain_s: float = 30.0
    abort_grace_s: float = 5.0
    checksums: bool = True


@dataclass(eq=False, slots=True)
class _Slot:
    """One server and what is known of it.

    `version` is what it claims, `verified` what it was last shown to have; -1: nothing yet.
    """

    server: Server
    state: EngineState = EngineState.STARTING
    version: int = -1
    verified: int = -1
    reason: str = ""
    outstanding: int = 0
    sessions: int = 0
    strikes: int = 0
    looks: int = 0
    next_look: float = 0.0
    cool_until: float = 0.0
    refused_version: int = -1
    lost_version: int = -1
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(eq=False, slots=True)
class _Job:
    """A live request; `stop` is set by an abort."""

    request: GenerateRequest
    began: float
    deadline: float
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    failures: int = 0
    deaths: int = 0
    empty: int = 0
    waiting: bool = False
    held_since: float | None = None
    avoid: dict[_Slot, float] = field(default_factory=dict)
    cached: int = 0
    engine_id: str = ""

    @property
    def over(self) -> bool:
        return self.stop.is_set() or time.monotonic() >= self.deadline


class SGLangFleet:
    """`rollout.protocols.RolloutEngine` over SGLang servers; see docs/fleet.md."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        vocab_size: int,
        context_len: int,
        base: Mapping[str, TensorSpec] | None = None,
        weights: Path | None = None,
        options: FleetOptions | None = None,
        api_key: str | None = None,
        hybrid: bool = False,
        seeded_sampling: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Set up; no server is asked before `start` or the first request.

        Args:
          urls: of the servers, without a trailing route.
          vocab_size: of the model; an id outside it would end a server, so none is sent.
          context_len: the servers' own `--context-length`.
          base: names, shapes and dtypes that every snapshot must have; None takes those of the
            first one.
          weights: folder of published snapshots, where a run that goes on finds its newest.
          options: waits and bounds.
          api_key: sent as a bearer token.
          hybrid: whether the model has linear layers.
          seeded_sampling: whether the servers run with deterministic inference, which alone
            honours seeds.
          transport: how HTTP is spoken; None is the network.

        Raises:
          ValueError: for no or equal URLs, or fewer than `min_servers`.
        """
        self._options = options or FleetOptions()
        if len(set(urls)) != len(urls) or len(urls) < max(1, self._options.min_servers):
            raise ValueError(
                f"need at least min_servers = {self._options.min_servers} different URLs, got"
                f" {list(urls)}"
            )
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            headers=headers,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            # Proxy settings of the environment are meant for the internet.
            trust_env=False,
            transport=transport,
        )
        self._slots = [_Slot(Server(url, self._http)) for url in urls]
        self._base = dict(base) if base is not None else None
        self._weights = weights
        self._caps = EngineCaps(
            seeded_sampling=seeded_sampling,
            hybrid=hybrid,
            vocab_size=vocab_size,
            context_len=context_len,
            max_sessions=self._options.max_outstanding * len(urls),
        )
        self._version = -1
        self._snapshot: WeightSnapshot | None = None
        self._probe: snapshots.Probe | None = None
        self._reference: dict[str, str] | None = None
        self._sums: _FileSums | None = None
        self._sessions: OrderedDict[str, _Slot] = OrderedDict()
        self._live: dict[str, _Job] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._changed = asyncio.Event()
        self._updating = False
        self._update = asyncio.Lock()
        self._below_since: float | None = None
        self._number = itertools.count()
        self._nonce = uuid4().hex[:8]
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started: asyncio.Task[None] | None = None
        self._closed = False
        self._random = random.Random(self._nonce)

    @property
    def caps(self) -> EngineCaps:
        """Static capabilities."""
        return self._caps

    async def start(self) -> None:
        """Ask every server what it serves, and watch them from now on. Idempotent.

        Raises:
          SnapshotRefused: the newest snapshot of `weights` is unreadable.
        """
        self._check_open()
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        await asyncio.shield(self._started)

    async def _start(self) -> None:
        if self._weights is not None and (newest := snapshots.latest(self._weights)):
            self._snapshot, self._probe = snapshots.open_snapshot(newest)
            self._version = self._snapshot.version
            self._base = self._base or dict(self._snapshot.manifest)
        await asyncio.gather(*(self._greet(slot) for slot in self._slots))
        if self._snapshot is None:
            # Weights that nobody here has pushed: the newest version that a server claims.
            self._version = max(slot.version for slot in self._slots)
        for slot in self._slots:
            self._spawn(self._watch(slot))

    async def _greet(self, slot: _Slot) -> None:
        try:
            label = await slot.server.label()
        except ServerTrouble as error:
            self._set(slot, EngineState.DEAD, error.detail)
            return
        slot.version = int(label) if label.isdecimal() else -1
        self._set(slot, EngineState.STALE, f"serves weights {label!r}")

    # --- sessions and requests ----------------------------------------------------------------

    async def open_sessions(self, session_ids: Sequence[str]) -> None:
        """Nothing is reserved: a session gets its server with its first request."""
        self._check_open()

    async def close_session(self, session_id: str) -> None:
        """Forget which server has the session's cache."""
        slot = self._sessions.pop(session_id, None)
        if slot is not None:
            slot.sessions -= 1

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one completion, on as many servers as it takes.

        Raises:
          InvalidRequest: for ids, lengths or settings that no server may see, a live id, or what
            a server refused.
          EngineError: the request failed `retries` times, was held off for `busy_s`, or was there
            when `max_deaths` servers died.
          FleetUnavailable: fewer than `min_servers` serve, for longer than `recovery_s`.
        """
        self._validate(request)
        now = time.monotonic()
        deadline = math.inf if request.deadline_s is None else now + request.deadline_s
        job = _Job(request, now, deadline)
        self._live[request.request_id] = job
        try:
            await self.start()
            return await self._generate(job)
        finally:
            del self._live[request.request_id]

    async def _generate(self, job: _Job) -> GenerateResult:
        request = job.request
        budget, seed = request.sampling.max_new_tokens, request.sampling.seed
        if seed is None and self._caps.seeded_sampling:
            # What is sent has another name at each attempt; the request's own one decides.
            seed = zlib.crc32(request.request_id.encode())
        while True:
            if len(job.ids) >= budget:
                return self._result(job, FinishKind.LENGTH)
            slot = await self._choose(job)
            if slot is None:
                return self._result(job, FinishKind.ABORT)
            rest = replace(
                request,
                input_ids=request.input_ids + tuple(job.ids),
                sampling=replace(request.sampling, max_new_tokens=budget - len(job.ids), seed=seed),
            )
            try:
                piece = await self._attempt(slot, job, rest)
            except ServerTrouble as error:
                await self._recover(slot, job, error)
                continue
            slot.strikes = 0
            job.held_since = None
            if piece.output_ids:
                job.empty = 0
            if piece.finish is not FinishKind.ABORT:
                return self._result(job, piece.finish)
            if job.over:
                return self._result(job, FinishKind.ABORT)
            if not piece.output_ids and slot.state is EngineState.READY:
                # Somebody else aborts there; going on at once would be a race.
                job.empty += 1
                await self._sleep(job, job.empty)

    async def _attempt(self, slot: _Slot, job: _Job, request: GenerateRequest) -> Piece:
        """One `/generate`; what it gave is added to the job, if its weights are known."""
        rid = f"{request.request_id}~{self._nonce}.{next(self._number)}"
        limit = self._options.request_timeout_s
        before = slot.verified
        slot.outstanding += 1
        call = asyncio.create_task(slot.server.generate(request, rid, None))
        stop = asyncio.create_task(job.stop.wait())
        try:
            left = min(limit, max(job.deadline - time.monotonic(), 0.0))
            await asyncio.wait({call, stop}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                await self._abort_attempt(slot, rid, call)
            if not call.done():
                raise ServerTrouble(slot.server.url, Trouble.LATE, f"no reply to {rid}")
            piece = call.result()
        except asyncio.CancelledError:
            self._spawn(self._abort_quietly(slot, rid))
            raise
        finally:
            slot.outstanding -= 1
            for task in (call, stop):
                task.cancel()
            await asyncio.gather(call, stop, return_exceptions=True)
            self._wake()
        if any(not 0 <= token < self._caps.vocab_size for token in piece.output_ids):
            raise ServerTrouble(slot.server.url, Trouble.GARBLED, "ids outside the vocabulary")
        # A request that waited out an update there comes back before the server is verified.
        async with slot.lock:
            known = sorted((before, slot.verified))
        try:
            spans = spans_of(piece.labels, len(piece.output_ids), len(job.ids))
            for span in spans:
                if not known[0] <= span.version <= known[1]:
                    raise ValueError(f"tokens of version {span.version}, not {known[1]}")
        except ValueError as error:
            # Restarted, changed by somebody else, or refused: its tokens are nobody's.
            if slot.state is EngineState.READY:
                self._set(slot, EngineState.STALE, str(error))
                slot.next_look = 0.0
            raise ServerTrouble(slot.server.url, Trouble.GARBLED, str(error)) from error
        for span in spans:
            last = job.spans[-1] if job.spans else None
            if last and last.version == span.version:
                job.spans[-1] = VersionSpan(span.version, last.start, span.end)
            else:
                job.spans.append(span)
        job.ids += piece.output_ids
        job.logprobs += piece.logprobs
        job.cached = piece.cached_tokens if not job.engine_id else job.cached
        job.engine_id = slot.server.url
        return piece

    async def _abort_attempt(self, slot: _Slot, rid: str, call: asyncio.Task[Piece]) -> None:
        """Ask for what there is; more than once, since the request may still be on its way."""
        until = time.monotonic() + self._options.abort_grace_s
        while not call.done() and (left := until - time.monotonic()) > 0:
            await self._abort_quietly(slot, rid)
            await asyncio.wait({call}, timeout=min(left, 0.5))

    async def _abort_quietly(self, slot: _Slot, rid: str | None) -> None:
        with contextlib.suppress(ServerTrouble):
            await slot.server.abort(rid)

    async def _choose(self, job: _Job) -> _Slot | None:
        """The server for the next attempt; None when the job is over before there is one."""
        job.waiting = True
        while not job.over:
            self._check_open()
            now = time.monotonic()
            if self._open.is_set() and not self._updating:
                self._check_quorum(now)
                slot = self._pick(job, now)
                if slot is not None:
                    job.waiting = False
                    return slot
            # Nothing says that a wait of ours is over; everything else wakes.
            pauses = [s.cool_until for s in self._slots] + list(job.avoid.values())
            await self._wait(job, min([0.25, *(t - now for t in pauses if t > now)]))
        return None

    def _pick(self, job: _Job, now: float) -> _Slot | None:
        fit = [
            slot
            for slot in self._slots
            if slot.state is EngineState.READY
            and slot.version == self._version
            and slot.cool_until <= now
            and slot.outstanding < self._options.max_outstanding
        ]
        session = job.request.session_id
        home = self._sessions.get(session) if session is not None else None
        if (
            home is not None
            and home.state is EngineState.READY
            and home.strikes < _STRIKES
            and job.avoid.get(home, 0.0) <= now
        ):
            # A full server is worth waiting for: it has the cache.
            return home if home in fit else None
        fit = [slot for slot in fit if job.avoid.get(slot, 0.0) <= now]
        if not fit:
            return None
        slot = min(fit, key=lambda s: (s.outstanding, s.sessions))
        if session is not None:
            self._move(session, slot)
        return slot

    def _move(self, session: str, slot: _Slot) -> None:
        old = self._sessions.pop(session, None)
        if old is not None:
            old.sessions -= 1
        self._sessions[session] = slot
        slot.sessions += 1
        while len(self._sessions) > 8 * self._caps.max_sessions:
            _, forgotten = self._sessions.popitem(last=False)
            forgotten.sessions -= 1

    async def _recover(self, slot: _Slot, job: _Job, error: ServerTrouble) -> None:
        """Decide what follows a failed attempt; returns when another may be made."""
        options, now = self._options, time.monotonic()
        name = f"request {job.request.request_id!r}"
        if job.over:
            return
        if error.trouble is Trouble.REFUSED:
            raise InvalidRequest(f"{name}: {error}") from error
        if error.trouble in (Trouble.BUSY, Trouble.UNAVAILABLE):
            job.held_since = job.held_since or now
            if now - job.held_since > options.busy_s:
                raise EngineError(f"{name}: held off for {options.busy_s:g} s: {error}") from error
            slot.strikes += 1
            slot.cool_until = now + max(error.wait_s, self._backoff(slot.strikes))
            if error.trouble is Trouble.UNAVAILABLE:
                await self._look(slot)
            self._wake()
            return
        dead = False
        if error.trouble in (Trouble.UNREACHED, Trouble.LOST, Trouble.LATE):
            dead = not await self._look(slot, tries=2)
        if dead and error.trouble is not Trouble.UNREACHED:
            job.deaths += 1
            if job.deaths >= options.max_deaths:
                raise EngineError(
                    f"{name}: {job.deaths} servers died with it, so no other gets it: {error}"
                ) from error
        slot.strikes += 1
        if slot.strikes >= _STRIKES:
            slot.cool_until = time.monotonic() + self._backoff(slot.strikes)
        if error.trouble is Trouble.UNREACHED and dead:
            return
        if error.trouble is Trouble.LOST and not dead and not _is_updated(slot):
            # It may be another process by now, with the same claim: to be verified again.
            self._set(slot, EngineState.STALE, error.detail)
            slot.next_look = 0.0
        job.failures += 1
        if job.failures > options.retries:
            raise EngineError(f"{name}: failed {job.failures} times, at last {error}") from error
        wait = self._backoff(job.failures)
        job.avoid[slot] = time.monotonic() + (2 * wait if len(self._slots) > 1 else wait)
        await self._sleep(job, job.failures)

    async def score(self, ids: Sequence[int], start: int, temperature: float) -> tuple[float, ...]:
        """Log-probs of ids[start:] given what precedes each.

        A server says log-probs at temperature 1 only; other temperatures ask for the whole
        distribution of every token and are for small vocabularies.

        Raises:
          InvalidRequest: for ids, a start or a temperature that can't be scored.
          EngineError, FleetUnavailable: as `generate`.
        """
        self._check_ids("score", ids)
        if not 1 <= start <= len(ids):
            raise InvalidRequest(f"score: start {start} is outside 1..{len(ids)}")
        if not temperature >= 0 or not math.isfinite(temperature):
            raise InvalidRequest(f"score: temperature must be >= 0, got {temperature}")
        rescale = temperature not in (0.0, 1.0)
        if rescale and self._caps.vocab_size > _MAX_RESCALED_VOCABULARY:
            raise InvalidRequest(
                f"score: servers score at temperature 1 (or 0), got {temperature}; with at most"
                f" {_MAX_RESCALED_VOCABULARY} ids in the vocabulary any will do"
            )
        if start == len(ids):
            return ()
        await self.start()
        request = GenerateRequest(f"score-{next(self._number)}", tuple(ids), _NOTHING)
        job = _Job(request, time.monotonic(), math.inf)
        while True:
            slot = await self._choose(job)
            if slot is None:
                raise EngineError("score: no server")
            rid = f"{request.request_id}~{self._nonce}.{next(self._number)}"
            slot.outstanding += 1
            try:
                said, whole = await slot.server.score(
                    ids,
                    rid,
                    self._options.request_timeout_s,
                    vocab_size=self._caps.vocab_size if rescale else 0,
                )
            except ServerTrouble as error:
                await self._recover(slot, job, error)
                continue
            finally:
                slot.outstanding -= 1
                self._wake()
            if rescale:
                said = [_rescaled(x, row, temperature) for x, row in zip(said, whole, strict=True)]
            return tuple(said[start - 1 :])

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Stop requests of this fleet (None: all of them); callers get what there is."""
        for request_id in list(self._live) if request_ids is None else request_ids:
            job = self._live.get(request_id)
            if job is not None:
                job.stop.set()
        self._wake()

    async def pause(self) -> None:
        """Hold new requests here; those that run end as they would."""
        self._open.clear()

    async def resume(self) -> None:
        """Send what was held."""
        self._open.set()
        self._wake()

    # --- weights ------------------------------------------------------------------------------

    async def update_weights(self, snapshot: WeightSnapshot) -> UpdateReport:
        """Give every server that lives the weights of a published directory.

        Nothing is sent before names, shapes and dtypes agree with the base. Each server is
        paused, which returns what runs to its callers to go on later, loads the weights, drops
        its cache and must then claim the version, hold the same tensors as the others, and give
        the probe's log-probs. One server goes first: a snapshot that kills it is given to no
        other.

        Returns:
          Who has the new weights, and who failed and why; the latter stay out.

        Raises:
          SnapshotRefused: for weights that no server may be given, or that killed the first one
            (the others still have the old ones then).
          FleetUnavailable: fewer than `min_servers` have the new weights.
        """
        began = time.monotonic()
        self._check_open()
        await self.start()
        async with self._update:
            checked = await asyncio.to_thread(self._checked, snapshot)
            probe = await asyncio.to_thread(_probe_of, checked)
            answers = await asyncio.gather(*map(self._look, self._slots))
            alive = [slot for slot, lives in zip(self._slots, answers, strict=True) if lives]
            failed = {slot.server.url: slot.reason for slot in self._slots if slot not in alive}
            updated: list[str] = []
            reference: dict[str, str] | None = None
            self._updating = True
            try:
                waiting = list(alive)
                while waiting and not updated:
                    slot = waiting.pop(0)
                    reason, sums = await self._bring(slot, checked, probe, None)
                    if not reason:
                        reference = sums
                        updated.append(slot.server.url)
                    elif slot.lost_version == checked.version:
                        raise SnapshotRefused(
                            f"{checked.path}: {slot.server.url} was lost with it ({reason}); the"
                            f" other servers still have version {self._version}"
                        )
                    else:
                        failed[slot.server.url] = reason
                if updated:
                    self._version, self._snapshot = checked.version, checked
                    self._probe, self._reference = probe, reference
                outcomes = await asyncio.gather(
                    *(self._bring(slot, checked, probe, reference) for slot in waiting)
                )
                for slot, (reason, _) in zip(waiting, outcomes, strict=True):
                    if reason:
                        failed[slot.server.url] = reason
                    else:
                        updated.append(slot.server.url)
            finally:
                self._updating = False
                self._wake()
        if len(updated) < self._options.min_servers:
            raise FleetUnavailable(self._too_few(len(updated)))
        return UpdateReport(checked.version, time.monotonic() - began, tuple(updated), failed)

    def _checked(self, snapshot: WeightSnapshot) -> WeightSnapshot:
        """The snapshot with a manifest of what its files hold, held to the base's."""
        if snapshot.path is None:
            raise SnapshotRefused("a fleet needs weights in a directory, and the snapshot has none")
        directory = snapshot.path.resolve()
        found = snapshots.read_manifest(directory)
        base = self._base if self._base is not None else found
        snapshots.compare(found, base, str(directory))
        if (directory / snapshots.MANIFEST).is_file():
            known = snapshot.manifest or snapshots.open_snapshot(directory)[0].manifest
            snapshots.compare(found, known, str(directory))
        else:
            # Not published by us: its numbers have not been looked at.
            snapshots.examine(directory, base)
        self._base = dict(base)
        return replace(snapshot, path=directory, manifest=found)

    async def _bring(
        self,
        slot: _Slot,
        snapshot: WeightSnapshot,
        probe: snapshots.Probe | None,
        reference: Mapping[str, str] | None,
    ) -> tuple[str, dict[str, str] | None]:
        """Give one server weights and verify them; returns why it failed, and its checksums."""
        async with slot.lock:
            server, options = slot.server, self._options
            self._set(slot, EngineState.PAUSED, "")
            sums: dict[str, str] | None = None
            reason, given = "", False
            try:
                try:
                    files = await self._file_sums(slot, snapshot)
                    await server.pause()
                    await self._drain(slot)
                    given = True
                    await server.update(
                        str(snapshot.path), str(snapshot.version), options.update_timeout_s
                    )
                    await self._check_label(slot, snapshot.version)
                    if options.checksums:
                        sums = await self._check_sums(slot, files, reference)
                finally:
                    await server.resume()
                await self._check_probe(slot, probe)
            except ServerTrouble as error:
                reason = error.detail
                # A server whose scheduler died answers `/model_info` for some seconds more.
                if given and error.trouble not in (Trouble.REFUSED, Trouble.GARBLED):
                    slot.lost_version = snapshot.version
            except _Unverified as error:
                reason = str(error)
            if not reason:
                slot.version = slot.verified = snapshot.version
                slot.strikes, slot.cool_until = 0, 0.0
                self._set(slot, EngineState.READY, "")
                return "", sums
            if given:
                slot.refused_version = snapshot.version
            alive = await self._reached(slot, tries=3)
            self._set(slot, EngineState.POISONED if alive else EngineState.DEAD, reason)
            return reason, None

    async def _drain(self, slot: _Slot) -> None:
        """Wait until nothing runs; what came in after the pause's abort is aborted too."""
        until = time.monotonic() + self._options.drain_s
        pause = 0.02
        while True:
            load = await slot.server.load()
            if load.running + load.waiting == 0:
                return
            if time.monotonic() > until:
                raise _Unverified(
                    f"{load.running + load.waiting} requests did not end in"
                    f" {self._options.drain_s:g} s"
                )
            await asyncio.sleep(pause)
            if pause > 0.5:
                await slot.server.abort(None)
            pause = min(2 * pause, 1.0)

    async def _check_label(self, slot: _Slot, version: int) -> None:
        label = await slot.server.label()
        if label != str(version):
            raise _Unverified(f"claims weights {label!r} after an update to {version}")

    async def _file_sums(self, slot: _Slot, snapshot: WeightSnapshot) -> _FileSums | None:
        """Begin to sum up the files as this server does, while it loads; None where it can't be.

        On a CPU a server's checksum of a tensor is the beginning of the SHA-256 of its bytes. On
        a GPU, or in another dtype than the files', checksums are only compared between servers.
        """
        info = await slot.server.info() if self._options.checksums else {}
        dtype = _DTYPES.get(str(info.get("dtype"))) if info.get("device") == "cpu" else None
        if dtype is None:
            return None
        known = self._sums
        if known is None or known.snapshot is not snapshot or known.dtype != dtype:
            known = self._sums = _FileSums(snapshot, dtype)
        return known

    async def _check_sums(
        self,
        slot: _Slot,
        files: _FileSums | None,
        reference: Mapping[str, str] | None,
    ) -> dict[str, str] | None:
        """Checksums of a server's tensors, against the files' and another server's.

        A server without the route is not held to it.
        """
        try:
            sums = await slot.server.checksums(self._options.update_timeout_s)
        except ServerTrouble as error:
            if error.trouble is Trouble.REFUSED:
                return None
            raise
        expected = await files.of(sums) if files is not None else {}
        for name, checksum in sums.items():
            if name in expected and not expected[name].startswith(checksum):
                raise _Unverified(f"tensor {name} differs from the file's")
        for name, checksum in (reference or {}).items():
            if sums.get(name) != checksum:
                raise _Unverified(f"tensor {name} differs from another server's")
        return sums

    async def _check_probe(self, slot: _Slot, probe: snapshots.Probe | None) -> None:
        if probe is None:
            return
        rid = f"probe~{self._nonce}.{next(self._number)}"
        said, _ = await slot.server.score(probe.ids, rid, self._options.update_timeout_s)
        gap = snapshots.mean_gap(said, probe.logprobs)
        if not gap <= probe.tolerance:
            raise _Unverified(
                f"log-probs of the probe differ by {gap:.2g} on average, at most"
                f" {probe.tolerance:.2g} is allowed"
            )

    # --- looking after the servers ------------------------------------------------------------

    async def status(self) -> tuple[EngineStatus, ...]:
        """One entry a server, as last seen."""
        if not self._closed:
            await self.start()
        # Requests that wait here belong to no server yet; the first entry counts them.
        held = [sum(job.waiting for job in self._live.values()), *[0] * len(self._slots)]
        return tuple(
            EngineStatus(slot.server.url, self._shown(slot), slot.version, slot.outstanding, n)
            for slot, n in zip(self._slots, held, strict=False)
        )

    def _shown(self, slot: _Slot) -> EngineState:
        if self._closed:
            return EngineState.CLOSED
        held = slot.state is EngineState.READY and not self._open.is_set()
        return EngineState.PAUSED if held else slot.state

    async def _watch(self, slot: _Slot) -> None:
        """Look at one server now and then, and bring it back when it has returned."""
        while not self._closed:
            now = time.monotonic()
            if slot.next_look <= now and not self._updating:
                await self._visit(slot)
                quick = slot.state is EngineState.READY
                wait = self._options.poll_s if quick else self._backoff(slot.looks)
                slot.next_look = time.monotonic() + wait
            await asyncio.sleep(min(self._options.poll_s, 0.1))

    async def _visit(self, slot: _Slot) -> None:
        if slot.state in (EngineState.PAUSED, EngineState.POISONED):
            return
        if not await self._look(slot):
            slot.looks += 1
            return
        if slot.state is EngineState.READY:
            slot.looks = 0
            return
        slot.looks += 1
        async with self._update:
            if slot.state is not EngineState.STALE or self._version < 0:
                return
            if slot.version == self._version and slot.refused_version != self._version:
                await self._readmit(slot)
            elif self._snapshot is not None:
                if slot.refused_version == self._version:
                    self._set(slot, EngineState.POISONED, slot.reason)
                else:
                    await self._bring(slot, self._snapshot, self._probe, self._reference)

    async def _readmit(self, slot: _Slot) -> None:
        """A server that claims the current version must also have its weights."""
        async with slot.lock:
            try:
                await slot.server.resume()
                await self._check_probe(slot, self._probe)
            except (ServerTrouble, _Unverified) as error:
                slot.version = -1
                self._set(slot, EngineState.STALE, str(error))
                return
            slot.verified, slot.strikes, slot.cool_until = slot.version, 0, 0.0
            self._set(slot, EngineState.READY, "")

    async def _look(self, slot: _Slot, tries: int = 1) -> bool:
        """Ask for the version and note what follows; whether the server answers."""
        if _is_updated(slot):
            return True
        label = await self._reached(slot, tries)
        if _is_updated(slot):
            return True
        if label is None:
            self._set(slot, EngineState.DEAD, slot.reason or "does not answer")
            return False
        version = int(label) if label.isdecimal() else -1
        if slot.state is EngineState.POISONED:
            return True
        if slot.state is EngineState.READY and version == self._version:
            return True
        slot.version = version
        self._set(slot, EngineState.STALE, f"serves weights {label!r}, not {self._version}")
        return True

    async def _reached(self, slot: _Slot, tries: int) -> str | None:
        for attempt in range(tries):
            if attempt:
                await asyncio.sleep(self._backoff(attempt))
            try:
                return await slot.server.label()
            except ServerTrouble as error:
                slot.reason = error.detail
        return None

    def _check_quorum(self, now: float) -> None:
        ready = self._ready()
        if ready >= self._options.min_servers:
            return
        if self._below_since is None:
            self._below_since = now
        if now - self._below_since > self._options.recovery_s:
            raise FleetUnavailable(self._too_few(ready))

    def _too_few(self, ready: int) -> str:
        others = "; ".join(
            f"{slot.server.url} {slot.state}" + (f" ({slot.reason})" if slot.reason else "")
            for slot in self._slots
            if slot.state is not EngineState.READY
        )
        return (
            f"{ready} of {len(self._slots)} servers serve version {self._version}, min_servers is"
            f" {self._options.min_servers}: {others}; start them again (`trsi fleet up`) and run"
            " the same command again, it goes on from the last checkpoint"
        )

    async def aclose(self) -> None:
        """End what is live, stop watching, close the connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if self._started is not None:
            self._started.cancel()
            tasks.append(self._started)
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._live:
            await asyncio.sleep(0.01)
        await self._http.aclose()

    # --- small things -------------------------------------------------------------------------

    def _set(self, slot: _Slot, state: EngineState, reason: str) -> None:
        slot.state, slot.reason = state, reason
        if self._ready() >= self._options.min_servers:
            self._below_since = None
        self._wake()

    def _ready(self) -> int:
        return sum(slot.state is EngineState.READY for slot in self._slots)

    def _wake(self) -> None:
        """Let everyone who waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, job: _Job, seconds: float) -> None:
        """Until something changed, the job is stopped, or the time is over."""
        seconds = min(seconds, max(job.deadline - time.monotonic(), 0.0))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _sleep(self, job: _Job, attempt: int) -> None:
        seconds = min(self._backoff(attempt), max(job.deadline - time.monotonic(), 0.0))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await job.stop.wait()

    def _backoff(self, attempt: int) -> float:
        """Doubling from `backoff_s`, at most `backoff_max_s`, times 0.5 to 1 by chance."""
        options = self._options
        longest = min(
            options.backoff_s * 2.0 ** min(max(attempt - 1, 0), 30), options.backoff_max_s
        )
        return longest * (0.5 + 0.5 * self._random.random())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the fleet is closed")

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        vocab, context = self._caps.vocab_size, self._caps.context_len
        if not ids:
            raise InvalidRequest(f"{name}: no input ids")
        if len(ids) > context:
            raise InvalidRequest(f"{name}: {len(ids)} ids are over the context of {context}")
        for token in ids:
            if not 0 <= token < vocab:
                raise InvalidRequest(f"{name}: id {token} is outside the vocabulary 0..{vocab - 1}")

    def _validate(self, request: GenerateRequest) -> None:
        self._check_open()
        name, spec = f"request {request.request_id!r}", request.sampling
        if request.request_id in self._live:
            raise InvalidRequest(f"{name}: a request of this id is live")
        self._check_ids(name, request.input_ids)
        whole = len(request.input_ids) + spec.max_new_tokens
        rules: list[tuple[bool, str]] = [
            (spec.max_new_tokens >= 0, f"max_new_tokens must be >= 0, got {spec.max_new_tokens}"),
            (
                whole <= self._caps.context_len,
                f"{len(request.input_ids)} ids and {spec.max_new_tokens} new tokens are over the"
                f" context of {self._caps.context_len}",
            ),
            (
                spec.temperature >= 0 and math.isfinite(spec.temperature),
                f"temperature must be >= 0, got {spec.temperature}",
            ),
            (0 < spec.top_p <= 1, f"top_p must be in (0, 1], got {spec.top_p}"),
            (
                spec.top_k == -1 or spec.top_k >= 1,
                f"top_k must be -1 or >= 1, got {spec.top_k}",
            ),
        ]
        for holds, message in rules:
            if not holds:
                raise InvalidRequest(f"{name}: {message}")

    def _result(self, job: _Job, finish: FinishKind) -> GenerateResult:
        return GenerateResult(
            request_id=job.request.request_id,
            output_ids=tuple(job.ids),
            logprobs=tuple(job.logprobs),
            finish=finish,
            matched_stop=job.ids[-1] if finish is FinishKind.STOP else None,
            spans=tuple(job.spans),
            prompt_tokens=len(job.request.input_ids),
            cached_tokens=job.cached,
            engine_id=job.engine_id,
            latency_s=time.monotonic() - job.began,
        )


class _Unverified(Exception):
    """A server took weights, and what it has now is not them."""


def _is_updated(slot: _Slot) -> bool:
    """Whether its weights are being replaced, so that nothing else may judge its state."""
    return slot.state is EngineState.PAUSED


_NOTHING = SamplingSpec(max_new_tokens=0)


def _rescaled(logprob: float, row: Sequence[float], temperature: float) -> float:
    """A log-prob at `temperature` from those at 1 of the whole vocabulary."""
    scaled = [x / temperature for x in row]
    top = max(scaled)
    return logprob / temperature - top - math.log(math.fsum(math.exp(x - top) for x in scaled))


class _FileSums:
    """SHA-256 of a snapshot's tensors, begun in a thread before anybody asks."""

    def __init__(self, snapshot: WeightSnapshot, dtype: str) -> None:
        self.snapshot = snapshot
        self.dtype = dtype
        held = dict(_fused(name, snapshot.manifest) for name in snapshot.manifest)
        self._begun = asyncio.create_task(asyncio.to_thread(self._sum, held))

    async def of(self, names: Collection[str]) -> Mapping[str, str]:
        """By a server's names of its tensors; those that the files lack are left out."""
        known = await asyncio.shield(self._begun)
        apart = {name: (name,) for name in names if name in self.snapshot.manifest.keys() - known}
        return known | await asyncio.to_thread(self._sum, apart) if apart else known

    def _sum(self, held: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
        path, specs = self.snapshot.path, self.snapshot.manifest
        assert path is not None
        groups = {
            name: parts
            for name, parts in held.items()
            if all(specs[part].dtype == self.dtype for part in parts)
        }
        return dict(zip(groups, snapshots.digests(path, groups.values()), strict=True))


def _fused(name: str, specs: Mapping[str, TensorSpec]) -> tuple[str, tuple[str, ...]]:
    """The tensor of a server that holds this one of the files, and all that it holds."""
    for fused, parts in _FUSED.items():
        for part in parts:
            names = tuple(name.replace(part, other) for other in parts)
            if part in name and all(other in specs for other in names):
                return name.replace(part, fused), names
    return name, (name,)


def _probe_of(snapshot: WeightSnapshot) -> snapshots.Probe | None:
    path = snapshot.path
    if path is None or not (path / snapshots.MANIFEST).is_file():
        return None
    return snapshots.open_snapshot(path)[1]
