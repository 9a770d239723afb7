"""One trajectory as one value: its token arrays without their repetition, its record, a checksum.

Most of a trajectory's arrays repeats itself: masks, turns and weight versions change a few times in
thousands of tokens, and a log-prob is 0 wherever nothing was sampled. So each array takes the form
that is shortest, which is cheaper to undo than a general compression, and a trajectory is read in
one piece. All numbers are little-endian, every part begins at a multiple of 8 bytes:

  uint32 0
  uint32 format    2
  uint64 checksum  XXH3 (64 bits, seed 0) of everything after it
  int64  tokens    T
  int64  record    bytes of the record
  int64  [5, 2]    form and number of values of each array, in the order of `TOKEN_FIELDS`
  the arrays, then the record as JSON

  form 0, whole    T values
  form 1, runs     n lengths (uint32), n values
  form 2, acted    a value for each acted token; 0 elsewhere

Format 1, of layout 3, is still read: it began with the CRC-32 of everything after it (uint32) and
the format (uint32), and went on with the tokens. XXH3 sees more (64 bits) in a tenth of the time.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from rollout.store.layout import TOKEN_FIELDS

_MAGIC = struct.pack("<II", 0, 2)
_CHECKSUM = struct.Struct("<Q")
_CRC32_FORMAT = (1).to_bytes(4, "little")
_CRC32 = struct.Struct("<I")
_WHOLE, _RUNS, _ACTED = 0, 1, 2
_LENGTH = np.dtype("<u4")
_HEAD = struct.Struct(f"<{2 + 2 * len(TOKEN_FIELDS)}q")
_STORED = {name: dtype.newbyteorder("<") for name, dtype in TOKEN_FIELDS.items()}

Arrays = Mapping[str, npt.NDArray[Any]]


def encode(record: bytes, arrays: Arrays) -> bytes:
    """A record and its token arrays as one value.

    Args:
      record: JSON.
      arrays: [T] of each of `TOKEN_FIELDS`, of its dtype.
    """
    acted = arrays["acted_t"]
    head, parts = [acted.size, len(record)], []
    for name, dtype in _STORED.items():
        array = np.ascontiguousarray(arrays[name], dtype)
        form, count, data = _WHOLE, array.size, array.tobytes()
        if name == "logprob_t":
            # Bits, for -0.0 is equal to 0 and would not come back.
            if not array.view("<u4")[~acted].any():
                told = array[acted]
                form, count, data = _ACTED, told.size, told.tobytes()
        else:
            # Counted before they are cut out: most token ids differ from the one before.
            changed = array[1:] != array[:-1]
            runs = int(np.count_nonzero(changed)) + min(array.size, 1)
            if runs * (_LENGTH.itemsize + dtype.itemsize) < len(data):
                starts = np.concatenate([[0], np.flatnonzero(changed) + 1])
                lengths = np.diff(starts, append=array.size).astype(_LENGTH)
                form, count, data = _RUNS, runs, lengths.tobytes() + array[starts].tobytes()
        head += [form, count]
        parts.append(_padded(data))
    body = [_HEAD.pack(*head), *parts, record]
    checksum = xxh3_64()
    for part in body:
        checksum.update(part)
    return b"".join([_MAGIC, _CHECKSUM.pack(checksum.intdigest()), *body])


def decode(data: bytes) -> tuple[bytes, dict[str, npt.NDArray[Any]]]:
    """Inverse of `encode`; the arrays are read-only.

    Raises:
      ValueError: for data that is cut short or changed.
    """
    at = _checked(data)
    tokens, record, *forms = _HEAD.unpack_from(data, at)
    at += _HEAD.size
    arrays: dict[str, npt.NDArray[Any]] = {}
    for (name, dtype), form, count in zip(_STORED.items(), forms[::2], forms[1::2], strict=True):
        start = at
        if form == _RUNS:
            lengths = np.frombuffer(data, _LENGTH, count, at)
            at += lengths.nbytes
        array = np.frombuffer(data, dtype, count, at)
        at += array.nbytes
        at += (start - at) % 8
        if form == _RUNS:
            array = array.repeat(lengths)
        elif form == _ACTED:
            told, array = array, np.zeros(tokens, dtype)
            array[arrays["acted_t"]] = told
        array = array.astype(TOKEN_FIELDS[name], copy=False)
        array.setflags(write=False)
        arrays[name] = array
    return data[at : at + record], arrays


def _checked(data: bytes) -> int:
    """Where the numbers of tokens begin, in data whose checksum is right."""
    size = len(data) - _HEAD.size
    if size >= 16 and data[:8] == _MAGIC:
        (checksum,) = _CHECKSUM.unpack_from(data, 8)
        if checksum == xxh3_64_intdigest(memoryview(data)[16:]):
            return 16
    if size >= 8 and data[4:8] == _CRC32_FORMAT:
        (checksum,) = _CRC32.unpack_from(data)
        if checksum == zlib.crc32(memoryview(data)[4:]):
            return 8
    raise ValueError("a stored trajectory is damaged: its checksum or its format is wrong")


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)
