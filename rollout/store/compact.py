"""Compaction: move committed segments out of the database into sealed zarr3 shards.

A database of many commits keeps every value and every tree that it ever had. A compaction copies
all segments and columns into one sealed set (see `rollout.store.layout`), reads it back, and then
points the segments' headers at it in one transaction. Only then are the data files deleted that no
later version stands on. Writers and readers go on meanwhile:

- a writer's commits touch none of the keys that a compaction moves;
- a reader of the newest version finds each segment in one place or in the other, at each version
  in exactly one;
- a pinned version keeps its content though its files go: each header says since which version its
  segment exists, and each sealed column, so that a pinned reader sees what it saw.

One compactor works at a time: it holds a lease in the database, and the transaction that moves the
segments is refused if somebody else took the lease over. A compactor that is killed leaves the
store as it was before or after that transaction; the next one ends what it began.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from rollout.errors import StoreError
from rollout.store import layout
from rollout.store.commit import commit, commit_lock
from rollout.store.history import (
    COMPACTION_KEY,
    Compaction,
    Walk,
    decode_compaction,
    holders,
    version_files,
)
from rollout.store.location import (
    Location,
    base_spec,
    describe,
    newest_version,
    open_base,
    open_database,
    store_errors,
)
from rollout.store.reader import SegmentReader

LEASE_KEY = "compactor"

_LEASE_S = 120.0
# Each pass moves every key that pins a data file; more than one is needed only while others write.
_PASSES = 4


@dataclass(frozen=True, slots=True)
class Report:
    """What one compaction did.

    Attributes:
      segments: segments moved.
      columns: columns moved.
      files: data files of the database deleted.
      bytes_before: size of everything in a local store when it began; None elsewhere.
      bytes_after: size when it ended.
    """

    segments: int
    columns: int
    files: int
    bytes_before: int | None
    bytes_after: int | None


def compact(
    location: Location,
    *,
    context: Any = None,
    lease_s: float = _LEASE_S,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Seal every committed segment and column that is not sealed yet, and give space back.

    Args:
      location: folder, URL or key-value store spec of an existing store.
      context: tensorstore context to share, for stores in memory.
      lease_s: seconds without a sign of life after which another compactor may take over.
      progress: called with the tokens written so far and in all, those of columns included.

    Returns:
      What was done.

    Raises:
      StoreError: where there is no store, while another compactor holds the lease, when the lease
        was lost, for a full disk, and for a sealed set that does not read back equal.
    """
    return _Compactor(location, context or ts.Context(), lease_s).run(progress)


def stored_bytes(location: Location) -> int | None:
    """Bytes of everything in a local store; None elsewhere, where it would cost reading them."""
    base = base_spec(location)
    if base["driver"] != "file":
        return None
    return sum(p.stat().st_size for p in Path(base["path"]).rglob("*") if p.is_file())


