"""Published weights: a directory of safetensors, its manifest, and the folder that holds them.

    weights/v000012/            files of the base checkpoint with new weights
        trsi-manifest.json      every tensor's shape and dtype, and a probe
    weights/LATEST              name of the newest complete one

A directory appears by one rename, complete or not at all, and `LATEST` is replaced by another.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout.errors import SnapshotRefused, UserError
from rollout.protocols import TensorSpec, WeightSnapshot

MANIFEST = "trsi-manifest.json"
LATEST = "LATEST"

_NAME = re.compile(r"v(\d{6,})")
_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2}
_ITEM_BYTES |= {"BF16": 2, "F16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}
# Bits of the exponent; a number is not finite where all of them are set.
_EXPONENT: dict[str, Any] = {
    "BF16": np.uint16(0x7F80),
    "F16": np.uint16(0x7C00),
    "F32": np.uint32(0x7F80_0000),
    "F64": np.uint64(0x7FF0_0000_0000_0000),
}
# Fits a core's cache, with what is masked of it.
_BLOCK = 256 << 10
_MAX_HEAD = 100 << 20


@dataclass(frozen=True, slots=True)
class Probe:
    """A fixed sequence and what the trainer's own forward says of it.

    Attributes:
      ids: N token ids.
      logprobs: N - 1 log-probs, of ids[1:] given what precedes each, at temperature 1.
      tolerance: largest mean absolute difference at which a server still has these weights.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float


def snapshot_name(version: int) -> str:
    """Name of a version's directory."""
    return f"v{version:06d}"


def read_manifest(directory: Path) -> dict[str, TensorSpec]:
    """Name -> shape and dtype of every tensor, from the files' headers alone.

    Raises:
      SnapshotRefused: names the file that is missing, cut off or no safetensors file.
    """
    found: dict[str, TensorSpec] = {}
    for path in _files(directory):
        for name, (dtype, shape, _, _) in _head(path).items():
            if name in found:
                raise SnapshotRefused(f"{path}: tensor {name} is in another file too")
            found[name] = TensorSpec(shape, dtype)
    return found


def compare(found: Mapping[str, TensorSpec], base: Mapping[str, TensorSpec], where: str) -> None:
    """Hold names, shapes and dtypes of a snapshot to those of the base checkpoint.

    Raises:
      SnapshotRefused: names the first tensor that is missing, extra, or differs.
    """
    for name, spec in base.items():
        if name not in found:
            raise SnapshotRefused(f"{where}: tensor {name} is missing")
        if found[name].shape != spec.shape:
            raise SnapshotRefused(
                f"{where}: tensor {name} has shape {list(found[name].shape)}, the base has"
                f" {list(spec.shape)}"
            )
        if found[name].dtype != spec.dtype:
            raise SnapshotRefused(
                f"{where}: tensor {name} has dtype {found[name].dtype}, the base has {spec.dtype}"
            )
    for name in found:
        if name not in base:
            raise SnapshotRefused(f"{where}: tensor {name} is not one of the base")


