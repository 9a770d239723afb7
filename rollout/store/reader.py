"""Reading: whole trajectories of committed segments, of the newest or of one pinned version."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from rollout.errors import StoreError
from rollout.records import Trajectory
from rollout.store import codec, layout
from rollout.store.history import COMPACTION_KEY, Compaction, decode_compaction
from rollout.store.location import (
    Location,
    base_spec,
    describe,
    newest_version,
    open_base,
    open_database,
    store_errors,
)
from rollout.store.shards import LocalShards

_CACHE_BYTES = 64 * 1024 * 1024
# A read fails at most once for each compaction that ends while it is under way.
_ATTEMPTS = 16

T = TypeVar("T")

Part = tuple[bytes, dict[str, npt.NDArray[Any]]]
"""The record of a trajectory, JSON, and its token arrays by name."""


def read_context(cache_bytes: int = _CACHE_BYTES) -> Any:
    """A tensorstore context for reading.

    What is read lies in memory mostly, where more threads than one cost more than they give.
    """
    one = {"limit": 1}
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": cache_bytes},
            "file_io_concurrency": one,
            "data_copy_concurrency": one,
        }
    )


@dataclass(frozen=True, slots=True)
class Quarantined:
    """What the door refused, as far as it could be kept; secrets are removed.

    Attributes:
      record: the trajectory's fields, or the id and the name of a refused column.
      arrays: its token arrays, or the column.
    """

    id: str
    segment: str
    problem: str
    record: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]


class SegmentReader:
    """Implements `rollout.protocols.TrajectoryReader` on an OCDBT database.

    A reader sees each segment whole or not at all, however many writers are at work, and whatever
    a compactor moves meanwhile. Without a version it follows the newest commit (a store that does
    not exist yet reads as empty); with one it gives the same trajectories for ever. Arrays that it
    returns are read-only.
    """

    def __init__(
        self, location: Location, *, version: int | None = None, context: Any = None
    ) -> None:
        """A reader of the newest commit, or of the commit with generation number `version`."""
        self._location = location
        self._version = version
        self._context = context or read_context()
        self._base = open_base(location, context=self._context)
        base = base_spec(location)
        self._local = LocalShards(base["path"]) if base["driver"] == "file" else None
        self._view: _View | None = None

    @property
    def version(self) -> int | None:
        """The pinned version, or the newest one; None while there is no store."""
        if self._version is not None:
            return self._version
        return newest_version(self._location, base=self._base)

    def pinned(self) -> SegmentReader:
        """A reader of what is committed now, whatever is written later.

        Raises:
          StoreError: where there is no store.
        """
        version = self.version
        if version is None:
            raise StoreError(f"no trajectory store at {describe(self._location)}")
        return SegmentReader(self._location, version=version, context=self._context)

    def segments(self) -> tuple[str, ...]:
        """Names of the committed segments, sorted."""
        return self._reading(lambda view: view.segments())

    def has(self, segment: str) -> bool:
        """Whether the segment is committed."""
        return self._reading(lambda view: view.find_header(segment)) is not None

    def header(self, segment: str) -> layout.Header:
        """Ids and lengths of a segment. Raises `StoreError` for one that is not committed."""
        return self._reading(lambda view: view.header(segment))

    def ids(self) -> tuple[str, ...]:
        """Ids of every committed trajectory, sorted."""
        return self._reading(lambda view: view.ids())

    def read(self, segment: str) -> tuple[Trajectory, ...]:
        """All trajectories of a segment, in the order written."""
        return self._reading(lambda view: view.read(segment, 0, len(view.header(segment).ids)))

    def get(self, trajectory_id: str) -> Trajectory:
        """One trajectory by id. Raises `StoreError` that names the id if there is none."""

        def one(view: _View) -> Trajectory:
            segment, index = view.place(trajectory_id)
            return view.read(segment, index, index + 1)[0]

        return self._reading(one)

    def find(self, trajectory_id: str) -> tuple[str, int] | None:
        """Segment of a trajectory and its place there; None if it is not stored."""
        return self._reading(lambda view: view.find(trajectory_id))

    def __iter__(self) -> Iterator[Trajectory]:
        """Every trajectory, segment by segment."""
        for segment in self.segments():
            yield from self.read(segment)

    def read_tokens(self, segment: str, field: str) -> tuple[npt.NDArray[Any], ...]:
        """One token array of every trajectory of a segment."""
        return self._reading(lambda view: view.read_tokens(segment, field))

    def read_parts(self, segment: str) -> tuple[Part, ...]:
        """The record of every trajectory of a segment as stored, and its token arrays."""
        return self._reading(lambda view: view.read_parts(segment))

    def read_packed(self, segment: str) -> tuple[bytes, ...]:
        """Every trajectory of a segment as one value each (`rollout.store.codec`)."""
        return self._reading(lambda view: view.read_packed(segment))

    def columns(self, segment: str) -> tuple[str, ...]:
        """Names of the columns beside a segment, sorted."""
        return self._reading(lambda view: view.columns(segment))

    def read_columns(self, segment: str, name: str) -> tuple[npt.NDArray[np.float32], ...]:
        """One column of every trajectory of a segment, [T_i] float32 each.

        Raises:
          StoreError: for an unknown segment or column.
        """
        return self._reading(lambda view: view.read_columns(segment, name))

    def get_columns(self, trajectory_id: str) -> dict[str, npt.NDArray[np.float32]]:
        """Every column of one trajectory by name, [T] float32 each."""
        return self._reading(lambda view: view.get_columns(*view.place(trajectory_id)))

    def get_many(
        self, places: Mapping[str, tuple[str, int]], columns: tuple[str, ...] = ()
    ) -> dict[str, tuple[Trajectory, dict[str, npt.NDArray[np.float32]]]]:
        """Several trajectories and some of their columns, read at once.

        Args:
          places: trajectory id -> segment and place there, as `find` gives it.
          columns: names of columns to read with each.

        Raises:
          StoreError: for an unknown segment or column.
        """
        return self._reading(lambda view: view.get_many(places, columns))

    def believing(self, headers: Mapping[str, layout.Header]) -> SegmentReader:
        """A reader of the same version that takes the headers given for the committed ones."""
        reader = SegmentReader(self._location, version=self.version, context=self._context)
        reader._current()._headers.update(headers)
        return reader

    def quarantined(self) -> tuple[Quarantined, ...]:
        """Everything that the door refused by the newest commit, pinned or not."""
        return self._reading(lambda view: view.quarantined())

    def _reading(self, read: Callable[[_View], T]) -> T:
        """Read from one version, again from a later one if a compactor took it away meanwhile."""
        for attempt in range(_ATTEMPTS):
            view = self._current()
            try:
                return read(view)
            except StoreError as error:
                self._view = None
                gone = self._current().compaction.at != view.compaction.at
                if not gone or attempt == _ATTEMPTS - 1:
                    raise error
        raise AssertionError("unreachable")

    def _current(self) -> _View:
        if self._view is not None and self._view.limit is not None:
            return self._view
        if self._view is not None and self._version is not None:
            return self._view
        newest = newest_version(self._location, base=self._base)
        if self._view is None or self._view.version != newest:
            self._view = self._open(newest)
        return self._view

    def _open(self, newest: int | None) -> _View:
        latest = _View(self, newest, None, Compaction())
        if newest is None:
            return latest
        latest.compaction = decode_compaction(latest.value(COMPACTION_KEY))
        if self._version is None:
            return latest
        if self._version < latest.compaction.at:
            return _View(self, newest, self._version, latest.compaction)
        return _View(self, self._version, None, latest.compaction)


class _View:
    """What one version of the database holds.

    Attributes:
      version: the version read from; None where there is no database.
      limit: hide what was born after this version; None shows all.
      compaction: what was known of compactions when the view was opened.
    """

    def __init__(
        self, reader: SegmentReader, version: int | None, limit: int | None, compaction: Compaction
    ) -> None:
        self._location = reader._location
        self._context = reader._context
        self._base = reader._base
        self.version = version
        self.limit = limit
        self.compaction = compaction
        self._database = open_database(self._location, version=version, context=self._context)
        self._headers: dict[str, layout.Header] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._arrays: dict[str, Any] = {}
        self._shards: dict[tuple[str, int], Any] = {}
        self._local = reader._local

    def segments(self) -> tuple[str, ...]:
        names = sorted(layout.segment_name(k) for k in self._names("headers/"))
        if self.limit is None:
            return tuple(names)
        unknown = [name for name in names if name not in self._headers]
        for name, data in zip(unknown, self._values(map(layout.header_key, unknown)), strict=True):
            self._headers[name] = layout.decode_header(data or b"", name)
        return tuple(n for n in names if self._born(layout.header_key(n), self._headers[n].born))

    def find_header(self, segment: str) -> layout.Header | None:
        header = self._headers.get(segment)
        if header is None:
            data = self.value(layout.header_key(segment))
            if data is None:
                return None
            header = self._headers[segment] = layout.decode_header(data, segment)
        if self.limit is None:  # As nearly always; a key takes longer than the rest.
            return header
        return header if self._born(layout.header_key(segment), header.born) else None

    def header(self, segment: str) -> layout.Header:
        header = self.find_header(segment)
        if header is None:
            raise StoreError(
                f"no segment {segment} in {describe(self._location)}; it has "
                f"{_some(self.segments())}"
            )
        return header

    def ids(self) -> tuple[str, ...]:
        if self.limit is None:
            return tuple(sorted(self._names("ids/")))
        return tuple(sorted(i for s in self.segments() for i in self._headers[s].ids))

    def find(self, trajectory_id: str) -> tuple[str, int] | None:
        data = self.value(layout.id_key(trajectory_id))
        if data is None:
            return None
        index, segment = data.decode().split(":", 1)
        return None if self.find_header(segment) is None else (segment, int(index))

    def place(self, trajectory_id: str) -> tuple[str, int]:
        if trajectory_id not in self._places:
            place = self.find(trajectory_id)
            if place is None:
                raise StoreError(f"no trajectory {trajectory_id!r} in {describe(self._location)}")
            # Who reads one trajectory of a segment will read others of it.
            ids = self.header(place[0]).ids
            self._places |= {other: (place[0], i) for i, other in enumerate(ids)}
        return self._places[trajectory_id]

    def read(self, segment: str, start: int, stop: int) -> tuple[Trajectory, ...]:
        schema = self.header(segment).schema_version
        parts = self._parts([(segment, i) for i in range(start, stop)])
        return tuple(layout.decode_trajectory(*part, schema) for part in parts)

    def read_parts(self, segment: str) -> tuple[Part, ...]:
        return tuple(self._parts(self._places_of(segment)))

    def read_packed(self, segment: str) -> tuple[bytes, ...]:
        if self.header(segment).layout_version == layout.LAYOUT_VERSION:
            return tuple(self._packed(self._places_of(segment)))
        return tuple(codec.encode(*part) for part in self.read_parts(segment))

    def read_tokens(self, segment: str, field: str) -> tuple[npt.NDArray[Any], ...]:
        if self._is_packed(segment):
            return tuple(arrays[field] for _, arrays in self.read_parts(segment))
        header = self.header(segment)
        spans = self._spans(segment, 0, len(header.ids))
        (flat,) = self._slices([spans[list(layout.TOKEN_FIELDS).index(field)]])
        return _split(flat, layout.bounds(header.lengths))

    def columns(self, segment: str) -> tuple[str, ...]:
        header = self.find_header(segment)
        if header is None:
            return ()
        names = {name.split("/")[0] for name in self._names(layout.column_path(segment))}
        seen = {n for n in names if self._born(layout.column_path(segment, n), None)}
        seen |= {n for n, c in header.columns.items() if self.limit is None or c.born <= self.limit}
        return tuple(sorted(seen))

    def read_columns(self, segment: str, name: str) -> tuple[npt.NDArray[np.float32], ...]:
        header = self.header(segment)
        self._check_column(segment, name)
        (flat,) = self._slices([self._column_span(segment, name, 0, sum(header.lengths))])
        return _split(flat, layout.bounds(header.lengths))

    def get_columns(self, segment: str, index: int) -> dict[str, npt.NDArray[np.float32]]:
        names = self.columns(segment)
        span = self._span(segment, index)
        values = self._slices([self._column_span(segment, name, *span) for name in names])
        return dict(zip(names, values, strict=True))

    def get_many(
        self, places: Mapping[str, tuple[str, int]], columns: tuple[str, ...]
    ) -> dict[str, tuple[Trajectory, dict[str, npt.NDArray[np.float32]]]]:
        parts = self._parts(list(places.values()))
        spans = []
        for segment, index in places.values():
            for column in columns:
                self._check_column(segment, column)
                spans.append(self._column_span(segment, column, *self._span(segment, index)))
        values = iter(self._slices(spans))
        return {
            name: (
                layout.decode_trajectory(*part, self.header(segment).schema_version),
                {column: next(values) for column in columns},
            )
            for (name, (segment, _)), part in zip(places.items(), parts, strict=True)
        }

    def quarantined(self) -> tuple[Quarantined, ...]:
        found = []
        keys = sorted(f"quarantine/{name}" for name in self._names("quarantine/"))
        for data in self._values(keys):
            with np.load(io.BytesIO(data or b""), allow_pickle=False) as archive:
                entry = json.loads(archive["record"].tobytes())
                arrays = {k: archive[k] for k in archive.files if k != "record"}
            found.append(
                Quarantined(
                    id=str(entry["record"]["id"]),
                    segment=entry["segment"],
                    problem=entry["problem"],
                    record=entry["record"],
                    arrays=arrays,
                )
            )
        return tuple(found)

    def value(self, key: str) -> bytes | None:
        """A key's value; None if there is none."""
        return self._values([key])[0]

    def _values(self, keys: Any) -> list[bytes | None]:
        with store_errors(self._location, "reading the store"):
            pending = [(key, self._database.read(key)) for key in keys]
            results = [(key, future.result()) for key, future in pending]
            for key, result in results:
                # tensorstore reads a value whose data file is gone as empty, or as no value.
                # No value of a store is empty.
                if (result.state != "value" or not result.value) and self._listed(key):
                    raise ValueError(f"the value of {key} is gone")
        return [r.value if r.state == "value" else None for _, r in results]

    def _listed(self, key: str) -> bool:
        return bool(self._database.list(ts.KvStore.KeyRange(key, f"{key}\0")).result())

    def _names(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`, a path that ends in a slash, without it."""
        with store_errors(self._location, "listing the store"):
            keys = self._database.list(ts.KvStore.KeyRange(prefix, f"{prefix[:-1]}0")).result()
        return [key.decode().removeprefix(prefix) for key in keys]

    def _born(self, key: str, born: int | None) -> bool:
        """Whether the view shows what was born at a version, or by the record of compactions."""
        if self.limit is None:
            return True
        since = born if born is not None else self.compaction.born.get(key)
        return since is not None and since <= self.limit

    def _check_column(self, segment: str, name: str) -> None:
        if name in self.header(segment).columns:
            return
        names = self.columns(segment)
        if name not in names:
            raise StoreError(f"no column {name!r} beside segment {segment}; it has {_some(names)}")

    def _span(self, segment: str, index: int) -> tuple[int, int]:
        """First and last token, exclusive, of a trajectory within its segment."""
        offset = layout.bounds(self.header(segment).lengths)
        return int(offset[index]), int(offset[index + 1])

    def _is_packed(self, segment: str) -> bool:
        return self.header(segment).layout_version >= layout.PACKED_SINCE

    def _places_of(self, segment: str) -> list[tuple[str, int]]:
        return [(segment, i) for i in range(len(self.header(segment).ids))]

    def _parts(self, places: Sequence[tuple[str, int]]) -> list[Part]:
        """Trajectories of any layout by segment and place there, read at once."""
        packed = [place for place in places if self._is_packed(place[0])]
        parts = dict(zip(packed, map(self._decoded, packed, self._packed(packed)), strict=True))
        if len(packed) < len(places):
            parts |= self._unpacked([place for place in places if place not in parts])
        return [parts[place] for place in places]

    def _unpacked(self, places: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Part]:
        """Trajectories of layouts that kept an array a field."""
        spans = [span for segment, i in places for span in self._spans(segment, i, i + 1)]
        arrays = iter(self._slices(spans))
        parts = {}
        for place in places:
            fields = {name: next(arrays) for name in layout.TOKEN_FIELDS}
            parts[place] = (next(arrays).tobytes(), fields)
        return parts

    def _decoded(self, place: tuple[str, int], value: bytes) -> Part:
        try:
            return codec.decode(value)
        except ValueError as error:
            segment, i = place
            raise StoreError(
                f"reading the store: trajectory {self.header(segment).ids[i]} of segment "
                f"{segment}: {error}"
            ) from None

    def _packed(self, places: Sequence[tuple[str, int]]) -> list[bytes]:
        """The values of trajectories by segment and place there, read at once."""
        with store_errors(self._location, "reading the store"):
            pending = [self._value_at(*place) for place in places]
            values = [v if isinstance(v, bytes) else v.result().value for v in pending]
            for (segment, i), value in zip(places, values, strict=True):
                # tensorstore reads a value whose file is gone as empty, or as no value.
                if not value:
                    raise ValueError(f"trajectory {i} of segment {segment} is missing")
        return values

    def _value_at(self, segment: str, i: int) -> Any:
        """The value of a trajectory, or a future of it."""
        sealed = self.header(segment).sealed
        if not isinstance(sealed, layout.Sealed):
            return self._database.read(layout.trajectory_key(segment, i))
        if self._local is not None:
            return self._local.read(sealed.set, sealed.first + i)
        number, key = layout.shard_entry(sealed.first + i)
        return self._shard(sealed.set, number).read(key)

    def _shard(self, sealed_set: str, number: int) -> Any:
        if (sealed_set, number) not in self._shards:
            spec = layout.shard_spec(self._base, sealed_set, number)
            self._shards[sealed_set, number] = ts.KvStore.open(spec, context=self._context).result()
        return self._shards[sealed_set, number]

    def _spans(self, segment: str, start: int, stop: int) -> list[_Slice]:
        """Where arrays of layout 1 or 2 lie, of trajectories [start, stop); the records last."""
        header = self.header(segment)
        tokens = layout.bounds(header.lengths)
        records = layout.bounds(header.record_bytes)
        sealed = header.sealed if isinstance(header.sealed, layout.SealedArrays) else None
        token_base, record_base = (sealed.tokens, sealed.records) if sealed else (0, 0)
        first, last = token_base + int(tokens[start]), token_base + int(tokens[stop])
        spans = [
            _Slice(
                layout.sealed_path(sealed.set, name)
                if sealed
                else layout.tokens_path(segment, name),
                first,
                last,
                header.layout_version,
            )
            for name in layout.TOKEN_FIELDS
        ]
        path = layout.sealed_path(sealed.set, "records") if sealed else layout.records_path(segment)
        first, last = record_base + int(records[start]), record_base + int(records[stop])
        return [*spans, _Slice(path, first, last, header.layout_version)]

    def _column_span(self, segment: str, name: str, start: int, stop: int) -> _Slice:
        header = self.header(segment)
        column = header.columns.get(name)
        if column is None:
            # The column may be older than what its segment's header says of the layout.
            return _Slice(layout.column_path(segment, name), start, stop, 1)
        path = layout.sealed_path(column.set, f"columns/{name}")
        return _Slice(path, column.tokens + start, column.tokens + stop)

    def _slices(self, spans: list[_Slice]) -> list[npt.NDArray[Any]]:
        """Elements [start, stop) of several arrays, read at once."""
        with store_errors(self._location, "reading the store"):
            opening = {
                span.path: self._opened(span) for span in spans if span.path not in self._arrays
            }
            self._arrays.update({path: future.result() for path, future in opening.items()})
            pending = [self._arrays[s.path][s.start : s.stop].read() for s in spans]
            arrays = [future.result() for future in pending]
        for array in arrays:
            array.setflags(write=False)
        return arrays

    def _opened(self, span: _Slice) -> Any:
        sealed = span.path.startswith(layout.SEALED)
        kvstore = self._base if sealed else self._database
        zeros = not sealed and span.layout_version == 1 and self._leaves_out_zeros(span.path)
        return ts.open(
            layout.array_spec(kvstore, span.path, zeros=zeros),
            open=True,
            read=True,
            context=self._context,
        )

    def _leaves_out_zeros(self, path: str) -> bool:
        """Whether an array of layout 1, which has no checksums, lacks chunks that hold zeros.

        A chunk that the version lists and whose file is gone is a hole, and no such chunk.
        """
        names = self._names(path)
        values = self._values(f"{path}{name}" for name in names)
        metadata = json.loads(values[names.index("zarr.json")] or b"{}")
        if any(step["name"] == "crc32c" for step in metadata["codecs"]):
            return False
        size = int(metadata["shape"][0])
        chunk = int(metadata["chunk_grid"]["configuration"]["chunk_shape"][0])
        return len(names) - 1 < -(-size // chunk)


@dataclass(frozen=True, slots=True)
class _Slice:
    """Elements [start, stop) of the array at a path."""

    path: str
    start: int
    stop: int
    layout_version: int = layout.LAYOUT_VERSION


def _split(flat: npt.NDArray[Any], offset: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], ...]:
    return tuple(flat[a:b] for a, b in pairwise(offset.tolist()))


def _some(names: tuple[str, ...]) -> str:
    if not names:
        return "none"
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
