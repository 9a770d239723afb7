"""The catalogue: counts, determinism, gates, siblings, splits, difficulty and suites."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections import Counter

import pytest

from rollout.errors import TaskError, UserError
from rollout.records import SPLITS, TIERS, Check, Entry
from rollout.tasks import predicates
from rollout.tasks.catalog import generate as catalog
from rollout.tasks.catalog.difficulty import measures, tier_of
from rollout.tasks.catalog.generate import (
    FAMILIES,
    HELD_OUT,
    TASKS_PER_FAMILY,
    generate,
    make_task,
    sibling,
    split_for,
)
from rollout.tasks.catalog.lexicon import OPEN_WORDS, RESERVED_WORDS, WORDS
from rollout.tasks.catalog.suites import STEEP_FROM, SUITES, generate_suite
from rollout.tasks.catalog.world import Family, World
from rollout.tasks.verifier import judge

DIGEST = "ae1f596ef6cc304d9b95f24869f1dbc51da6d61e317cbfb1b827de71aebb10a0"
"""sha256 over the pool of seed 0; a change of it changes every task that was ever generated."""


def digest(tasks) -> str:
    return hashlib.sha256(repr(tasks).encode()).hexdigest()


@pytest.fixture(scope="module")
def pool():
    return generate(0)


def untouched(task) -> dict[str, Entry]:
    tree = {path: Entry("directory", 0o755) for path in task.directories}
    return tree | {path: Entry("file", 0o644, data) for path, data in task.files.items()}


def test_the_pool_has_46_families_and_3000_different_tasks(pool):
    forms = Counter(f.form for f in FAMILIES.values())
    assert forms == {"checks": 40, "binary": 6}
    assert Counter(t.family for t in pool) == {
        name: TASKS_PER_FAMILY[f.form] for name, f in FAMILIES.items()
    }
    assert len(pool) == len({t.id for t in pool}) == 3000


def test_the_pool_of_a_seed_is_the_same_in_every_process(pool):
    assert digest(pool) == DIGEST
    program = (
        "import hashlib; from rollout.tasks.catalog.generate import generate;"
        "print(hashlib.sha256(repr(generate(0, {'log_triage': 5})).encode()).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == digest(generate(0, {"log_triage": 5}))


def test_a_larger_pool_extends_a_smaller_one_and_seeds_differ(pool):
    few = generate(0, {"copy_file": 3})
    assert few == tuple(t for t in pool if t.family == "copy_file")[:3]
    assert not {t.id for t in generate(1, {"copy_file": 60})} & {t.id for t in pool}


def test_untouched_every_effective_check_fails_and_every_guard_holds(pool):
    """But for checks of a command's outcome, which `trsi tasks check` tries in sandboxes."""
    for task in pool:
        judged = [c for c in task.checks if predicates.run_of(c.predicate) is None]
        if any(c.kind == "effective" for c in judged):
            for result in judge(judged, untouched(task)).results:
                assert result.passed == (result.kind == "guard"), (task.id, result.id)


def test_forms_have_the_checks_they_promise(pool):
    for task in pool:
        effective = [c for c in task.checks if c.kind == "effective"]
        if FAMILIES[task.family].form == "binary":
            assert [c.predicate[0] for c in task.checks] == ["exit"]
        else:
            assert 1 <= len(effective) <= 12
            assert task.checks[-1].id == "nothing-else"
            assert not predicates.runs_of(c.predicate for c in task.checks)


def test_the_answer_is_not_in_the_request(pool):
    """Where the check is about words of the contents, none of them is in the request."""
    for task in pool:
        if task.family in ("json_get_field", "treasure_chain", "find_by_name_and_move"):
            told = set(re.findall(r"[a-z]+", task.instruction))
            wanted = {c.predicate[-1].strip() for c in task.checks if c.id.startswith("goal-right")}
            assert not wanted & told, task.id


@pytest.mark.parametrize("text", ["exit 0\n", "exec true\n", "return 0\n", "kill $$\n"])
def test_a_sourced_file_cannot_end_its_check_with_success(tmp_path, text):
    task = make_task("env_file_source", 1)
    (check,) = task.checks

    def status() -> int:
        return subprocess.run(["/bin/sh", "-c", check.predicate[1]], cwd=tmp_path).returncode

    name = re.search(r"> (\S+)$", task.oracle[-1])[1]
    subprocess.run(["/bin/sh", "-c", task.oracle[-1]], cwd=tmp_path, check=True)
    assert status() == 0
    (tmp_path / name).write_text(text)
    assert status() != 0


