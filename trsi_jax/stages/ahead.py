"""Rollouts of an RPR stage from a fleet that samples while the trainer trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from rollout.asynchronous import AsyncCollector, AsyncOptions
from rollout.collect import EpisodeSpec
from rollout.errors import EngineError
from rollout.records import Trajectory
from trsi_jax.config import FleetSection
from trsi_jax.stages.context import Context, graded, success_rate


class Ahead:
    """Batches of a stage's joint iterations, each committed before the update that takes it.

    A batch in the store is read, so a run that goes on repeats the updates it had made; what was
    running for later ones when it was killed is sampled anew.
    """

    def __init__(
        self,
        context: Context,
        fleet: FleetSection,
        *,
        version: int,
        first: int,
        iterations: int,
        specs: Callable[[int], Sequence[EpisodeSpec]],
        segment: Callable[[int], str],
    ) -> None:
        """Set up; nothing runs yet.

        Args:
          context: the run.
          fleet: its settings.
          version: weight version of iteration 0.
          first: iteration to begin with.
          iterations: of the stage.
          specs: the episodes of an iteration.
          segment: and the store's segment for it.
        """
        self._context = context
        self._version = version
        self._iterations = iterations
        self._specs = specs
        self._segment = segment
        self._admitted = first
        self._now = first
        options = AsyncOptions(fleet.max_staleness, fleet.over_stale, fleet.straggler)
        self._collector = AsyncCollector(context.collect_ahead, options, first=version + first)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.runner.run(self._collector.aclose())

    def take(self, iteration: int) -> list[Trajectory]:
        """Graded episodes for an iteration, whose weights are being served.

        Raises:
          EngineError: when none ended in time.
        """
        context = self._context
        segment = f"{self._segment(iteration)}.000"
        if iteration > self._now:
            context.runner.run(self._collector.advance(self._version + iteration))
            self._now = iteration
        self._admitted = max(self._admitted, iteration)
        if context.reader.has(segment):
            self._admitted = max(self._admitted, iteration + 1)
            return graded(context.reader.read(segment))
        context.runner.run(self._admit())
        label = self._segment(iteration).rpartition("/")[2]
        with context.observer.part(label, 1) as part, context.clock.charge("sampling"):
            taken = context.runner.run(self._collector.take(self._version + iteration))
            part.advance(1, success=success_rate(taken.trajectories))
        if taken.over_stale or taken.late or taken.abandoned:
            context.observer.note(
                f"{label}: {taken.over_stale} over-stale, {taken.late} late,"
                f" {taken.abandoned} abandoned"
            )
        with context.clock.charge("store"):
            context.writer.write(segment, taken.trajectories)
        usable = graded(taken.trajectories)
        if not usable:
            raise EngineError(
                f"{label}: no episode ended within straggler = {taken.waited_s:.0f} s that is young"
                " enough and has a verdict"
            )
        return usable

    async def _admit(self) -> None:
        while (
            self._admitted < self._iterations
            and self._version + self._admitted <= self._collector.room
        ):
            if not self._context.reader.has(f"{self._segment(self._admitted)}.000"):
                number = self._version + self._admitted
                self._collector.admit(number, self._specs(self._admitted))
            self._admitted += 1
