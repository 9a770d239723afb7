"""Sealed shards on a local disk, read without tensorstore.

tensorstore hands each request to another thread: it took 90 to 130 us of CPU time a value of 150 kB
where opening the file, one `pread` and closing it took 20 to 55. A shard never changes once it is
sealed, so where its entries lie is read once, checked, and kept: offset and size of each as two
uint64 and the CRC-32C of all, at the end of the file (zarr3's indexed shards,
`rollout.store.layout.shard_spec`).
"""

from __future__ import annotations

import os
import struct

import tensorstore as ts

from rollout.store import layout

_ENTRY = struct.Struct("<QQ")
_CHECKSUM_BYTES = 4
_NONE = 2**64 - 1
"""Offset and size of an entry that a shard lacks."""


class LocalShards:
    """The shards of a store in a local folder."""

    def __init__(self, folder: str) -> None:
        """Shards below `folder`, a path that ends in a slash; opens nothing."""
        self._folder = folder
        self._indices: dict[str, bytes] = {}

    def read(self, sealed_set: str, place: int) -> bytes:
        """The value at a place of a sealed set; empty if it or its shard is missing.

        Raises:
          ValueError: for an index whose checksum is wrong.
          OSError: for what the file system refuses.
        """
        number, entry = divmod(place, layout.ENTRIES)
        path = f"{self._folder}{layout.shard_path(sealed_set, number)}"
        try:
            # Opened for each read: a store has more shards than a process may have files open.
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return b""
        try:
            index = self._indices.get(path)
            if index is None:
                index = self._indices[path] = _index(file)
            offset, size = _ENTRY.unpack_from(index, entry * _ENTRY.size)
            # Less than `size` comes back from a file that was cut; its checksum finds that.
            return b"" if offset == _NONE else os.pread(file, size, offset)
        finally:
            os.close(file)


def _index(file: int) -> bytes:
    """The index of a shard, after its checksum was found right."""
    size = layout.ENTRIES * _ENTRY.size + _CHECKSUM_BYTES
    data = os.pread(file, size, max(os.fstat(file).st_size - size, 0))
    context = ts.Context()
    memory = ts.KvStore.open("memory://", context=context).result()
    memory["c/0/0"] = data
    opened = ts.open(layout.index_spec(), open=True, assume_metadata=True, context=context)
    return bytes(opened.result().read().result().astype("<u8").tobytes())
