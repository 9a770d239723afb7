"""The bounded part of an output that is kept."""

from __future__ import annotations


class Output:
    """Keeps the first and the last part of a stream, and counts it.

    Args:
      max_bytes: bytes kept in all.
    """

    def __init__(self, max_bytes: int) -> None:
        self._tail_bytes = max_bytes // 2
        self._head_bytes = max_bytes - self._tail_bytes
        self._max_bytes = max_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        self.total += len(data)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            # Cut in large steps: once per byte would be quadratic.
            if len(self._tail) > 2 * self._tail_bytes + 65_536:
                del self._tail[: len(self._tail) - self._tail_bytes]

    @property
    def truncated(self) -> bool:
        """Whether something was left out."""
        return self.total > self._max_bytes

    def value(self) -> bytes:
        """What is kept."""
        excess = len(self._tail) - self._tail_bytes
        return bytes(self._head + self._tail[max(0, excess) :])
