"""Import: a Hugging Face directory straight into (sharded) arrays."""

from __future__ import annotations

import math
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
    row_blocks,
    transpose_into,
)
from trsi_jax.model.hf.match import Match, match

Index = tuple[tuple[int, int], ...]
# XLA on a CPU takes a host buffer without a copy where it is aligned like this.
_ALIGNMENT = 64
# A piece this large is read by more than one thread.
_JOB = 32 << 20
# Parameters of about so many bytes are read in the order of the files. A stacked parameter is all
# over them, so one by one would be random access.
_WINDOW = 1 << 30
# Bytes in the page cache that no worker has begun.
_AHEAD = 128 << 20
_SCRATCH = 1 << 20


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
    windows: deque[dict[names.Path, _Placement]] = deque()

    def finish() -> None:
        for path, placement in windows.popleft().items():
            arrays[path] = placement.array()

    window: dict[names.Path, _Placement] = {}
    with _ReadAhead() as ahead, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:

        def begin() -> None:
            # In the order of the files, as a disk and the kernel's own read-ahead like it.
            pieces = [piece for placement in window.values() for piece in placement.pieces()]
            pieces.sort(key=lambda piece: (piece.path, piece.start))
            ahead.add(pieces)
            for piece in pieces:
                piece.job = pool.submit(_copy, piece, ahead, on_read)
            windows.append(window)

        for path, leaf in names.flatten(abstract).items():
            if leaf.dtype != jax.dtypes.canonicalize_dtype(leaf.dtype):
                raise ValueError(f"{leaf.dtype} parameters need jax_enable_x64")
            read = _Reader(leaf, sources[path], found)
            window[path] = _Placement(leaf.shape, placed.get(path), read)
            if sum(placement.nbytes for placement in window.values()) >= _WINDOW:
                begin()
                window = {}
                if len(windows) > 1:
                    finish()
        begin()
        while windows:
            finish()
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    ordered = [arrays[tuple(entry.key for entry in path)] for path, _ in leaves]
    params: Params = jax.tree_util.tree_unflatten(tree, ordered)
    return params


@dataclass(eq=False, slots=True)
class _Piece:
    """Rows of a stored tensor, and where their numbers go.

    Attributes:
      path, start, stop: the bytes of a file that hold them.
      stored: the tensor.
      rows: view of the mapped file, [outs, ins], or of more axes where it takes a copy to be that.
      target: [outs, ins], or [ins, outs] if `turned`.
    """

    path: Path
    start: int
    stop: int
    stored: Stored
    rows: Bits | None
    target: Bits | None
    turned: bool
    begun: bool = False
    there: bool = False
    job: Future[None] | None = None


class _ReadAhead:
    """A thread that brings pieces into the page cache before the workers come to them.

    `mmap.madvise` would be the obvious way, but holds Python's lock while the disk works; and
    the kernel reads a file much faster for one reader that goes straight on than for faults here
    and there.
    """

    def __init__(self) -> None:
        self.waiting: deque[_Piece] = deque()
        self.changed = threading.Condition()
        self.bytes = 0
        self.closed = False
        self.files: dict[Path, int] = {}
        self.thread = threading.Thread(target=self._run, name="trsi-read-ahead", daemon=True)

    def __enter__(self) -> _ReadAhead:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()
        for descriptor in self.files.values():
            os.close(descriptor)

    def add(self, pieces: Iterable[_Piece]) -> None:
        """Pieces in the order in which workers will begin them."""
        with self.changed:
            self.waiting.extend(pieces)
            self.changed.notify()

    def begin(self, piece: _Piece) -> None:
        """A worker's call: returns when the piece's bytes are in the page cache."""
        with self.changed:
            piece.begun = True
            if piece.there:
                self.bytes -= piece.stop - piece.start
                self.changed.notify()
        if not piece.there:
            self._read(piece)

    def _run(self) -> None:
        while piece := self._next():
            try:
                self._read(piece)
            except (OSError, UserError):
                continue  # The worker will meet it, too.
            with self.changed:
                if not piece.begun:
                    piece.there = True
                    self.bytes += piece.stop - piece.start

    def _next(self) -> _Piece | None:
        with self.changed:
            while not self.closed:
                while self.waiting and self.waiting[0].begun:
                    self.waiting.popleft()
                if self.waiting and self.bytes < _AHEAD:
                    return self.waiting.popleft()
                self.changed.wait()
        return None

    def _read(self, piece: _Piece) -> None:
        with self.changed:
            if piece.path not in self.files:
                self.files[piece.path] = os.open(piece.path, os.O_RDONLY)
            descriptor = self.files[piece.path]
        buffer = memoryview(bytearray(_SCRATCH))
        at = piece.start
        while at < piece.stop:
            got = os.preadv(descriptor, [buffer[: piece.stop - at]], at)
            if not got:
                raise UserError(f"{piece.path}: cut off in tensor {piece.stored.name}")
            at += got


