"""Plans of an epoch: which trajectories share a row, and which rows a step; from lengths alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Overlong = Literal["error", "drop"]


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one step, over all processes.

    Attributes:
      row_tokens: tokens that a row holds.
      rows: for each row, indices of its trajectories in order; a row may be empty.
    """

    row_tokens: int
    rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """Several trajectories a row, best fit.

    The shuffled trajectories are cut into windows; within a window the longest is placed first,
    into the fullest row that still holds it. Rows are then shuffled, so that a step mixes windows.

    Attributes:
      rows: rows of a step, over all processes.
      row_tokens: tokens of a row.
      window: trajectories of a window; a larger one fills rows better and mixes lengths less.
    """

    rows: int
    row_tokens: int
    window: int = 4096

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory that fits."""
        return self.row_tokens

    def steps(self, lengths: npt.NDArray[np.int64], rng: np.random.Generator) -> tuple[Step, ...]:
        """The steps of one epoch; every index of `lengths` occurs once."""
        order = rng.permutation(lengths.size)
        packed: list[tuple[int, ...]] = []
        for start in range(0, order.size, self.window):
            window = order[start : start + self.window]
            longest_first = window[np.argsort(-lengths[window], kind="stable")]
            packed += _best_fit(lengths, longest_first, self.row_tokens)
        packed = [packed[i] for i in rng.permutation(len(packed))]
        return tuple(
            Step(self.row_tokens, _filled(packed[start : start + self.rows], self.rows))
            for start in range(0, len(packed), self.rows)
        )


@dataclass(frozen=True, slots=True)
class Bucketed:
    """One trajectory a row, rows of a step of similar length.

    Attributes:
      rows: rows of a step, over all processes.
      edges: tokens of a row in each bucket, ascending; as many compiled shapes as edges.
    """

    rows: int
    edges: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory that fits."""
        return self.edges[-1]

    def steps(self, lengths: npt.NDArray[np.int64], rng: np.random.Generator) -> tuple[Step, ...]:
        """The steps of one epoch; every index of `lengths` occurs once."""
        order = rng.permutation(lengths.size)
        bucket = np.searchsorted(np.asarray(self.edges), lengths[order])
        steps: list[Step] = []
        for i, edge in enumerate(self.edges):
            members = order[bucket == i].tolist()
            for start in range(0, len(members), self.rows):
                rows = [(m,) for m in members[start : start + self.rows]]
                steps.append(Step(edge, _filled(rows, self.rows)))
        return tuple(steps[i] for i in rng.permutation(len(steps)))


Plan = Packed | Bucketed


def epoch_steps(
    plan: Plan, lengths: Sequence[int], *, seed: int, epoch: int, overlong: Overlong = "error"
) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    """The steps of one epoch, a function of its arguments alone.

    Args:
      plan: how trajectories share rows.
      lengths: tokens of each trajectory; one without tokens is left out.
      seed: of the order, in every epoch another one.
      epoch: counted from 0.
      overlong: what to do with a trajectory that no row holds: "error", or "drop" it.

    Returns:
      The steps, in which every other trajectory occurs once, and the indices dropped.

    Raises:
      ValueError: for a plan without rows or room, and for a trajectory that no row holds under
        "error".
    """
    _check(plan)
    if overlong not in ("error", "drop"):
        raise ValueError(f'overlong must be "error" or "drop", got {overlong!r}')
    sizes = np.asarray(lengths, np.int64).reshape(-1)
    dropped = np.flatnonzero(sizes > plan.longest)
    if dropped.size and overlong == "error":
        raise ValueError(
            f"trajectory {dropped[0]} has {sizes[dropped[0]]} tokens, a row holds {plan.longest}; "
            'make rows longer or choose overlong="drop"'
        )
    kept = np.flatnonzero((sizes > 0) & (sizes <= plan.longest))
    rng = np.random.default_rng([seed, epoch])
    steps = tuple(
        Step(s.row_tokens, tuple(tuple(kept[list(row)].tolist()) for row in s.rows))
        for s in plan.steps(sizes[kept], rng)
    )
    return steps, tuple(dropped.tolist())


def fill(steps: Sequence[Step], lengths: Sequence[int]) -> float:
    """Share of all positions of the steps that hold a token."""
    room = sum(step.row_tokens * len(step.rows) for step in steps)
    tokens = sum(lengths[i] for step in steps for row in step.rows for i in row)
    return tokens / room if room else 0.0


def _check(plan: Plan) -> None:
    edges = (plan.row_tokens,) if isinstance(plan, Packed) else plan.edges
    if plan.rows < 1 or not edges or min(edges) < 1 or list(edges) != sorted(set(edges)):
        raise ValueError(
            f"a plan needs rows >= 1 and rows of at least one token, edges ascending; got {plan}"
        )
    if isinstance(plan, Packed) and plan.window < 1:
        raise ValueError(f"window must be at least 1, got {plan.window}")


def _filled(rows: Sequence[tuple[int, ...]], count: int) -> tuple[tuple[int, ...], ...]:
    """As many rows as every step has, the last ones empty: all steps are of one shape."""
    return (*rows, *[()] * (count - len(rows)))


def _best_fit(
    lengths: npt.NDArray[np.int64], order: npt.NDArray[np.int64], room: int
) -> list[tuple[int, ...]]:
    """Put each trajectory into the fullest row that still holds it."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for i, size in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(free, (size, 0))
        if at == len(free):
            rows.append([i])
            insort(free, (room - size, len(rows) - 1))
        else:
            left, number = free.pop(at)
            rows[number].append(i)
            insort(free, (left - size, number))
    return [tuple(row) for row in rows]
