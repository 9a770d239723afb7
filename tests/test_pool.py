"""The generated pool: gates, guards, structure, splits, determinism."""

import hashlib
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter

import pytest

from rollout.errors import ProtectedSplit, TaskError, UserError
from rollout.records import SPLITS, TIERS, Check, Entry
from rollout.tasks.pool import generate as generating
from rollout.tasks.pool import simulate
from rollout.tasks.pool.compose import compose
from rollout.tasks.pool.demonstrations import Teaching, demonstrations
from rollout.tasks.pool.families import FAMILIES, TIER_WEIGHTS, matches, tier_of
from rollout.tasks.pool.generate import generate, make_task
from rollout.tasks.pool.lexicon import MODES, NAMES, vocabulary
from rollout.tasks.pool.operations import OPERATIONS
from rollout.tasks.pool.source import PoolSource
from rollout.tasks.splits import split_of
from rollout.tasks.verifier import verify

SEEDS = range(12)
PIECES = re.compile(r" ?[a-z]+| ?[0-9]+|\n| ?[^a-z0-9\s]+")
TASKS = [make_task(family, seed) for family in FAMILIES for seed in SEEDS]


def start(task):
    return simulate.initial_tree(task.files, task.directories)


def replay(task, commands):
    """The tree after each command."""
    trees = [start(task)]
    for command in commands:
        trees.append(simulate.run(trees[-1], command).tree)
    return trees


def digest(tasks):
    return hashlib.sha256(repr(tasks).encode()).hexdigest()


def test_there_are_at_least_sixteen_families_in_four_tiers():
    assert len(FAMILIES) >= 16
    assert {f.tier for f in FAMILIES.values()} == set(TIERS)


def test_the_computed_tier_is_the_declared_one():
    for task in TASKS:
        assert task.tier == tier_of(task.difficulty["score"]) == FAMILIES[task.family].tier


def test_difficulty_is_measured_on_the_task_itself():
    for task in TASKS:
        assert task.difficulty["turns"] == len(task.oracle)
        assert task.difficulty["n_effective"] == sum(c.kind == "effective" for c in task.checks)
        assert task.difficulty["needs_observation"] == any("grep -rl" in c for c in task.oracle)


def test_doing_nothing_scores_exactly_zero():
    for task in TASKS:
        verdict = verify(task, start(task))
        assert not any(r.passed for r in verdict.results if r.kind == "effective")
        assert all(r.passed for r in verdict.results if r.kind == "guard")
        assert verdict.progress == 0.0


def test_progress_never_falls_along_the_reference_solution_and_ends_at_one():
    for task in TASKS:
        progress = [verify(task, tree).progress for tree in replay(task, task.oracle)]
        assert progress == sorted(progress)
        assert verify(task, replay(task, task.oracle)[-1]).strict_success


def test_every_command_of_the_reference_solution_is_needed():
    for task in TASKS:
        for i in range(len(task.oracle)):
            if task.oracle[i].startswith("grep -rl"):
                continue  # it only looks
            rest = task.oracle[:i] + task.oracle[i + 1 :]
            assert not verify(task, replay(task, rest)[-1]).strict_success, (task.oracle, i)


def test_typical_mistakes_are_never_a_success():
    """A sub-goal done in each of its wrong variants, the others right."""
    for family in FAMILIES:
        for seed in SEEDS:
            task = make_task(family, seed)
            plan = compose_again(family, seed)
            assert plan.commands == task.oracle
            for i, sub_goal in enumerate(plan.sub_goals):
                for wrong in sub_goal.mistakes():
                    script = [
                        c
                        for j, s in enumerate(plan.sub_goals)
                        for c in (wrong if i == j else s.commands)
                    ]
                    tree = replay(task, script)[-1]
                    assert not verify(task, tree).strict_success, (task.oracle, script)


def compose_again(family, seed):
    return compose(random.Random(f"task/{family}/{seed}"), FAMILIES[family].slots)


