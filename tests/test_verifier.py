"""The verifier judges snapshots only; faults of manifests and snapshots are typed errors."""

import math
from dataclasses import replace

import pytest

from rollout.errors import VerifierError
from rollout.records import Check, Entry
from rollout.tasks.verifier import judge

DIRECTORY = Entry("directory", 0o755)


def text(data: str, mode: int = 0o644) -> Entry:
    return Entry("file", mode, data.encode())


TREE = {
    "d": DIRECTORY,
    "d/moved": text("one\n"),
    "kept": text("two\n", 0o600),
    "link": Entry("symlink", 0o777, b"kept"),
    "pipe": Entry("other", 0o644),
    "binary": Entry("file", 0o644, b"\xff\xfe"),
}


@pytest.mark.parametrize(
    ("predicate", "holds"),
    [
        (("text", "kept", "two\n"), True),
        (("text", "kept", "two"), False),
        (("text", "absent", "x", "kept", "two\n"), True),
        (("text", "link", "two\n"), False),
        (("text", "pipe", ""), False),
        (("text", "d", ""), False),
        (("text", "binary", "x"), False),
        (("moved", "old", "d/moved", "one\n"), True),
        (("moved", "kept", "d/moved", "one\n"), False),
        (("moved", "old", "d/moved", "other\n"), False),
        (("absent", "old"), True),
        (("absent", "link"), False),
        (("directory", "d"), True),
        (("directory", "kept"), False),
        (("directory", "link"), False),
        (("mode", "600", "old", "kept"), True),
        (("mode", "644", "kept"), False),
        (("mode", "755", "d"), False),
        (("mode", "777", "link"), False),
        (("only", *TREE, "unused"), True),
        (("only", "d", "d/moved"), False),
    ],
)
def test_predicates_hold_for_real_files_and_directories_only(predicate, holds):
    verdict = judge([Check("c", "effective", predicate)], TREE)
    assert verdict.strict_success is holds
    assert verdict.progress == float(holds)


def test_progress_is_the_weighted_effective_share_times_the_guard_share():
    checks = [
        Check("a", "effective", ("absent", "old"), weight=3.0),
        Check("b", "effective", ("absent", "kept"), weight=1.0),
        Check("g", "guard", ("directory", "d")),
        Check("h", "guard", ("absent", "link")),
    ]
    verdict = judge(checks, TREE)
    assert verdict.n_effective == 2
    assert verdict.progress == pytest.approx(3 / 4 * 1 / 2)
    assert not verdict.strict_success
    backwards = judge(checks[::-1], TREE)
    assert backwards.progress == verdict.progress
    assert [r.id for r in backwards.results] == ["h", "g", "b", "a"]


GOOD = Check("a", "effective", ("absent", "x"))


@pytest.mark.parametrize(
    "checks",
    [
        [],
        [replace(GOOD, kind="guard")],
        [GOOD, GOOD],
        [replace(GOOD, kind="bonus")],
        [replace(GOOD, weight=0.0)],
        [replace(GOOD, weight=-1.0)],
        [replace(GOOD, weight=math.nan)],
        [replace(GOOD, weight=math.inf)],
        [replace(GOOD, predicate=())],
        [replace(GOOD, predicate=("exec", "true"))],
        [replace(GOOD, predicate=("absent",))],
        [replace(GOOD, predicate=("absent", "x", "y"))],
        [replace(GOOD, predicate=("absent", 3))],
        [replace(GOOD, predicate=("text", "x"))],
        [replace(GOOD, predicate=("moved", "x", "y"))],
        [replace(GOOD, predicate=("mode", "rwx", "x"))],
        [replace(GOOD, predicate=("mode", "689", "x"))],
        [replace(GOOD, predicate=("mode", "600"))],
    ],
)
def test_a_malformed_manifest_is_a_fault_of_the_verifier(checks):
    with pytest.raises(VerifierError):
        judge(checks, {})


@pytest.mark.parametrize(
    "tree",
    [
        {"/etc/passwd": text("")},
        {"../out": text("")},
        {"d": DIRECTORY, "d/../x": text("")},
        {"d": DIRECTORY, "d//x": text("")},
        {"./x": text("")},
        {"": text("")},
        {"a\0b": text("")},
        {3: text("")},
        {"x": "text"},
        {"x": Entry("door", 0o644)},
        {"x": Entry("file", -1)},
        {"x": Entry("file", 0o200000)},
        {"x": Entry("file", 0o644, "text")},
        {"d/x": text("")},
        {"d": text(""), "d/x": text("")},
        {"d": Entry("symlink", 0o777, b"e"), "e": DIRECTORY, "d/x": text("")},
    ],
)
def test_a_malformed_snapshot_is_a_fault_of_the_verifier(tree):
    with pytest.raises(VerifierError):
        judge([GOOD], tree)


def test_odd_names_that_an_agent_can_make_are_data():
    tree = {"a\nb": text(""), "\udcff": text(""), "-rf": text(""), " ": text("")}
    assert judge([GOOD], tree).strict_success
    assert not judge([GOOD, Check("only", "guard", ("only", "x"))], tree).strict_success
