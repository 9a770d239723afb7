"""The gates find what is unsolvable, free, flaky, faulty, unsupported or malformed; and the CLI."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rollout.protocols import Sandbox
from rollout.sandbox import make_backend
from rollout.tasks.catalog.generate import FAMILIES, generate
from rollout.tasks.catalog.suites import SUITES, generate_suite
from rollout.tasks.harbor import Step, open_dataset
from rollout.tasks.harbor.gates import check_all, sample
from rollout.tasks.harbor.protocol import (
    attempt,
    run_solution,
    start_attempt,
    take,
    verify_checks,
    verify_step,
)
from rollout.tasks.harbor.source import as_task
from rollout.tasks.harbor.support import plan
from rollout.tasks.harbor.write import write_dataset
from tests.harbor_tasks import TOML, write
from trsi_jax.cli.main import call

STEPS = (
    TOML
    + 'network_mode_ignored = "x"\n[[steps]]\nname = "one"\nmin_reward = 1.0\n'
    + '[[steps]]\nname = "two"\n'
)
DESCRIPTIONS = {"steps/one/instruction.md": "Write 42.", "steps/two/instruction.md": "Keep it."}

BAD: dict[str, dict[str, str]] = {
    "ok": {},
    "unsolvable": {"solution/solve.sh": "echo 41 > answer.txt\n"},
    "free": {"tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n"},
    "flaky": {
        # Passes at even nanoseconds of the clock only.
        "tests/test.sh": "echo $((10#$(date +%N) / 1000 % 2)) > /logs/verifier/reward.txt\n"
    },
    "faulty": {"tests/test.sh": "true\n"},
    "unsupported": {"task.toml": TOML + "gpus = 1\n"},
    "malformed": {"task.toml": TOML + "gpus = -1\n"},
}


def test_the_gates_tell_what_is_wrong_with_a_task(tmp_path):
    roots = [write(tmp_path / state, files) for state, files in BAD.items()]
    roots.append(write(tmp_path / "none"))
    (roots[-1] / "solution" / "solve.sh").unlink()
    steps = write(tmp_path / "steps", {"task.toml": STEPS, **DESCRIPTIONS})

    async def main():
        backend = make_backend()
        try:
            found = await check_all([*roots, steps], backend, jobs=4)
            # What one attempt of each kind cannot tell, eight can, but for a chance of 1 in 16,384.
            at = [root.name for root in roots].index("flaky")
            (found[at],) = await check_all([roots[at]], backend, jobs=1, repeats=8)
            return found
        finally:
            await backend.aclose()

    *found, none, multi = asyncio.run(main())
    assert {c.root.name: c.state for c in found} == {state: state for state in BAD}
    reasons = {c.state: c.reason for c in found}
    assert reasons["ok"] == ""
    assert "doing nothing gives reward 1" in reasons["free"]
    assert "the solution fails reward" in reasons["unsolvable"]
    assert "neither reward.json nor reward.txt" in reasons["faulty"]
    assert "environment.gpus = 1" in reasons["unsupported"]
    assert "task.toml: environment.gpus = -1" in reasons["malformed"]
    assert (none.state, multi.state) == ("unsolvable", "ok")
    assert "has no solution" in none.reason
    assert multi.unknown_keys == ("environment.network_mode_ignored",)


def test_a_step_below_its_least_reward_ends_the_attempt(tmp_path):
    root = write(tmp_path / "t", {"task.toml": STEPS, **DESCRIPTIONS})
    final = write(
        tmp_path / "f",
        {"task.toml": 'multi_step_reward_strategy = "final"\n' + STEPS, **DESCRIPTIONS},
    )

    async def main():
        backend = make_backend()
        tried: list[str] = []

        async def late(box: Sandbox, step: Step) -> None:
            tried.append(step.name)

        async def first_only(box: Sandbox, step: Step) -> None:
            await box.exec("echo 42 > answer.txt" if step.name == "one" else "rm answer.txt")

        found = []
        for path, act in ((root, late), (root, first_only), (final, first_only)):
            (task,) = open_dataset(path)
            found.append(await attempt(task, plan(task), backend, act))
        await backend.aclose()
        return tried, found

    tried, (stopped, half, last) = asyncio.run(main())
    assert tried == ["one"]
    assert (stopped.reward, stopped.success, len(stopped.outcomes)) == (0.0, False, 1)
    assert (half.reward, half.success, len(half.outcomes)) == (0.5, False, 2)
    assert last.reward == 0.0


@pytest.mark.slow
def test_every_family_and_suite_passes_its_gates_and_both_judges_agree(tmp_path):
    """The checker that a task carries, in a sandbox, and the host come to the same results."""
    tasks = generate(3, dict.fromkeys(FAMILIES, 1))
    for name in ("marathon", "rebuild"):
        tasks += generate_suite(name, 3)[:1]
    assert len(SUITES) == 4
    forms = {f.name: f.form for f in FAMILIES.values()}
    write_dataset(tmp_path / "set", "trsi/x", tasks, forms)
    texts: dict[str, int] = {}

    async def one(task, backend, gate) -> None:
        how, step = plan(task), task.steps[0]
        manifest = json.loads(task.tests(step)["checks.json"].data)["checks"]
        async with gate:
            for solve in (True, False):
                box = await start_attempt(how, backend, task, step)
                if solve:
                    ran = await run_solution(task, box, step)
                    texts[task.root.name.rpartition("-")[0]] = ran.total_bytes
                left = await take(box, how, task, step)
                inside = await verify_step(task, step, left, how, backend)
                assert inside.verdict.strict_success is solve, task.root.name
                checks = [c for c in _checks(task) if c.predicate]
                assert len(checks) == len(manifest)
                outside = await verify_checks(checks, left.tree, backend)
                assert outside.strict_success is solve
                assert inside.verdict.results == outside.results
                if not solve:
                    assert inside.reward == outside.progress == 0.0

    def _checks(task):
        from rollout.tasks.harbor.protocol import manifest_of

        return manifest_of(task, task.steps[0]).checks

    async def main() -> None:
        backend, gate = make_backend(), asyncio.Semaphore(4)
        try:
            async with asyncio.TaskGroup() as group:
                for task in open_dataset(tmp_path / "set"):
                    group.create_task(one(task, backend, gate))
        finally:
            await backend.aclose()

    asyncio.run(main())
    for family in FAMILIES.values():
        # 200 to 2,000 tokens at about four bytes each.
        if family.logs:
            assert 800 <= texts[family.name] <= 8000, (family.name, texts[family.name])


def test_a_sample_is_stratified_and_always_the_same():
    roots = [Path(f"set/{f}-{i:012x}") for f in ("copy_file", "grep_q") for i in range(9)]
    roots.append(Path("set/other"))
    first = sample(roots, 2, 0)
    assert [r.name.rpartition("-")[0] for r in first] == ["copy_file"] * 2 + ["grep_q"] * 2 + [""]
    assert sample(roots, 2, 0) == first != sample(roots, 2, 1)


def test_trsi_tasks_make_and_check(tmp_path, capsys):
    out = tmp_path / "set"
    assert call(["tasks", "make", "--seed", "0", "--suite", "marathon", "--out", str(out)]) == 0
    assert "wrote 46 tasks" in capsys.readouterr().out
    assert len(open_dataset(out)) == 46
    assert as_task(next(iter(open_dataset(out)))).split == "test"
    report = tmp_path / "report.json"
    assert call(["tasks", "check", str(out), "--sample", "2", "--out", str(report)]) == 0
    assert "2 ok " in capsys.readouterr().out
    assert [row["state"] for row in json.loads(report.read_text())] == ["ok", "ok"]
    bad = write(tmp_path / "bad", BAD["free"])
    assert call(["tasks", "check", str(bad)]) == 1
    assert "free" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tasks", "check", "nowhere"], "nowhere: no such file"),
        (["tasks", "make", "--seed", "0", "--suite", "x", "--out", "new"], "allowed: open, steep"),
        (["tasks", "make", "--seed", "0", "--out", "."], "is not an empty directory"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message, capsys):
    assert call(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
