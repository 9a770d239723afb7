"""One trajectory as one value: its token arrays without their repetition, its record, a checksum.

Most of a trajectory's arrays repeats itself: masks, turns and weight versions change a few times in
thousands of tokens, and a log-prob is 0 wherever nothing was sampled. So each array takes the form
that is shortest, which is cheaper to undo than a general compression, and a trajectory is read in
one piece. All numbers are little-endian, every part begins at a multiple of 8 bytes:

  uint32 crc32     of everything after it
  uint32 format    1
  int64  tokens    T
  int64  record    bytes of the record
  int64  [5, 2]    form and number of values of each array, in the order of `TOKEN_FIELDS`
  the arrays, then the record as JSON

  form 0, whole    T values
  form 1, runs     n lengths (uint32), n values
  form 2, acted    a value for each acted token; 0 elsewhere
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.store.layout import TOKEN_FIELDS

_FORMAT = 1
_WHOLE, _RUNS, _ACTED = 0, 1, 2
_LENGTH = np.dtype("<u4")
_HEAD = np.dtype("<i8")
_HEAD_BYTES = 8 + 8 * (2 + 2 * len(TOKEN_FIELDS))
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
            lengths, values = _runs(array)
            if lengths.nbytes + values.nbytes < len(data):
                form, count, data = _RUNS, values.size, lengths.tobytes() + values.tobytes()
        head += [form, count]
        parts.append(_padded(data))
    body = b"".join(
        [_FORMAT.to_bytes(4, "little"), np.array(head, _HEAD).tobytes(), *parts, record]
    )
    return zlib.crc32(body).to_bytes(4, "little") + body


def decode(data: bytes) -> tuple[bytes, dict[str, npt.NDArray[Any]]]:
    """Inverse of `encode`; the arrays are read-only.

    Raises:
      ValueError: for data that is cut short or changed.
    """
    if len(data) < _HEAD_BYTES or zlib.crc32(memoryview(data)[4:]) != int.from_bytes(
        data[:4], "little"
    ):
        raise ValueError("a stored trajectory is damaged: its checksum is wrong")
    if (found := int.from_bytes(data[4:8], "little")) != _FORMAT:
        raise ValueError(f"a stored trajectory has format {found}, known is {_FORMAT}")
    tokens, record, *forms = np.frombuffer(data, _HEAD, 2 + 2 * len(TOKEN_FIELDS), 8).tolist()
    at = _HEAD_BYTES
    arrays: dict[str, npt.NDArray[Any]] = {}
    for (name, dtype), form, count in zip(_STORED.items(), forms[::2], forms[1::2], strict=True):
        lengths = np.frombuffer(data, _LENGTH, count if form == _RUNS else 0, at)
        stored = np.frombuffer(data, dtype, count, at + lengths.nbytes)
        size = lengths.nbytes + stored.nbytes
        if form == _RUNS:
            array = np.repeat(stored, lengths)
        elif form == _ACTED:
            array = np.zeros(tokens, dtype)
            array[arrays["acted_t"]] = stored
        else:
            array = stored
        arrays[name] = array.astype(TOKEN_FIELDS[name], copy=False)
        arrays[name].setflags(write=False)
        at += size + -size % 8
    return data[at : at + record], arrays


def _runs(array: npt.NDArray[Any]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[Any]]:
    """Lengths and values of the runs of equal elements."""
    edges = np.flatnonzero(array[1:] != array[:-1]) + 1
    starts = np.concatenate([np.zeros(min(array.size, 1), np.int64), edges])
    return np.diff(starts, append=array.size).astype(_LENGTH), array[starts]


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)
