"""A two-command task, its tokenizer and scripts of episodes, for the tests of the acting side."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

from rollout.collect import EpisodeSpec
from rollout.engines.scripted import ScriptedEngine
from rollout.harness import shell_chat
from rollout.protocols import ExecResult
from rollout.records import Check, Entry, Task

STEPS = ("put the count of note into total", "move note to docs")
TASK = Task(
    id="count-1",
    family="count",
    tier="medium",
    split="train",
    seed=1,
    instruction=", then ".join(STEPS),
    steps=STEPS,
    files={"note": b"alpha\nbeta\nalpha\n", "old/plan": b"beta\n"},
    directories=("docs", "old"),
    checks=(
        Check("total", "effective", ("text", "total", "3\n")),
        Check("moved", "effective", ("moved", "note", "docs/note", "alpha\nbeta\nalpha\n")),
        Check("rest", "guard", ("text", "old/plan", "beta\n")),
    ),
    oracle=("wc -l < note > total", "mv note docs"),
)
CHAT = shell_chat((TASK.instruction, *TASK.oracle, "alpha beta old plan ls cat grep echo rm"))


def engine(scripts, *, max_sessions=128, context_len=512):
    """An engine that says these commands: session -> commands."""
    return ScriptedEngine(
        {session: [CHAT.action(c) for c in commands] for session, commands in scripts.items()},
        vocab_size=CHAT.tokenizer.vocab_size,
        context_len=context_len,
        max_sessions=max_sessions,
    )


def spec(harness="general", sample=0, task=TASK, **changes):
    """One episode of the task."""
    return EpisodeSpec(task, harness, sample, **{"stage": "base", "iteration": 0, **changes})


class DirectorySandbox:
    enforced = frozenset({"lifetime"})

    def __init__(self):
        self.root = Path(tempfile.mkdtemp())

    async def exec(self, command, *, timeout_s=10.0, max_output=10_000):
        started = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            command,
            cwd=self.root,
            start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            return ExecResult(None, b"", "timeout", False, 0, time.perf_counter() - started)
        seconds = time.perf_counter() - started
        return ExecResult(process.returncode, output[:max_output], "ok", False, 0, seconds)

    async def put_files(self, files, *, directories=(), modes=None):
        for d in directories:
            (self.root / d).mkdir(parents=True, exist_ok=True)
        for path, data in files.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_bytes(data)

    async def get_file(self, path, *, max_bytes=1_000_000):
        return (self.root / path).read_bytes()

    async def snapshot(self, *, max_bytes=16_000_000):
        return {
            str(p.relative_to(self.root)): Entry("directory", 0o755)
            if p.is_dir()
            else Entry("file", p.stat().st_mode & 0o777, p.read_bytes())
            for p in sorted(self.root.rglob("*"))
        }

    async def close(self):
        shutil.rmtree(self.root, ignore_errors=True)


class DirectoryBackend:
    name = "directory"

    async def start(self, spec):
        return DirectorySandbox()

    async def aclose(self):
        pass
