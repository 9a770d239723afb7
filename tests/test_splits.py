"""Protected splits are enforced at every door: tasks, stores, training examples, selection."""

from __future__ import annotations

import pytest

from rollout.errors import ProtectedSplit, UserError
from rollout.records import CheckResult, Fault, Verdict
from rollout.store.reader import SegmentReader
from rollout.store.segments import SegmentWriter
from rollout.tasks.splits import VISIBLE, GuardedReader, check_results
from tests.test_store import VOCAB, make
from trsi_jax.batch import trajectory_example
from trsi_jax.evaluate.select import select_checkpoint

PASSED = Verdict((CheckResult("a", "effective", True), CheckResult("b", "effective", True)))
HALF = Verdict((CheckResult("a", "effective", True), CheckResult("b", "effective", False)))
FAILED = Verdict((CheckResult("a", "effective", False), CheckResult("b", "effective", False)))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with one segment a split."""
    path = tmp_path_factory.mktemp("guard") / "store"
    writer = SegmentWriter(path, vocab_size=VOCAB)
    for split in ("train", "validation", "test"):
        writer.write(f"s/{split}", [make(f"{split}-{i}", split=split) for i in range(2)])
    return SegmentReader(path)


@pytest.mark.parametrize("purpose", list(VISIBLE))
def test_a_reader_of_one_purpose_passes_over_the_rest_and_refuses_it_by_name(store, purpose):
    own = VISIBLE[purpose]
    guarded = GuardedReader(store, purpose)
    assert guarded.segments() == ("s/test", "s/train", "s/validation")
    assert [t.id for t in guarded] == [f"{own}-0", f"{own}-1"]
    assert [t.id for t in guarded.read(f"s/{own}")] == [f"{own}-0", f"{own}-1"]
    assert guarded.get(f"{own}-1").split == own
    for other in {"train", "validation", "test"} - {own}:
        with pytest.raises(ProtectedSplit, match=f"trajectory {other}-0: split {other!r}"):
            guarded.read(f"s/{other}")
        with pytest.raises(ProtectedSplit, match=f"trajectory {other}-1"):
            guarded.get(f"{other}-1")


def test_an_unknown_purpose_is_named(store):
    with pytest.raises(UserError, match="allowed: train, select, evaluate"):
        GuardedReader(store, "peek")
    with pytest.raises(UserError, match="allowed: train, select, evaluate"):
        check_results([make("a")], "peek")


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_protected_trajectory_becomes_no_training_example(split):
    trajectory_example(make("a"))
    with pytest.raises(ProtectedSplit, match=f"split {split!r} can't be opened"):
        trajectory_example(make("a", split=split))


def attempts(verdict, split="validation", tasks=("x", "y")):
    return [make(f"{t}-{split}", task_id=t, split=split, verdict=verdict) for t in tasks]


def test_selection_goes_by_validation_success_then_progress_then_order():
    assert select_checkpoint({"a": attempts(HALF), "b": attempts(PASSED)}) == "b"
    assert select_checkpoint({"a": attempts(FAILED), "b": attempts(HALF)}) == "b"
    assert select_checkpoint({"a": attempts(HALF), "b": attempts(HALF)}) == "a"


@pytest.mark.parametrize("split", ["train", "test"])
def test_selection_cannot_read_other_results(split):
    mixed = attempts(PASSED, tasks=("x",)) + attempts(PASSED, split, tasks=("y",))
    with pytest.raises(ProtectedSplit, match=f"trajectory y-{split}: split {split!r}"):
        select_checkpoint({"a": attempts(HALF), "b": mixed})


def test_selection_compares_like_with_like():
    with pytest.raises(UserError, match="'a' and 'b' were tried on different tasks"):
        select_checkpoint({"a": attempts(HALF), "b": attempts(PASSED, tasks=("x",))})
    with pytest.raises(UserError, match="no checkpoint to select from"):
        select_checkpoint({})


def test_a_masked_attempt_counts_for_no_checkpoint():
    masked = [
        make(
            "z",
            task_id="x",
            split="validation",
            verdict=None,
            finish="fault",
            fault=Fault("verifier", "no result"),
        )
    ]
    best = {"a": attempts(HALF), "b": attempts(PASSED) + masked}
    assert select_checkpoint(best) == "b"
