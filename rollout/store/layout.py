"""How a segment lies in the store: keys, arrays and records.

Keys of the database (`name` is the segment's name, percent-encoded to hold no slash):

  headers/<name>                 JSON: versions, ids, tokens and record bytes of each, and where
                                 a compaction put the trajectories
  trajectories/<name>/<place>    a trajectory as `rollout.store.codec` writes it
  columns/<name>/<column>/       zarr3 array [tokens] float32, added later
  ids/<trajectory id>            "<place>:<segment>", where the trajectory lies
  quarantine/<id>/<digest>       what the door refused
  compaction, compactor          what compactions did, and who may do the next

Columns of the database are chunked at 65,536 elements and compressed with zstd at level 1. A
compaction moves everything out of the database, beside it, into sealed sets:

  sealed/<set>/trajectories/<n>      shards of zarr3's indexed format, an entry a trajectory, as
                                     many as 256 a shard
  sealed/<set>/columns/<column>/     sharded zarr3 array, the columns of many segments end to end

Older layouts are still read. What they have not sealed becomes this one when it is compacted; what
they sealed stays as it is. In layout 3 a trajectory had another checksum. In layout 2 the token
arrays and the records of a segment were zarr3 arrays, `tokens/<name>/<field>/` and
`records/<name>/`, or after a compaction `sealed/<set>/<field>/` and `sealed/<set>/records/`.
Layout 1 had neither sealed sets nor checksums, and left out chunks of zeros.
"""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from rollout.errors import StoreError
from rollout.records import SCHEMA_VERSION, CheckResult, Fault, Trajectory, Turn, Verdict

TOKEN_FIELDS: Mapping[str, np.dtype[Any]] = {
    "token_ids": np.dtype(np.int32),
    "acted_t": np.dtype(np.bool_),
    "logprob_t": np.dtype(np.float32),
    "turn_t": np.dtype(np.int32),
    "weight_version_t": np.dtype(np.int32),
}

LAYOUT_VERSION = 4
PACKED_SINCE = 3
"""First layout in which a trajectory is one value."""

ENTRIES = 256
"""Trajectories of a shard."""

SEALED = "sealed/"

_CHUNK = 65536
_SEALED_CHUNK = 16384
_SHARD = 256 * _SEALED_CHUNK
_INDEX_CODECS = (
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
)
_SEGMENT_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_COLUMN_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RECORD_FIELDS = tuple(
    f.name
    for f in dataclasses.fields(Trajectory)
    if f.name not in (*TOKEN_FIELDS, "schema_version")
)


@dataclass(frozen=True, slots=True)
class Sealed:
    """Where the trajectories of a segment lie after a compaction.

    Attributes:
      set: name of the sealed set.
      first: place of the segment's first trajectory in the set.
      sha256: of the token arrays in the order of `TOKEN_FIELDS`, then the records.
    """

    set: str
    first: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SealedArrays:
    """Where the arrays of a segment of layout 2 lie after a compaction.

    Attributes:
      set: name of the sealed set.
      tokens: place of the segment's first token in the set's token arrays.
      records: place of its first byte in the set's records.
      sha256: of the token arrays in the order of `TOKEN_FIELDS`, then the records.
    """

    set: str
    tokens: int
    records: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SealedColumn:
    """Where a column lies after a compaction, and since which version the store has it."""

    set: str
    tokens: int
    sha256: str
    born: int


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of a segment without reading its arrays.

    Attributes:
      lengths: tokens of each trajectory.
      record_bytes: bytes of each trajectory's JSON.
      schema_version: of the records.
      layout_version: of the trajectories.
      born: first version of the store that has the segment; None before its compaction.
      sealed: where the trajectories lie; None while they lie in the database.
      columns: the columns that a compaction sealed.
    """

    ids: tuple[str, ...]
    lengths: tuple[int, ...]
    record_bytes: tuple[int, ...]
    schema_version: int = SCHEMA_VERSION
    layout_version: int = LAYOUT_VERSION
    born: int | None = None
    sealed: Sealed | SealedArrays | None = None
    columns: Mapping[str, SealedColumn] = field(default_factory=dict)


def segment_key(segment: str) -> str:
    """The segment's name as one path component of a key.

    Raises:
      StoreError: for a name with other characters than letters, digits, ".", "_", "-" and "/".
    """
    if not _SEGMENT_NAME.fullmatch(segment):
        raise StoreError(
            f"segment name {segment!r}: allowed are letters, digits, '.', '_', '-', "
            "and '/' between parts"
        )
    return quote(segment, safe="")


def segment_name(key: str) -> str:
    """Inverse of `segment_key`."""
    return unquote(key)


def header_key(segment: str) -> str:
    """Key whose presence says that the segment is committed."""
    return f"headers/{segment_key(segment)}"


def trajectory_key(segment: str, place: int | None = None) -> str:
    """Key of one trajectory of the segment, or what the keys of all of them begin with."""
    return f"trajectories/{segment_key(segment)}/{'' if place is None else place}"


def tokens_path(segment: str, name: str = "") -> str:
    """Path of one token array of a segment of layout 2, or of all of them."""
    return f"tokens/{segment_key(segment)}/{f'{name}/' if name else ''}"


def records_path(segment: str) -> str:
    """Path of the records of a segment of layout 2."""
    return f"records/{segment_key(segment)}/"


def column_path(segment: str, column: str = "") -> str:
    """Path of one column, or of all of them."""
    if column and (not _COLUMN_NAME.fullmatch(column) or column in TOKEN_FIELDS):
        raise StoreError(
            f"column name {column!r}: allowed are lower-case letters, digits and '_', and no "
            f"name of {sorted(TOKEN_FIELDS)}"
        )
    return f"columns/{segment_key(segment)}/{f'{column}/' if column else ''}"


def file_name(trajectory_id: str) -> str:
    """The trajectory's id as the name of a file."""
    return quote(trajectory_id, safe=" #@=+,")


