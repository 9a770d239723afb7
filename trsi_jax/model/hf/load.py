"""Import: a Hugging Face directory straight into (sharded) arrays."""

from __future__ import annotations

import math
import mmap
import os
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from rollout.errors import UserError
from trsi_jax.model.config import ModelConfig
from trsi_jax.model.decoder import Params, abstract_params
from trsi_jax.model.hf import names
from trsi_jax.model.hf.description import read_description
from trsi_jax.model.hf.files import (
    DTYPES,
    TILE,
    Bits,
    Stored,
    finite,
    map_bits,
    open_checkpoint,
    read_ahead,
    row_blocks,
    transpose_into,
    will_need,
)
from trsi_jax.model.hf.match import Match, match

Index = tuple[tuple[int, int], ...]
# XLA on a CPU takes a host buffer without a copy where it is aligned like this.
_ALIGNMENT = 64
# A piece this large is read by more than one thread.
_JOB = 32 << 20
# The next parameters are begun while fewer bytes than this are under way, so that neither the
# threads nor the disk rest at the end of one.
_UNDER_WAY = 64 << 20


def load_params(
    directory: Path,
    config: ModelConfig,
    *,
    shardings: Any = None,
    on_read: Callable[[int], None] | None = None,
) -> Params:
    """Parameters of a checkpoint, in the tree, shapes and dtypes of `init_params`.

    Every tensor is looked up before the first is read. Files are memory-mapped, and of each only
    the rows that this process's devices hold are read. Host memory stays below the bytes of this
    process's shards and one tensor: a shard is assembled once, then handed to its device, while
    the next ones are read.

    Args:
      directory: `config.json` and safetensors, one file or sharded with an index, of a text-only
        or a vision-language model. BF16, F16, F32 or F64; vision and prediction block stay out.
      config: usually `ModelConfig.from_hf(directory)`; its dtypes are what the result has.
      shardings: tree like the parameters of `jax.sharding.Sharding`; None: the default device.
      on_read: called with the bytes of each piece that was read, from worker threads.

    Returns:
      A nested dict of arrays.

    Raises:
      UserError: names the tensor that is wrong, missing, unknown or not finite.
      ValueError: for a dtype that JAX would narrow because 64-bit types are off.
    """
    found = match(open_checkpoint(directory), config, read_description(directory))
    _check_tied(found, config)
    sources: dict[names.Path, list[tuple[names.Part, names.Tensor]]] = defaultdict(list)
    for tensor in found.trained.values():
        for part in tensor.parts:
            if tensor.name != names.HEAD or not config.tie_embeddings:
                sources[part.path].append((part, tensor))
    abstract = abstract_params(config)
    placed = {} if shardings is None else names.flatten(shardings)
    arrays: dict[names.Path, jax.Array] = {}
    workers = min(8, os.cpu_count() or 1)
    pieces = _Pieces(workers)
    begun: deque[tuple[names.Path, _Placement]] = deque()
    under_way = 0
    with ThreadPoolExecutor(max_workers=workers) as pool:
        for path, leaf in names.flatten(abstract).items():
            if leaf.dtype != jax.dtypes.canonicalize_dtype(leaf.dtype):
                raise ValueError(f"{leaf.dtype} parameters need jax_enable_x64")
            read = _Reader(leaf, sources[path], found, pool, pieces, on_read)
            begun.append((path, _Placement(leaf.shape, placed.get(path), read)))
            under_way += begun[-1][1].nbytes
            while len(begun) > 1 and under_way > _UNDER_WAY:
                done, placement = begun.popleft()
                arrays[done] = placement.array()
                under_way -= placement.nbytes
        for done, placement in begun:
            arrays[done] = placement.array()
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    ordered = [arrays[tuple(entry.key for entry in path)] for path, _ in leaves]
    params: Params = jax.tree_util.tree_unflatten(tree, ordered)
    return params


class _Placement:
    """One parameter on its way to its devices; what several of them hold alike is read once."""

    def __init__(
        self,
        shape: tuple[int, ...],
        sharding: Any,
        read: Callable[[Index], tuple[Bits, list[Future[None]]]],
    ) -> None:
        self.shape = shape
        self.sharding = sharding
        self.holders: dict[Index, list[Any]] = defaultdict(list)
        if sharding is None:
            self.holders[tuple((0, side) for side in shape)].append(None)
        else:
            for device, index in sharding.addressable_devices_indices_map(shape).items():
                spans = (cut.indices(side)[:2] for cut, side in zip(index, shape, strict=True))
                self.holders[tuple(spans)].append(device)
        self.blocks = {span: read(span) for span in self.holders}
        self.nbytes = sum(block.nbytes for block, _ in self.blocks.values())

    def array(self) -> jax.Array:
        """Wait for the numbers and hand them over."""
        shards: list[jax.Array] = []
        for span, devices in self.holders.items():
            block, jobs = self.blocks.pop(span)
            for job in jobs:
                job.result()
            shards += [jax.device_put(block, device) for device in devices]
        if self.sharding is None:
            return shards[0]
        whole: jax.Array = jax.make_array_from_single_device_arrays(
            self.shape, self.sharding, shards
        )
        return whole


