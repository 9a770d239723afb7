"""Ends a container engine in the middle of a command: the command must be told at once.

    DOCKER_HOST=... TRSI_DOCKER_IMAGE=... python -m tests.engine_end PID

PID is the engine's own process, which is gone afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time

from rollout.errors import SandboxDead, SandboxError, SandboxUnavailable
from rollout.protocols import SandboxSpec
from rollout.sandbox import make_backend

TOLD_S = 5.0


async def main(engine: int) -> None:
    """Raise AssertionError unless command, files and the next start fail as they should."""
    backend = make_backend("docker")
    box = await backend.start(SandboxSpec())
    command = asyncio.ensure_future(box.exec("trap '' TERM; sleep 99", timeout_s=99.0))
    await asyncio.sleep(0.5)
    begun = time.monotonic()
    os.kill(engine, signal.SIGTERM)
    try:
        result = await command
    except SandboxDead as error:
        told, reason = time.monotonic() - begun, str(error)
    else:
        raise AssertionError(f"the command ended as if nothing were: {result}")
    assert told < TOLD_S, told
    for call in (box.exec("true"), box.get_file("x"), box.put_files({"x": b""})):
        try:
            await call
        except SandboxError:
            continue
        raise AssertionError("a dead sandbox answered")
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        try:
            await backend.start(SandboxSpec())
        except SandboxUnavailable as error:
            print(f"told after {told:.1f} s: {reason}; then: {error}")
            break
        except SandboxError:
            await asyncio.sleep(0.2)
    else:
        raise AssertionError("sandboxes start without an engine")
    with contextlib.suppress(SandboxError):
        await backend.aclose()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