# --- splits -----------------------------------------------------------------------------------


def test_splits_follow_from_family_and_seed_and_held_out_families_are_test_only(pool):
    assert {t.split for t in pool} == set(SPLITS)
    for task in pool:
        assert task.split == split_for(task.family, task.seed)
        if task.family in HELD_OUT:
            assert task.split == "test"
    assert len(HELD_OUT) == 4
    others = Counter(t.split for t in pool if t.family not in HELD_OUT)
    share = others["train"] / others.total()
    # 0.7 of 2,720 tasks: a standard deviation is 0.9 %; the bound is four.
    assert abs(share - 0.7) < 0.035


def test_test_tasks_speak_in_words_that_training_never_uses(pool):
    assert not set(OPEN_WORDS) & set(RESERVED_WORDS)
    assert len(RESERVED_WORDS) / len(WORDS) == pytest.approx(0.2, abs=0.005)
    known, reserved = set(OPEN_WORDS), set(RESERVED_WORDS)
    for task in pool:
        text = task.instruction + " ".join(task.files) + b" ".join(task.files.values()).decode()
        used = set(re.findall(r"[a-z]+", text.lower()))
        assert not used & (known if task.split == "test" else reserved), task.id


def test_no_word_is_part_of_another_or_of_a_template():
    assert len(WORDS) >= 200
    assert not [(a, b) for a in WORDS for b in WORDS if a != b and a in b]
    templates = " ".join(text for f in FAMILIES.values() for text in f.templates)
    assert not set(re.findall(r"[a-z]+", templates)) & set(WORDS)


def test_every_family_has_paraphrases():
    for family in FAMILIES.values():
        assert 3 <= len(family.templates) <= 5
        fields = {frozenset(re.findall(r"{(\w+)}", text)) for text in family.templates}
        assert len({f - {"x"} for f in fields}) <= 2
        assert fields


# --- siblings -----------------------------------------------------------------------------------


SAME_CONTENTS = {"env_file_source", "make_dir", "nested_dir", "write_line", "touch_empty"}
"""Families whose results don't depend on contents."""


def test_a_sibling_asks_the_same_of_other_contents(pool):
    for task in pool[::7]:
        other = sibling(task)
        assert other.instruction == task.instruction
        assert other.split == task.split
        assert set(other.files) == set(task.files) or task.family not in SAME_CONTENTS
        if task.family not in SAME_CONTENTS:
            assert other.files != task.files
    with pytest.raises(UserError, match="family 'none' is unknown"):
        make_task("none", 0)


# --- difficulty ---------------------------------------------------------------------------------


def test_tiers_are_computed_and_all_are_there(pool):
    counts = Counter(t.tier for t in pool)
    assert set(counts) == set(TIERS)
    assert min(counts.values()) >= 150
    for task in pool:
        assert task.tier == tier_of(task.difficulty["score"])
    by_tier = {t: [x.difficulty["turns"] for x in pool if x.tier == t] for t in TIERS}
    means = [sum(by_tier[t]) / len(by_tier[t]) for t in TIERS]
    assert means == sorted(means)


def test_measures_by_hand():
    """Three commands; the second uses the first's product, the third a word nobody was told."""
    found = measures(
        "copy acorn.txt to badge.txt and sort it into candle",
        ["cp acorn.txt badge.txt", "sort badge.txt > canyon", "echo basil > canyon"],
        n_effective=2,
        distractors=3,
    )
    assert found["turns"] == 3
    assert found["chain"] == 3
    assert found["needs_observation"] == 1
    assert found["syntax"] == 4
    assert found["score"] == pytest.approx(1.5 + 1.0 + 3 + 1.5 + 0.6 + 0.3)
    plain = measures("make acorn", ["mkdir acorn"], n_effective=1, distractors=0)
    assert (plain["chain"], plain["needs_observation"]) == (1, 0)


# --- the gate -----------------------------------------------------------------------------------


def broken(build) -> Family:
    return Family("broken", ("do {f}",), build)


def _done_already(w: World):
    f, _ = w.source()
    w.do(f"touch {f}")
    w.goal("there", "file", f)
    return {"f": f}


def _command_without_proof(w: World):
    f, _ = w.source()
    w.do("true")
    w.goal("exit", "exit", "true")
    return {"f": f}


