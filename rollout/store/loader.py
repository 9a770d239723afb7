"""Loading: the steps of a plan, read ahead, resumable, dealt to data-parallel processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.errors import StoreError
from rollout.records import Trajectory
from rollout.store.location import Location
from rollout.store.plan import Overlong, Plan, Step, epoch_steps, fill
from rollout.store.reader import SegmentReader


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where to go on: everything that decides what comes next, but for the plan.

    Attributes:
      version: of the store, pinned.
      seed: of the order.
      epoch: counted from 0.
      step: within the epoch, counted from 0, over all processes alike.
    """

    version: int
    seed: int
    epoch: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """One trajectory and the columns asked for, [T] float32 each."""

    trajectory: Trajectory
    columns: Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """The rows of one step that one process gets.

    Attributes:
      row_tokens: tokens that a row holds.
      rows: for each row, its trajectories in order; a row may be empty.
      after: where to go on after this step.
    """

    row_tokens: int
    rows: tuple[tuple[Loaded, ...], ...]
    after: Cursor


class Loader:
    """Steps of a store's trajectories, the same for the same cursor whatever is written meanwhile.

    Rows of a step are dealt to the processes in turn: row r goes to process r mod P. Together the
    processes see every trajectory of an epoch exactly once, in as many steps each.
    """

    def __init__(
        self,
        location: Location,
        *,
        plan: Plan,
        cursor: Cursor | None = None,
        seed: int | None = None,
        process: int = 0,
        processes: int = 1,
        columns: Sequence[str] = (),
        segments: Callable[[str], bool] = lambda name: True,
        overlong: Overlong = "error",
        ahead: int = 2,
        context: Any = None,
    ) -> None:
        """A loader that begins at a cursor, or at the beginning of the newest version.

        Args:
          location: folder, URL or key-value store spec of an existing store.
          plan: how trajectories share rows.
          cursor: where to go on; None begins.
          seed: of the order; given exactly where `cursor` is not.
          process: this process, in [0, processes).
          processes: data-parallel processes; must divide the plan's rows.
          columns: names of columns to load; each must lie beside every segment chosen.
          segments: which segments to load, by name.
          overlong: what to do with a trajectory that no row holds: "error", or "drop" it.
          ahead: steps to read before they are asked for, at most.
          context: tensorstore context to share, for stores in memory.

        Raises:
          ValueError: for arguments that contradict each other.
          StoreError: where there is no store.
        """
        if (cursor is None) == (seed is None):
            raise ValueError("give either a cursor or a seed")
        if not 0 <= process < processes or plan.rows % processes:
            raise ValueError(
                f"process {process} of {processes} with {plan.rows} rows a step: the process must "
                "be in [0, processes), and processes must divide the rows"
            )
        if ahead < 1:
            raise ValueError(f"ahead must be at least 1, got {ahead}")
        version = None if cursor is None else cursor.version
        reader = SegmentReader(location, version=version, context=context)
        self._reader = reader if version is not None else reader.pinned()
        self._cursor = cursor or Cursor(self._reader.version or 0, seed or 0)
        self._plan = plan
        self._process, self._processes = process, processes
        self._columns = tuple(columns)
        self._overlong: Overlong = overlong
        self._ahead = ahead
        self._places: list[tuple[str, str, int]] = []  # id, segment, place there
        self._lengths: list[int] = []
        for name in self._reader.segments():
            if segments(name):
                header = self._reader.header(name)
                self._places += [(t, name, i) for i, t in enumerate(header.ids)]
                self._lengths += header.lengths
        # One thread: it is the disk that is waited for, and order must not depend on timing.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trsi-loader")

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    @property
    def cursor(self) -> Cursor:
        """Where the loader began."""
        return self._cursor

    def steps(self, epoch: int) -> tuple[Step, ...]:
        """The plan of one epoch, over all processes."""
        steps, _ = self._planned(epoch)
        return steps

    def fill(self, epoch: int = 0) -> float:
        """Share of all positions of an epoch that hold a token."""
        return fill(self.steps(epoch), self._lengths)

    def dropped(self) -> tuple[str, ...]:
        """Ids of the trajectories that no row holds."""
        _, dropped = self._planned(0)
        return tuple(self._places[i][0] for i in dropped)

    def epochs(self, stop: int) -> Iterator[LoadedStep]:
        """Every step from the cursor to the end of epoch `stop` - 1.

        Raises:
          ValueError: for a trajectory that no row holds.
          StoreError: for a column that is missing, for a store that cannot be read.
        """
        pending: deque[Future[LoadedStep]] = deque()
        try:
            for step, after in self._positions(stop):
                pending.append(self._thread.submit(self._load, step, after))
                if len(pending) > self._ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()

    def _planned(self, epoch: int) -> tuple[tuple[Step, ...], tuple[int, ...]]:
        return epoch_steps(
            self._plan,
            self._lengths,
            seed=self._cursor.seed,
            epoch=epoch,
            overlong=self._overlong,
        )

    def _positions(self, stop: int) -> Iterator[tuple[Step, Cursor]]:
        version, seed = self._cursor.version, self._cursor.seed
        for epoch in range(self._cursor.epoch, stop):
            steps = self.steps(epoch)
            first = self._cursor.step if epoch == self._cursor.epoch else 0
            if first > len(steps):
                raise StoreError(
                    f"the cursor stands at step {first} of an epoch of {len(steps)}: it is of "
                    "another plan or another choice of segments"
                )
            for number in range(first, len(steps)):
                last = number + 1 == len(steps)
                after = Cursor(version, seed, *((epoch + 1, 0) if last else (epoch, number + 1)))
                yield steps[number], after

    def _load(self, step: Step, after: Cursor) -> LoadedStep:
        rows = step.rows[self._process :: self._processes]
        wanted = {self._places[i][0]: self._places[i][1:] for row in rows for i in row}
        found = self._reader.get_many(wanted, self._columns)
        return LoadedStep(
            step.row_tokens,
            tuple(tuple(Loaded(*found[self._places[i][0]]) for i in row) for row in rows),
            after,
        )
