"""A two-command task, its tokenizer and scripts of episodes, for the tests of the acting side."""

from __future__ import annotations

from rollout.collect import EpisodeSpec
from rollout.engines.scripted import ScriptedEngine
from rollout.harness import shell_chat
from rollout.records import Check, Task

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
