"""Looking at a whole store: what it holds, and whether it still is what was written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import StoreError
from rollout.store import layout
from rollout.store.compact import sealed_problem, stored_bytes
from rollout.store.contract import column_violation, violations
from rollout.store.location import Location, describe
from rollout.store.reader import Quarantined, SegmentReader

_TOKEN_BYTES = sum(dtype.itemsize for dtype in layout.TOKEN_FIELDS.values())
_COLUMN_BYTES = 4
# Any id that an int32 holds: the contract of a store whose vocabulary is not known.
_ANY_VOCAB = 2**31


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a store holds at one version.

    Attributes:
      raw_bytes: size of all arrays and records without compression or index.
      stored_bytes: size on a local disk, older versions included; None elsewhere.
      columns: name -> segments that have it.
      groups: first part of a segment's name -> (segments, trajectories, tokens).
    """

    version: int
    segments: int
    sealed: int
    trajectories: int
    tokens: int
    raw_bytes: int
    stored_bytes: int | None
    columns: Mapping[str, int]
    groups: Mapping[str, tuple[int, int, int]]
    quarantined: tuple[Quarantined, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a store that is not as it should be."""

    segment: str
    text: str


@dataclass(slots=True)
class _Group:
    segments: int = 0
    trajectories: int = 0
    tokens: int = 0


def statistics(location: Location, *, context: Any = None) -> Statistics:
    """Count what a store holds, from its headers alone.

    Raises:
      StoreError: where there is no store.
    """
    reader = SegmentReader(location, context=context).pinned()
    columns: Counter[str] = Counter()
    groups: dict[str, _Group] = {}
    raw = sealed = 0
    for name in reader.segments():
        header = reader.header(name)
        tokens = sum(header.lengths)
        beside = reader.columns(name)
        columns.update(beside)
        raw += tokens * (_TOKEN_BYTES + _COLUMN_BYTES * len(beside)) + sum(header.record_bytes)
        sealed += header.sealed is not None
        group = groups.setdefault(name.split("/")[0], _Group())
        group.segments += 1
        group.trajectories += len(header.ids)
        group.tokens += tokens
    return Statistics(
        version=reader.version or 0,
        segments=sum(g.segments for g in groups.values()),
        sealed=sealed,
        trajectories=sum(g.trajectories for g in groups.values()),
        tokens=sum(g.tokens for g in groups.values()),
        raw_bytes=raw,
        stored_bytes=stored_bytes(location),
        columns=dict(sorted(columns.items())),
        groups={k: (g.segments, g.trajectories, g.tokens) for k, g in sorted(groups.items())},
        quarantined=reader.quarantined(),
    )


def verify(
    location: Location,
    *,
    vocab_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    context: Any = None,
) -> Iterator[Problem]:
    """Read everything of the newest version and hold it to the contract.

    Every chunk is read, and with it its checksum; every trajectory is held to the rules of the
    door, every column to its own, every sealed segment to its digest, every id to its place.

    Args:
      location: folder, URL or key-value store spec of an existing store.
      vocab_size: number of token ids; None allows any.
      progress: called with the segments read so far and in all.
      context: tensorstore context to share, for stores in memory.

    Yields:
      What is wrong, segment by segment.

    Raises:
      StoreError: where there is no store.
    """
    reader = SegmentReader(location, context=context).pinned()
    names = reader.segments()
    known: set[str] = set()
    for i, name in enumerate(names):
        try:
            for text in _segment_problems(reader, name, vocab_size or _ANY_VOCAB):
                yield Problem(name, text)
            for trajectory_id in reader.header(name).ids:
                if trajectory_id in known:
                    yield Problem(name, f"trajectory {trajectory_id} is stored twice")
                known.add(trajectory_id)
        except StoreError as error:
            yield Problem(name, str(error))
        if progress is not None:
            progress(i + 1, len(names))
    for trajectory_id in sorted(set(reader.ids()) - known):
        yield Problem("", f"id {trajectory_id} points at no trajectory of {describe(location)}")


def _segment_problems(reader: SegmentReader, name: str, vocab_size: int) -> Iterator[str]:
    header = reader.header(name)
    trajectories = reader.read(name)
    if tuple(t.id for t in trajectories) != header.ids:
        yield "its records have other ids than its header"
    for i, problem in violations(trajectories, vocab_size=vocab_size).items():
        yield f"trajectory {header.ids[i]}: {problem}"
    for i, trajectory_id in enumerate(header.ids):
        if reader.find(trajectory_id) != (name, i):
            yield f"trajectory {trajectory_id}: its id does not point at its place"
    for column in reader.columns(name):
        values = reader.read_columns(name, column)
        for trajectory, column_t in zip(trajectories, values, strict=True):
            column_problem = column_violation(column, column_t, trajectory.acted_t)
            if column_problem is not None:
                yield f"trajectory {trajectory.id}: {column_problem}"
    damage = sealed_problem(reader, name)
    if damage is not None:
        yield damage
