"""What the sandboxes of every backend share: one command at a time, and when no more can follow."""

from __future__ import annotations

import asyncio
import time

from rollout.errors import SandboxDead, SandboxPoisoned
from rollout.protocols import ExecResult, SandboxSpec
from rollout.sandbox.output import Output


class Session:
    """The persistent shell of one sandbox; a backend says how a command is run in it.

    Args:
      spec: what the sandbox is.
      enforced: the limits that hold.
    """

    def __init__(self, spec: SandboxSpec, enforced: frozenset[str]) -> None:
        self._spec = spec
        self._enforced = enforced
        self._lock = asyncio.Lock()
        self._poisoned = ""
        self._gone = ""
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._ooms = 0
        self._deadline = time.monotonic() + spec.lifetime_s

    @property
    def enforced(self) -> frozenset[str]:
        """What really holds."""
        return self._enforced

    async def exec(
        self, command: str, *, timeout_s: float = 10.0, max_output: int = 10_000
    ) -> ExecResult:
        """As `rollout.protocols.Sandbox.exec`."""
        async with self._lock:
            self._check_usable()
            output = Output(max_output)
            begun = time.monotonic()
            try:
                status, code = await self._run(command, timeout_s, output)
                if code == 137 and status != "timeout":
                    ooms = await self._oom_kills()
                    status, self._ooms = ("oom" if ooms > self._ooms else status), ooms
            except TimeoutError:
                self._poisoned = "its shell does not come back"
            except asyncio.CancelledError:
                self._poisoned = "a command was abandoned"
                raise
            if self._poisoned:
                raise self._unusable()
            return ExecResult(
                exit_code=None if status == "timeout" else code,
                output=output.value(),
                status=status,
                truncated=output.truncated,
                total_bytes=output.total,
                duration_s=time.monotonic() - begun,
            )

    async def close(self) -> None:
        """Remove the sandbox and verify that it is gone. Idempotent.

        Everybody who calls it waits for the end; cancelling a caller does not stop it.
        """
        if self._closed:
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        try:
            await asyncio.shield(self._closing)
        finally:
            if self._closing is not None and self._closing.done():
                self._closing = None

    async def _close(self) -> None:
        """End the sandbox, set `_closed` and give its place back.

        Raises:
          SandboxError: it could not be ended; another `close` tries again.
        """
        raise NotImplementedError

    async def _run(self, command: str, timeout_s: float, output: Output) -> tuple[str, int]:
        """Run a command; its status ("ok", "timeout" or "shell-exit") and exit code.

        Raises:
          TimeoutError: the shell does not come back.
          SandboxDead: the sandbox has ended.
        """
        raise NotImplementedError

    async def _oom_kills(self) -> int:
        """How many processes of the sandbox the kernel has killed for lack of memory."""
        raise NotImplementedError

    def _started(self) -> bool:
        """Whether the start is over."""
        raise NotImplementedError

    def _check_open(self) -> None:
        """Raise `SandboxDead` before the start and from the beginning of the end."""
        if self._closed or self._closing is not None or not self._started():
            raise SandboxDead("the sandbox is closed")

    def _check_usable(self) -> None:
        self._check_open()
        if self._gone:
            raise SandboxDead(self._gone)
        if self._poisoned:
            raise self._unusable()

    def _unusable(self) -> SandboxPoisoned:
        return SandboxPoisoned(f"the sandbox cannot be used any more: {self._poisoned}")

    def _dead(self, why: str = "its first process is gone") -> SandboxDead:
        """The error of a sandbox that has ended by itself, the reason found the first time."""
        if not self._gone:
            if time.monotonic() >= self._deadline - 1.5:
                why = f"its lifetime of {self._spec.lifetime_s:g} s is over"
            self._gone = f"the sandbox ended: {why}"
        return SandboxDead(self._gone)
