"""Host memory that compilers leave behind.

XLA's CPU compiler allocates and frees hundreds of megabytes a program, in whichever thread
compiles. glibc keeps what is freed below the top of a thread's arena: three train steps of the
tiny preset, compiled one after another, left 0.7 GB that nothing used. `malloc_trim` gives such
pages back to the system.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import jax.monitoring

COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's event at the end of a compilation, with its seconds."""

_MIN_COMPILE_S = 1.0


@contextmanager
def trimmed_after_compilation() -> Iterator[None]:
    """Give freed pages back after every compilation of a second or more inside the block.

    Where the C library has no `malloc_trim` (musl, macOS), nothing is done. Values are not touched.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        yield
        return

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILED and duration_secs >= _MIN_COMPILE_S:
            trim(0)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
