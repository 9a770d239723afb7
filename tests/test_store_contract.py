"""The contract at the store's door: each rule, what it says, and where the record goes."""

import dataclasses
import re

import numpy as np
import pytest

from rollout.errors import ContractViolation, StoreError
from rollout.records import Fault, Turn, Verdict
from rollout.store.contract import violations
from rollout.store.reader import SegmentReader
from rollout.store.segments import SegmentWriter
from tests.store_data import VOCAB, assert_same, make

# `make("x", 12)` acts at tokens 5, 6, 9 and 10; turn 1 begins at token 9.


def put(field: str, place: int, value: float):
    def change(trajectory):
        array = getattr(trajectory, field).copy()
        array[place] = value
        return {field: array}

    return change


RULES = {
    "id below 0": (put("token_ids", 3, -1), r"token 3: token id -1 must be in \[0, 384\)"),
    "id of the vocabulary's size": (put("token_ids", 11, 384), "token 11: token id 384"),
    "log-prob above 0": (put("logprob_t", 5, 1e-6), r"token 5: log-prob .* finite and <= 0"),
    "log-prob not a number": (put("logprob_t", 6, np.nan), "token 6: log-prob nan"),
    "log-prob infinite": (put("logprob_t", 6, -np.inf), "token 6: log-prob -inf"),
    "log-prob off the mask": (put("logprob_t", 7, -0.5), "token 7: log-prob -0.5 .* must be 0"),
    "turn backwards": (put("turn_t", 10, 0), "token 10: turn 0 goes backwards"),
    "turn negative": (put("turn_t", 0, -1), "token 0: turn -1 must be >= 0"),
    "no weight version": (put("weight_version_t", 9, -1), "token 9: weight version -1"),
    "stray weight version": (put("weight_version_t", 1, 0), "token 1: weight version 0"),
    "lengths": (lambda t: {"turn_t": t.turn_t[:-1]}, r"turn_t has shape \(11,\)"),
    "rank": (lambda t: {"turn_t": t.turn_t[None]}, r"turn_t has shape \(1, 12\)"),
    "acted dtype": (
        lambda t: {"acted_t": t.acted_t.astype(np.int8)},
        "acted_t has dtype int8, must be bool",
    ),
    "log-prob dtype": (
        lambda t: {"logprob_t": t.logprob_t.astype(np.float64)},
        "logprob_t has dtype float64, must be float32",
    ),
    "list for an array": (lambda t: {"turn_t": t.turn_t.tolist()}, "turn_t is a list"),
    "first token acted": (
        lambda t: {"acted_t": np.ones(12, bool), "weight_version_t": np.zeros(12, np.int32)},
        "token 0: is acted",
    ),
    "verdict and fault": (lambda t: {"fault": Fault("sandbox-dead", "")}, "has both"),
    "no verdict, no fault": (lambda t: {"verdict": None}, "has neither"),
    "empty id": (lambda t: {"id": ""}, "the id is ''"),
    "unprintable id": (lambda t: {"id": "a\ud800"}, "non-empty printable"),
    "schema": (lambda t: {"schema_version": 2}, "schema version 2, must be 1"),
    "temperature": (lambda t: {"temperature": float("nan")}, "temperature is nan"),
    "secret name": (lambda t: {"provenance": {"HF_TOKEN": "x"}}, "'HF_TOKEN' has the name"),
    "secret value": (
        lambda t: {"provenance": {"command": "run --key sk-" + "a1" * 12}},
        "'command' holds a value that looks like a secret",
    ),
    "provenance type": (lambda t: {"provenance": {"steps": 3}}, "'steps' is a int"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_violation_names_the_trajectory_and_the_problem(rule) -> None:
    change, problem = RULES[rule]
    bad = dataclasses.replace(make("bad"), **change(make("bad")))
    found = violations([make("good"), bad, make("also good")], vocab_size=VOCAB)
    assert list(found) == [1]
    assert re.search(problem, found[1]), found[1]


def test_what_is_allowed_passes() -> None:
    batch = [
        make("a"),
        make("b", 0, verdict=None, fault=Fault("sandbox-unavailable", "no bwrap"), finish="fault"),
        make("c", 1, temperature=0.0),
        make("d", provenance={"tokenizer": "sha256:0af3", "max_tokens": "64", "commit": "af" * 20}),
        make("e", verdict=Verdict(())),
        make("é/f 1#2"),
    ]
    assert violations(batch, vocab_size=VOCAB) == {}


def test_an_id_twice_in_a_batch_is_a_violation() -> None:
    found = violations([make("a"), make("b"), make("a")], vocab_size=VOCAB)
    assert found == {2: "the id occurs twice in the batch"}


def test_offenders_go_to_quarantine_and_nothing_of_the_batch_is_written(tmp_path) -> None:
    late = make("late", logprob_t=np.full(12, np.nan, np.float32))
    odd = make("odd/1", turn_t=np.array([None] * 12))
    writer = SegmentWriter(tmp_path, vocab_size=VOCAB)
    with pytest.raises(ContractViolation, match="trajectory late: token 5") as caught:
        writer.write("s", [make("good"), late, odd])
    assert caught.value.trajectory_id == "late"
    reader = SegmentReader(tmp_path)
    assert reader.segments() == ()
    assert reader.find("good") is None
    kept = {q.id: q for q in reader.quarantined()}
    assert set(kept) == {"late", "odd/1"}
    assert kept["late"].segment == "s"
    assert "log-prob nan" in kept["late"].problem
    np.testing.assert_array_equal(kept["late"].arrays["token_ids"], late.token_ids)
    np.testing.assert_array_equal(kept["late"].arrays["logprob_t"], late.logprob_t)
    assert kept["late"].record["turns"][0]["command"] == "wc -l < a"
    # The same batch, mended, is then written under the same name.
    writer.write("s", [make("good"), make("late"), make("odd/1")])
    assert_same(make("late"), reader.get("late"))
    assert len(reader.quarantined()) == 2


def test_a_secret_of_the_environment_is_refused_and_not_kept(tmp_path, monkeypatch) -> None:
    secret = "correct horse battery"
    monkeypatch.setenv("REGISTRY_PASSWORD", secret)
    writer = SegmentWriter(tmp_path, vocab_size=VOCAB)
    for i, change in enumerate(
        (
            {"provenance": {"command": f"login {secret}"}},
            {"turns": (Turn("env", f"REGISTRY_PASSWORD={secret}", 0),)},
        )
    ):
        with pytest.raises(ContractViolation, match="variable REGISTRY_PASSWORD") as caught:
            writer.write("s", [make(f"leak{i}", **change)])
        assert secret not in str(caught.value)
    kept = SegmentReader(tmp_path).quarantined()
    assert len(kept) == 2
    assert secret not in repr(kept)
    fault = make("leak2", verdict=None, fault=Fault("sandbox-dead", secret), finish="fault")
    with pytest.raises(ContractViolation, match="the fault's message shows the value"):
        writer.write("s", [fault])
    assert secret not in repr(SegmentReader(tmp_path).quarantined())
    monkeypatch.delenv("REGISTRY_PASSWORD")
    writer.write("s", [make("harmless", provenance={"command": f"login {secret}"})])


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="writing segment s") as caught:
        SegmentWriter(tmp_path / "file", vocab_size=VOCAB).write("s", [make("a")])
    assert "\n" not in str(caught.value)


def test_a_value_that_looks_secret_counts_whatever_its_variable_is_called(monkeypatch) -> None:
    monkeypatch.setenv("HARMLESS", "sk-" + "a1b2" * 6)
    found = violations(
        [make("a", turns=(Turn("env", "HARMLESS=sk-" + "a1b2" * 6, 0),))], vocab_size=VOCAB
    )
    assert found == {0: "turn 0 shows the value of environment variable HARMLESS"}


def test_a_refused_column_goes_to_quarantine(tmp_path) -> None:
    writer = SegmentWriter(tmp_path, vocab_size=VOCAB)
    writer.write("s", [make("a")])
    stray = np.full(12, 0.5, np.float32)
    with pytest.raises(
        ContractViolation, match=r"trajectory a: column reward_t is 0\.5 at token 0"
    ):
        writer.write_columns("s", "reward_t", [stray])
    (kept,) = SegmentReader(tmp_path).quarantined()
    assert (kept.id, kept.segment, kept.record["column"]) == ("a", "s", "reward_t")
    np.testing.assert_array_equal(kept.arrays["reward_t"], stray, strict=True)
    assert SegmentReader(tmp_path).columns("s") == ()
