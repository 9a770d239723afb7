"""Over the generated pool: solved under any harness, a task comes out as a grounded replay."""

from __future__ import annotations

import asyncio

from rollout.collect import EpisodeSpec, collect
from rollout.engines.scripted import ScriptedEngine
from rollout.harness import HARNESSES, shell_chat
from rollout.rewrite.audit import RuleReviewer
from rollout.rewrite.planner import RulePlanner
from rollout.rewrite.replay import rewrite
from rollout.sandbox.bubblewrap import BubblewrapBackend
from rollout.tasks.harbor.protocol import verify_task
from rollout.tasks.pool.lexicon import vocabulary
from rollout.tasks.pool.source import PoolSource

CHAT = shell_chat(vocabulary())
TASKS = PoolSource(11).tasks("train")[:40]
BY_ID = {task.id: task for task in TASKS}
LOOKS = [task for task in TASKS if any(c.startswith("grep -rl") for c in task.oracle)]


def wander(task, harness):
    """The reference solution with a look, a failure and a repeat in between."""
    end = ["next"] * len(task.steps) if harness == "stepwise" else ["done"]
    return [task.oracle[0], "ls", "cat nowhere", *task.oracle[1:], *end]


def run(scripts):
    """Play (task, harness) -> commands live, then rewrite what succeeded."""

    async def go():
        specs = [EpisodeSpec(task, harness, 0, "base", 0) for task, harness, _ in scripts]
        engine = ScriptedEngine(
            {
                s.id: [CHAT.action(c) for c in commands]
                for s, (_, _, commands) in zip(specs, scripts, strict=True)
            },
            vocab_size=CHAT.tokenizer.vocab_size,
            context_len=128,
        )
        backend = BubblewrapBackend()
        shared = {"backend": backend, "chat": CHAT, "verify": verify_task, "run_seed": 0}
        try:
            found = await collect(specs, engine=engine, **shared)
            return found, await rewrite(
                found,
                BY_ID,
                planner=RulePlanner({t.id: t.instruction for t in TASKS}),
                reviewer=RuleReviewer(),
                stage="rsr-1",
                **shared,
            )
        finally:
            await backend.aclose()

    return asyncio.run(go())


def test_a_wandering_success_becomes_the_reference_solution():
    scripts = [
        (task, harness, wander(task, harness))
        for i, task in enumerate(TASKS)
        for harness in [list(HARNESSES)[i % len(HARNESSES)]]
    ]
    found, result = run(scripts)
    assert all(t.verdict.strict_success for t in found)
    assert {r.task_id: r.commands for r in result.runbooks} == {t.id: t.oracle for t in TASKS}
    assert result.funnel["kept"] == len(TASKS)
    assert result.rejections == {}


def test_a_lucky_name_is_dropped_and_a_found_one_kept():
    assert LOOKS
    lucky = [
        (t, "survey", [*(c for c in t.oracle if not c.startswith("grep -rl")), "done"])
        for t in LOOKS
    ]
    found, result = run(lucky)
    assert all(t.verdict.strict_success for t in found)
    assert (result.funnel["verified"], result.funnel["kept"]) == (len(LOOKS), 0)


def test_the_pools_words_are_single_tokens():
    for task in TASKS:
        for command in task.oracle:
            pieces = len(command.split()) + sum(map(command.count, "/-"))
            # "s/a/b/" is seven pieces and "-l" two, of which the word itself is counted already.
            extra = 2 if command.startswith("sed") else 0
            assert len(CHAT.tokenizer.encode(command)) <= pieces + extra
