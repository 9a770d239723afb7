"""Collection: order, determinism, faults that mask, and live episodes that equal rendered ones."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from rollout.collect import Clock, EpisodeSpec, collect
from rollout.engines.scripted import ScriptedEngine
from rollout.errors import (
    EngineError,
    HarnessError,
    SandboxDead,
    SandboxUnavailable,
    TransferError,
    VerifierError,
)
from rollout.harness import HARNESSES, Limits, public_view, render, shell_chat
from rollout.sandbox.bubblewrap import BubblewrapBackend
from rollout.tasks import predicates
from rollout.tasks.catalog.generate import make_task
from rollout.tasks.catalog.suites import generate_suite
from rollout.tasks.harbor.protocol import verify_task
from tests.shell_world import CHAT, TASK, engine, spec

SOLVE = ("wc -l < note > total", "cat total", "mv note docs", "done")


def run(scripts, specs, *, backend=None, verify=verify_task, engine_of=engine, **options):
    async def go():
        box = backend or BubblewrapBackend()
        try:
            return await collect(
                specs,
                engine=engine_of(scripts),
                backend=box,
                chat=options.pop("chat", CHAT),
                verify=verify,
                run_seed=options.pop("run_seed", 0),
                **options,
            )
        finally:
            await box.aclose()

    return asyncio.run(go())


def one(commands, harness="general", **options):
    episode = spec(harness)
    return run({episode.id: commands}, [episode], **options)[0]


class Flaky(BubblewrapBackend):
    """A real backend whose n-th sandboxes fail at a given call."""

    def __init__(self, call, error, failing):
        self.inner, self.call, self.error, self.failing = BubblewrapBackend(), call, error, failing
        self.started = 0
        self.alive: set[object] = set()
        self.most_alive = 0

    async def start(self, spec):
        number = self.started
        self.started += 1
        if self.call == "start" and number in self.failing:
            raise self.error
        box = await self.inner.start(spec)
        self.alive.add(box)
        self.most_alive = max(self.most_alive, len(self.alive))
        close = box.close

        async def closed():
            await close()
            self.alive.discard(box)

        async def fail(*args, **kwargs):
            raise self.error

        box.close = closed
        if number in self.failing and self.call != "start":
            setattr(box, self.call, fail)
        return box

    async def aclose(self):
        await self.inner.aclose()


# --- one episode ----------------------------------------------------------------------------


def test_a_solved_task_is_a_strict_success_and_an_untouched_one_scores_zero():
    solved, idle = one(SOLVE), one(("done",))
    assert (solved.finish, solved.verdict.strict_success) == ("done", True)
    assert (idle.finish, idle.verdict.progress) == ("done", 0.0)
    assert [turn.observation for turn in solved.turns] == ["", "3", "", ""]


@pytest.mark.parametrize("harness", HARNESSES)
def test_a_live_episode_has_the_tokens_of_its_rendering(harness):
    words = {"stepwise": ("next", "next")}.get(harness, ("done",))
    commands = ("wc -l < note > total", "cat nowhere", "cat note", *words)
    live = one(commands, harness)
    outputs = {"cat note": (b"alpha\nbeta\nalpha\n", 0), "cat nowhere": (b"cat: no file\n", 1)}
    public = public_view(TASK)
    shown = render(
        HARNESSES[harness],
        CHAT,
        SimpleNamespace(
            instruction=public.instruction,
            steps=public.steps,
            listing=public.listing,
            turns=[
                SimpleNamespace(command=c, stdout=o, exit_code=x)
                for c, (o, x) in ((c, outputs.get(c, (b"", 0))) for c in commands)
            ],
        ),
    )
    np.testing.assert_array_equal(live.token_ids, shown.token_ids)
    np.testing.assert_array_equal(live.acted_t, shown.acted_t)
    np.testing.assert_array_equal(live.turn_t, shown.turn_t)


def test_an_agents_own_time_out_is_graded():
    slow = one((*SOLVE[:3], "sleep 60", "done"), limits=Limits(command_s=0.3))
    assert slow.fault is None
    assert slow.verdict.strict_success
    assert slow.turns[3].status == "timeout"
    assert slow.turns[3].observation == "err timeout"


def test_an_episode_at_its_turn_limit_is_graded():
    cut = one(SOLVE, limits=Limits(turns=3))
    assert (cut.finish, cut.verdict.strict_success) == ("turn-limit", True)


def test_the_engines_context_bounds_an_episode():
    prompt = len(CHAT.prompt(TASK.instruction))
    cut = one(SOLVE, engine_of=lambda s: engine(s, context_len=prompt + 12))
    assert cut.finish == "context-limit"
    assert len(cut.token_ids) <= prompt + 12
    assert cut.verdict.progress < 1


def test_a_record_tells_where_it_comes_from_and_where_time_went():
    record = one(SOLVE, run_seed=5)
    assert (record.engine, record.task_id, record.family) == ("scripted", "count-1", "count")
    assert record.provenance["run_seed"] == "5"
    assert record.provenance["role"] == "actor"
    assert set(record.timings) == {"generate", "sandbox", "verify"}


# --- many -----------------------------------------------------------------------------------


def test_results_stand_in_the_order_of_the_specs_whatever_ends_first():
    specs = [spec(sample=i) for i in range(6)]
    scripts = {s.id: (f"sleep 0.{6 - i}", "done") for i, s in enumerate(specs)}
    ended = []
    results = run(
        scripts, specs, wave=4, progress=lambda done, n, t: ended.append((done, n, t.sample))
    )
    assert [t.sample for t in results] == list(range(6))
    assert [done for done, _, _ in ended] == [1, 2, 3, 4, 5, 6]
    assert [sample for _, _, sample in ended][:4] == [3, 2, 1, 0]


def test_waves_never_open_more_sessions_than_the_engine_has():
    specs = [spec(sample=i) for i in range(7)]
    results = run(
        {s.id: SOLVE for s in specs}, specs, engine_of=lambda s: engine(s, max_sessions=3)
    )
    assert all(t.verdict.strict_success for t in results)


def test_no_more_sandboxes_live_than_allowed_and_none_is_left():
    specs = [spec(sample=i) for i in range(8)]
    backend = Flaky("start", None, set())
    run({s.id: SOLVE for s in specs}, specs, backend=backend, wave=2, max_live=3)
    assert backend.started == 8
    assert backend.most_alive <= 3
    assert not backend.alive


def test_each_episode_has_a_sandbox_of_its_own():
    specs = [spec(sample=i) for i in range(2)]
    first, second = run({s.id: ("ls", *SOLVE) for s in specs}, specs, wave=1)
    assert first.turns[0].observation == second.turns[0].observation == "docs note old"


def test_a_repeat_gives_the_same_episodes_and_another_seed_only_other_seeds():
    specs = [spec(h, i) for h in ("general", "survey") for i in range(2)]
    scripts = {s.id: SOLVE for s in specs}
    first, again = run(scripts, specs), run(scripts, specs[::-1])[::-1]
    other = run(scripts, specs, run_seed=1)
    for a, b, c in zip(first, again, other, strict=True):
        assert (a.id, a.seed, a.turns, a.verdict) == (b.id, b.seed, b.turns, b.verdict)
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        assert (a.id, a.turns) == (c.id, c.turns)
        assert a.seed != c.seed


def test_a_seed_depends_on_every_part_of_an_episodes_name():
    base = spec()
    others = [
        spec("survey"),
        spec(sample=1),
        spec(stage="rsr-1"),
        spec(iteration=1),
        spec(role="executor"),
    ]
    assert len({s.seed(0) for s in (base, *others)}) == 6
    # The trailer of `printf 0/base.0.actor.count-1.general.0 | gzip`, so no process changes it.
    assert base.seed(0) == 3469964147 & 0x7FFFFFFF
    assert spec(temperature=0.6).seed(0) == base.seed(0)


def test_wall_clock_is_booked_once():
    specs = [spec(sample=i) for i in range(4)]
    clock = Clock()
    run({s.id: ("sleep 0.2", "done") for s in specs}, specs, clock=clock)
    assert clock.sandbox >= 0.2
    assert clock.generate + clock.sandbox + clock.verify <= clock.wall < 0.8 + clock.sandbox


def test_two_specs_of_the_same_episode_are_refused():
    with pytest.raises(HarnessError, match="the same task"):
        run({}, [spec(), spec()])


def test_an_unknown_harness_is_refused():
    with pytest.raises(HarnessError, match="no harness 'tmux'; there are general, survey"):
        run({}, [spec("tmux")])


# --- faults ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("start", SandboxUnavailable("no room")),
        ("put_files", TransferError("cut")),
        ("exec", SandboxDead("gone")),
        ("snapshot", TransferError("cut")),
    ],
)
def test_a_sandbox_fault_is_tried_again_and_leaves_no_trace(call, error):
    specs = [spec(sample=i) for i in range(3)]
    scripts = {s.id: SOLVE for s in specs}
    backend = Flaky(call, error, {1})
    results = run(scripts, specs, backend=backend, max_starts=1)
    assert backend.started == 4
    assert [t.verdict.strict_success for t in results] == [True] * 3
    calm = run(scripts, specs)
    for a, b in zip(results, calm, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
    assert not backend.alive


@pytest.mark.parametrize("call", ["exec", "snapshot"])
def test_a_sandbox_fault_that_stays_masks_and_never_scores(call):
    backend = Flaky(call, SandboxDead("gone"), set(range(1, 9)))
    specs = [spec(sample=i) for i in range(3)]
    results = run({s.id: SOLVE for s in specs}, specs, backend=backend, max_starts=1)
    assert results[0].verdict.strict_success
    for masked in results[1:]:
        assert (masked.finish, masked.verdict) == ("fault", None)
        assert (masked.fault.kind, masked.fault.message) == ("sandbox-dead", "gone")
    assert backend.started == 3 + 2
    assert not backend.alive


def test_a_verifier_fault_masks_and_is_not_tried_again():
    async def broken(task, tree, backend):
        raise VerifierError("manifest without checks")

    backend = Flaky("start", None, set())
    masked = one(SOLVE, verify=broken, backend=backend)
    assert (masked.fault.kind, masked.verdict) == ("verifier", None)
    assert backend.started == 1


def test_checks_that_run_commands_are_judged_in_a_sandbox_of_their_own():
    # One exit status (binary), and what a program of the agent prints for hidden inputs.
    tasks = [make_task("script_exit0", 1), generate_suite("rebuild", 0)[0]]
    assert all(predicates.runs_of(c.predicate for c in task.checks) for task in tasks)
    shell = shell_chat(text for task in tasks for text in (task.instruction, *task.oracle))
    specs = [spec(task=task, sample=i) for task in tasks for i in range(2)]
    scripts = {
        episode.id: [
            shell.action(command)
            for command in ((*episode.task.oracle, "done") if episode.sample else ("ls", "done"))
        ]
        for episode in specs
    }
    backend = Flaky("start", None, set())

    def said(scripts):
        vocabulary = shell.tokenizer.vocab_size
        return ScriptedEngine(scripts, vocab_size=vocabulary, context_len=4096, max_sessions=8)

    results = run(
        scripts, specs, backend=backend, engine_of=said, chat=shell, limits=Limits(context=4096)
    )
    assert [r.fault for r in results] == [None] * 4
    assert [r.verdict.strict_success for r in results] == [False, True, False, True]
    assert all(r.verdict.progress == 0 for r in results[::2])
    assert backend.started == 8
    assert not backend.alive


def test_an_engine_fault_of_one_episode_masks_it():
    specs = [spec(sample=i) for i in range(2)]
    whole, cut = run({specs[0].id: SOLVE, specs[1].id: SOLVE[:2]}, specs)
    assert whole.verdict.strict_success
    assert (cut.fault.kind, cut.verdict) == ("engine", None)
    assert [turn.command for turn in cut.turns] == list(SOLVE[:2])


@pytest.mark.parametrize("n", [1, 4])
def test_sandboxes_that_never_start_are_an_error_and_no_masked_run(n):
    backend = Flaky(
        "start", SandboxUnavailable("user namespaces are off", "allow them"), {*range(9)}
    )
    specs = [spec(sample=i) for i in range(n)]
    with pytest.raises(SandboxUnavailable, match="user namespaces are off; allow them"):
        run({s.id: SOLVE for s in specs}, specs, backend=backend)


def test_an_engine_that_never_answers_is_an_error():
    specs = [spec(sample=i) for i in range(2)]
    with pytest.raises(EngineError, match="ends after 1 outputs"):
        run({s.id: SOLVE[:1] for s in specs}, specs)


def test_a_bug_is_raised_and_closes_every_sandbox():
    async def bug(task, tree, backend):
        raise KeyError("total")

    backend = Flaky("start", None, set())
    specs = [spec(sample=i) for i in range(6)]
    with pytest.raises(KeyError, match="total"):
        run({s.id: SOLVE for s in specs}, specs, verify=bug, backend=backend, wave=2)
    assert not backend.alive


def test_a_spec_is_plain_data():
    assert spec() == EpisodeSpec(TASK, "general", 0, "base", 0)


@pytest.mark.parametrize(
    ("command", "status", "observation"),
    [
        ("exit 3", "shell-exit", "err exit"),
        ("cat", "ok", ""),
        ("echo 'open", "ok", "err 2"),
    ],
)
def test_an_agent_that_breaks_its_shell_goes_on_and_is_graded(command, status, observation):
    record = one((command, *SOLVE))
    assert (record.turns[0].status, record.turns[0].observation) == (status, observation)
    assert record.fault is None
    assert record.verdict.strict_success