def id_key(trajectory_id: str) -> str:
    """Key that says where a trajectory lies."""
    return f"ids/{trajectory_id}"


def quarantine_key(trajectory_id: str, digest: str) -> str:
    """Key of a refused record; the digest keeps repeated refusals of one id apart."""
    return f"quarantine/{quote(trajectory_id, safe='')}/{digest}"


def sealed_path(sealed_set: str, array: str = "") -> str:
    """Path, beside the database, of one array of a sealed set, or of all of them."""
    return f"{SEALED}{sealed_set}/{f'{array}/' if array else ''}"


def array_spec(kvstore: Any, path: str, *, zeros: bool = False) -> dict[str, Any]:
    """Spec of an existing array.

    Args:
      kvstore: what `path` is relative to.
      path: of the array.
      zeros: read a chunk that is missing as zeros; otherwise it is an error, so that no reader
        can take a hole for data.
    """
    spec = kvstore.spec().to_json()
    spec["path"] = f"{spec.get('path', '')}{path}"
    return {"driver": "zarr3", "kvstore": spec, "fill_missing_data_reads": zeros}


def shard_path(sealed_set: str, number: int) -> str:
    """Path, beside the database, of one shard of a sealed set."""
    return f"{sealed_path(sealed_set, 'trajectories')}{number}"


def shard_spec(kvstore: Any, sealed_set: str, number: int) -> dict[str, Any]:
    """Spec of a shard as a key-value store of `ENTRIES` trajectories."""
    base = kvstore.spec().to_json()
    base["path"] = f"{base.get('path', '')}{shard_path(sealed_set, number)}"
    return {
        "driver": "zarr3_sharding_indexed",
        "base": base,
        "grid_shape": [ENTRIES],
        "index_codecs": list(_INDEX_CODECS),
    }


def index_spec() -> dict[str, Any]:
    """Spec of a shard's index as an array: [ENTRIES, 2] uint64, offset and size of each entry."""
    shape = [ENTRIES, 2]
    return {
        "driver": "zarr3",
        "kvstore": "memory://",
        "metadata": {
            "shape": shape,
            "data_type": "uint64",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
            "codecs": list(_INDEX_CODECS),
        },
    }


def shard_entry(place: int) -> tuple[int, bytes]:
    """Shard of the trajectory at a place of a sealed set, and its key there."""
    number, entry = divmod(place, ENTRIES)
    return number, struct.pack(">I", entry)


def sealed_spec(kvstore: Any, path: str, size: int, dtype: npt.DTypeLike) -> dict[str, Any]:
    """Spec of a new array of a sealed set: small chunks to read, few large files to keep."""
    spec = array_spec(kvstore, path)
    inner = min(_SEALED_CHUNK, max(size, 1))
    # A whole number of chunks, and no larger than the array needs.
    shard = min(_SHARD, -(-max(size, 1) // inner) * inner)
    codec = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [inner],
            "codecs": _codecs(np.dtype(dtype)),
            "index_codecs": list(_INDEX_CODECS),
        },
    }
    return spec | _metadata(size, np.dtype(dtype), shard, [codec])


def shard_edges(size: int) -> list[int]:
    """Places at which an array of a sealed set must be cut for each write to be a whole shard."""
    return [*range(0, size, _SHARD), size]