def test_side_damage_and_stray_files_fail_the_task():
    for task in TASKS:
        done = replay(task, task.oracle)[-1]
        stray = {**done, "stray": Entry("file", 0o644, b"")}
        assert not verify(task, stray).strict_success
        for path, entry in done.items():
            if any(p.startswith(f"{path}/") for p in done):
                continue
            without = {p: e for p, e in done.items() if p != path}
            assert not verify(task, without).strict_success, path
            if entry.kind == "file":
                spoiled = {**done, path: Entry("file", entry.mode, entry.data + b"x")}
                assert not verify(task, spoiled).strict_success, path


def test_a_symlink_never_stands_in_for_a_file_or_directory():
    for task in TASKS:
        done = replay(task, task.oracle)[-1]
        for path in done:
            if any(p.startswith(f"{path}/") for p in done):
                continue
            linked = {**done, path: Entry("symlink", 0o777, b"/app/elsewhere")}
            assert not verify(task, linked).strict_success, path


def test_hunted_names_occur_only_in_the_sandbox_output():
    for task in TASKS:
        for i, command in enumerate(task.oracle):
            if command.startswith("grep -rl"):
                found = simulate.run(replay(task, task.oracle[:i])[-1], command).stdout
                name = found.decode().strip()
                assert name not in PIECES.findall(task.instruction.replace(" ", ""))
                assert name not in re.findall(r"[a-z]+", task.instruction)
                assert name in task.oracle[i + 1].split()


def test_names_are_single_pieces_that_can_not_be_confused():
    words = {w for o in OPERATIONS.values() for t in o.templates for w in re.findall(r"[a-z]+", t)}
    assert len(set(NAMES)) == len(NAMES)
    for name in NAMES:
        assert PIECES.fullmatch(name)
        assert PIECES.fullmatch(f" {name}")
        assert not any(name != other and name in other for other in NAMES)
    commands = {"cat", "cp", "done", "echo", "err", "grep", "head", "ls", "mv", "next", "rm", "wc"}
    assert not set(NAMES) & (words | commands)


def test_the_vocabulary_is_small_and_closed():
    vocab = set(vocabulary())
    assert 120 <= len(vocab) <= 200
    used = set()
    for task in (*TASKS, *generate("train", 300, 3)):
        texts = [task.instruction, *task.steps, *(f"{c}\n" for c in task.oracle)]
        texts += [data.decode() for data in task.files.values()]
        used |= {p.removeprefix(" ") for text in texts for p in PIECES.findall(text)}
    stream = demonstrations(0, Teaching(exclude_families=()))
    for document in (next(stream) for _ in range(1500)):
        for turn in document.turns:
            texts = [f"{turn.command}\n", turn.stdout.decode(), f"err {turn.exit_code or 0}"]
            used |= {p.removeprefix(" ") for text in texts for p in PIECES.findall(text)}
    assert used <= vocab
    assert set(NAMES) | set(MODES) <= used


def test_paraphrases_are_all_used():
    texts = " | ".join(t.instruction for t in generate("train", 600, 0))
    for operation in OPERATIONS.values():
        assert len(operation.templates) >= 2
        for template in operation.templates:
            pattern = re.sub(r"\\\{\w\\\}", "[a-z0-9]+", re.escape(template))
            assert re.search(pattern, texts), template


def test_a_seed_decides_the_pool_in_any_process():
    code = (
        "import hashlib; from rollout.tasks.pool.generate import generate;"
        "print(hashlib.sha256(repr(generate('train', 60, 7)).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for salt in ("1", "2")
    }
    assert digests == {digest(generate("train", 60, 7))}
    assert digest(generate("train", 60, 8)) not in digests


def test_a_larger_pool_extends_a_smaller_one_and_ids_are_unique():
    small, large = generate("train", 50, 0), generate("train", 400, 0)
    assert large[:50] == small
    assert len({t.id for t in large}) == len({t.instruction for t in large}) == 400


def test_a_task_can_be_made_again_from_its_family_and_seed():
    for task in generate("validation", 20, 5):
        assert make_task(task.family, task.seed) == task


def test_splits_share_no_text_within_and_across_seeds():
    texts = {
        split: {t.instruction for seed in (0, 1) for t in generate(split, 150, seed)}
        for split in SPLITS
    }
    assert not texts["train"] & texts["validation"]
    assert not texts["train"] & texts["test"]
    assert not texts["validation"] & texts["test"]
    for split in SPLITS:
        assert {t.split for t in generate(split, 20, 0)} == {split}


