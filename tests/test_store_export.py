"""Exports and `trsi store`: what other programs read, what a person is told."""

import json
import math

import numpy as np
import pytest
import tensorstore as ts
from typer.testing import CliRunner

from rollout.errors import ContractViolation, StoreError, UserError
from rollout.records import CheckResult, Fault, Turn, Verdict
from rollout.store import layout
from rollout.store.compact import compact
from rollout.store.export import atif_document, export_atif, export_parquet
from rollout.store.inspect import statistics, verify
from rollout.store.reader import SegmentReader
from rollout.store.segments import SegmentWriter
from tests.store_data import VOCAB, make
from trsi_jax.batch import token_rewards
from trsi_jax.cli.main import app

BATCH = [
    make(
        "rpr-1/0/7",
        turns=(Turn("wc -l < a", "3\udce9\n", 0), Turn("done", "", None, "control")),
        provenance={"instruction": "count the lines"},
        verdict=Verdict((CheckResult("a", "effective", True), CheckResult("b", "guard", True))),
    ),
    make("rpr-1/0/8", verdict=None, fault=Fault("sandbox-dead", "gone"), finish="fault"),
]


@pytest.fixture
def run(tmp_path):
    writer = SegmentWriter(tmp_path / "run" / "store", vocab_size=VOCAB)
    writer.write("rpr-1/0", BATCH)
    value = [np.linspace(0, 1, 12, dtype=np.float32)] * 2
    writer.write_columns("rpr-1/0", "value_t", value)
    reward = [token_rewards(BATCH[0], 1.25), np.zeros(12, np.float32)]
    writer.write_columns("rpr-1/0", "reward_t", reward)
    writer.write("base/0", [make("base/a", 40, 1)])
    with pytest.raises(ContractViolation):
        writer.write("rpr-1/1", [make("bad", temperature=math.nan)])
    return tmp_path / "run"


def test_atif_documents_hold_what_the_format_has_a_place_for(run, tmp_path) -> None:
    reader = SegmentReader(run / "store")
    files = list(export_atif(reader, tmp_path / "out", session="r", version="0"))
    assert len(files) == 3
    assert not list((tmp_path / "out").rglob("*.part"))
    document = json.loads((tmp_path / "out/rpr-1%2F0/rpr-1%2F0%2F7.json").read_text())
    assert document["trajectory_id"] == "rpr-1/0/7"
    user, first, second = document["steps"]
    assert (user["source"], user["message"]) == ("user", "count the lines")
    # `make` samples tokens 5, 6 in turn 0 and 9, 10 in turn 1.
    t = BATCH[0]
    assert first["metrics"]["completion_token_ids"] == t.token_ids[[5, 6]].tolist()
    assert first["metrics"]["logprobs"] == t.logprob_t[[5, 6]].tolist()
    assert (first["metrics"]["prompt_tokens"], second["metrics"]["prompt_tokens"]) == (5, 9)
    assert first["tool_calls"][0]["arguments"] == {"command": "wc -l < a"}
    assert first["observation"]["results"][0]["content"] == "3\ufffd\n"
    assert second["tool_calls"][0]["function_name"] == "control"
    assert second["extra"]["columns"]["reward_t"] == [0.0, 1.25]
    assert document["extra"]["strict_success"] is True
    assert document["extra"]["reward"] == 1.25
    assert document["final_metrics"]["total_completion_tokens"] == 4


def test_atif_documents_are_valid_by_another_implementation(run, tmp_path) -> None:
    atif = pytest.importorskip("atif", reason=".ci/store.sh brings it")
    for path in export_atif(SegmentReader(run / "store"), tmp_path / "out"):
        parsed = atif.Trajectory.model_validate_json(path.read_text())
        assert len(parsed.steps) == len(json.loads(path.read_text())["steps"])


def test_a_value_that_json_cannot_hold_is_refused() -> None:
    trajectory = make("a", logprob_t=np.full(12, np.nan, np.float32))
    with pytest.raises(StoreError, match="trajectory a: logprob_t is nan"):
        atif_document(trajectory, {})
    with pytest.raises(StoreError, match="trajectory a: value_t is inf"):
        atif_document(make("a"), {"value_t": np.full(12, np.inf, np.float32)})