def encode_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, bytes]:
    """Keys and values of new one-dimensional arrays, by path.

    The arrays are made in memory, for the database then writes them in one transaction with the
    other keys: arrays opened on the database itself would each commit on their own.
    """
    context = ts.Context()
    memory = ts.KvStore.open("memory://", context=context).result()
    opened = [
        ts.open(_new_array_spec(path, array), create=True, context=context)
        for path, array in arrays.items()
    ]
    written = [
        future.result().write(array) for future, array in zip(opened, arrays.values(), strict=True)
    ]
    for future in written:
        future.result()
    return {key.decode(): memory[key] for key in memory.list().result()}


def _new_array_spec(path: str, array: npt.NDArray[Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {"driver": "zarr3", "kvstore": {"driver": "memory", "path": path}}
    chunk = min(max(array.size, 1), _CHUNK)
    return spec | _metadata(array.size, array.dtype, chunk, _codecs(array.dtype))


def _metadata(
    size: int, dtype: np.dtype[Any], chunk: int, codecs: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "metadata": {
            "shape": [size],
            "data_type": str(dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk]}},
            "codecs": codecs,
        },
        "store_data_equal_to_fill_value": True,
    }


def _codecs(dtype: np.dtype[Any]) -> list[dict[str, Any]]:
    return [
        _raw(dtype),
        {"name": "zstd", "configuration": {"level": 1}},
        {"name": "crc32c"},
    ]


def _raw(dtype: np.dtype[Any]) -> dict[str, Any]:
    if dtype.itemsize == 1:
        return {"name": "bytes"}
    return {"name": "bytes", "configuration": {"endian": "little"}}


def encode_header(header: Header) -> bytes:
    """The header as JSON."""
    return json.dumps(dataclasses.asdict(header)).encode()


def decode_header(data: bytes, segment: str) -> Header:
    """Inverse of `encode_header`, of this and of every older layout.

    Raises:
      StoreError: for a schema or a layout newer than this program's.
    """
    fields = json.loads(data)
    layout_version = fields.get("layout_version", 1)
    for name, version, known in (
        ("schema", fields["schema_version"], SCHEMA_VERSION),
        ("layout", layout_version, LAYOUT_VERSION),
    ):
        if version > known:
            raise StoreError(
                f"segment {segment} has {name} version {version}; this trsi-jax reads up to "
                f"{known}: install a newer one"
            )
    sealed: Sealed | SealedArrays | None = None
    if (place := fields.get("sealed")) is not None:
        sealed = Sealed(**place) if "first" in place else SealedArrays(**place)
    return Header(
        ids=tuple(fields["ids"]),
        lengths=tuple(fields["lengths"]),
        record_bytes=tuple(fields["record_bytes"]),
        schema_version=fields["schema_version"],
        layout_version=layout_version,
        born=fields.get("born"),
        sealed=sealed,
        columns={k: SealedColumn(**v) for k, v in fields.get("columns", {}).items()},
    )


def encode_record(trajectory: Trajectory) -> bytes:
    """Everything but the token arrays, as ASCII JSON (which keeps undecodable bytes of outputs)."""
    return json.dumps(record_fields(trajectory)).encode()


def record_fields(trajectory: Trajectory) -> dict[str, Any]:
    """Everything but the token arrays, as plain dicts and lists."""
    record = {name: getattr(trajectory, name) for name in _RECORD_FIELDS}
    record["turns"] = [
        {
            "command": t.command,
            "observation": t.observation,
            "exit_code": t.exit_code,
            "status": t.status,
        }
        for t in trajectory.turns
    ]
    if trajectory.verdict is not None:
        record["verdict"] = [
            {"id": r.id, "kind": r.kind, "passed": bool(r.passed), "weight": r.weight}
            for r in trajectory.verdict.results
        ]
    if trajectory.fault is not None:
        record["fault"] = {"kind": trajectory.fault.kind, "message": trajectory.fault.message}
    record["timings"] = dict(trajectory.timings)
    record["provenance"] = dict(trajectory.provenance)
    return record


def decode_trajectory(
    record: bytes, arrays: Mapping[str, npt.NDArray[Any]], schema_version: int
) -> Trajectory:
    """Join a record and its token arrays; a field that an older schema lacks has its default."""
    stored: dict[str, Any] = json.loads(record)
    fields: dict[str, Any] = {name: stored[name] for name in _RECORD_FIELDS if name in stored}
    fields["turns"] = tuple(Turn(**turn) for turn in fields["turns"])
    if fields["verdict"] is not None:
        fields["verdict"] = Verdict(tuple(CheckResult(**r) for r in fields["verdict"]))
    if fields.get("fault") is not None:
        fields["fault"] = Fault(**fields["fault"])
    fields |= arrays
    return Trajectory(**fields, schema_version=schema_version)


def bounds(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    """[N + 1] offsets of N pieces laid end to end."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
