"""The in-process generation engine: `rollout.protocols.RolloutEngine` over the jitted decoder.

Slots are cut into blocks of equal width, and one compiled loop serves them all. A session keeps
its slot over its turns; a request outside a session gets a slot when one is free. Requests join a
block between two calls of the loop and leave it when they end, whatever the others do. An idle
block starts when each of its open sessions waits, or when no request has come for a short while.
Since rows are independent and keys belong to requests, timing decides nothing about the tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from rollout.errors import EngineError, InvalidRequest, UserError
from rollout.protocols import (
    EngineCaps,
    EngineState,
    EngineStatus,
    FinishKind,
    GenerateRequest,
    GenerateResult,
    UpdateReport,
    WeightSnapshot,
)
from trsi_jax.model.config import ModelConfig
from trsi_jax.model.decoder import Params, hidden_states, logits
from trsi_jax.model.hf.load import load_params
from trsi_jax.slots import MAX_STOP_IDS, Block, Work

_SCORE_MULTIPLE = 32

OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""Called in the engine's event loop with all ids and log-probs so far."""


@dataclass(eq=False, slots=True)
class _Job:
    """One live request."""

    request: GenerateRequest
    work: Work
    future: asyncio.Future[GenerateResult]
    arrived: float
    deadline: float
    on_tokens: OnTokens | None
    slot: int = -1
    aborted: bool = False

    def over(self) -> bool:
        """Whether nobody waits for more tokens."""
        return self.aborted or time.monotonic() >= self.deadline


@dataclass(eq=False, slots=True)
class _Served:
    """A block and who uses it."""

    block: Block
    owners: list[str | None]
    weights: int
    used: list[float]
    placed: dict[int, _Job] = field(default_factory=dict)
    running: dict[int, _Job] = field(default_factory=dict)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    worker: asyncio.Task[None] | None = None

    def waits_for_none(self) -> bool:
        """Whether every open session of the block has a request here."""
        here = self.placed.keys() | self.running.keys()
        return all(owner is None or row in here for row, owner in enumerate(self.owners))


