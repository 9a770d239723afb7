"""What every stage works with: pool, engine, sandboxes, store, compiled steps, clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.chat import Chat
from rollout.collect import Clock as CollectionClock
from rollout.collect import EpisodeSpec, Progress, collect
from rollout.harness import Limits
from rollout.protocols import RolloutEngine, SandboxBackend, WeightSnapshot
from rollout.records import TIERS, Task, Trajectory
from rollout.store.reader import SegmentReader
from rollout.store.segments import SegmentWriter
from rollout.tasks.harbor.protocol import verify_task
from trsi_jax import model, prng
from trsi_jax.config import Config
from trsi_jax.publish import publish
from trsi_jax.stages.loop import Runner
from trsi_jax.stages.observer import Observer
from trsi_jax.steps import Steps

WAVES_PER_SEGMENT = 4
"""Collection waves that are committed together: what a kill can cost."""


@dataclass
class Clock:
    """Wall seconds by part, for the table of where time goes. Parts do not overlap."""

    seconds: dict[str, float] = field(default_factory=dict)
    _charged_inside: list[float] = field(default_factory=list, repr=False)
    """For each open `charge`, what parts inside it took."""

    def add(self, part: str, seconds: float) -> None:
        """Charge `seconds` to `part`."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        if self._charged_inside:
            self._charged_inside[-1] += seconds

    @contextmanager
    def charge(self, part: str) -> Iterator[None]:
        """Charge the body's wall time to `part`, less what the body charges to parts itself."""
        start = time.perf_counter()
        self._charged_inside.append(0.0)
        try:
            yield
        finally:
            inside = self._charged_inside.pop()
            self.add(part, time.perf_counter() - start - inside)
            if self._charged_inside:
                self._charged_inside[-1] += inside


@dataclass(frozen=True)
class Context:
    """The parts of one run, made once by the machine and shared by its stages.

    Attributes:
      medians: family -> median number of effective checks, over the training pool.
    """

    config: Config
    out: Path
    model: model.ModelConfig
    chat: Chat
    train_tasks: Sequence[Task]
    evaluation_tasks: Sequence[Task]
    medians: Mapping[str, float]
    engine: RolloutEngine
    backend: SandboxBackend
    reader: SegmentReader
    writer: SegmentWriter
    steps: Steps
    observer: Observer
    runner: Runner
    clock: Clock

    def checkpoints(self, stage: str) -> Path:
        """Folder of a stage's checkpoints."""
        return self.out / "checkpoints" / stage

    def draw_tasks(self, n: int, *path: str | int, tiers: Collection[str] = TIERS) -> list[Task]:
        """`n` different training tasks, in an order that the run's seed and `path` decide."""
        order = prng.generator(self.config.seed, "tasks", *path).permutation(len(self.train_tasks))
        shuffled = (self.train_tasks[i] for i in order)
        return list(islice((task for task in shuffled if task.tier in tiers), n))

    def serve(self, version: int, params: Any) -> None:
        """Give the engine new weights; the only place where weights reach it."""
        snapshot = WeightSnapshot(version, params=params)
        fleet = self.config.fleet
        if fleet is not None:
            with self.clock.charge("weights"):
                snapshot = publish(
                    Path(fleet.weights),
                    version,
                    self.model,
                    params,
                    base=Path(fleet.base) if fleet.base else None,
                    dtype=fleet.dtype,
                    keep=fleet.keep,
                    again=True,
                )
                self.runner.run(self.engine.update_weights(snapshot))
            return
        self.runner.run(self.engine.update_weights(snapshot))

    def collect(
        self, segment: str, specs: Sequence[EpisodeSpec], *, label: str
    ) -> list[Trajectory]:
        """Run episodes in the sandboxes and commit them, or read what is committed already.

        An episode is a function of its spec, the seed and the weights alone, so a run that was
        killed and goes on reads what an uninterrupted one would have sampled.
        """
        size = self.config.engine.sessions * WAVES_PER_SEGMENT
        trajectories: list[Trajectory] = []
        with self.observer.part(label, len(specs)) as part:
            for start in range(0, len(specs), size):
                chunk = specs[start : start + size]
                name = f"{segment}.{start // size:03d}"
                if self.reader.has(name):
                    trajectories += self.reader.read(name)
                    part.advance(len(chunk), success=success_rate(trajectories))
                    continue
                so_far = list(trajectories)

                def progress(
                    done: int, total: int, trajectory: Trajectory, seen: list[Trajectory] = so_far
                ) -> None:
                    seen.append(trajectory)
                    part.advance(1, success=success_rate(seen))

                batch = self._collect(chunk, progress)
                with self.clock.charge("store"):
                    self.writer.write(name, batch)
                trajectories += batch
        return trajectories

    def annotate(
        self, segment: str, column: str, of_trajectory: Mapping[str, npt.NDArray[np.float32]]
    ) -> None:
        """Write a per-token column beside a collection; zeros where a trajectory has none."""
        for name in self.reader.segments():
            if name.rpartition(".")[0] != segment or column in self.reader.columns(name):
                continue
            header = self.reader.header(name)
            arrays = [
                of_trajectory.get(i, np.zeros(n, np.float32))
                for i, n in zip(header.ids, header.lengths, strict=True)
            ]
            self.writer.write_columns(name, column, arrays)

    def limits(self) -> Limits:
        """Limits of every episode."""
        config = self.config
        return Limits(
            turns=config.harness.max_turns,
            turn_tokens=config.harness.max_new_tokens,
            context=config.engine.context,
            command_s=config.sandbox.command_timeout,
        )

    @contextmanager
    def charge_collection(self) -> Iterator[CollectionClock]:
        """Charge the wall time of the body, a collection, to what it was doing."""
        clock = CollectionClock()
        start = time.perf_counter()
        yield clock
        wall = time.perf_counter() - start
        self.clock.add("sampling", clock.generate)
        self.clock.add("sandbox", clock.sandbox)
        self.clock.add("verification", clock.verify)
        self.clock.add("harness", wall - clock.generate - clock.sandbox - clock.verify)

    async def collect_ahead(
        self, specs: Sequence[EpisodeSpec], keep: Callable[[Trajectory], None]
    ) -> None:
        """Run episodes beside the trainer and hand each over as it ends."""
        await collect(specs, progress=lambda _, __, trajectory: keep(trajectory), **self._parts())

    def _parts(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "backend": self.backend,
            "chat": self.chat,
            "verify": verify_task,
            "run_seed": self.config.seed,
            "limits": self.limits(),
            "wave": self.config.engine.sessions,
            "max_starts": self.config.sandbox.starts,
        }

    def _collect(self, specs: Sequence[EpisodeSpec], progress: Progress) -> list[Trajectory]:
        with self.charge_collection() as clock:
            return self.runner.run(collect(specs, progress=progress, clock=clock, **self._parts()))


def graded(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Trajectories with a verdict: a fault masks an episode everywhere."""
    return [t for t in trajectories if t.verdict is not None]


def success_rate(trajectories: Sequence[Trajectory]) -> float:
    """Share of strict successes among the graded trajectories; 0 if there are none."""
    verdicts = [t.verdict for t in trajectories if t.verdict is not None]
    return sum(v.strict_success for v in verdicts) / len(verdicts) if verdicts else 0.0
