"""A terminal of keystrokes inside a sandbox: tmux, for harnesses that type and look at a screen.

Only the outside of tmux is used, through the sandbox's own `exec`, so the terminal has every limit
of its sandbox, its output is bounded, and it ends with it. An exit code it has none to give.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import time
from collections.abc import Sequence

from rollout.errors import SandboxPoisoned, SandboxUnavailable
from rollout.protocols import Sandbox

START_TIMEOUT_S = 10.0
START_TRIES = 3
CALL_TIMEOUT_S = 10.0
CHUNK = 4000
"""Characters typed at a time: tmux refuses an order of more than 16 kB."""
POLL_S = 0.05


class Terminal:
    """A shell in a window, made by `Terminal.open`.

    Args:
      sandbox: started with `SandboxSpec(terminal=True)`.
      socket: of the tmux server, inside.
    """

    def __init__(self, sandbox: Sandbox, socket: str) -> None:
        self._sandbox = sandbox
        self._tmux = f"command tmux -u -S {socket} -f /dev/null"

    @classmethod
    async def open(cls, sandbox: Sandbox, *, columns: int = 160, lines: int = 40) -> Terminal:
        """Start a terminal.

        Args:
          sandbox: started with `SandboxSpec(terminal=True)`; a program in it is `tmux`.
          columns: width of the screen.
          lines: its height.

        Raises:
          SandboxUnavailable: there is no tmux in the sandbox, or it doesn't start.
          SandboxError: the sandbox is dead or poisoned.
        """
        said = ""
        for _ in range(START_TRIES):
            # A first start under load may hang; another socket is another server.
            terminal = cls(sandbox, f"/tmp/.terminal-{secrets.token_hex(4)}")
            ran = await sandbox.exec(
                f"{terminal._tmux} new-session -d -s main -x {columns} -y {lines} "
                "'exec bash --norc --noprofile' \\; "
                "set-option -g status off \\; set-option -g history-limit 10000",
                timeout_s=START_TIMEOUT_S,
            )
            if ran.status == "ok" and ran.exit_code == 0:
                return terminal
            said = " ".join(ran.output.decode("utf-8", "replace").split())
            if ran.exit_code == 127:
                break
        raise SandboxUnavailable(
            f"no terminal starts in the sandbox ({said[:200]})",
            "install tmux there: apt-get install tmux",
        )

    async def _call(self, arguments: str, max_output: int = 10_000) -> str:
        ran = await self._sandbox.exec(
            f"{self._tmux} {arguments}", timeout_s=CALL_TIMEOUT_S, max_output=max_output
        )
        if ran.status != "ok" or ran.exit_code:
            said = " ".join(ran.output.decode("utf-8", "replace").split())
            raise SandboxPoisoned(f"the sandbox's terminal is gone ({said[:200] or ran.status})")
        return ran.output.decode("utf-8", "replace")

    async def type(self, text: str) -> None:
        """Type characters as they are; a newline is the return key."""
        for at in range(0, len(text), CHUNK):
            lines = text[at : at + CHUNK].replace("\0", "").split("\n")
            for number, line in enumerate(lines):
                if number:
                    await self._call("send-keys -t main Enter")
                if line:
                    await self._call(f"send-keys -t main -l -- {shlex.quote(line)}")

    async def press(self, keys: Sequence[str]) -> None:
        """Press keys by tmux's names: "Enter", "C-c", "Escape", "Up"."""
        await self._call(f"send-keys -t main -- {shlex.join(keys)}")

    async def screen(self) -> str:
        """What the screen shows, without colours; lines end where their text does."""
        return await self._call("capture-pane -p -t main", 100_000)

    async def history(self, *, max_bytes: int = 100_000) -> str:
        """The screen and what has left it upwards: first and last half of at most `max_bytes`."""
        return await self._call("capture-pane -p -J -S - -t main", max_bytes)

    async def settled(self, *, quiet_s: float = 0.3, timeout_s: float = 10.0) -> str:
        """The screen, once it did not change for `quiet_s`, or when the time is over."""
        deadline = time.monotonic() + timeout_s
        seen, since = await self.screen(), time.monotonic()
        while (now := time.monotonic()) < deadline and now - since < quiet_s:
            await asyncio.sleep(POLL_S)
            if (shown := await self.screen()) != seen:
                seen, since = shown, time.monotonic()
        return seen

    async def close(self) -> None:
        """End the terminal and what runs in it. What ignores that ends with the sandbox."""
        await self._sandbox.exec(f"{self._tmux} kill-server", timeout_s=CALL_TIMEOUT_S)
