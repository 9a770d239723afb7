"""How a segment lies in the store: keys, arrays and records.

Keys of the database (`name` is the segment's name, percent-encoded to hold no slash):

  headers/<name>                 JSON: schema version, ids, tokens and record bytes of each
  tokens/<name>/<field>/         zarr3 array, the field of all trajectories end to end
  records/<name>/                zarr3 array of bytes, the JSON of all trajectories end to end
  columns/<name>/<column>/       zarr3 array [tokens] float32, added later
  ids/<trajectory id>            "<place>:<segment>", where the trajectory lies
  quarantine/<id>/<digest>       what the door refused

Every array is chunked at 65,536 elements and compressed with zstd at level 1.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

_CHUNK = 65536
_SEGMENT_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_COLUMN_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RECORD_FIELDS = tuple(
    f.name
    for f in dataclasses.fields(Trajectory)
    if f.name not in (*TOKEN_FIELDS, "schema_version")
)


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of a segment without reading its arrays.

    Attributes:
      lengths: tokens of each trajectory.
      record_bytes: bytes of each trajectory's JSON.
    """

    ids: tuple[str, ...]
    lengths: tuple[int, ...]
    record_bytes: tuple[int, ...]
    schema_version: int = SCHEMA_VERSION


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


def tokens_path(segment: str, field: str) -> str:
    """Path of one array of the segment."""
    return f"tokens/{segment_key(segment)}/{field}/"


def records_path(segment: str) -> str:
    """Path of the segment's records."""
    return f"records/{segment_key(segment)}/"


def column_path(segment: str, column: str = "") -> str:
    """Path of one column, or of all of them."""
    if column and (not _COLUMN_NAME.fullmatch(column) or column in TOKEN_FIELDS):
        raise StoreError(
            f"column name {column!r}: allowed are lower-case letters, digits and '_', and no "
            f"name of {sorted(TOKEN_FIELDS)}"
        )
    return f"columns/{segment_key(segment)}/{f'{column}/' if column else ''}"


def id_key(trajectory_id: str) -> str:
    """Key that says where a trajectory lies."""
    return f"ids/{trajectory_id}"


def quarantine_key(trajectory_id: str, digest: str) -> str:
    """Key of a refused record; the digest keeps repeated refusals of one id apart."""
    return f"quarantine/{quote(trajectory_id, safe='')}/{digest}"


def array_spec(kvstore: Any, path: str) -> dict[str, Any]:
    """Spec of an existing array of the database."""
    spec = kvstore.spec().to_json()
    spec["path"] = path
    return {"driver": "zarr3", "kvstore": spec}


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
    raw: dict[str, Any] = {"name": "bytes"}
    if array.dtype.itemsize > 1:
        raw["configuration"] = {"endian": "little"}
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "memory", "path": path},
        "metadata": {
            "shape": [array.size],
            "data_type": str(array.dtype),
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [min(max(array.size, 1), _CHUNK)]},
            },
            "codecs": [raw, {"name": "zstd", "configuration": {"level": 1}}],
        },
    }


def encode_header(header: Header) -> bytes:
    """The header as JSON."""
    fields = {f.name: getattr(header, f.name) for f in dataclasses.fields(Header)}
    return json.dumps(fields).encode()


def decode_header(data: bytes, segment: str) -> Header:
    """Inverse of `encode_header`.

    Raises:
      StoreError: for a schema newer than this program's.
    """
    fields = json.loads(data)
    version = fields["schema_version"]
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"segment {segment} has schema version {version}; this trsi-jax reads up to "
            f"{SCHEMA_VERSION}: install a newer one"
        )
    return Header(
        ids=tuple(fields["ids"]),
        lengths=tuple(fields["lengths"]),
        record_bytes=tuple(fields["record_bytes"]),
        schema_version=version,
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
