"""Reading: whole trajectories of committed segments, of the newest or of one pinned version."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from rollout.errors import StoreError
from rollout.records import Trajectory
from rollout.store import layout
from rollout.store.location import (
    Location,
    describe,
    newest_version,
    open_database,
    store_errors,
)

_CACHE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Quarantined:
    """What the door refused, as far as it could be kept; secrets are removed."""

    id: str
    segment: str
    problem: str
    record: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]


class SegmentReader:
    """Implements `rollout.protocols.TrajectoryReader` on an OCDBT database.

    A reader sees each segment whole or not at all, however many writers are at work. Without a
    version it follows the newest commit (a store that does not exist yet reads as empty); with
    one it gives the same trajectories for ever. Arrays that it returns are read-only.
    """

    def __init__(
        self, location: Location, *, version: int | None = None, context: Any = None
    ) -> None:
        """A reader of the newest commit, or of the commit with generation number `version`."""
        self._location = location
        self._version = version
        self._context = context or ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        self._database = open_database(location, version=version, context=self._context)
        self._headers: dict[str, layout.Header] = {}
        self._arrays: dict[str, Any] = {}

    @property
    def version(self) -> int | None:
        """The pinned version, or the newest one; None while there is no store."""
        if self._version is not None:
            return self._version
        return newest_version(self._location, context=self._context)

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
        return tuple(sorted(layout.segment_name(k) for k in self._names("headers/")))

    def has(self, segment: str) -> bool:
        """Whether the segment is committed."""
        return segment in self._headers or self._value(layout.header_key(segment)) is not None

    def header(self, segment: str) -> layout.Header:
        """Ids and lengths of a segment. Raises `StoreError` for one that is not committed."""
        if segment not in self._headers:
            data = self._value(layout.header_key(segment))
            if data is None:
                raise StoreError(
                    f"no segment {segment} in {describe(self._location)}; it has "
                    f"{_some(self.segments())}"
                )
            self._headers[segment] = layout.decode_header(data, segment)
        return self._headers[segment]

    def ids(self) -> tuple[str, ...]:
        """Ids of every committed trajectory, sorted."""
        return tuple(sorted(self._names("ids/")))

    def read(self, segment: str) -> tuple[Trajectory, ...]:
        """All trajectories of a segment, in the order written."""
        return self._read(segment, 0, len(self.header(segment).ids))

    def get(self, trajectory_id: str) -> Trajectory:
        """One trajectory by id. Raises `StoreError` that names the id if there is none."""
        segment, index = self._place(trajectory_id)
        return self._read(segment, index, index + 1)[0]

    def find(self, trajectory_id: str) -> tuple[str, int] | None:
        """Segment of a trajectory and its place there; None if it is not stored."""
        data = self._value(layout.id_key(trajectory_id))
        if data is None:
            return None
        index, segment = data.decode().split(":", 1)
        return segment, int(index)

    def __iter__(self) -> Iterator[Trajectory]:
        """Every trajectory, segment by segment."""
        for segment in self.segments():
            yield from self.read(segment)

    def read_tokens(self, segment: str, field: str) -> tuple[npt.NDArray[Any], ...]:
        """One token array of every trajectory of a segment."""
        header = self.header(segment)
        flat = self._slices({layout.tokens_path(segment, field): (0, sum(header.lengths))})[0]
        return _split(flat, layout.bounds(header.lengths))

    def columns(self, segment: str) -> tuple[str, ...]:
        """Names of the columns beside a segment, sorted."""
        names = self._names(layout.column_path(segment))
        return tuple(sorted({name.split("/")[0] for name in names}))

    def read_columns(self, segment: str, name: str) -> tuple[npt.NDArray[np.float32], ...]:
        """One column of every trajectory of a segment, [T_i] float32 each.

        Raises:
          StoreError: for an unknown segment or column.
        """
        header = self.header(segment)
        self._check_column(segment, name)
        flat = self._slices({layout.column_path(segment, name): (0, sum(header.lengths))})[0]
        return _split(flat, layout.bounds(header.lengths))

    def get_columns(self, trajectory_id: str) -> dict[str, npt.NDArray[np.float32]]:
        """Every column of one trajectory by name, [T] float32 each."""
        segment, index = self._place(trajectory_id)
        offset = layout.bounds(self.header(segment).lengths)
        names = self.columns(segment)
        span = (int(offset[index]), int(offset[index + 1]))
        values = self._slices({layout.column_path(segment, name): span for name in names})
        return dict(zip(names, values, strict=True))

    def quarantined(self) -> tuple[Quarantined, ...]:
        """Everything that the door refused."""
        found = []
        for name in sorted(self._names("quarantine/")):
            data = self._value(f"quarantine/{name}")
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

    def _place(self, trajectory_id: str) -> tuple[str, int]:
        place = self.find(trajectory_id)
        if place is None:
            raise StoreError(f"no trajectory {trajectory_id!r} in {describe(self._location)}")
        return place

    def _check_column(self, segment: str, name: str) -> None:
        names = self.columns(segment)
        if name not in names:
            raise StoreError(f"no column {name!r} beside segment {segment}; it has {_some(names)}")

    def _read(self, segment: str, start: int, stop: int) -> tuple[Trajectory, ...]:
        header = self.header(segment)
        tokens = layout.bounds(header.lengths)[start : stop + 1]
        records = layout.bounds(header.record_bytes)[start : stop + 1]
        spans = {
            layout.tokens_path(segment, field): (int(tokens[0]), int(tokens[-1]))
            for field in layout.TOKEN_FIELDS
        }
        spans[layout.records_path(segment)] = (int(records[0]), int(records[-1]))
        *arrays, text = self._slices(spans)
        fields = [_split(array, tokens - tokens[0]) for array in arrays]
        return tuple(
            layout.decode_trajectory(
                record.tobytes(),
                dict(zip(layout.TOKEN_FIELDS, of_one, strict=True)),
                header.schema_version,
            )
            for record, *of_one in zip(_split(text, records - records[0]), *fields, strict=True)
        )

    def _slices(self, spans: dict[str, tuple[int, int]]) -> list[npt.NDArray[Any]]:
        """Elements [start, stop) of several arrays, read at once."""
        with store_errors(self._location, "reading the store"):
            opening = {
                path: ts.open(
                    layout.array_spec(self._database, path),
                    open=True,
                    read=True,
                    context=self._context,
                )
                for path in spans
                if path not in self._arrays
            }
            self._arrays.update({path: future.result() for path, future in opening.items()})
            pending = [self._arrays[path][a:b].read() for path, (a, b) in spans.items()]
            arrays = [future.result() for future in pending]
        for array in arrays:
            array.setflags(write=False)
        return arrays

    def _value(self, key: str) -> bytes | None:
        with store_errors(self._location, "reading the store"):
            result = self._database.read(key).result()
        return result.value if result.state == "value" else None

    def _names(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`, a path that ends in a slash, without it."""
        with store_errors(self._location, "listing the store"):
            keys = self._database.list(ts.KvStore.KeyRange(prefix, f"{prefix[:-1]}0")).result()
        return [key.decode().removeprefix(prefix) for key in keys]


def _split(flat: npt.NDArray[Any], offset: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], ...]:
    return tuple(flat[a:b] for a, b in pairwise(offset.tolist()))


def _some(names: tuple[str, ...]) -> str:
    if not names:
        return "none"
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