class JaxEngine:
    """Batched, cached decoding with one seeded stream a request.

    The same request seed, ids and weights give bit for bit the same tokens and log-probs,
    whatever else runs beside, whenever it comes and whatever is cached.
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
        prefill_chunk: int = 0,
        prefill_width: int = 4,
        streams: int = 1,
        shardings: Any = None,
        version: int = 0,
        engine_id: str = "jax",
    ) -> None:
        """Set up; nothing is compiled or allocated before the first request.

        Args:
          config: the model.
          params: tree of `init_params`; the engine never writes or donates it.
          context_len: longest prompt and completion together.
          max_sessions: most sessions (and requests outside one) that are served at once; further
            requests outside a session wait.
          block_width: slots of one block; wide ones cost less a token, several overlap with what
            their sessions do between two requests.
          linger_s: how long an idle block waits for further requests after the last one.
          steps_per_call: tokens a row reads or samples by steps before aborts, deadlines and new
            requests are looked at again.
          prefill_chunk: tokens of a chunk that contexts are read by; 0: they are read by steps.
            The two agree up to rounding. A session then feeds all that is new and nothing else
            (0), or what follows its last prompt's last multiple of this (`trsi_jax.slots`).
          prefill_width: contexts that are read by chunks together.
          streams: blocks that compute at the same time. More than one is for a CPU: a step of a
            small model keeps one core busy.
          shardings: tree like the parameters of `jax.sharding.Sharding`, where they are served;
            None: where `params` lies.
          version: of `params`.
          engine_id: name in results.

        Raises:
          ValueError: for a size that is not positive or a context the model has no positions for.
        """
        for name, size, least in (
            ("context_len", context_len, 1),
            ("max_sessions", max_sessions, 1),
            ("block_width", block_width, 1),
            ("steps_per_call", steps_per_call, 1),
            ("prefill_width", prefill_width, 1),
            ("streams", streams, 1),
            ("prefill_chunk", prefill_chunk, 0),
        ):
            if size < least:
                raise ValueError(f"{name} must be {'positive' if least else '>= 0'}, got {size}")
        if context_len > config.max_position:
            raise ValueError(
                f"context_len {context_len} is over the {config.max_position} positions of "
                f"{config.name}"
            )
        self._config = config
        self._params = params if shardings is None else jax.device_put(params, shardings)
        self._version = version
        # Counts updates: a version may come twice.
        self._weights = 0
        self._engine_id = engine_id
        self._linger_s = linger_s
        self._width = min(block_width, max_sessions)
        self._new_block = partial(
            Block,
            config,
            width=self._width,
            context=context_len,
            steps=steps_per_call,
            chunk=prefill_chunk,
            fill_width=prefill_width,
        )
        self._caps = EngineCaps(
            seeded_sampling=True,
            hybrid=config.uses_gdn,
            vocab_size=config.vocab_size,
            context_len=context_len,
            max_sessions=max_sessions,
        )
        self._served: list[_Served] = []
        self._slots: dict[str, int] = {}
        self._live: dict[str, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._serving = asyncio.Event()
        self._serving.set()
        self._streams = streams
        self._device = asyncio.Semaphore(streams)
        # Callers that want the device for themselves, between two calls of every block.
        self._urgent = 0
        self._cutting = asyncio.Lock()
        self._pool = ThreadPoolExecutor(max_workers=streams, thread_name_prefix="trsi-engine")
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
        """Free the session's slot and abort its live request. Unknown ids are no error."""
        slot = self._slots.pop(session_id, None)
        if slot is None or self._closed:
            return
        for job in list(self._live.values()):
            if job.slot == slot:
                self._stop(job)
        self._free_slot(slot)

    async def generate(
        self, request: GenerateRequest, *, on_tokens: OnTokens | None = None
    ) -> GenerateResult:
        """Sample one completion.

        Args:
          request: what to sample.
          on_tokens: called after each call of the loop that gave this request tokens.

        Raises:
          InvalidRequest: for ids, lengths or sampling settings that cannot be served, or a
            request id or session that already has a live request.
          EngineError: when the engine is closed, has no slot for a new session, or is broken.
        """
        self._validate(request)
        session = request.session_id
        if session is not None:
            await self.open_sessions([session])
            if any(job.request.session_id == session for job in self._live.values()):
                raise InvalidRequest(f"session {session!r} already has a live request")
        seed = request.sampling.seed
        now = time.monotonic()
        loop = asyncio.get_running_loop()
        job = _Job(
            request=request,
            work=Work(
                request.input_ids,
                request.sampling,
                zlib.crc32(request.request_id.encode()) if seed is None else seed,
            ),
            future=loop.create_future(),
            arrived=now,
            deadline=np.inf if request.deadline_s is None else now + request.deadline_s,
            on_tokens=on_tokens,
        )
        self._live[request.request_id] = job
        alarm = None
        if request.deadline_s is not None:
            alarm = loop.call_later(request.deadline_s, self._stop, job)
        if session is not None:
            self._place(job, self._slots[session])
        else:
            self._queue.append(job)
            self._serve_queue()
        try:
            return await job.future
        finally:
            if alarm is not None:
                alarm.cancel()
            self._stop(job)  # Also when the caller was cancelled.
            self._live.pop(request.request_id, None)
            if session is None and job.slot >= 0 and not self._closed:
                self._free_slot(job.slot)

    async def score(self, ids: Sequence[int], start: int, temperature: float) -> tuple[float, ...]:
        """Log-probs of ids[start:] given what precedes each, by the training forward.

        Raises:
          InvalidRequest: for ids or a start that cannot be scored.
        """
        tokens, segments = self._padded("score", ids)
        if not 1 <= start <= len(ids):
            raise InvalidRequest(f"score: start {start} is outside 1..{len(ids)}")
        if not temperature >= 0 or not np.isfinite(temperature):
            raise InvalidRequest(f"score: temperature must be >= 0, got {temperature}")
        compute = partial(
            _score, self._config, self._params, tokens, segments, np.float32(temperature)
        )
        scores = await self._between_calls(lambda: np.asarray(compute()))
        return tuple(float(x) for x in scores[start - 1 : len(ids) - 1])

    async def distributions(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Log-probs at temperature 1 of every id at each place but the first, [N - 1, V].

        Raises:
          InvalidRequest: for ids that cannot be scored.
        """
        tokens, segments = self._padded("distributions", ids)
        compute = partial(_distributions, self._config, self._params, tokens, segments)
        whole = await self._between_calls(lambda: np.asarray(compute()))
        return whole[: len(ids) - 1]

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Stop requests (None: all) within one call of the loop; callers get what there is."""
        for request_id in list(self._live) if request_ids is None else request_ids:
            job = self._live.get(request_id)
            if job is not None:
                self._stop(job)

    async def pause(self) -> None:
        """Hold new requests, and those that run between two of their tokens."""
        self._serving.clear()

    async def resume(self) -> None:
        """Go on with what was held."""
        self._serving.set()
        for served in self._served:
            served.woken.set()

    async def update_weights(self, snapshot: WeightSnapshot) -> UpdateReport:
        """Swap the pointer to the parameters and drop every cache.

        Parameters that lie elsewhere than those served are moved there; a snapshot with a path
        alone is read from its directory. Requests that run go on with the new weights: what they
        have is read again, and their spans say which weights made each token.

        Raises:
          EngineError: for a snapshot that holds neither, of another model, with another tree,
            shape or dtype than what is served, or that cannot be read; nothing changes.
        """
        began = time.monotonic()
        self._check_open()
        params = await asyncio.to_thread(self._params_of, snapshot)
        async with self._cut_in():
            self._params = params
            self._version = snapshot.version
            self._weights += 1
        return UpdateReport(
            version=snapshot.version,
            seconds=time.monotonic() - began,
            updated=(self._engine_id,),
        )

    async def flush_cache(self) -> bool:
        """Forget every cache; False, and nothing is forgotten, while requests are live."""
        if self._live:
            return False
        self._weights += 1
        return True

    async def status(self) -> tuple[EngineStatus, ...]:
        """One entry: this engine."""
        running = sum(len(served.running) for served in self._served)
        state = EngineState.READY if self._serving.is_set() else EngineState.PAUSED
        return (
            EngineStatus(
                engine_id=self._engine_id,
                state=EngineState.CLOSED if self._closed else state,
                version=self._version,
                running=running,
                waiting=max(0, len(self._live) - running),
            ),
        )

    async def aclose(self) -> None:
        """Fail what is live, stop the workers, drop the caches. Idempotent."""
        if self._closed:
            return
        self._closed = True
        workers = [served.worker for served in self._served if served.worker is not None]
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for job in list(self._live.values()):
            self._fail(job, EngineError(f"{self._engine_id}: closed"))
        self._served.clear()
        self._slots.clear()
        self._queue.clear()
        self._pool.shutdown(wait=True)

    # --- the device ---------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _cut_in(self) -> AsyncIterator[None]:
        """Hold the device alone, between two calls of whatever blocks run."""
        self._urgent += 1
        held = 0
        try:
            # One at a time, or two callers would each wait for what the other holds.
            async with self._cutting:
                for _ in range(self._streams):
                    await self._device.acquire()
                    held += 1
                self._check_open()
                yield
        finally:
            self._urgent -= 1
            for _ in range(held):
                self._device.release()

    async def _between_calls(
        self, compute: Callable[[], npt.NDArray[np.float32]]
    ) -> npt.NDArray[np.float32]:
        async with self._cut_in():
            return await asyncio.get_running_loop().run_in_executor(self._pool, compute)

    def _padded(
        self, name: str, ids: Sequence[int]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Ids and segments [1, T] for the training forward, T of few sizes."""
        self._check_ids(name, ids)
        padded = -(-len(ids) // _SCORE_MULTIPLE) * _SCORE_MULTIPLE
        tokens = np.zeros((1, padded), np.int32)
        tokens[0, : len(ids)] = ids
        return tokens, (np.arange(padded) < len(ids)).astype(np.int32)[None]

    # --- slots --------------------------------------------------------------------------------

    def _at(self, slot: int) -> tuple[_Served, int]:
        return self._served[slot // self._width], slot % self._width

    def _take_slot(self, owner: str, ids: tuple[int, ...] | None = None) -> int:
        """A free slot: the lowest, or the one from which `ids` can best go on."""
        self._check_open()
        while ids is not None and len(self._served) < self._streams and self._may_grow():
            # A stream without a block would idle while another block fills up.
            self._add_block()
        free = [
            (index, row)
            for index, served in enumerate(self._served)
            for row, name in enumerate(served.owners)
            if name is None
        ]
        if free and ids is not None:
            index, row = min(free, key=partial(self._preference, ids))
        elif free:
            index, row = free[0]
        else:
            index, row = self._add_block(), 0
        self._served[index].owners[row] = owner
        return index * self._width + row

    def _preference(
        self, ids: tuple[int, ...], at: tuple[int, int]
    ) -> tuple[int, int, bool, float]:
        """Most of `ids` held, in the emptiest block, here rather than beside, longest unused."""
        served, row = self._served[at[0]], at[1]
        source, held = served.block.reuse(ids, row)
        taken = sum(owner is not None for owner in served.owners)
        return -held, taken, source != row, served.used[row]

    def _add_block(self) -> int:
        slots = sum(len(served.owners) for served in self._served)
        room = self._caps.max_sessions - slots
        if room <= 0:
            raise EngineError(
                f"{self._engine_id}: {slots} sessions are open, at most "
                f"{self._caps.max_sessions} are served at once; close some or raise max_sessions"
            )
        # Every block has the full width, so that one compiled shape serves all; the last may hold
        # slots that are never given out.
        spare = max(0, self._width - room)
        self._served.append(
            _Served(
                block=self._new_block(),
                owners=[None] * (self._width - spare),
                weights=self._weights,
                used=[0.0] * self._width,
            )
        )
        return len(self._served) - 1

    def _free_slot(self, slot: int) -> None:
        served, row = self._at(slot)
        served.owners[row] = None
        served.used[row] = time.monotonic()
        served.woken.set()
        self._serve_queue()

    def _serve_queue(self) -> None:
        """Give slots to requests outside a session, in the order they came."""
        while self._queue and self._has_room():
            job = self._queue.popleft()
            name = f"request {job.request.request_id}"
            self._place(job, self._take_slot(name, job.request.input_ids))

    def _has_room(self) -> bool:
        return self._may_grow() or any(None in served.owners for served in self._served)

    def _may_grow(self) -> bool:
        """Whether another block may be added."""
        return sum(len(served.owners) for served in self._served) < self._caps.max_sessions

    def _place(self, job: _Job, slot: int) -> None:
        job.slot = slot
        served, row = self._at(slot)
        served.placed[row] = job
        if served.worker is None:
            served.worker = asyncio.create_task(self._serve(served))
            served.worker.add_done_callback(partial(self._worker_ended, served))
        served.woken.set()

    def _stop(self, job: _Job) -> None:
        """Let a request end as it is: at once if it waits, else after the call that runs."""
        job.aborted = True
        if self._closed:
            return
        if job in self._queue:
            self._queue.remove(job)
            self._resolve(job)
        if job.slot < 0:
            return
        served, row = self._at(job.slot)
        if served.placed.get(row) is job:
            del served.placed[row]
            self._resolve(job)
        served.woken.set()

    # --- checks -------------------------------------------------------------------------------

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

    def _params_of(self, snapshot: WeightSnapshot) -> Params:
        """The snapshot's parameters where they are to be served, checked."""
        where = jax.tree.map(lambda leaf: leaf.sharding, self._params)
        params = snapshot.params
        if params is None:
            if snapshot.path is None:
                raise EngineError(
                    f"{self._engine_id}: the snapshot has neither parameters nor a path"
                )
            return self._read(snapshot.path, where)
        self._check_tree(params)

        def placed(leaf: Any, place: Any) -> Any:
            there = isinstance(leaf, jax.Array) and leaf.sharding == place
            return leaf if there else jax.device_put(leaf, place)

        moved: Params = jax.tree.map(placed, params, where)
        return moved

    def _read(self, path: Path, where: Any) -> Params:
        ours = dataclasses.asdict(self._config)
        try:
            theirs = dataclasses.asdict(ModelConfig.from_hf(path))
            for key in _DESCRIBED:
                if theirs[key] != ours[key]:
                    raise EngineError(
                        f"{self._engine_id}: {path}: {key} is {theirs[key]}, not {ours[key]}"
                    )
            return load_params(path, self._config, shardings=where)
        except UserError as error:
            raise EngineError(f"{self._engine_id}: {error}") from error

    def _check_tree(self, params: Any) -> None:
        old = dict(jax.tree_util.tree_leaves_with_path(self._params))
        new = dict(jax.tree_util.tree_leaves_with_path(params))
        for path in old.keys() | new.keys():
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            if path not in new or path not in old:
                what = "missing" if path not in new else "not a parameter of this model"
                raise EngineError(f"{self._engine_id}: {where} is {what}")
            for what in ("shape", "dtype"):
                has, needs = getattr(new[path], what), getattr(old[path], what)
                if has != needs:
                    raise EngineError(f"{self._engine_id}: {where} has {what} {has}, not {needs}")

    # --- running ------------------------------------------------------------------------------

    async def _serve(self, served: _Served) -> None:
        while True:
            await self._gather(served)
            while not self._serving.is_set():
                self._end_stopped(served)
                served.woken.clear()
                await served.woken.wait()
            async with self._device:
                await self._turn(served)

    async def _gather(self, served: _Served) -> None:
        """Wait for requests, and a little for more of them."""
        while not served.placed and not served.running:
            served.woken.clear()
            await served.woken.wait()
        while self._linger_s and not served.waits_for_none():
            served.woken.clear()
            try:
                # Not wait_for, which on Python 3.11 can swallow a cancellation.
                async with asyncio.timeout(self._linger_s):
                    await served.woken.wait()
            except TimeoutError:
                break

    async def _turn(self, served: _Served) -> None:
        """Call the loop until the requests of the first call are done or somebody cuts in.

        Later requests join but do not prolong the turn: other blocks want the device, too.
        """
        block, loop = served.block, asyncio.get_running_loop()
        first: set[_Job] | None = None
        while not self._urgent and self._serving.is_set():
            if served.weights != self._weights:
                served.weights = self._weights
                block.restart()
            self._end_stopped(served)
            if first is not None and first.isdisjoint(served.running.values()):
                return
            loads = {row: j for row, j in served.placed.items() if row not in served.running}
            for row in loads:
                del served.placed[row]
            served.running |= loads
            if not served.running:
                return
            first = first or set(served.running.values())
            works = {row: job.work for row, job in loads.items()}
            ended = await loop.run_in_executor(
                self._pool, block.call, self._params, self._version, works
            )
            for row, job in list(served.running.items()):
                if row in ended:
                    del served.running[row]
                    self._resolve(job)
                elif job.on_tokens is not None:
                    job.on_tokens(job.work.output, job.work.logprobs)

    def _end_stopped(self, served: _Served) -> None:
        """Between two calls: return what nobody waits for longer."""
        for row, job in list(served.placed.items()):
            if job.over():
                del served.placed[row]
                self._resolve(job)
        for row, job in list(served.running.items()):
            if job.over():
                served.block.drop(row)
                del served.running[row]
                self._resolve(job)

    def _resolve(self, job: _Job) -> None:
        if job.future.done():
            return
        work = job.work
        if work.stopped:
            finish = FinishKind.STOP
        else:
            finish = FinishKind.LENGTH if work.full else FinishKind.ABORT
        job.future.set_result(
            GenerateResult(
                request_id=job.request.request_id,
                output_ids=tuple(work.output),
                logprobs=tuple(work.logprobs),
                finish=finish,
                matched_stop=work.output[-1] if finish is FinishKind.STOP else None,
                spans=tuple(work.spans),
                prompt_tokens=len(work.prompt),
                cached_tokens=max(work.cached, 0),
                engine_id=self._engine_id,
                latency_s=time.monotonic() - job.arrived,
            )
        )

    def _fail(self, job: _Job, error: EngineError) -> None:
        if not job.future.done():
            job.future.set_exception(error)

    def _worker_ended(self, served: _Served, worker: asyncio.Task[None]) -> None:
        """A worker ends by `aclose`, or by a fault that its callers must see."""
        served.worker = None
        if worker.cancelled():
            return
        fault = worker.exception()
        served.block.reset()
        for job in [*served.placed.values(), *served.running.values()]:
            error = EngineError(f"{self._engine_id}: {fault}")
            error.__cause__ = fault
            self._fail(job, error)
        served.placed.clear()
        served.running.clear()


_DESCRIBED = (
    *("vocab_size", "hidden_size", "num_layers", "intermediate_size", "layer_pattern"),
    *("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "rope_theta", "gated_attention"),
    *("norm_offset", "tie_embeddings", "gdn_key_heads", "gdn_value_heads", "gdn_key_dim"),
    *("gdn_value_dim", "conv_width", "norm_eps"),
)
"""What of a directory's description must be that of the model that is served."""


@partial(jax.jit, static_argnums=0)
def _score(
    config: ModelConfig,
    params: Params,
    token_ids: jax.Array,
    segment_ids: jax.Array,
    temperature: jax.Array,
) -> jax.Array:
    """[1, T] ids -> [T-1] log-probs of the tokens 1..T-1."""
    logprob = _forward(config, params, token_ids, segment_ids, temperature)
    return jnp.take_along_axis(logprob, token_ids[0, 1:, None], axis=-1)[:, 0]


@partial(jax.jit, static_argnums=0)
def _distributions(
    config: ModelConfig, params: Params, token_ids: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """[1, T] ids -> [T-1, V] log-probs at the places 1..T-1."""
    return _forward(config, params, token_ids, segment_ids, jnp.float32(1))


def _forward(
    config: ModelConfig,
    params: Params,
    token_ids: jax.Array,
    segment_ids: jax.Array,
    temperature: jax.Array,
) -> jax.Array:
    positions = jnp.arange(token_ids.shape[1])[None]
    hidden = hidden_states(config, params, token_ids, segment_ids, positions)
    scores = logits(config, params, hidden[0, :-1]).astype(jnp.float32)
    return jax.nn.log_softmax(scores / jnp.where(temperature == 0, 1, temperature))
