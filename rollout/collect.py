"""Episodes in waves: generation, fresh sandboxes and verification side by side."""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rollout.chat import Chat
from rollout.errors import (
    EngineError,
    FleetUnavailable,
    HarnessError,
    InvalidRequest,
    RolloutError,
    SandboxError,
    SandboxUnavailable,
    VerifierError,
)
from rollout.harness import HARNESSES, Episode, Limits, public_view, run_episode
from rollout.protocols import RolloutEngine, Sandbox, SandboxBackend, SandboxSpec
from rollout.records import Fault, FileTree, Task, Trajectory, Verdict

Verify = Callable[[Task, FileTree, SandboxBackend], Awaitable[Verdict]]
"""Judges the working directory that an attempt left, in a sandbox where a check runs a command."""
Progress = Callable[[int, int, Trajectory], None]


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to run; with the run's seed it decides the episode's id and seed.

    Attributes:
      harness: a name in `HARNESSES`.
      sample: index among the episodes of this task under this harness.
      role: who acts: "actor", "executor", "evaluation".
      source: id of the trajectory that this one was rewritten from.
    """

    task: Task
    harness: str
    sample: int
    stage: str
    iteration: int
    temperature: float = 1.0
    role: str = "actor"
    source: str = ""

    @property
    def id(self) -> str:
        """Unique in a run, and the same whenever the episode is repeated."""
        parts = (self.stage, self.iteration, self.role, self.task.id, self.harness, self.sample)
        return ".".join(map(str, parts))

    def seed(self, run_seed: int) -> int:
        """31-bit seed of the episode."""
        return zlib.crc32(f"{run_seed}/{self.id}".encode()) & 0x7FFFFFFF


@dataclass
class Clock:
    """Wall-clock seconds by what the collection was doing; the first of several counts.

    Attributes:
      generate: at least one completion was in flight.
      sandbox: none was, but a sandbox was starting, working or closing.
      verify: verification alone.
      wall: everything.
    """

    wall: float = 0.0
    generate: float = 0.0
    sandbox: float = 0.0
    verify: float = 0.0
    _running: dict[str, int] = field(default_factory=dict, repr=False)
    _since: float = field(default_factory=time.perf_counter, repr=False)

    @contextlib.contextmanager
    def part(self, name: str, timings: dict[str, float]) -> Iterator[None]:
        """Book the time inside under `name`, here and in an episode's own timings."""
        started = time.perf_counter()
        self._lap(started)
        self._running[name] = self._running.get(name, 0) + 1
        try:
            yield
        finally:
            now = time.perf_counter()
            self._lap(now)
            self._running[name] -= 1
            timings[name] = timings.get(name, 0.0) + now - started

    def _lap(self, now: float) -> None:
        for name in ("generate", "sandbox", "verify"):
            if self._running.get(name):
                setattr(self, name, getattr(self, name) + now - self._since)
                break
        self._since = now