def examine(directory: Path, base: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """`read_manifest` and `compare`, then a look at every number: all must be finite.

    Args:
      directory: of safetensors files.
      base: what it must hold.

    Returns:
      The manifest.

    Raises:
      SnapshotRefused: names the tensor that is missing, extra, of another shape or dtype, or holds
        a number that is not finite.
    """
    found = read_manifest(directory)
    compare(found, base, str(directory))
    jobs = [
        (path, name, dtype, start, stop)
        for path in _files(directory)
        for name, (dtype, _, start, stop) in _head(path).items()
        if dtype in _EXPONENT
    ]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        # Largest first, so that no thread starts on the embedding when all others are done.
        jobs.sort(key=lambda job: job[3] - job[4])
        deque(pool.map(lambda job: _examine_one(*job), jobs), maxlen=0)
    return found


def _examine_one(path: Path, name: str, dtype: str, start: int, stop: int) -> None:
    exponent = _EXPONENT[dtype]
    spare = np.empty(_BLOCK // exponent.itemsize, exponent.dtype)
    for block in _blocks(path, name, start, stop):
        bits = np.frombuffer(block, exponent.dtype)
        if np.bitwise_and(bits, exponent, out=spare[: bits.size]).max() == exponent:
            raise SnapshotRefused(f"{path}: tensor {name} holds numbers that aren't finite")


def digests(directory: Path, groups: Iterable[Sequence[str]]) -> list[str]:
    """SHA-256 of the bytes of each group of tensors, one behind the other.

    Args:
      directory: of safetensors files.
      groups: names, one or several a group.

    Returns:
      A hexadecimal digest a group, in their order.

    Raises:
      SnapshotRefused: there is no such tensor, or a file is cut off.
    """
    places = {
        name: (path, start, stop)
        for path in _files(directory)
        for name, (_, _, start, stop) in _head(path).items()
    }
    found = []
    for names in groups:
        digest = hashlib.sha256()
        for name in names:
            if name not in places:
                raise SnapshotRefused(f"{directory}: tensor {name} is missing")
            path, start, stop = places[name]
            for block in _blocks(path, name, start, stop):
                digest.update(block)
        found.append(digest.hexdigest())
    return found


def _blocks(path: Path, name: str, start: int, stop: int) -> Iterator[memoryview]:
    """The bytes of a tensor, in one buffer that stays in cache."""
    buffer = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < stop:
            view = buffer[: min(stop - start, _BLOCK)]
            filled = 0
            while filled < len(view):
                got = file.readinto(view[filled:])
                if not got:
                    raise SnapshotRefused(f"{path}: cut off in tensor {name}")
                filled += got
            yield view
            start += filled


def write_manifest(
    directory: Path, version: int, tensors: Mapping[str, TensorSpec], probe: Probe | None
) -> None:
    """Write and sync `trsi-manifest.json` into a directory that is not published yet."""
    content = {
        "version": version,
        "probe": asdict(probe) if probe else None,
        "tensors": {name: asdict(spec) for name, spec in sorted(tensors.items())},
    }
    path = directory / MANIFEST
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def open_snapshot(directory: Path) -> tuple[WeightSnapshot, Probe | None]:
    """A published snapshot, by its manifest.

    Raises:
      SnapshotRefused: for a directory that was never published, or an unreadable manifest.
    """
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text("utf-8"))
        tensors = {
            name: TensorSpec(tuple(spec["shape"]), spec["dtype"])
            for name, spec in content["tensors"].items()
        }
        probe = content["probe"] and Probe(
            tuple(content["probe"]["ids"]),
            tuple(content["probe"]["logprobs"]),
            float(content["probe"]["tolerance"]),
        )
        return WeightSnapshot(int(content["version"]), directory, tensors), probe or None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SnapshotRefused(f"{path}: no readable manifest ({error})") from error


def reveal(partial: Path, directory: Path) -> None:
    """Publish: rename the finished directory and point `LATEST` at it, both synced."""
    folder = directory.parent
    try:
        partial.rename(directory)
    except OSError as error:
        raise UserError(f"{directory} exists already; a version is published once") from error
    pointer = folder / f".{LATEST}.partial"
    with pointer.open("w", encoding="utf-8") as file:
        file.write(directory.name + "\n")
        file.flush()
        os.fsync(file.fileno())
    pointer.rename(folder / LATEST)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def latest(folder: Path) -> Path | None:
    """The newest published directory of `folder`; None before the first."""
    there = {path.name: path for _, path in published(folder)}
    try:
        name = (folder / LATEST).read_text("utf-8").strip()
    except FileNotFoundError:
        name = ""
    # A kill between two renames can leave the pointer behind.
    return there.get(name) or next(reversed(there.values()), None)


def published(folder: Path) -> list[tuple[int, Path]]:
    """(version, directory) of every published snapshot, oldest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` snapshots, and what a killed publication left."""
    for path in folder.glob(".*.partial"):
        shutil.rmtree(path, ignore_errors=True)
    for _, path in published(folder)[:-keep]:
        _remove(path)


def forget(folder: Path, version: int) -> None:
    """Remove the snapshots of this version and of later ones."""
    for number, path in published(folder):
        if number >= version:
            _remove(path)


def _remove(path: Path) -> None:
    # Out of sight first: nobody reads a directory that is being emptied.
    gone = path.with_name(f".{path.name}.gone.partial")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def mean_gap(said: Sequence[float], expected: Sequence[float]) -> float:
    """Mean absolute difference of two lists of log-probs; infinite where lengths or NaN differ."""
    if len(said) != len(expected) or not all(map(math.isfinite, said)):
        return math.inf
    return sum(abs(a - b) for a, b in zip(said, expected, strict=True)) / max(len(said), 1)


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise SnapshotRefused(f"no directory {directory}")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise SnapshotRefused(f"no safetensors file in {directory}")
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            listed = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SnapshotRefused(f"{index}: no readable weight_map ({error})") from error
        if listed != {path.name for path in files}:
            raise SnapshotRefused(f"{index}: lists other files than there are")
    return files


def _head(path: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Name -> dtype, shape, and byte range in the file, in the data's order."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, _MAX_HEAD):
            raise SnapshotRefused(f"{path}: not a safetensors file, or cut off in its header")
        text = file.read(length)
    try:
        entries = sorted(_entries(json.loads(text), 8 + length), key=lambda entry: entry[1][2])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise SnapshotRefused(f"{path}: unreadable safetensors header ({error})") from error
    at = 8 + length
    for name, (dtype, shape, start, stop) in entries:
        if start != at or stop - start != math.prod(shape) * _ITEM_BYTES.get(dtype, -1):
            raise SnapshotRefused(f"{path}: tensor {name} has impossible offsets or dtype {dtype}")
        at = stop
    if at != size:
        raise SnapshotRefused(f"{path}: cut off, or bytes behind the last tensor")
    return dict(entries)


def _entries(
    header: Mapping[str, Any], data: int
) -> Iterator[tuple[str, tuple[str, tuple[int, ...], int, int]]]:
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            shape = tuple(int(side) for side in entry["shape"])
            yield name, (str(entry["dtype"]), shape, data + int(begin), data + int(end))
