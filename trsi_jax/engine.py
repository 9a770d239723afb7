"""The in-process generation engine: `rollout.protocols.RolloutEngine` over the jitted decoder.

Slots are cut into blocks of equal width, and one compiled loop serves them all. A session keeps
its slot and cache over its turns, so a request feeds only what is new. A block runs when each of
its open sessions waits, or when no request has come for a short while; since rows are independent
and keys belong to requests, that timing decides nothing about the tokens.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

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
from trsi_jax.model.config import ModelConfig
from trsi_jax.model.decode import Cache, Rows, advance, clear_slots, init_cache
from trsi_jax.model.decoder import Params, hidden_states, logits

MAX_STOP_IDS = 8
_SCORE_MULTIPLE = 32

_clear = jax.jit(clear_slots, donate_argnums=0)


@dataclass(eq=False, slots=True)
class _Job:
    """One live request."""

    request: GenerateRequest
    future: asyncio.Future[GenerateResult]
    slot: int
    arrived: float
    deadline: float
    aborted: bool = False


@dataclass(eq=False, slots=True)
class _Block:
    """Slots that share one cache and one call of the loop."""

    cache: Cache | None
    owners: list[str | None]
    read: list[tuple[int, ...]]
    jobs: dict[int, _Job] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    worker: asyncio.Task[None] | None = None

    def waits_for_none(self) -> bool:
        """Whether every open session of the block has a request here."""
        return all(owner is None or slot in self.jobs for slot, owner in enumerate(self.owners))


class JaxEngine:
    """Batched, cached decoding with one seeded stream a request.

    The same request seed, ids and weights give bit for bit the same tokens and log-probs,
    whatever else runs beside, whenever it comes and whatever the session has cached.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        context_len: int,
        max_sessions: int = 128,
        block_width: int = 64,
        linger_s: float = 0.1,
        steps_per_call: int = 32,
        version: int = 0,
        engine_id: str = "jax",
    ) -> None:
        """Set up; nothing is compiled or allocated before the first request.

        Args:
          config: the model.
          params: tree of `init_params`; the engine never writes or donates it.
          context_len: longest prompt and completion together.
          max_sessions: most sessions (and requests outside one) that are live at once.
          block_width: slots of one block; wide ones cost less a token, several overlap with what
            their sessions do between two requests.
          linger_s: how long a block waits for further requests after the last one.
          steps_per_call: tokens a row reads before aborts and deadlines are looked at again.
          version: of `params`.
          engine_id: name in results.

        Raises:
          ValueError: for a size that is not positive or a context the model has no positions for.
        """
        for name, size in (
            ("context_len", context_len),
            ("max_sessions", max_sessions),
            ("block_width", block_width),
            ("steps_per_call", steps_per_call),
        ):
            if size <= 0:
                raise ValueError(f"{name} must be positive, got {size}")
        if context_len > config.max_position:
            raise ValueError(
                f"context_len {context_len} is over the {config.max_position} positions of "
                f"{config.name}"
            )
        self._config = config
        self._params = params
        self._version = version
        self._engine_id = engine_id
        self._linger_s = linger_s
        self._steps = steps_per_call
        self._width = min(block_width, max_sessions)
        self._caps = EngineCaps(
            seeded_sampling=True,
            hybrid=config.uses_gdn,
            vocab_size=config.vocab_size,
            context_len=context_len,
            max_sessions=max_sessions,
        )
        self._blocks: list[_Block] = []
        self._slots: dict[str, int] = {}
        self._live: dict[str, _Job] = {}
        self._serving = asyncio.Event()
        self._serving.set()
        self._device = asyncio.Lock()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trsi-engine")
        self._closed = False

    @property
    def caps(self) -> EngineCaps:
        """Static capabilities."""
        return self._caps

    async def open_sessions(self, session_ids: Sequence[str]) -> None:
        """Give each new session the lowest free slot, in the order given.

        Raises:
          EngineError: when more sessions are live than `caps.max_sessions`.
        """
        for session in session_ids:
            if session not in self._slots:
                self._slots[session] = self._take_slot(session)

    async def close_session(self, session_id: str) -> None:
        """Free the session's slot. Unknown ids are no error."""
        slot = self._slots.pop(session_id, None)
        if slot is not None:
            self._free_slot(slot)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one completion.

        Raises:
          InvalidRequest: for ids, lengths or sampling settings that cannot be served, or a
            request id or session that already has a live request.
          EngineError: when the engine is closed, full or broken.
        """
        self._validate(request)
        temporary = None
        session = request.session_id
        if session is None:
            temporary = f"request {request.request_id}"
            slot = self._take_slot(temporary)
        else:
            if session not in self._slots:
                await self.open_sessions([session])
            slot = self._slots[session]
        block, row = self._blocks[slot // self._width], slot % self._width
        if row in block.jobs:
            raise InvalidRequest(f"session {session!r} already has a live request")
        now = time.monotonic()
        job = _Job(
            request=request,
            future=asyncio.get_running_loop().create_future(),
            slot=slot,
            arrived=now,
            deadline=np.inf if request.deadline_s is None else now + request.deadline_s,
        )
        self._live[request.request_id] = block.jobs[row] = job
        if block.worker is None:
            block.worker = asyncio.create_task(self._serve(block))
            block.worker.add_done_callback(partial(self._worker_ended, block))
        block.arrived.set()
        try:
            return await job.future
        finally:
            job.aborted = True  # Also when the caller was cancelled.
            self._withdraw(job)
            self._live.pop(request.request_id, None)
            if temporary is not None:
                self._free_slot(slot)

    async def score(self, ids: Sequence[int], start: int, temperature: float) -> tuple[float, ...]:
        """Log-probs of ids[start:] given what precedes each, by the training forward.

        Raises:
          InvalidRequest: for ids or a start that cannot be scored.
        """
        self._check_ids("score", ids)
        if not 1 <= start <= len(ids):
            raise InvalidRequest(f"score: start {start} is outside 1..{len(ids)}")
        if temperature < 0:
            raise InvalidRequest(f"score: temperature must be >= 0, got {temperature}")
        padded = -(-len(ids) // _SCORE_MULTIPLE) * _SCORE_MULTIPLE
        tokens = np.zeros((1, padded), np.int32)
        tokens[0, : len(ids)] = ids
        segments = (np.arange(padded) < len(ids)).astype(np.int32)[None]
        async with self._device:
            self._check_open()
            compute = partial(
                _score, self._config, self._params, tokens, segments, np.float32(temperature)
            )
            scores = await asyncio.get_running_loop().run_in_executor(
                self._pool, lambda: np.asarray(compute())
            )
        return tuple(float(x) for x in scores[start - 1 : len(ids) - 1])

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Stop requests (None: all) within `steps_per_call` tokens; callers get what there is."""
        for request_id in list(self._live) if request_ids is None else request_ids:
            job = self._live.get(request_id)
            if job is None:
                continue
            job.aborted = True
            if self._withdraw(job):
                _resolve(job, self._result(job, (), (), FinishKind.ABORT, 0))

    async def pause(self) -> None:
        """Hold new requests; those that run already end as they would."""
        self._serving.clear()

    async def resume(self) -> None:
        """Serve held requests."""
        self._serving.set()

    async def update_weights(self, snapshot: WeightSnapshot) -> UpdateReport:
        """Swap the pointer to the parameters and drop every cache, after what runs now.

        Raises:
          EngineError: for a snapshot without in-process parameters, or with a tree, a shape or a
            dtype that differs from what is served.
        """
        began = time.monotonic()
        self._check_snapshot(snapshot)
        async with self._device:
            self._check_open()
            self._params = snapshot.params
            self._version = snapshot.version
            for block in self._blocks:
                block.read = [()] * self._width
        return UpdateReport(
            version=snapshot.version,
            seconds=time.monotonic() - began,
            updated=(self._engine_id,),
        )

    async def status(self) -> tuple[EngineStatus, ...]:
        """One entry: this engine."""
        waiting = sum(len(block.jobs) for block in self._blocks)
        state = EngineState.READY if self._serving.is_set() else EngineState.PAUSED
        state = EngineState.CLOSED if self._closed else state
        return (
            EngineStatus(
                engine_id=self._engine_id,
                state=state,
                version=self._version,
                running=len(self._live) - waiting,
                waiting=waiting,
            ),
        )

    async def aclose(self) -> None:
        """Fail what is live, stop the workers, drop the caches. Idempotent."""
        if self._closed:
            return
        self._closed = True
        workers = [block.worker for block in self._blocks if block.worker is not None]
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for job in list(self._live.values()):
            if not job.future.done():
                job.future.set_exception(EngineError(f"{self._engine_id}: closed"))
        self._blocks.clear()
        self._slots.clear()
        self._pool.shutdown(wait=True)

    # --- slots and checks ---------------------------------------------------------------------

    def _take_slot(self, owner: str) -> int:
        self._check_open()
        for index, block in enumerate(self._blocks):
            if None in block.owners:
                row = block.owners.index(None)
                block.owners[row] = owner
                return index * self._width + row
        live = sum(owner is not None for block in self._blocks for owner in block.owners)
        room = self._caps.max_sessions - live
        if room <= 0:
            raise EngineError(
                f"{self._engine_id}: {live} sessions are open, at most "
                f"{self._caps.max_sessions} are served at once; close some or raise max_sessions"
            )
        # Every block has the full width, so that one compiled shape serves all; the last may hold
        # slots that are never given out.
        spare = max(0, self._width - room)
        owners: list[str | None] = [None] * (self._width - spare)
        self._blocks.append(_Block(cache=None, owners=owners, read=[()] * self._width))
        return self._take_slot(owner)

    def _free_slot(self, slot: int) -> None:
        if self._closed:
            return
        block, row = self._blocks[slot // self._width], slot % self._width
        block.owners[row] = None
        block.read[row] = ()
        block.arrived.set()

    def _withdraw(self, job: _Job) -> bool:
        """Take a job back that does not run yet."""
        if self._closed:
            return False
        jobs, row = self._blocks[job.slot // self._width].jobs, job.slot % self._width
        if jobs.get(row) is not job:
            return False
        del jobs[row]
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(f"{self._engine_id}: closed")

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        vocab, context = self._caps.vocab_size, self._caps.context_len
        if not ids:
            raise InvalidRequest(f"{name}: no input ids")
        if len(ids) > context:
            raise InvalidRequest(f"{name}: {len(ids)} ids are over the context of {context}")
        array = np.asarray(ids)
        bad = array[(array < 0) | (array >= vocab)]
        if bad.size:
            raise InvalidRequest(f"{name}: id {bad[0]} is outside the vocabulary 0..{vocab - 1}")

    def _validate(self, request: GenerateRequest) -> None:
        self._check_open()
        name, spec = f"request {request.request_id!r}", request.sampling
        if request.request_id in self._live:
            raise InvalidRequest(f"{name}: a request of this id is live")
        self._check_ids(name, request.input_ids)
        context = self._caps.context_len
        if spec.max_new_tokens < 0:
            raise InvalidRequest(f"{name}: max_new_tokens must be >= 0, got {spec.max_new_tokens}")
        if len(request.input_ids) + spec.max_new_tokens > context:
            raise InvalidRequest(
                f"{name}: {len(request.input_ids)} ids and {spec.max_new_tokens} new tokens are "
                f"over the context of {context}"
            )
        if not spec.temperature >= 0 or not np.isfinite(spec.temperature):
            raise InvalidRequest(f"{name}: temperature must be >= 0, got {spec.temperature}")
        if not 0 < spec.top_p <= 1:
            raise InvalidRequest(f"{name}: top_p must be in (0, 1], got {spec.top_p}")
        if spec.top_k != -1 and spec.top_k < 1:
            raise InvalidRequest(f"{name}: top_k must be -1 or >= 1, got {spec.top_k}")
        if len(spec.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidRequest(
                f"{name}: at most {MAX_STOP_IDS} stop ids, got {len(spec.stop_token_ids)}"
            )

    def _check_snapshot(self, snapshot: WeightSnapshot) -> None:
        if snapshot.params is None:
            raise EngineError(f"{self._engine_id}: the in-process engine needs snapshot.params")
        old = dict(jax.tree_util.tree_leaves_with_path(self._params))
        new = dict(jax.tree_util.tree_leaves_with_path(snapshot.params))
        for path in old.keys() | new.keys():
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            if path not in new or path not in old:
                what = "missing" if path not in new else "not a parameter of this model"
                raise EngineError(f"{self._engine_id}: {where} is {what}")
            if jnp.shape(old[path]) != jnp.shape(new[path]):
                raise EngineError(
                    f"{self._engine_id}: {where} has shape {jnp.shape(new[path])}, not "
                    f"{jnp.shape(old[path])}"
                )

    # --- running ------------------------------------------------------------------------------

    async def _serve(self, block: _Block) -> None:
        while not self._closed:
            await block.arrived.wait()
            while block.jobs and not block.waits_for_none():
                block.arrived.clear()
                try:
                    # Not wait_for, which on Python 3.11 can swallow a cancellation.
                    async with asyncio.timeout(self._linger_s):
                        await block.arrived.wait()
                except TimeoutError:
                    break
            block.arrived.clear()
            await self._serving.wait()
            async with self._device:
                jobs, block.jobs = block.jobs, {}
                if jobs:
                    await self._run(block, jobs)

    async def _run(self, block: _Block, jobs: dict[int, _Job]) -> None:
        loop = asyncio.get_running_loop()
        cache, rows, cached = await loop.run_in_executor(self._pool, self._load, block, jobs)
        block.cache = None  # Donated: if a call fails, nothing half-written is read again.
        truncate = any(
            j.request.sampling.top_p < 1 or j.request.sampling.top_k > 0 for j in jobs.values()
        )
        step = partial(_advance, self._config, self._params, steps=self._steps, truncate=truncate)
        stopped: dict[int, bool] = {}
        while True:
            now = time.monotonic()
            halt = np.zeros(self._width, bool)
            for row, job in jobs.items():
                if row not in stopped and (job.aborted or now >= job.deadline):
                    halt[row] = stopped[row] = True
            cache, rows, done = await loop.run_in_executor(
                self._pool, partial(step, cache, rows, halt)
            )
            if done.all():
                break
        tokens, logprobs = np.asarray(rows.tokens), np.asarray(rows.logprobs)
        known, length = np.asarray(rows.known), np.asarray(cache.length)
        block.cache = cache
        for row, job in jobs.items():
            spec = job.request.sampling
            start = len(job.request.input_ids)
            output = tuple(int(t) for t in tokens[row, start : known[row]])
            block.read[row] = tuple(int(t) for t in tokens[row, : length[row]])
            stop_ids = () if spec.ignore_eos else spec.stop_token_ids
            if output and output[-1] in stop_ids:
                finish = FinishKind.STOP
            elif len(output) >= spec.max_new_tokens:
                finish = FinishKind.LENGTH
            else:
                finish = FinishKind.ABORT
            scores = tuple(float(x) for x in logprobs[row, start : known[row]])
            _resolve(job, self._result(job, output, scores, finish, cached[row]))

    def _load(self, block: _Block, jobs: dict[int, _Job]) -> tuple[Cache, Rows, dict[int, int]]:
        width, context = self._width, self._caps.context_len
        cache = block.cache
        if cache is None:
            cache = init_cache(self._config, width, context)
            block.read = [()] * width
        tokens = np.zeros((width, context), np.int32)
        known = np.ones(width, np.int32)
        limit = np.ones(width, np.int32)
        key_data = np.zeros((width, 2), np.uint32)
        temperature = np.ones(width, np.float32)
        top_p, top_k = np.ones(width, np.float32), np.full(width, -1, np.int32)
        stop = np.full((width, MAX_STOP_IDS), -1, np.int32)
        restart = np.zeros(width, bool)
        cached: dict[int, int] = {}
        for row, job in jobs.items():
            ids, spec = job.request.input_ids, job.request.sampling
            read = block.read[row]
            # The state after the last token cannot be rolled back, and its logits are not kept.
            reusable = len(read) < len(ids) and ids[: len(read)] == read
            restart[row] = not reusable
            cached[row] = len(read) if reusable else 0
            tokens[row, : len(ids)] = ids
            known[row] = len(ids)
            limit[row] = len(ids) + spec.max_new_tokens
            seed = zlib.crc32(job.request.request_id.encode()) if spec.seed is None else spec.seed
            key_data[row] = (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF
            temperature[row] = spec.temperature
            top_p[row], top_k[row] = spec.top_p, spec.top_k
            if not spec.ignore_eos:
                stop[row, : len(spec.stop_token_ids)] = spec.stop_token_ids
        # An empty read is a slot that was freed, or whose weights changed.
        restart |= np.asarray([not read for read in block.read])
        if restart.any():
            cache = _clear(cache, jnp.asarray(restart))
        rows = Rows(
            tokens=jnp.asarray(tokens),
            logprobs=jnp.zeros((width, context), jnp.float32),
            known=jnp.asarray(known),
            limit=jnp.asarray(limit),
            done=jnp.asarray(known >= limit),
            key_data=jnp.asarray(key_data),
            temperature=jnp.asarray(temperature),
            top_p=jnp.asarray(top_p),
            top_k=jnp.asarray(top_k),
            stop=jnp.asarray(stop),
        )
        return cache, rows, cached

    def _result(
        self,
        job: _Job,
        output: tuple[int, ...],
        logprobs: tuple[float, ...],
        finish: FinishKind,
        cached: int,
    ) -> GenerateResult:
        spans = (VersionSpan(self._version, 0, len(output)),) if output else ()
        return GenerateResult(
            request_id=job.request.request_id,
            output_ids=output,
            logprobs=logprobs,
            finish=finish,
            matched_stop=output[-1] if finish is FinishKind.STOP else None,
            spans=spans,
            prompt_tokens=len(job.request.input_ids),
            cached_tokens=cached,
            engine_id=self._engine_id,
            latency_s=time.monotonic() - job.arrived,
        )

    def _worker_ended(self, block: _Block, worker: asyncio.Task[None]) -> None:
        """A worker ends by `aclose`, or by a fault that its callers must see."""
        block.worker = None
        if worker.cancelled():
            return
        fault = worker.exception()
        block.jobs.clear()
        for job in list(self._live.values()):
            if self._blocks[job.slot // self._width] is block and not job.future.done():
                error = EngineError(f"{self._engine_id}: {fault}")
                error.__cause__ = fault
                job.future.set_exception(error)


def _resolve(job: _Job, result: GenerateResult) -> None:
    if not job.future.done():
        job.future.set_result(result)


def _advance(
    config: ModelConfig,
    params: Params,
    cache: Cache,
    rows: Rows,
    halt: npt.NDArray[np.bool_],
    *,
    steps: int,
    truncate: bool,
) -> tuple[Cache, Rows, npt.NDArray[np.bool_]]:
    cache, rows = advance(
        config, params, cache, rows, jnp.asarray(halt), steps=steps, truncate=truncate
    )
    return cache, rows, np.asarray(rows.done)


@partial(jax.jit, static_argnums=0)
def _score(
    config: ModelConfig,
    params: Params,
    token_ids: jax.Array,
    segment_ids: jax.Array,
    temperature: jax.Array,
) -> jax.Array:
    """[1, T] ids -> [T-1] log-probs of the tokens 1..T-1."""
    positions = jnp.arange(token_ids.shape[1])[None]
    hidden = hidden_states(config, params, token_ids, segment_ids, positions)
    scores = logits(config, params, hidden[0, :-1]).astype(jnp.float32)
    logprob = jax.nn.log_softmax(scores / jnp.where(temperature == 0, 1, temperature))
    return jnp.take_along_axis(logprob, token_ids[0, 1:, None], axis=-1)[:, 0]