async def collect(
    specs: Sequence[EpisodeSpec],
    *,
    engine: RolloutEngine,
    backend: SandboxBackend,
    chat: Chat,
    verify: Verify,
    run_seed: int,
    limits: Limits | None = None,
    sandbox: SandboxSpec | None = None,
    wave: int = 128,
    max_live: int = 192,
    max_starts: int = 8,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> list[Trajectory]:
    """Run every episode in a fresh sandbox of its own; results in the order of `specs`.

    A wave's sessions are announced together and its episodes run side by side. The next wave's
    sandboxes start, and the last one's are read, verified and closed, while a wave generates.
    An episode that an infrastructure fault ended is run once more after all others; if it fails
    again, its trajectory is masked.

    Args:
      specs: the episodes, in the order of the results.
      engine: samples; it sees the sessions in the same order.
      backend: gives the sandboxes.
      chat: tokenizer and markup of the policy.
      verify: judges the final working directory: `rollout.tasks.harbor.protocol.verify_task`.
      run_seed: seed of the run.
      limits: of each episode; the engine's context length holds as well.
      sandbox: what each sandbox must be.
      wave: episodes at a time; no more than the engine's sessions, or `max_live`.
      max_live: sandboxes that live at a time.
      max_starts: sandboxes that start at a time, and verifications that run at a time.
      progress: called with (finished, all, trajectory) as episodes finish.
      clock: where wall-clock seconds by part are added.

    Raises:
      SandboxUnavailable, EngineError: when no episode of a whole wave got a sandbox, or a
        completion: that is no chance fault.
      HarnessError: for two specs of the same id or a harness that doesn't exist.
    """
    for spec in specs:
        if spec.harness not in HARNESSES:
            raise HarnessError(f"no harness {spec.harness!r}; there are {', '.join(HARNESSES)}")
    if len({spec.id for spec in specs}) != len(specs):
        raise HarnessError("two episodes have the same task, harness, sample, stage and iteration")
    limits = limits or Limits()
    run = _Collection(
        engine=engine,
        backend=backend,
        chat=chat,
        verify=verify,
        run_seed=run_seed,
        limits=replace(limits, context=min(limits.context, engine.caps.context_len)),
        sandbox=sandbox or SandboxSpec(),
        live=asyncio.Semaphore(max_live),
        starts=asyncio.Semaphore(max_starts),
        verifications=asyncio.Semaphore(max_starts),
        clock=clock or Clock(),
    )
    size = max(1, min(wave, engine.caps.max_sessions, max_live))
    results: dict[int, Trajectory] = {}

    def keep(index: int, trajectory: Trajectory) -> None:
        results[index] = trajectory
        if progress is not None:
            progress(len(results), len(specs), trajectory)

    def keep_unless_transient(index: int, trajectory: Trajectory) -> None:
        if not run.is_transient(index):
            keep(index, trajectory)

    started = time.perf_counter()
    indexed = list(enumerate(specs))
    await run.waves(indexed, size, keep_unless_transient)
    again = [(i, spec) for i, spec in indexed if run.is_transient(i)]
    await run.waves(again, size, keep)
    run.raise_if_systematic(range(len(specs)))
    run.clock.wall += time.perf_counter() - started
    return [results[i] for i in range(len(specs))]


@dataclass
class _Collection:
    """What the episodes of one `collect` share; `faults` holds each one's last fault."""

    engine: RolloutEngine
    backend: SandboxBackend
    chat: Chat
    verify: Verify
    run_seed: int
    limits: Limits
    sandbox: SandboxSpec
    live: asyncio.Semaphore
    starts: asyncio.Semaphore
    verifications: asyncio.Semaphore
    clock: Clock
    faults: dict[int, RolloutError] = field(default_factory=dict)

    def is_transient(self, index: int) -> bool:
        """Whether a fault that may not come again ended the episode."""
        fault = self.faults.get(index)
        return isinstance(fault, SandboxError | EngineError) and not isinstance(
            fault, InvalidRequest
        )

    def raise_if_systematic(self, members: Sequence[int]) -> None:
        """Raise the first fault if no member got a sandbox, or a completion."""
        faults = [self.faults.get(index) for index in members]
        for fault in faults[:1]:
            if fault and all(isinstance(f, SandboxUnavailable | EngineError) for f in faults):
                raise fault

    async def waves(
        self,
        indexed: Sequence[tuple[int, EpisodeSpec]],
        size: int,
        keep: Callable[[int, Trajectory], None],
    ) -> None:
        """Run the episodes wave by wave; an unexpected exception ends all of them."""
        waves = [indexed[i : i + size] for i in range(0, len(indexed), size)]
        ahead: dict[int, asyncio.Task[Sandbox]] = {}
        running: list[asyncio.Task[None]] = []
        try:
            for number, members in enumerate(waves):
                for index, _ in members if number == 0 else ():
                    ahead[index] = asyncio.create_task(self._start())
                for index, _ in waves[number + 1] if number + 1 < len(waves) else ():
                    ahead[index] = asyncio.create_task(self._start())
                await self.engine.open_sessions([spec.id for _, spec in members])
                acted = [asyncio.Event() for _ in members]
                for (index, spec), event in zip(members, acted, strict=True):
                    episode = self._episode(index, spec, ahead.pop(index), event, keep)
                    running.append(asyncio.create_task(episode))
                for event in acted:
                    await event.wait()
                running = [task for task in running if not (task.done() and task.result() is None)]
                # One fault may be chance; it is judged after its second attempt.
                if len(members) > 1:
                    self.raise_if_systematic([index for index, _ in members])
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self._discard(list(ahead.values()))

    async def _episode(
        self,
        index: int,
        spec: EpisodeSpec,
        start: asyncio.Task[Sandbox],
        acted: asyncio.Event,
        keep: Callable[[int, Trajectory], None],
    ) -> None:
        """One attempt; `acted` is set as soon as the agent is finished."""
        timings: dict[str, float] = {}
        part = partial(self.clock.part, timings=timings)
        task, seed = spec.task, spec.seed(self.run_seed)
        episode = Episode(HARNESSES[spec.harness], self.chat, public_view(task), self.limits)
        provenance = {"run_seed": str(self.run_seed), "role": spec.role}
        provenance["sandbox"] = self.backend.name
        if spec.source:
            provenance["source"] = spec.source
        box: Sandbox | None = None
        verdict: Verdict | None = None
        fault: RolloutError | None = None
        engine_id = ""
        try:
            try:
                with part("sandbox"):
                    box = await start
                    await box.put_files(task.files, directories=task.directories)
                provenance["enforced"] = ",".join(sorted(box.enforced))
                engine_id = await run_episode(
                    episode,
                    self.engine,
                    box,
                    chat=self.chat,
                    limits=self.limits,
                    episode_id=spec.id,
                    seed=seed,
                    temperature=spec.temperature,
                    part=part,
                )
            finally:
                await self.engine.close_session(spec.id)
            self.faults.pop(index, None)
            acted.set()
            with part("sandbox"):
                tree = await box.snapshot()
            async with self.verifications:
                with part("verify"):
                    verdict = await self.verify(task, tree, self.backend)
        except FleetUnavailable:
            raise  # Not this episode's fault, and the others will not fare better.
        except (SandboxError, EngineError, HarnessError, VerifierError) as error:
            fault = self.faults[index] = error
        finally:
            acted.set()
            if box is not None:
                with part("sandbox"):
                    provenance |= await self._close(box)
        tokens = episode.tokens()
        logprob_t, weight_version_t = episode.behaviour()
        trajectory = Trajectory(
            id=spec.id,
            task_id=task.id,
            family=task.family,
            tier=task.tier,
            split=task.split,
            harness=spec.harness,
            stage=spec.stage,
            iteration=spec.iteration,
            sample=spec.sample,
            seed=seed,
            engine=engine_id,
            temperature=spec.temperature,
            token_ids=tokens.token_ids,
            acted_t=tokens.acted_t,
            logprob_t=logprob_t,
            turn_t=tokens.turn_t,
            weight_version_t=weight_version_t,
            turns=tuple(episode.turns),
            finish="fault" if fault else episode.finish or "fault",
            verdict=verdict,
            fault=Fault(fault.kind, str(fault)) if fault else None,
            timings=timings,
            provenance=provenance,
        )
        keep(index, trajectory)

    async def _start(self) -> Sandbox:
        await self.live.acquire()
        try:
            async with self.starts:
                with self.clock.part("sandbox", {}):
                    return await self.backend.start(self.sandbox)
        except BaseException:
            self.live.release()
            raise

    async def _close(self, box: Sandbox) -> dict[str, str]:
        """Close a sandbox; what goes wrong then says nothing about the episode, but is kept."""
        try:
            await box.close()
        except SandboxError as error:
            return {"close": str(error)}
        finally:
            self.live.release()
        return {}

    async def _discard(self, unused: Sequence[asyncio.Task[Sandbox]]) -> None:
        """Close the sandboxes of episodes that never began."""
        for task in unused:
            task.cancel()
        for box in await asyncio.gather(*unused, return_exceptions=True):
            if not isinstance(box, BaseException):
                await self._close(box)