def test_a_sampled_turn_without_a_command_is_a_step_too() -> None:
    document = atif_document(make("a", turns=()), {})
    assert [s["source"] for s in document["steps"]] == ["user", "agent", "agent"]
    assert [len(s["metrics"]["completion_token_ids"]) for s in document["steps"][1:]] == [2, 2]


def test_parquet_files_hold_the_arrays_bit_by_bit(run, tmp_path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason=".ci/store.sh brings it")
    files = list(export_parquet(SegmentReader(run / "store"), tmp_path / "out"))
    assert [f.name for f in files] == ["base%2F0.parquet", "rpr-1%2F0.parquet"]
    table = parquet.read_table(files[1])
    assert table["id"].to_pylist() == ["rpr-1/0/7", "rpr-1/0/8"]
    for name in layout.TOKEN_FIELDS:
        for i, trajectory in enumerate(BATCH):
            values = np.array(table[name][i].as_py(), getattr(trajectory, name).dtype)
            assert values.tobytes() == getattr(trajectory, name).tobytes()
    assert table["value_t"][0].as_py() == np.linspace(0, 1, 12, dtype=np.float32).tolist()
    assert json.loads(table["record"][1].as_py())["fault"]["kind"] == "sandbox-dead"


def test_statistics_count_and_quarantine_is_listed(run) -> None:
    found = statistics(run / "store")
    assert (found.segments, found.sealed, found.trajectories, found.tokens) == (2, 0, 3, 64)
    assert found.columns == {"reward_t": 1, "value_t": 1}
    assert found.groups == {"base": (1, 1, 40), "rpr-1": (1, 2, 24)}
    assert [q.id for q in found.quarantined] == ["bad"]


def test_verify_finds_what_is_wrong_and_nothing_else(run) -> None:
    store = run / "store"
    assert list(verify(store, vocab_size=VOCAB)) == []
    (problem, *_) = verify(store, vocab_size=10)
    assert "must be in [0, 10)" in problem.text
    database = ts.KvStore.open(f"file://{store}/|ocdbt:").result()
    database["ids/ghost"] = "0:base/0"
    del database["ids/base/a"]
    texts = [p.text for p in verify(store)]
    assert any("its id does not point at its place" in text for text in texts)
    assert any("id ghost points at no trajectory" in text for text in texts)
    del database[layout.trajectory_key("rpr-1/0", 0)]
    assert any(p.segment == "rpr-1/0" and "missing" in p.text for p in verify(store))


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["store", *map(str, arguments)])


def test_the_commands_do_what_they_say(run, tmp_path) -> None:
    done = invoke("stat", run)
    assert done.exit_code == 0, done.output
    for part in ("segments      2, 0 of them sealed", "value_t (1)", "bad (rpr-1/1): temperature"):
        assert part in done.output
    assert "no problem found" in invoke("verify", run / "store").output
    assert "sealed 2 segments and 2 columns" in invoke("compact", run).output
    assert "2, 2 of them sealed" in invoke("stat", run).output
    assert "no problem found" in invoke("verify", run).output
    done = invoke("export", run, tmp_path / "out", "--segment", "base/")
    assert "1 files in" in done.output
    assert [p.name for p in (tmp_path / "out").rglob("*.json")] == ["base%2Fa.json"]


def test_each_mistake_is_one_line(run, tmp_path) -> None:
    for arguments, kind, problem in (
        (("stat", tmp_path / "none"), UserError, "no store at"),
        (("stat", tmp_path), StoreError, "no trajectory store at"),
        (("export", run, tmp_path / "o", "--format", "csv"), UserError, "allowed are atif, parq"),
    ):
        error = invoke(*arguments).exception
        assert isinstance(error, kind)
        assert problem in str(error)
        assert "\n" not in str(error)
    compact(run / "store")
    (shard,) = (run / "store").glob("sealed/*/trajectories/0")
    shard.write_bytes(shard.read_bytes()[:-9])
    done = invoke("verify", run)
    assert isinstance(done.exception, StoreError)
    assert "problem" in str(done.exception)
