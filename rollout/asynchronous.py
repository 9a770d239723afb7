"""Collection ahead of the trainer, with bounded staleness.

The trainer's weights have a version that grows by one an update. Batch k is what update k learns
from. While the trainer has version v, batches up to v + `max_staleness` may be running, so with 0
sampling and training take turns. What a batch got is judged by its tokens: a trajectory whose
oldest token is of a version below v - `max_staleness` when update v takes it is over-stale.

Off-policy correction is the losses': every token has the log-prob of the weights that sampled it,
and the policy ratio is taken to that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rollout.collect import EpisodeSpec
from rollout.records import Fault, Trajectory

Keep = Callable[[Trajectory], None]
Collect = Callable[[Sequence[EpisodeSpec], Keep], Awaitable[object]]
"""Runs episodes and hands each over as it ends."""

STALE = "stale"
"""Kind of the fault that masks an over-stale trajectory."""


@dataclass(frozen=True, slots=True)
class AsyncOptions:
    """Bounds of asynchronous collection.

    Attributes:
      max_staleness: versions that a trainer's batch may be behind; 0 is synchronous.
      over_stale: "drop" leaves an over-stale trajectory out, "mask" keeps it as a record that
        nothing is trained on.
      straggler_s: how long the trainer waits for a batch; what ends later joins the next one.
    """

    max_staleness: int = 1
    over_stale: Literal["drop", "mask"] = "drop"
    straggler_s: float = 600.0

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or not self.straggler_s > 0:
            raise ValueError(
                f"need max_staleness >= 0 and straggler_s > 0, got {self.max_staleness} and"
                f" {self.straggler_s}"
            )


@dataclass(frozen=True, slots=True)
class Taken:
    """What an update gets.

    Attributes:
      trajectories: the batch's own and the late ones of earlier batches, by id.
      over_stale: how many were dropped or masked for their age.
      late: how many of the batch still run.
      abandoned: episodes of earlier batches that were ended, too old to be of use.
      waited_s: how long the trainer waited.
    """

    trajectories: tuple[Trajectory, ...]
    over_stale: int
    late: int
    abandoned: int
    waited_s: float


@dataclass(eq=False, slots=True)
class _Batch:
    number: int
    size: int
    task: asyncio.Task[object]
    ended: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class AsyncCollector:
    """Runs admitted batches side by side; all methods belong to one event loop."""

    def __init__(self, collect: Collect, options: AsyncOptions, *, first: int = 0) -> None:
        """Set up.

        Args:
          collect: runs a batch.
          options: bounds.
          first: version that the trainer starts with, and so the first batch's number.
        """
        self._collect = collect
        self._options = options
        self._version = first
        self._batches: dict[int, _Batch] = {}
        self._done: list[tuple[int, Trajectory]] = []
        self._abandoned = 0

    @property
    def room(self) -> int:
        """The highest number of a batch that may be admitted now."""
        return self._version + self._options.max_staleness

    def admit(self, number: int, specs: Sequence[EpisodeSpec]) -> None:
        """Start batch `number`.

        Raises:
          ValueError: for a number over `room`, or one that was admitted before.
        """
        if number > self.room or number < self._version or number in self._batches:
            raise ValueError(
                f"batch {number} cannot be admitted: the trainer has version {self._version}, at"
                f" most {self.room} may run, and {sorted(self._batches)} do"
            )
        batch = _Batch(number, len(specs), asyncio.create_task(self._run(number, specs)))
        self._batches[number] = batch
        batch.task.add_done_callback(lambda _: batch.changed.set())

    async def _run(self, number: int, specs: Sequence[EpisodeSpec]) -> object:
        def keep(trajectory: Trajectory) -> None:
            batch = self._batches.get(number)
            if batch is not None:
                self._done.append((number, trajectory))
                batch.ended += 1
                if batch.ended == batch.size:
                    batch.changed.set()

        return await self._collect(specs, keep)

    async def advance(self, version: int) -> None:
        """The trainer has a new version; batches that can give nothing in time any more end.

        Raises:
          ValueError: for a version that is not newer.
        """
        if version <= self._version:
            raise ValueError(f"version {version} does not follow {self._version}")
        self._version = version
        for number in [n for n in self._batches if n < version - self._options.max_staleness]:
            batch = self._batches.pop(number)
            self._abandoned += batch.size - batch.ended
            await _end(batch.task)

    async def take(self, number: int) -> Taken:
        """What there is for update `number`, waiting for its batch until the deadline.

        Raises:
          ValueError: for a batch that was not admitted.
          RolloutError: whatever ended the batch's collection.
        """
        if number not in self._batches:
            raise ValueError(f"batch {number} was not admitted")
        batch, began = self._batches[number], self._now()
        deadline = began + self._options.straggler_s
        while not batch.task.done() and batch.ended < batch.size:
            try:
                async with asyncio.timeout_at(deadline):
                    await batch.changed.wait()
            except TimeoutError:
                break
        for other in list(self._batches.values()):
            if other.task.done():
                other.task.result()
                if other.number <= number:
                    del self._batches[other.number]
        # What ended early of a later batch is left to it, so that batches keep their size.
        taken = sorted((t for n, t in self._done if n <= number), key=lambda t: t.id)
        self._done = [(n, t) for n, t in self._done if n > number]
        oldest_allowed = self._version - self._options.max_staleness
        kept, stale = [], 0
        for trajectory in taken:
            version = oldest_version(trajectory)
            if version is None or version >= oldest_allowed:
                kept.append(trajectory)
                continue
            stale += 1
            if self._options.over_stale == "mask":
                reason = f"a token of version {version}, at least {oldest_allowed} is allowed"
                kept.append(
                    replace(trajectory, finish="fault", verdict=None, fault=Fault(STALE, reason))
                )
        abandoned, self._abandoned = self._abandoned, 0
        return Taken(
            trajectories=tuple(kept),
            over_stale=stale,
            late=batch.size - batch.ended if not batch.task.done() else 0,
            abandoned=abandoned,
            waited_s=self._now() - began,
        )

    async def aclose(self) -> None:
        """End every batch."""
        batches, self._batches = list(self._batches.values()), {}
        for batch in batches:
            await _end(batch.task)

    @staticmethod
    def _now() -> float:
        # The loop's clock, which a simulation may run faster than the wall's.
        return asyncio.get_running_loop().time()


def oldest_version(trajectory: Trajectory) -> int | None:
    """The oldest version among its sampled tokens; None if nothing was sampled."""
    versions = trajectory.weight_version_t[trajectory.acted_t]
    return int(versions.min()) if versions.size else None


async def _end(task: asyncio.Task[object]) -> None:
    """Cancel and wait; what it raises then is nobody's any more."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
