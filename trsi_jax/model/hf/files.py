"""Safetensors files on disk: headers read and checked, tensors as memory-mapped views."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from rollout.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
"""Storage dtypes that are read and written, by their name in a header."""

_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2}
_ITEM_BYTES |= {"I32": 4, "U32": 4, "I64": 8, "U64": 8}
_ITEM_BYTES |= {name: dtype.itemsize for name, dtype in DTYPES.items()}

# Bits of the exponent by item size; a number is not finite where all of them are set.
_EXPONENT = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F80_0000, "F64": 0x7FF0_0000_0000_0000}
_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_BLOCK = 4 << 20
_CACHED = 128 << 10
TILE = 16
"""Rows that `transpose_into` takes at once."""

Bits = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    Attributes:
      name, dtype, shape: as the header says.
      start, stop: byte range in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file: all bytes before the data, and the tensors in the data's order."""

    name: str
    head: bytes
    tensors: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory of safetensors files whose headers agree with the index.

    Attributes:
      directory: where the files are.
      shards: the files, by name.
    """

    directory: Path
    shards: tuple[Shard, ...]

    def tensors(self) -> Iterator[tuple[Path, Stored]]:
        """Every tensor with the file it is in."""
        for shard in self.shards:
            for stored in shard.tensors:
                yield self.directory / shard.name, stored


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read and check the headers of a directory's safetensors files; no weights are read.

    Raises:
      UserError: names the file, and the tensor where it is one's fault.
    """
    if not directory.is_dir():
        raise UserError(f"no directory {directory}; a Hugging Face model directory is needed")
    index = directory / INDEX
    if not index.is_file():
        if not (directory / SINGLE).is_file():
            raise UserError(f"neither {INDEX} nor {SINGLE} in {directory}")
        return Checkpoint(directory, (_read_head(directory / SINGLE),))
    try:
        where: dict[str, str] = dict(json.loads(index.read_text("utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index}: no readable weight_map ({error})") from error
    shards = []
    for name in sorted(set(where.values())):
        if Path(name).name != name:
            raise UserError(f"{index}: shard {name!r} is not a file name")
        if not (directory / name).is_file():
            raise UserError(f"{directory}: shard {name}, listed in {INDEX}, is missing")
        shards.append(_read_head(directory / name))
    held = {stored.name: shard.name for shard in shards for stored in shard.tensors}
    for tensor, name in where.items():
        if held.get(tensor) != name:
            raise UserError(f"{directory / name}: tensor {tensor}, listed in {INDEX}, is missing")
    for shard in shards:
        for stored in shard.tensors:
            if where.get(stored.name) != shard.name:
                raise UserError(
                    f"{directory / shard.name}: tensor {stored.name} is not listed in {INDEX}"
                )
    return Checkpoint(directory, tuple(shards))


def _read_head(path: Path) -> Shard:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > size - 8:
            raise UserError(f"{path}: not a safetensors file, or cut off in its header")
        head = prefix + file.read(length)
    try:
        header: dict[str, Any] = json.loads(head[8:])
        stored = [
            Stored(
                name,
                str(entry["dtype"]),
                tuple(int(side) for side in entry["shape"]),
                len(head) + int(entry["data_offsets"][0]),
                len(head) + int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path}: unreadable safetensors header ({error})") from error
    stored.sort(key=lambda tensor: tensor.start)
    at = len(head)
    for tensor in stored:
        if tensor.dtype not in _ITEM_BYTES:
            raise UserError(f"{path}: tensor {tensor.name} has the unknown dtype {tensor.dtype}")
        expected = math.prod(tensor.shape) * _ITEM_BYTES[tensor.dtype]
        if tensor.start != at or tensor.stop - tensor.start != expected:
            raise UserError(f"{path}: tensor {tensor.name} has impossible offsets")
        at = tensor.stop
        if at > size:
            raise UserError(f"{path}: cut off in tensor {tensor.name}")
    if at != size:
        raise UserError(f"{path}: {size - at} bytes behind the last tensor")
    return Shard(path.name, head, tuple(stored))


def new_shards(
    tensors: Mapping[str, tuple[int, ...]], dtype: str, *, shard_bytes: int
) -> tuple[Shard, ...]:
    """Files for a checkpoint that has no base: filled in the order given, names as published.

    Args:
      tensors: name -> shape.
      dtype: one of `DTYPES`, of all of them.
      shard_bytes: most bytes of weights in a file that holds more than one tensor.

    Returns:
      The files, `model.safetensors` or `model-00001-of-0000N.safetensors` and so on.
    """
    item = DTYPES[dtype].itemsize
    groups: list[list[str]] = [[]]
    used = 0
    for name, shape in tensors.items():
        size = math.prod(shape) * item
        if groups[-1] and used + size > shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    shards = []
    for number, group in enumerate(groups, start=1):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in group:
            stop = at + math.prod(tensors[name]) * item
            header[name] = {
                "dtype": dtype,
                "shape": list(tensors[name]),
                "data_offsets": [at, stop],
            }
            at = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        head = struct.pack("<Q", len(text)) + text
        stored = tuple(
            Stored(
                name, dtype, tensors[name], *(len(head) + o for o in header[name]["data_offsets"])
            )
            for name in group
        )
        total = len(groups)
        file = SINGLE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
        shards.append(Shard(file, head, stored))
    return tuple(shards)


def map_bits(path: Path, stored: Stored) -> Bits:
    """The tensor as unsigned integers of its item size, mapped and not read.

    Plain integers: numpy moves and compares them several times faster than bfloat16.
    """
    with path.open("rb") as file:
        start = stored.start - stored.start % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(file.fileno(), stored.stop - start, prot=mmap.PROT_READ, offset=start)
    kind = _UNSIGNED[DTYPES[stored.dtype].itemsize]
    return np.ndarray(stored.shape, kind, buffer=mapped, offset=stored.start - start)


def row_blocks(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut rows into runs of about 4 MB, which stay in a core's cache between two passes."""
    step = max(1, _BLOCK // max(row_bytes, 1))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def finite(bits: Bits, dtype: str) -> bool:
    """Whether every number of a block is finite."""
    exponent = bits.dtype.type(_EXPONENT[dtype])
    flat = bits.reshape(-1)
    # Pieces that stay in a core's first caches, and one buffer for all of them.
    step = _CACHED // flat.itemsize
    spare = np.empty(min(step, flat.size), flat.dtype)
    for start in range(0, flat.size, step):
        piece = flat[start : start + step]
        if np.bitwise_and(piece, exponent, out=spare[: piece.size]).max() == exponent:
            return False
    return True


def transpose_into(target: Bits, source: Bits) -> None:
    """target[...] = source.T for 2-D arrays, in tiles that stay in a core's first cache.

    A tile writes 16 neighbours into every row of the target. Taller ones take twice as long: where
    rows are a power of two of bytes apart, their lines fall on the same few sets of the cache.
    """
    rows, columns = source.shape
    for row in range(0, rows, TILE):
        for column in range(0, columns, 1024):
            tile = source[row : row + TILE, column : column + 1024]
            target[column : column + 1024, row : row + TILE] = tile.T
