"""Memory that compilation leaves is given back, and only inside the block."""

from __future__ import annotations

import ctypes
from pathlib import Path

import jax.monitoring
import pytest

from trsi_jax.memory import COMPILED, trimmed_after_compilation

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc's malloc_trim"
)


def _anonymous_mb() -> float:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def _leave_garbage() -> int:
    """Free 64 MB below a block that is kept, as a compiler's leftovers lie; where that one is."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    blocks = [libc.malloc(64 * 1024) for _ in range(1024)]
    for block in blocks:
        ctypes.memset(block, 1, 64 * 1024)
    kept: int = libc.malloc(64 * 1024)
    for block in blocks:
        libc.free(block)
    return kept


@pytest.mark.parametrize(
    ("event", "seconds", "returned"),
    [(COMPILED, 2.0, True), (COMPILED, 0.01, False), ("/another/event", 2.0, False)],
)
def test_freed_pages_go_back_after_a_long_compilation(
    event: str, seconds: float, returned: bool
) -> None:
    ctypes.CDLL(None).malloc_trim(0)
    with trimmed_after_compilation():
        kept = _leave_garbage()
        held = _anonymous_mb()
        jax.monitoring.record_event_duration_secs(event, seconds)
        gone = held - _anonymous_mb()
    assert (gone > 48) == returned, f"{gone:.0f} of 64 MB went back"
    ctypes.CDLL(None).free(ctypes.c_void_p(kept))


def test_jax_tells_of_its_compilations_by_this_name() -> None:
    told = []
    jax.monitoring.register_event_duration_secs_listener(
        listen := lambda event, *_, **__: told.append(event)
    )
    try:
        jax.jit(lambda x: x * 3 + 1).lower(1.0).compile()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert COMPILED in told


def test_the_listener_is_gone_after_the_block() -> None:
    ctypes.CDLL(None).malloc_trim(0)
    with trimmed_after_compilation():
        pass
    kept = _leave_garbage()
    held = _anonymous_mb()
    jax.monitoring.record_event_duration_secs(COMPILED, 2.0)
    assert held - _anonymous_mb() < 48
    ctypes.CDLL(None).free(ctypes.c_void_p(kept))
