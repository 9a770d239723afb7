"""Splits by content hash, and who may open which of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal

from rollout.errors import ProtectedSplit, UserError
from rollout.protocols import TrajectoryReader
from rollout.records import SPLITS, Split, Trajectory

Purpose = Literal["train", "select", "evaluate"]

VISIBLE: dict[Purpose, Split] = {"train": "train", "select": "validation", "evaluate": "test"}
"""Purpose -> the one split that may be opened for it."""

TRAIN_SHARE = 0.7
VALIDATION_SHARE = 0.1


def split_of(key: str) -> Split:
    """The split that owns `key`, the canonical text of a task's sub-goals.

    Two tasks that ask for the same thing have the same key, whatever their seeds, files and
    paraphrases: no text is in two splits, and a larger pool never moves a task to another one.
    """
    digest = hashlib.sha256(f"split/{key}".encode()).digest()
    position = int.from_bytes(digest[:8], "big") / 2**64
    if position < TRAIN_SHARE:
        return "train"
    return "validation" if position < TRAIN_SHARE + VALIDATION_SHARE else "test"


def check_access(split: str, purpose: str) -> Split:
    """`split`, if it may be opened for `purpose`.

    Raises:
      UserError: an unknown split or purpose.
      ProtectedSplit: a split that this purpose may not see.
    """
    if purpose not in VISIBLE:
        raise UserError(f"purpose {purpose!r} is unknown; allowed: {', '.join(VISIBLE)}")
    if split not in SPLITS:
        raise UserError(f"split {split!r} is unknown; allowed: {', '.join(SPLITS)}")
    visible = VISIBLE[purpose]
    if split != visible:
        raise ProtectedSplit(
            f"split {split!r} can't be opened for the purpose {purpose!r}, which sees {visible!r}"
        )
    return visible


def check_results(trajectories: Iterable[Trajectory], purpose: str) -> None:
    """Refuse trajectories on tasks that a purpose may not see.

    Raises:
      UserError: an unknown purpose.
      ProtectedSplit: naming the first such trajectory.
    """
    for trajectory in trajectories:
        try:
            check_access(trajectory.split, purpose)
        except ProtectedSplit as error:
            raise ProtectedSplit(f"trajectory {trajectory.id}: {error}") from None


class GuardedReader:
    """A trajectory store as one purpose may read it.

    What the purpose may not see is passed over where everything is read, and an error where it is
    asked for by name. Implements `rollout.protocols.TrajectoryReader`.
    """

    def __init__(self, reader: TrajectoryReader, purpose: Purpose) -> None:
        if purpose not in VISIBLE:
            raise UserError(f"purpose {purpose!r} is unknown; allowed: {', '.join(VISIBLE)}")
        self._reader = reader
        self._purpose = purpose

    def segments(self) -> tuple[str, ...]:
        """Names of the committed segments, sorted; some of them may not be read."""
        return self._reader.segments()

    def read(self, segment: str) -> tuple[Trajectory, ...]:
        """All trajectories of a segment. Raises `ProtectedSplit` if one of them is protected."""
        found = self._reader.read(segment)
        check_results(found, self._purpose)
        return found

    def get(self, trajectory_id: str) -> Trajectory:
        """One trajectory by id. Raises `ProtectedSplit` if it is protected."""
        found = self._reader.get(trajectory_id)
        check_results([found], self._purpose)
        return found

    def __iter__(self) -> Iterator[Trajectory]:
        """Every trajectory that the purpose may see."""
        return (t for t in self._reader if t.split == VISIBLE[self._purpose])