def test_paraphrases_of_one_request_are_in_one_split():
    by_request = {}
    for task in [make_task("arrange", seed) for seed in range(4000)]:
        by_request.setdefault((task.checks[0].id, task.oracle), set()).add(
            (task.instruction, task.split)
        )
    paraphrased = [v for v in by_request.values() if len({text for text, _ in v}) > 1]
    assert len(paraphrased) > 50
    assert all(len({split for _, split in v}) == 1 for v in paraphrased)


def test_split_shares_are_seventy_ten_twenty():
    n = 20_000
    shares = Counter(split_of(f"request {i}") for i in range(n))
    for split, share in (("train", 0.7), ("validation", 0.1), ("test", 0.2)):
        # five standard deviations of a binomial share
        assert abs(shares[split] / n - share) < 5 * (share * (1 - share) / n) ** 0.5


def test_the_mix_of_tiers_follows_the_weights():
    n = 1500
    tiers = Counter(t.tier for t in generate("train", n, 1))
    for tier, share in TIER_WEIGHTS.items():
        # easy tasks repeat (and are then dropped) more often than long ones
        assert abs(tiers[tier] / n - share) < 0.06
    assert len({t.family for t in generate("test", 128, 1)}) == len(FAMILIES)


def test_the_time_of_generating_grows_with_the_number_of_tasks_not_with_its_square():
    def cpu_s(n: int) -> float:
        """Seconds of this thread alone: XLA's own threads may be busy with earlier tests."""
        times = []
        for _ in range(3):
            began = time.thread_time()
            assert len(generate("train", n, 11)) == n
            times.append(time.thread_time() - began)
        return min(times)

    cpu_s(10)
    # Eight times as many tasks take about 8 times as long; 64 times if each were compared to all.
    assert cpu_s(600) < 24 * cpu_s(75)


@pytest.mark.parametrize(
    ("purpose", "visible"), [("train", "train"), ("select", "validation"), ("evaluate", "test")]
)
def test_a_purpose_opens_its_own_split_only(purpose, visible):
    source = PoolSource(0, purpose=purpose, counts=dict.fromkeys(SPLITS, 5))
    assert source.tasks(visible) == generate(visible, 5, 0)
    for split in set(SPLITS) - {visible}:
        with pytest.raises(ProtectedSplit, match=split):
            source.tasks(split)


def test_the_trainer_gets_training_tasks_by_default():
    source = PoolSource(0, counts={"train": 3, "validation": 3, "test": 3})
    assert {t.split for t in source.tasks("train")} == {"train"}
    with pytest.raises(ProtectedSplit):
        source.tasks("test")


def test_user_errors_name_what_is_allowed():
    with pytest.raises(UserError, match="train, validation, test"):
        generate("dev", 1, 0)
    with pytest.raises(UserError, match="-1"):
        generate("train", -1, 0)
    with pytest.raises(UserError, match="arrange"):
        make_task("nonesuch", 0)
    with pytest.raises(UserError, match="evaluate"):
        PoolSource(0, purpose="peek")
    with pytest.raises(UserError, match="validation"):
        PoolSource(0).tasks("dev")


def test_a_task_that_passes_untouched_is_refused(monkeypatch):

    real = generating._checks
    monkeypatch.setattr(
        generating,
        "_checks",
        lambda plan: (*real(plan), Check("free", "effective", ("absent", "nowhere"))),
    )
    with pytest.raises(TaskError, match="free"):
        make_task("arrange", 0)


def test_a_task_whose_solution_fails_is_refused(monkeypatch):

    real = generating._checks
    monkeypatch.setattr(
        generating,
        "_checks",
        lambda plan: (*real(plan), Check("never", "effective", ("directory", "nowhere"))),
    )
    with pytest.raises(TaskError, match="never"):
        make_task("arrange", 0)


def test_plans_match_their_own_family_and_not_every_other():
    for family in FAMILIES.values():
        for seed in range(5):
            assert matches(compose_again(family.name, seed), family)
    assert not matches(compose_again("note", 0), FAMILIES["digest"])
    assert not matches(compose_again("furnish", 0), FAMILIES["tidy_up"])