class _Pieces:
    """Mapped pieces in the order in which they are read; the disk is asked for them in advance."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.queue: list[tuple[mmap.mmap, Bits] | None] = []

    def add(self, mapped: mmap.mmap, piece: Bits) -> int:
        """The number of a piece, which `begin` takes."""
        self.queue.append((mapped, piece))
        return len(self.queue) - 1

    def begin(self, number: int) -> mmap.mmap:
        """Ask for this piece and for the one that its thread will probably read next."""
        mine = self.queue[number]
        assert mine is not None
        will_need(*mine)
        after = number + self.workers
        if after < len(self.queue) and (next_piece := self.queue[after]) is not None:
            will_need(*next_piece)
        return mine[0]

    def end(self, number: int) -> None:
        """Let the mapping go, and with it the pages."""
        self.queue[number] = None


class _Reader:
    """Reads index ranges of one parameter out of the checkpoint's tensors."""

    def __init__(
        self,
        leaf: Any,
        sources: list[tuple[names.Part, names.Tensor]],
        found: Match,
        pool: ThreadPoolExecutor,
        pieces: _Pieces,
        on_read: Callable[[int], None] | None,
    ) -> None:
        self.dtype = np.dtype(leaf.dtype)
        self.sources = sources
        self.found = found
        self.pool = pool
        self.pieces = pieces
        self.on_read = on_read

    def __call__(self, index: Index) -> tuple[Bits, list[Future[None]]]:
        """A fresh aligned host array for the numbers of `index`, and the jobs that fill it."""
        shape = tuple(stop - start for start, stop in index)
        block = _aligned(shape, self.dtype)
        jobs: list[Future[None]] = []
        for part, tensor in self.sources:
            depth = len(part.layer)
            layers = zip(part.layer, index[:depth], strict=True)
            if all(start <= layer < stop for layer, (start, stop) in layers):
                at = tuple(i - index[axis][0] for axis, i in enumerate(part.layer))
                jobs += self._submit(part, tensor, index[depth:], block[at])
        return block, jobs

    def _submit(
        self, part: names.Part, tensor: names.Tensor, span: Index, target: Bits
    ) -> list[Future[None]]:
        path, stored = self.found.where[tensor.name]
        mapped, bits = map_bits(path, stored)
        rows = bits[part.rows[0] : part.rows[1]]
        ins = len(part.in_shape)
        # Out axes lead in the checkpoint and trail in the parameter.
        ordered = (*span[ins:], *span[:ins])
        cut = rows.reshape(*part.out_shape, *part.in_shape)[tuple(slice(*s) for s in ordered)]
        outs = math.prod(cut.shape[: len(part.out_shape)]) if ins else len(cut)
        # A view unless a sharding cuts a head in two; then the piece is copied, at most a tensor.
        source = cut.reshape(outs, -1)
        flat = target.reshape(source.shape[1], outs) if ins else target.reshape(source.shape)
        jobs = []
        step = max(1, _JOB // max(1, source.shape[1] * bits.itemsize))
        for start in range(0, outs, step):
            piece = source[start : start + step]
            into = flat[:, start : start + step] if ins else flat[start : start + step]
            number = None
            if np.may_share_memory(piece, np.frombuffer(mapped, np.uint8)):
                number = self.pieces.add(mapped, piece)
            jobs.append(self.pool.submit(self._copy, number, stored, path, piece, into, bool(ins)))
        return jobs

    def _copy(
        self,
        number: int | None,
        stored: Stored,
        path: Path,
        source: Bits,
        target: Bits,
        turned: bool,
    ) -> None:
        mapped = None if number is None else self.pieces.begin(number)
        for start, stop in row_blocks(len(source), source.strides[0]):
            block = source[start:stop]
            if mapped is not None:
                read_ahead(mapped, block)
            if not finite(block, stored.dtype):
                raise UserError(f"{path}: tensor {stored.name} holds numbers that are not finite")
            into = target[:, start:stop] if turned else target[start:stop]
            _convert(block, stored.dtype, into, turned)
        if number is not None:
            self.pieces.end(number)
        if self.on_read is not None:
            self.on_read(source.nbytes)


def _convert(source: Bits, dtype: str, target: Bits, turned: bool) -> None:
    """target[...] = source, or its transpose, in the target's dtype."""
    stored = DTYPES[dtype]
    if stored == target.dtype:
        raw = target.view(source.dtype)
        if turned:
            transpose_into(raw, source)
        else:
            raw[...] = source
        return
    # Strip by strip: what is widened is turned while it is in cache.
    for start in range(0, len(source), TILE):
        strip = source[start : start + TILE]
        if stored == ml_dtypes.bfloat16 and target.dtype == np.float32:
            # A bfloat16 is the upper half of a float32.
            wide = strip.astype(np.uint32)
            wide <<= 16
        else:
            wide = strip.view(stored).astype(target.dtype).view(f"u{target.itemsize}")
        raw = target.view(wide.dtype)
        if turned:
            transpose_into(raw[:, start : start + TILE], wide)
        else:
            raw[start : start + TILE] = wide


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Bits:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _check_tied(found: Match, config: ModelConfig) -> None:
    """Refuse a tied model whose checkpoint holds a head of its own."""
    if not config.tie_embeddings or names.HEAD not in found.trained:
        return
    embedding = next(name for name in found.trained if name.endswith("embed_tokens.weight"))
    _, head = map_bits(*found.where[names.HEAD])
    _, rows = map_bits(*found.where[embedding])
    if head.dtype != rows.dtype or not all(
        np.array_equal(head[a:b], rows[a:b]) for a, b in row_blocks(len(head), head.strides[0])
    ):
        raise UserError(
            f"{found.where[names.HEAD][0]}: tensor {names.HEAD} differs from {embedding}, but "
            "config.json ties them"
        )
