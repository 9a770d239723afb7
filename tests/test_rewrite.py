"""Runbooks hold the work and no leaks; only replays that verify and are grounded are kept."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rollout.collect import collect
from rollout.protocols import Runbook
from rollout.records import CheckResult, Trajectory, Turn, Verdict
from rollout.rewrite.audit import RuleReviewer, ungrounded
from rollout.rewrite.planner import RulePlanner
from rollout.rewrite.replay import FUNNEL, rewrite
from rollout.rewrite.runbook import MAX_COMMANDS, problems
from rollout.rewrite.shell import is_view, literals
from rollout.sandbox.bubblewrap import BubblewrapBackend
from rollout.tasks.harbor.protocol import verify_task
from tests.shell_world import CHAT, TASK, engine, spec

PLANNER = RulePlanner({TASK.id: TASK.instruction, "hunt": "delete the file with beta"})
FILES = (*TASK.files, *TASK.directories)
SUCCESS = Verdict((CheckResult("total", "effective", True),))
FAILURE = Verdict((CheckResult("total", "effective", False),))


def trajectory(*turns, task_id=TASK.id, verdict=SUCCESS, name="t"):
    """A record with these (command, observation[, exit code[, status]]) turns and no tokens."""
    made = [Turn(*turn) if len(turn) > 2 else Turn(*turn, 0) for turn in turns]
    none = np.zeros(0, np.int32)
    return Trajectory(
        id=name, task_id=task_id, family="f", tier="easy", split="train", harness="survey",
        stage="base", iteration=0, sample=0, seed=0, engine="", temperature=1.0, token_ids=none,
        acted_t=none.astype(bool), logprob_t=none.astype(np.float32), turn_t=none,
        weight_version_t=none, turns=tuple(made), finish="done", verdict=verdict,
    )  # fmt: skip


def plan(*turns, **changes):
    runbook = PLANNER.plan(trajectory(*turns, **changes))
    return runbook and runbook.commands


def reasons(*commands, instruction=TASK.instruction):
    runbook = Runbook(TASK.id, "t", commands)
    return [r.split(":")[0] for r in RuleReviewer().review(instruction, FILES, runbook).reasons]


# --- planner --------------------------------------------------------------------------------


def test_what_did_the_work_stays_in_order():
    assert plan(("mkdir a", ""), ("mv note a", "")) == ("mkdir a", "mv note a")


@pytest.mark.parametrize(
    "useless",
    [
        ("next", "step: move", None, "control"),
        ("done", "", None, "control"),
        ("", "err empty", None, "control"),
        ("mkdir docs", "err 1", 1),
        ("sleep 60", "err timeout", None, "timeout"),
        ("exit", "err exit", 0, "shell-exit"),
        ("mkdir a", "", 0),
        ("cat note", "alpha", 0),
        ("ls", "docs note old", 0),
        ("wc -l < note", "3", 0),
        ("sed s/a/b/ note", "blpha", 0),
        ("echo note", "note", 0),
        ("grep -rl beta | head -1", "old/plan", 0),
    ],
)
def test_what_did_nothing_goes(useless):
    assert plan(("mkdir a", ""), useless, ("mv note a", "")) == ("mkdir a", "mv note a")


def test_a_look_stays_where_a_later_command_needed_what_it_showed():
    turns = (("ls", "docs note old"), ("grep -rl beta", "old/plan"), ("rm old/plan", ""))
    assert plan(*turns, task_id="hunt") == ("grep -rl beta", "rm old/plan")


def test_a_look_stays_where_a_later_look_needed_what_it_showed():
    turns = (("ls", "old"), ("ls old", "plan"), ("rm old/plan", ""))
    assert plan(*turns, task_id="hunt") == ("ls", "ls old", "rm old/plan")


def test_a_look_that_shows_only_what_the_instruction_says_goes():
    assert plan(("grep -rl alpha", "note"), ("mv note docs", "")) == ("mv note docs",)


def test_what_the_agent_told_itself_is_no_look():
    assert plan(("echo plan", "plan"), ("rm old/plan", ""), task_id="hunt") == ("rm old/plan",)


def test_an_append_said_twice_is_meant_twice():
    assert plan(("echo a >> x", ""), ("echo a >> x", "")) == ("echo a >> x",) * 2


@pytest.mark.parametrize("turns", [(), (("ls", "note"),), (("", "err empty", None, "control"),)])
def test_nothing_that_changes_anything_is_no_runbook(turns):
    assert plan(*turns) is None


# --- shell ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "view"),
    [
        ("ls", True),
        ("sort note | uniq -c", True),
        ("grep alpha note 2>/dev/null", True),
        ("find . -name note", True),
        ("sort note > total", False),
        ("cat note | tee total", False),
        ("find . -name note -delete", False),
        ("find . -exec rm {} +", False),
        ("sed -i s/a/b/ note", False),
        ("sort -o note note", False),
        ("ls; rm note", False),
        ("cat note && mv note docs", False),
        ("echo `rm note`", False),
        ("cat $(rm note)", False),
        ('cat "$(rm note)"', False),
        ("cat $(ls)", True),
        ("cd docs", False),
        ("x=1", False),
        ("cat 'note", False),
        ("", False),
    ],
)
def test_a_view_changes_nothing(command, view):
    assert is_view(command) == view


@pytest.mark.parametrize(
    ("command", "written"),
    [
        ("echo 7 > total", {"7"}),
        ("echo 7", set()),
        ("echo -n 7 >> total", {"7"}),
        ("printf '7\\n' | tee total", {"7"}),
        ("x=7; echo $x > total", {"7"}),
        ("echo $((3 + 4)) > total", {"3", "4"}),
        ("for x in 7; do echo $x > total; done", {"7"}),
        ("echo 7$ > total", {"7"}),
        ("echo $(echo 7) > total", {"7"}),
        ("echo $(cat $(echo note))>total", {"note"}),
        ("echo alpha > total 2>/dev/null", {"alpha"}),
        ("cat <<< 7 > total", {"7"}),
        ("wc -l < note > total", set()),
        ("echo $(wc -l < note) > total", set()),
        ("sed -i s/alpha/beta/ note", {"beta"}),
        ("sed s/alpha/beta/ note > total", {"beta"}),
        ("sed s/alpha/beta/ note", set()),
        ("awk 'BEGIN{print 7}' > total", {"7"}),
        ("cat note | sed s/.*/7/ > total", {"7"}),
    ],
)
def test_literals_are_what_a_line_writes_as_it_stands(command, written):
    assert literals(command) == written


# --- reviewer -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "commands",
    [
        TASK.oracle,
        ("wc -l note | cut -d' ' -f1 > total", "mv note docs/note"),
        ("for f in note; do wc -l < $f > total; done",),
        ("sed -i s/alpha/total/ note",),
        ("cat note 2>/dev/null > total",),
        ("cat old/plan", "echo beta > total"),
        ("cd docs && cp ../note .",),
        ("cat /app/note > total",),
        ("n=$(wc -l < note)", "echo $n > total"),
    ],
)
def test_honest_work_is_accepted(commands):
    assert reasons(*commands) == []


@pytest.mark.parametrize(
    ("reason", "command"),
    [
        # (a) places of the verifier
        ("verifier", "cat /tests/test.sh"),
        ("verifier", "cp /solution/solve.sh note"),
        ("verifier", "echo note > /logs/verifier/reward.txt"),
        ("verifier", "cat reward.json"),
        ("outside", "cat /etc/passwd"),
        # (b) and (c) values that had to be found or computed
        ("literal", "echo 7 > total"),
        ("literal", "printf 7 | tee total"),
        ("literal", "echo gamma >> note"),
        ("literal", "cat <<< 7 > total"),
        ("literal", "sed -i s/.*/7/ note"),
        ("literal", "awk 'BEGIN{print 7}' > total"),
        ("literal", "seq 7 7 > total"),
        # (d) prose
        ("prose", "first count the lines of note"),
        ("prose", "mv note docs # as asked"),
        ("prose", "# then move it"),
        ("prose", "echo the note is moved now"),
        ("prose", "python3 -c 'print(7)' > total"),
        ("prose", "cat 'note"),
        # actions of a harness
        ("harness", "next"),
        ("harness", "done"),
        # schema
        ("schema", ""),
        ("schema", "ls\nmv note docs"),
        ("schema", "ls " + "x" * 300),
    ],
)
def test_a_planted_leak_is_rejected_for_its_reason(reason, command):
    assert reason in reasons("wc -l < note > total", command)


def test_a_literal_of_the_instruction_is_no_leak():
    assert reasons("echo 7 > total", instruction="write 7 to total") == []


def test_a_runbook_is_bounded():
    assert problems(Runbook("a", "t", ("ls",) * MAX_COMMANDS)) == ()
    assert problems(Runbook("a", "t", ("ls",) * (MAX_COMMANDS + 1)))
    assert problems(Runbook("a", "t", ()))


# --- grounding ------------------------------------------------------------------------------


def test_values_must_come_from_the_instruction_or_an_earlier_output():
    hunt = replace(TASK, id="hunt", instruction="delete the file with beta")
    seen = trajectory(("grep -rl beta", "old/plan"), ("rm old/plan", ""))
    assert ungrounded(seen, hunt) == ()
    assert ungrounded(trajectory(("rm old/plan", "")), hunt) == ("old", "plan")
    late = trajectory(("rm old/plan", ""), ("grep -rl beta", "old/plan"))
    assert ungrounded(late, hunt) == ("old", "plan")
    told = trajectory(("echo old/plan", "old/plan"), ("rm old/plan", ""))
    assert ungrounded(told, hunt) != ()
    assert ungrounded(trajectory(("wc -l note", "3 note"), ("echo 3 > total", "")), TASK) == ()
    assert ungrounded(trajectory(("cat note", "alpha"), ("echo 3 > total", "")), TASK) == ("3",)


# --- replay ---------------------------------------------------------------------------------


def rewritten(scripts, specs, **options):
    """Real episodes of these scripts, then their rewrite; both in real sandboxes."""

    async def go():
        backend = BubblewrapBackend()
        shared = {"backend": backend, "chat": CHAT, "verify": verify_task, "run_seed": 0}
        try:
            found = await collect(specs, engine=engine(scripts), **shared)
            return found, await rewrite(
                found,
                {TASK.id: TASK},
                planner=PLANNER,
                reviewer=RuleReviewer(),
                stage="rsr-1",
                **shared,
                **options,
            )
        finally:
            await backend.aclose()

    return asyncio.run(go())


def test_successes_of_any_harness_become_verified_replays_under_the_general_one():
    scripts = {
        spec("stepwise").id: ("ls", "wc -l < note > total", "next", "mv note docs", "next"),
        spec("survey").id: ("mv note docs", "wc -l < docs/note > total", "cat total", "done"),
        spec("general").id: ("wc -l note > total", "mv note docs", "done"),
        spec("general", 1).id: ("cat note", "echo 3 > total", "mv note docs", "done"),
        spec("general", 2).id: ("mv note docs", "mv note docs", "done"),
    }
    specs = [spec("stepwise"), spec("survey"), *(spec(sample=i) for i in range(3))]
    found, result = rewritten(scripts, specs)
    assert [t.verdict.strict_success for t in found] == [True, True, False, True, False]
    assert [r.commands for r in result.runbooks] == [
        ("wc -l < note > total", "mv note docs"),
        ("mv note docs", "wc -l < docs/note > total"),
    ]
    # The fourth success wrote a computed result down: its look went, and the literal stood bare.
    assert result.funnel == dict(zip(FUNNEL, (5, 3, 3, 3, 2, 2, 2, 2, 2, 1), strict=True))
    assert result.rejections == {"literal": 1}
    for replay, source in zip(result.kept, found[:2], strict=True):
        assert (replay.harness, replay.stage, replay.finish) == ("general", "rsr-1", "done")
        assert replay.provenance["role"] == "executor"
        assert replay.provenance["source"] == source.id
        assert replay.verdict.strict_success
        assert replay.id != source.id
        assert not replay.logprob_t.any()
        acted = CHAT.tokenizer.decode(replay.token_ids[replay.acted_t].tolist())
        assert acted.endswith("done<|im_end|>")


def test_the_shortest_runbooks_of_a_task_are_kept():
    scripts = {
        spec(sample=0).id: ("touch x", "wc -l < note > total", "rm x", "mv note docs", "done"),
        spec(sample=1).id: ("wc -l < note > total; mv note docs", "done"),
        spec(sample=2).id: ("wc -l < note > total", "mv note docs", "done"),
    }
    specs = [spec(sample=i) for i in range(3)]
    _, result = rewritten(scripts, specs, per_task=2)
    assert [len(r.commands) for r in result.runbooks] == [1, 2]
    assert result.funnel["grounded"] == 3
    _, fewer = rewritten(scripts, specs, candidates=1)
    assert (fewer.funnel["accepted"], fewer.funnel["replayed"]) == (3, 1)


def test_a_runbook_that_only_worked_in_its_first_sandbox_is_not_kept():
    class Forgetful:
        def plan(self, source):
            return Runbook(source.task_id, source.id, ("mv note docs",))

    async def go():
        shared = {
            "backend": BubblewrapBackend(),
            "chat": CHAT,
            "verify": verify_task,
            "run_seed": 0,
        }
        return await rewrite(
            [trajectory(("mv note docs", ""))],
            {TASK.id: TASK},
            planner=Forgetful(),
            reviewer=RuleReviewer(),
            stage="rsr-1",
            **shared,
        )

    result = asyncio.run(go())
    assert (result.funnel["replayed"], result.funnel["verified"], result.kept) == (1, 0, ())


def test_failures_and_masked_episodes_are_no_sources():
    async def go():
        shared = {
            "backend": BubblewrapBackend(),
            "chat": CHAT,
            "verify": verify_task,
            "run_seed": 0,
        }
        return await rewrite(
            [trajectory(("mv note docs", ""), verdict=verdict) for verdict in (FAILURE, None)],
            {TASK.id: TASK},
            planner=PLANNER,
            reviewer=RuleReviewer(),
            stage="rsr-1",
            **shared,
        )

    result = asyncio.run(go())
    assert (result.funnel["trajectories"], result.funnel["successes"]) == (2, 0)
    assert result.kept == ()