class _Compactor:
    def __init__(self, location: Location, context: Any, lease_s: float) -> None:
        self._location = location
        self._context = context
        self._lease_s = lease_s
        self._base = open_base(location, context=context)
        self._database = open_database(location, create=True, context=context)
        self._name = uuid.uuid4().hex
        self._renewed = 0.0

    def run(self, progress: Callable[[int, int], None] | None) -> Report:
        if newest_version(self._location, base=self._base) is None:
            raise StoreError(f"no trajectory store at {describe(self._location)}")
        self._take_lease()
        before = stored_bytes(self._location)
        try:
            deleted = self._finish() + self._drop_orphans()
            reader = SegmentReader(self._location, context=self._context).pinned()
            segments, columns = self._seal(reader, progress or (lambda done, whole: None))
            deleted += self._finish()
        finally:
            self._give_lease_back()
        return Report(segments, columns, deleted, before, stored_bytes(self._location))

    # --- the lease ----------------------------------------------------------------------------

    def _take_lease(self) -> None:
        with store_errors(self._location, "compacting the store"):
            held = self._database.read(LEASE_KEY).result()
        if held.state == "value":
            other = json.loads(held.value)
            if other["until"] > time.time():
                until = time.strftime("%H:%M:%S", time.localtime(other["until"]))
                raise StoreError(
                    f"compacting the store: process {other['process']} on {other['host']} is at "
                    f"it; if it gives no sign of life, another may take over from {until} on"
                )
        self._write_lease(self._lease(), held.stamp.generation)

    def _renew_lease(self) -> None:
        if time.monotonic() - self._renewed > self._lease_s / 4:
            self._commit({}, ())

    def _give_lease_back(self) -> None:
        with store_errors(self._location, "compacting the store"):
            held = self._database.read(LEASE_KEY).result()
            if held.state == "value" and json.loads(held.value)["name"] == self._name:
                self._write_lease(None, held.stamp.generation)

    def _lease(self) -> bytes:
        lease = {
            "name": self._name,
            "host": platform.node(),
            "process": os.getpid(),
            "until": time.time() + self._lease_s,
        }
        return json.dumps(lease).encode()

    def _write_lease(self, lease: bytes | None, expected: bytes) -> None:
        with store_errors(self._location, "compacting the store"), commit_lock(self._location):
            stamp = self._database.write(LEASE_KEY, lease, if_equal=expected).result()
        if not stamp.generation:
            raise _lost()
        self._renewed = time.monotonic()

    # --- moving -------------------------------------------------------------------------------

    def _seal(self, reader: SegmentReader, progress: Callable[[int, int], None]) -> tuple[int, int]:
        """Write one sealed set, read it back, and point the headers at it."""
        version = reader.version or 0
        record = self._record()
        walk = Walk(self._location, self._base)
        walk.versions(max(record.at, 1), version)
        headers = {name: reader.header(name) for name in reader.segments()}
        moved = [name for name, header in headers.items() if header.sealed is None]
        columns = [
            (name, column)
            for name, header in headers.items()
            for column in reader.columns(name)
            if column not in header.columns
        ]
        if not moved and not columns:
            return 0, 0
        born = _Births(walk.born, record.born)
        places = _Places(headers, columns)
        whole = sum(sum(headers[name].lengths) for name in moved) + sum(places.sizes.values())
        done = 0

        def wrote(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress(done, whole)

        sealed = self._write_trajectories(reader, moved, wrote)
        for column, size in places.sizes.items():
            names = [name for name, of in places.first if of == column]
            pieces = (_end_to_end(reader.read_columns(name, column)) for name in names)
            self._write_column(column, size, pieces)
            wrote(size)
        changed = {
            name: replace(
                headers[name],
                layout_version=layout.LAYOUT_VERSION,
                born=born.segment(name),
                sealed=sealed[name],
            )
            for name in moved
        }
        for name, column in columns:
            header = changed.get(name, headers[name])
            sealed_column = layout.SealedColumn(
                set=self._name,
                tokens=places.first[name, column],
                sha256=column_digest(reader, name, column),
                born=born.column(name, column),
            )
            changed[name] = replace(header, columns={**header.columns, column: sealed_column})
        self._check(reader, changed)
        gone = {layout.header_key(n) for n in moved}
        gone |= {layout.column_path(n, c) for n, c in columns}
        kept = {key: version for key, version in record.born.items() if key not in gone}
        garbage = tuple(sorted(walk.files.union(record.garbage)))
        started = Compaction(record.at, kept, version, garbage)
        self._move(changed, moved, columns, started)
        return len(moved), len(columns)

    def _write_trajectories(
        self, reader: SegmentReader, moved: Sequence[str], wrote: Callable[[int], None]
    ) -> dict[str, layout.Sealed]:
        """Lay the trajectories of all segments end to end; where each segment then lies."""
        sealed: dict[str, layout.Sealed] = {}
        first = number = 0
        waiting: list[bytes] = []
        for name in moved:
            values = reader.read_packed(name)
            sealed[name] = layout.Sealed(self._name, first, segment_digest(reader, name))
            first += len(values)
            waiting += values
            while len(waiting) >= layout.ENTRIES:
                self._write_shard(number, waiting[: layout.ENTRIES])
                number += 1
                del waiting[: layout.ENTRIES]
            wrote(sum(reader.header(name).lengths))
        if waiting:
            self._write_shard(number, waiting)
        return sealed

    def _write_shard(self, number: int, values: Sequence[bytes]) -> None:
        with store_errors(self._location, "compacting the store"):
            spec = layout.shard_spec(self._base, self._name, number)
            shard = ts.KvStore.open(spec, context=self._context).result()
            # In one transaction, for a shard written twice is a shard written anew.
            with ts.Transaction() as transaction:
                staged = shard.with_transaction(transaction)
                for i, value in enumerate(values):
                    _, key = layout.shard_entry(i)
                    staged.write(key, value).result()
        self._renew_lease()

    def _write_column(self, column: str, size: int, pieces: Iterator[npt.NDArray[Any]]) -> None:
        path = layout.sealed_path(self._name, f"columns/{column}")
        with store_errors(self._location, "compacting the store"):
            spec = layout.sealed_spec(self._base, path, size, np.float32)
            opened = ts.open(spec, create=True, context=self._context).result()
            rest = np.zeros(0, np.float32)
            # Each write is a whole shard, for a shard written twice is a shard written anew.
            for start, stop in pairwise(layout.shard_edges(size)):
                parts = [rest]
                while sum(part.size for part in parts) < stop - start:
                    parts.append(next(pieces))
                flat = np.concatenate(parts)
                opened[start:stop].write(flat[: stop - start]).result()
                rest = flat[stop - start :]
                self._renew_lease()

    def _check(self, reader: SegmentReader, headers: dict[str, layout.Header]) -> None:
        """Read back what was written, by the headers that will point at it."""
        preview = reader.believing(headers)
        for name in headers:
            problem = sealed_problem(preview, name, only=self._name)
            if problem is not None:
                raise StoreError(f"compacting the store: {problem}; nothing was changed")
            self._renew_lease()

    def _move(
        self,
        headers: dict[str, layout.Header],
        moved: Sequence[str],
        columns: Sequence[tuple[str, str]],
        record: Compaction,
    ) -> None:
        new = {layout.header_key(n): layout.encode_header(h) for n, h in headers.items()}
        for name in moved:
            for i, trajectory_id in enumerate(headers[name].ids):
                # The same value, written anew: the old one may lie in a file that is to go.
                new[layout.id_key(trajectory_id)] = f"{i}:{name}".encode()
        new[COMPACTION_KEY] = record.encode()
        prefixes = [layout.trajectory_key(name) for name in moved]
        prefixes += [layout.tokens_path(name) for name in moved]
        prefixes += [layout.records_path(name) for name in moved]
        prefixes += [layout.column_path(name, column) for name, column in columns]
        self._commit(new, prefixes)

    # --- giving space back --------------------------------------------------------------------

    def _record(self) -> Compaction:
        with store_errors(self._location, "compacting the store"):
            result = self._database.read(COMPACTION_KEY).result()
        return decode_compaction(result.value if result.state == "value" else None)

    def _finish(self) -> int:
        """End what this or a killed compactor began: settle births, then delete data files."""
        record = self._record()
        if record.started is not None:
            record = self._settle(record)
        if not record.garbage:
            return 0
        # The list of versions is read by whoever commits next, wherever its parts lie.
        listing = version_files(self._location, self._base)
        gone = [name for name in record.garbage if name not in listing]
        with store_errors(self._location, "deleting data files of the store"):
            for pending in [self._base.write(name, None) for name in gone]:
                pending.result()
        left = tuple(name for name in record.garbage if name in listing)
        self._commit({COMPACTION_KEY: replace(record, garbage=left).encode()}, ())
        return len(gone)

    def _settle(self, record: Compaction) -> Compaction:
        """Make the newest version independent of old files, and say so in the record.

        What lies in files of older versions alone is garbage. Later versions stand on files of
        the newest one and on new files, so that garbage stays garbage whatever is committed.
        """
        garbage = set(record.garbage)
        for _ in range(_PASSES):
            pinning = holders(self._location, self._base)
            keys = sorted({k for file in garbage & set(pinning) for k in pinning[file]})
            if not keys:
                break
            self._rewrite(keys)
        at = newest_version(self._location, base=self._base) or 0
        walk, newest = Walk(self._location, self._base), Walk(self._location, self._base)
        walk.versions(record.started or 1, at)
        newest.versions(at, at)
        # What was born while the segments were moved lies in the database still.
        latest = SegmentReader(self._location, version=at, context=self._context)
        births = _Births(walk.born, record.born)
        born: dict[str, int] = {}
        for name in latest.segments():
            header = latest.header(name)
            if header.sealed is None:
                born[layout.header_key(name)] = births.segment(name)
            for column in latest.columns(name):
                if column not in header.columns:
                    born[layout.column_path(name, column)] = births.column(name, column)
        garbage = (garbage | walk.files) - newest.files
        settled = Compaction(at, born, None, tuple(sorted(garbage)))
        self._commit({COMPACTION_KEY: settled.encode()}, ())
        return settled

    def _rewrite(self, keys: Sequence[str]) -> None:
        """Write keys anew with the value that they have."""
        with store_errors(self._location, "compacting the store"):
            pending = [(key, self._database.read(key)) for key in keys]
            values = {key: future.result() for key, future in pending}
        mine = {LEASE_KEY, COMPACTION_KEY}
        self._commit({k: r.value for k, r in values.items() if k not in mine}, ())

    def _drop_orphans(self) -> int:
        """Delete sealed sets that a killed compactor wrote and nothing points at."""
        reader = SegmentReader(self._location, context=self._context)
        used = {self._name}
        for name in reader.segments():
            header = reader.header(name)
            used |= {header.sealed.set} if header.sealed else set()
            used |= {column.set for column in header.columns.values()}
        with store_errors(self._location, "deleting orphaned sets of the store"):
            prefix = layout.SEALED
            keys = self._base.list(ts.KvStore.KeyRange(prefix, f"{prefix[:-1]}0")).result()
            orphans = [k for k in keys if k.decode().split("/")[1] not in used]
            for pending in [self._base.write(key, None) for key in orphans]:
                pending.result()
        return len(orphans)

    def _commit(self, new: dict[str, bytes], prefixes: Sequence[str]) -> None:
        """One transaction that also renews the lease, and fails if it was lost."""

        def stage(staged: Any) -> None:
            for prefix in prefixes:
                end = f"{prefix[:-1]}0"
                staged.delete_range(ts.KvStore.KeyRange(prefix, end)).result()
            for pending in [staged.write(k, v) for k, v in new.items()]:
                pending.result()
            self._stage_lease(staged)

        commit(self._location, self._database, stage, action="compacting the store")
        self._renewed = time.monotonic()

    def _stage_lease(self, staged: Any) -> None:
        """Renew the lease within a transaction; what it held before must hold at the commit."""
        held = self._database.read(LEASE_KEY).result()
        if held.state != "value" or json.loads(held.value)["name"] != self._name:
            raise _lost()
        staged.write(LEASE_KEY, self._lease(), if_equal=held.stamp.generation).result()


@dataclass(frozen=True, slots=True)
class _Births:
    """Since which version segments and columns exist: as recorded, or else as walked."""

    walked: Mapping[str, int]
    recorded: Mapping[str, int]

    def segment(self, name: str) -> int:
        key = layout.header_key(name)
        return self.recorded[key] if key in self.recorded else self.walked[key]

    def column(self, name: str, column: str) -> int:
        path = layout.column_path(name, column)
        return self.recorded[path] if path in self.recorded else self.walked[f"{path}zarr.json"]


class _Places:
    """Where columns will lie in a new sealed set.

    Attributes:
      first: (segment, column) -> place of its first token in the column's array.
      sizes: column -> tokens of its array.
    """

    def __init__(
        self, headers: Mapping[str, layout.Header], columns: Sequence[tuple[str, str]]
    ) -> None:
        self.first: dict[tuple[str, str], int] = {}
        self.sizes: dict[str, int] = {}
        for name, column in columns:
            self.first[name, column] = self.sizes.get(column, 0)
            self.sizes[column] = self.first[name, column] + sum(headers[name].lengths)


def segment_digest(reader: SegmentReader, segment: str) -> str:
    """SHA-256 of a segment's token arrays, in the order of `TOKEN_FIELDS`, and its records."""
    digest = hashlib.sha256()
    parts = reader.read_parts(segment)
    for name in layout.TOKEN_FIELDS:
        for _, arrays in parts:
            digest.update(arrays[name].data)
    for record, _ in parts:
        digest.update(record)
    return digest.hexdigest()


def column_digest(reader: SegmentReader, segment: str, column: str) -> str:
    """SHA-256 of a column."""
    digest = hashlib.sha256()
    for array in reader.read_columns(segment, column):
        digest.update(array.data)
    return digest.hexdigest()


def sealed_problem(reader: SegmentReader, segment: str, *, only: str | None = None) -> str | None:
    """What of a segment does not read back as it was when it was sealed; None if all does.

    Args:
      reader: reads the segment.
      segment: its name.
      only: look at what lies in this sealed set alone; None looks at all.
    """
    header = reader.header(segment)
    sealed = header.sealed
    if (
        sealed is not None
        and only in (None, sealed.set)
        and segment_digest(reader, segment) != sealed.sha256
    ):
        return f"segment {segment} does not read back equal from sealed set {sealed.set}"
    for name, column in header.columns.items():
        if only in (None, column.set) and column_digest(reader, segment, name) != column.sha256:
            return (
                f"column {name} of segment {segment} does not read back equal from sealed set "
                f"{column.set}"
            )
    return None


def _end_to_end(columns: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    return np.concatenate([np.zeros(0, np.float32), *columns])


def _lost() -> StoreError:
    return StoreError("compacting the store: another compactor took over; this one changed nothing")