def _proof_that_holds(w: World):
    f, _ = w.source()
    w.do("true")
    w.goal("exit", "exit", "true")
    w.unmet.append(("file", f))
    return {"f": f}


def _bad_guard(w: World):
    f, _ = w.source()
    w.do(f"rm {f}")
    w.goal("gone", "absent", f)
    w.guard("none", "file", "nothing")
    return {"f": f}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_done_already, "goal-there is off"),
        (_command_without_proof, "nothing shows that its command fails untouched"),
        (_proof_that_holds, "passes untouched"),
        (_bad_guard, "keep-none is off"),
    ],
)
def test_a_task_that_passes_untouched_is_not_generated(monkeypatch, build, message):
    with pytest.raises(TaskError, match=message):
        catalog.build(broken(build), "k", seed=0, variant=0, split="train")
    monkeypatch.setitem(catalog.FAMILIES, "broken", broken(build))
    with pytest.raises(TaskError, match="only 0 of 2 different tasks found"):
        generate(0, {"broken": 2})


# --- suites -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SUITES))
def test_a_suite_is_of_its_size_for_test_only_and_not_in_the_pool(name, pool):
    tasks = generate_suite(name, 0)
    assert len(tasks) == len({t.id for t in tasks}) == SUITES[name].tasks
    assert {t.split for t in tasks} == {"test"}
    assert not {t.id for t in tasks} & {t.id for t in pool}
    assert tasks == generate_suite(name, 0)
    assert tasks[0] != generate_suite(name, 1)[0]


def test_suites_play_their_roles():
    steep = generate_suite("steep", 0)
    assert min(t.difficulty["score"] for t in steep) >= STEEP_FROM
    for task in generate_suite("marathon", 0):
        stages = [c for c in task.checks if c.kind == "effective"]
        assert 6 <= len(stages) == len(task.oracle) <= 12
        assert task.difficulty["chain"] == len(stages)
    for task in generate_suite("rebuild", 0):
        hidden = [c.predicate for c in task.checks if c.predicate[0] == "prints"]
        shown = {data.decode() for data in task.files.values()}
        assert len(hidden) == 5
        assert not {given for _, _, given, _ in hidden} & shown
    with pytest.raises(UserError, match="allowed: open, steep, marathon, rebuild"):
        generate_suite("none", 0)


def test_progress_in_a_marathon_is_the_share_of_stages():
    task = generate_suite("marathon", 0)[0]
    tree = untouched(task)
    effective = [c for c in task.checks if c.kind == "effective"]
    first = effective[0].predicate
    tree[first[1]] = Entry("file", 0o644, first[2].encode())
    assert judge(task.checks, tree).progress == pytest.approx(1 / len(effective))


# --- the new predicates -------------------------------------------------------------------------


def holds(*predicate: str, **files: str) -> bool:
    tree = {k: Entry("file", 0o644, v.encode()) for k, v in files.items()}
    tree["link"] = Entry("symlink", 0o777, b"a")
    return judge([Check("c", "effective", predicate)], tree).strict_success


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        (("file", "a"), True),
        (("file", "link"), False),
        (("lines", "a", "x y\nz\n"), True),
        (("lines", "a", "x y\nz"), True),
        (("lines", "a", "z\n"), False),
        (("lines", "link", "x y\nz\n"), False),
        (("contains", "a", "\nz"), True),
        (("contains", "a", "q"), False),
        (("lacks", "a", "q", "r"), True),
        (("lacks", "a", "q", "x"), False),
        (("lacks", "none", "q"), False),
        (("link", "link", "b", "a"), True),
        (("link", "link", "b"), False),
        (("link", "a", "a"), False),
        (("json", "j", '{"b": [1], "a": "x"}'), True),
        (("json", "j", '{"a": "x", "b": [1.0]}'), False),
        (("json", "j", '{"a": "x", "b": [true]}'), False),
        (("json", "a", "1"), False),
        (("archive", "a", "x", "y"), False),
    ],
)
def test_predicates_on_text(predicate, expected):
    assert holds(*predicate, a="x y  \nz\n\n", j='{"a": "x", "b": [1]}') is expected


def test_hostile_json_and_archives_are_failures_not_faults():
    assert not holds("json", "a", "1", a="[" * 100_000)
    assert not holds("archive", "a", "x", "y", a="\x1f\x8b" + "x" * 100)
