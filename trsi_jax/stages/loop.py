"""An event loop in a thread: what runs in it goes on while the caller trains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Protocol, Self, TypeVar

T = TypeVar("T")


class Runner(Protocol):
    """Runs one coroutine after the other on one event loop; `asyncio.Runner` is one."""

    def run(self, coro: Coroutine[Any, Any, T], /) -> T:
        """Run to its end."""
        ...


class LoopThread:
    """A `Runner` whose loop also runs between two calls."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="trsi-loop", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel what is left, and end the thread."""
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, coro: Coroutine[Any, Any, T], /) -> T:
        """Run a coroutine on the loop and wait for it; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(coro, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
