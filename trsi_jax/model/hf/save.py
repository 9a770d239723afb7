"""Export: the base checkpoint with new weights, published by one rename."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rollout.errors import UserError
from trsi_jax.model.config import ModelConfig
from trsi_jax.model.decoder import Params, abstract_params
from trsi_jax.model.hf import names
from trsi_jax.model.hf.description import describe, read_description
from trsi_jax.model.hf.files import (
    DTYPES,
    INDEX,
    Bits,
    Shard,
    Stored,
    finite,
    new_shards,
    open_checkpoint,
    row_blocks,
    transpose_into,
)
from trsi_jax.model.hf.match import match

_COPY_BYTES = 16 << 20
# So many bytes are brought to the disk while others are made.
_SYNC_BYTES = 32 << 20
_AHEAD = min(4, os.cpu_count() or 1)
_replicated: Any = PartitionSpec
_SPELLED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def save_params(
    directory: Path,
    config: ModelConfig,
    params: Params,
    *,
    base: Path | None = None,
    dtype: str = "BF16",
    shard_bytes: int = 5_000_000_000,
) -> Path:
    """Write a Hugging Face directory that holds `params`.

    With a base it has the base's files, tensor names, shapes, dtypes and order: trained tensors
    are new, multi-token-prediction and vision tensors are copied byte for byte, and so is every
    other file beside the weights. Unchanged parameters give back the same bytes. Without one it
    is a text-only model with a `config.json` of its own.

    The directory appears by one rename after everything is written and synced, so nobody ever
    reads half of it. With several processes all must call; the first one writes.

    Args:
      directory: to make; it must not exist.
      config: the model.
      params: tree of `init_params`, on any devices.
      base: directory that `params` descend from.
      dtype: without a base, storage dtype of every tensor: "BF16", "F16", "F32" or "F64".
      shard_bytes: without a base, most bytes of weights in one file.

    Returns:
      `directory`.

    Raises:
      UserError: names the parameter or tensor that is wrong, missing, unknown or not finite, or
        the directory that exists; nothing is published then.
    """
    if directory.exists():
        raise UserError(f"{directory} exists already; an export makes a new directory")
    leaves = names.flatten(params)
    check_params(config, params)
    if base is not None:
        checkpoint = open_checkpoint(base)
        trained = match(checkpoint, config, read_description(base)).trained
        shards = checkpoint.shards
    else:
        if dtype not in DTYPES:
            raise UserError(f"dtype {dtype!r} cannot be written; allowed: {', '.join(DTYPES)}")
        trained = names.text_tensors(config)
        shapes = {tensor.name: tensor.shape for tensor in trained.values()}
        shards = new_shards(shapes, dtype, shard_bytes=shard_bytes)
    writing = jax.process_index() == 0
    partial_directory = directory.with_name(f".{directory.name}.partial")
    if writing:
        shutil.rmtree(partial_directory, ignore_errors=True)
        partial_directory.mkdir(parents=True)
    pool = ThreadPoolExecutor(_AHEAD, thread_name_prefix="trsi-export")
    disk = ThreadPoolExecutor(1, thread_name_prefix="trsi-export-sync")
    try:
        for shard in shards:
            _write_shard(
                *(partial_directory, shard, trained, leaves, base, pool, disk),
                writing=writing,
            )
        if writing:
            if base is not None:
                _copy_others(base, partial_directory, shards)
            else:
                _describe_new(config, dtype, shards, partial_directory)
            _sync_files(partial_directory)
            partial_directory.rename(directory)
            _sync(directory.parent)
    finally:
        pool.shutdown(cancel_futures=True)
        disk.shutdown()
        if writing:
            shutil.rmtree(partial_directory, ignore_errors=True)
    return directory


def check_params(config: ModelConfig, params: Params) -> None:
    """Hold a tree to `init_params`.

    Raises:
      UserError: names the first parameter that is missing, of another shape, or extra.
    """
    leaves = names.flatten(params)
    expected = names.flatten(abstract_params(config))
    for path, leaf in expected.items():
        if path not in leaves:
            raise UserError(f"model {config.name!r}: parameter {'/'.join(path)} is missing")
        if tuple(leaves[path].shape) != leaf.shape:
            raise UserError(
                f"model {config.name!r}: parameter {'/'.join(path)} has shape "
                f"{list(leaves[path].shape)}, the model needs {list(leaf.shape)}"
            )
    for path in leaves:
        if path not in expected:
            raise UserError(f"model {config.name!r}: parameter {'/'.join(path)} is not one of it")


def _write_shard(
    directory: Path,
    shard: Shard,
    trained: dict[str, names.Tensor],
    leaves: dict[names.Path, Any],
    base: Path | None,
    pool: ThreadPoolExecutor,
    disk: ThreadPoolExecutor,
    *,
    writing: bool,
) -> None:
    target = (directory / shard.name).open("wb") if writing else None
    source = (base / shard.name).open("rb") if base is not None and writing else None
    syncing: list[Future[None]] = []
    synced = 0
    try:
        if target is not None:
            target.write(shard.head)
        for stored in shard.tensors:
            if stored.name in trained:
                for part in trained[stored.name].parts:
                    numbers = _fetch(leaves[part.path], part, stored)
                    for block in _ahead(pool, _rows(numbers, part, stored, directory)):
                        if target is None:
                            continue
                        target.write(block.data)
                        due = target.tell() - synced > _SYNC_BYTES
                        if due and all(sync.done() for sync in syncing):
                            _raise_errors(syncing)
                            synced = target.tell()
                            syncing = [disk.submit(os.fsync, target.fileno())]
            elif source is not None and target is not None:
                source.seek(stored.start)
                _copy_bytes(source, target, stored.stop - stored.start)
        if target is not None and target.tell() != shard.tensors[-1].stop:
            raise RuntimeError(f"{shard.name}: wrote {target.tell()} bytes")
        _raise_errors(syncing)
    finally:
        wait(syncing)
        for file in (source, target):
            if file is not None:
                file.close()


def _raise_errors(syncing: list[Future[None]]) -> None:
    # The kernel tells of a failed write once: another sync would not hear of it.
    for sync in syncing:
        sync.result()


def _fetch(leaf: Any, part: names.Part, stored: Stored) -> Bits:
    """One layer of a parameter on the host in the storage dtype, [in, out] or as it is stored."""
    dtype = DTYPES[stored.dtype]
    if isinstance(leaf, jax.Array) and (len(leaf.devices()) > 1 or _on_accelerator(leaf)):
        piece = np.asarray(_gather(leaf, part.layer, dtype).addressable_data(0))
    else:
        piece = np.asarray(leaf)[part.layer]  # A view of the host's memory.
    with np.errstate(over="ignore"):  # What overflows is found and named by the caller.
        numbers = piece.astype(dtype, copy=False)
    ins = math.prod(part.in_shape)
    return numbers.reshape(ins, -1) if part.in_shape else numbers.reshape(len(numbers), -1)


def _on_accelerator(leaf: jax.Array) -> bool:
    return any(device.platform != "cpu" for device in leaf.devices())


def _gather(leaf: jax.Array, layer: tuple[int, ...], dtype: Any) -> jax.Array:
    """One layer of a parameter on every device, narrowed there before it travels."""
    # Without 64-bit types a device cannot widen to float64; the host does.
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if not isinstance(leaf.sharding, NamedSharding):
        return _slice(None, dtype)(leaf, layer)
    mesh = leaf.sharding.mesh
    # A layer is cut out of stacked axes that may be sharded, which a mesh with explicit axes
    # refuses: the same shards are looked at through one that places by itself.
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    seen = jax.make_array_from_single_device_arrays(
        leaf.shape,
        NamedSharding(auto, leaf.sharding.spec),
        [shard.data for shard in leaf.addressable_shards],
    )
    return _slice(NamedSharding(auto, _replicated()), dtype)(seen, layer)


@lru_cache(maxsize=16)
def _slice(sharding: Any, dtype: Any) -> Callable[[Any, tuple[int, ...]], jax.Array]:
    def cut(leaf: jax.Array, layer: tuple[int, ...]) -> jax.Array:
        return leaf[layer].astype(dtype)

    return jax.jit(cut, out_shardings=sharding)


def _ahead(pool: ThreadPoolExecutor, work: Iterator[Callable[[], Bits]]) -> Iterator[Bits]:
    """Results in order, a few made in threads while the first ones are written."""
    waiting: deque[Future[Bits]] = deque()
    for make in work:
        waiting.append(pool.submit(make))
        if len(waiting) > _AHEAD:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _rows(
    numbers: Bits, part: names.Part, stored: Stored, directory: Path
) -> Iterator[Callable[[], Bits]]:
    """Makers of contiguous runs of the rows of a part, as bits, each checked."""
    bits = numbers.view(f"u{numbers.itemsize}")
    rows = bits.shape[1] if part.in_shape else bits.shape[0]
    width = bits.shape[0] if part.in_shape else bits.shape[1]

    def make(start: int, stop: int) -> Bits:
        if part.in_shape:
            block = _turned(bits[:, start:stop])
        else:
            block = np.ascontiguousarray(bits[start:stop])
        if not finite(block, stored.dtype):
            raise UserError(
                f"tensor {stored.name} (parameter {'/'.join(part.path)}) holds numbers that are "
                f"not finite in {stored.dtype}; {directory.name} is not published"
            )
        return block

    for start, stop in row_blocks(rows, width * bits.itemsize):
        yield partial(make, start, stop)


def _turned(source: Bits) -> Bits:
    """The transpose of a 2-D array with its rows one behind the other."""
    host = _host()
    if host is not None and source.itemsize <= 4:  # JAX would narrow wider words.
        # XLA's copy from the host is three to seven times as fast as numpy's.
        return np.asarray(jax.device_put(source.T, host))
    target = np.empty(source.shape[::-1], source.dtype)
    transpose_into(target, source)
    return target


@lru_cache(maxsize=1)
def _host() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _copy_bytes(source: BinaryIO, target: BinaryIO, count: int) -> None:
    while count:
        block = source.read(min(count, _COPY_BYTES))
        if not block:
            raise UserError(f"{source.name}: cut off while it was copied")
        target.write(block)
        count -= len(block)


def _copy_others(base: Path, directory: Path, shards: tuple[Shard, ...]) -> None:
    """Configuration, index, tokenizer, licence: every file of the base that is not weights."""
    weights = {shard.name for shard in shards}
    for path in sorted(base.iterdir()):
        foreign = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
        if path.is_file() and path.name not in weights and not foreign:
            shutil.copyfile(path, directory / path.name)


def _describe_new(
    config: ModelConfig, dtype: str, shards: tuple[Shard, ...], directory: Path
) -> None:
    describe(config, _SPELLED[dtype]).save_pretrained(str(directory))
    if len(shards) == 1:
        return
    where = {stored.name: shard.name for shard in shards for stored in shard.tensors}
    total = sum(stored.stop - stored.start for shard in shards for stored in shard.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _sync_files(directory: Path) -> None:
    for path in directory.iterdir():
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