class _Placement:
    """One parameter on its way to its devices; what several of them hold alike is read once."""

    def __init__(
        self,
        shape: tuple[int, ...],
        sharding: Any,
        read: Callable[[Index], tuple[Bits, list[_Piece]]],
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

    def pieces(self) -> list[_Piece]:
        """What is to be read."""
        return [piece for _, pieces in self.blocks.values() for piece in pieces]

    def array(self) -> jax.Array:
        """Wait for the numbers and hand them over."""
        shards: list[jax.Array] = []
        for span, devices in self.holders.items():
            block, pieces = self.blocks.pop(span)
            for piece in pieces:
                assert piece.job is not None
                piece.job.result()
            shards += [jax.device_put(block, device) for device in devices]
        if self.sharding is None:
            return shards[0]
        whole: jax.Array = jax.make_array_from_single_device_arrays(
            self.shape, self.sharding, shards
        )
        return whole


class _Reader:
    """Finds index ranges of one parameter in the checkpoint's tensors."""

    def __init__(
        self, leaf: Any, sources: list[tuple[names.Part, names.Tensor]], found: Match
    ) -> None:
        self.dtype = np.dtype(leaf.dtype)
        self.sources = sources
        self.found = found

    def __call__(self, index: Index) -> tuple[Bits, list[_Piece]]:
        """A fresh aligned host array for the numbers of `index`, and the pieces that fill it."""
        shape = tuple(stop - start for start, stop in index)
        block = _aligned(shape, self.dtype)
        pieces: list[_Piece] = []
        for part, tensor in self.sources:
            depth = len(part.layer)
            layers = zip(part.layer, index[:depth], strict=True)
            if all(start <= layer < stop for layer, (start, stop) in layers):
                at = tuple(i - index[axis][0] for axis, i in enumerate(part.layer))
                pieces += self._pieces(part, tensor, index[depth:], block[at])
        return block, pieces

    def _pieces(
        self, part: names.Part, tensor: names.Tensor, span: Index, target: Bits
    ) -> Iterator[_Piece]:
        path, stored = self.found.where[tensor.name]
        bits = map_bits(path, stored)
        rows = bits[part.rows[0] : part.rows[1]]
        ins = len(part.in_shape)
        # Out axes lead in the checkpoint and trail in the parameter.
        ordered = (*span[ins:], *span[:ins])
        cut = rows.reshape(*part.out_shape, *part.in_shape)[tuple(slice(*s) for s in ordered)]
        outs = math.prod(cut.shape[: len(part.out_shape)]) if ins else len(cut)
        wide = cut.size // max(outs, 1)
        flat = target.reshape(wide, outs) if ins else target.reshape(outs, wide)
        step = max(1, _JOB // max(1, wide * bits.itemsize))
        try:
            source = cut.reshape(outs, wide, copy=False)
        except ValueError:
            # A sharding cuts a head in two: the worker copies it, whole.
            source, step = cut, max(outs, 1)
        for at in range(0, outs, step):
            piece = source[at : at + step] if source.ndim == 2 else source
            low, high = (end - bits.ctypes.data for end in np.lib.array_utils.byte_bounds(piece))
            into = flat[:, at : at + step] if ins else flat[at : at + step]
            yield _Piece(
                path, stored.start + low, stored.start + high, stored, piece, into, bool(ins)
            )


def _copy(piece: _Piece, ahead: _ReadAhead, on_read: Callable[[int], None] | None) -> None:
    ahead.begin(piece)
    rows, target, dtype = piece.rows, piece.target, piece.stored.dtype
    assert rows is not None
    assert target is not None
    # Let the mapping go with the last piece of it, and the array when it has been handed over.
    piece.rows = piece.target = None
    rows = rows.reshape(target.shape[::-1] if piece.turned else target.shape)
    for start, stop in row_blocks(len(rows), rows.strides[0]):
        block = rows[start:stop]
        if not finite(block, dtype):
            raise UserError(
                f"{piece.path}: tensor {piece.stored.name} holds numbers that are not finite"
            )
        into = target[:, start:stop] if piece.turned else target[start:stop]
        _convert(block, dtype, into, piece.turned)
    if on_read is not None:
        on_read(rows.nbytes)


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
    head = map_bits(*found.where[names.HEAD])
    rows = map_bits(*found.where[embedding])
    if head.dtype != rows.dtype or not all(
        np.array_equal(head[a:b], rows[a:b]) for a, b in row_blocks(len(head), head.strides[0])
    ):
        raise UserError(
            f"{found.where[names.HEAD][0]}: tensor {names.HEAD} differs from {embedding}, but "
            "config.json ties them"
        )
