"""How many sandboxes may live, and how many may be starting, in one process."""

from __future__ import annotations

import asyncio


class Slots:
    """Shared by every backend that a process uses side by side.

    Args:
      live: sandboxes that may live at once; a further start waits.
      starting: starts at once.
    """

    def __init__(self, live: int = 256, starting: int = 8) -> None:
        self.live = asyncio.Semaphore(live)
        self.starting = asyncio.Semaphore(starting)
