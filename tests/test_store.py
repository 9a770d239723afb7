"""The trajectory store: what is written comes back, whole or not at all."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import ContractViolation, StoreError
from rollout.records import CheckResult, Fault, Trajectory, Turn, Verdict
from rollout.store import codec, layout
from rollout.store.reader import SegmentReader
from rollout.store.segments import SegmentWriter
from tests.store_data import ROOT, VOCAB, assert_same, make


@st.composite
def trajectories(draw, name: str) -> Trajectory:
    n = draw(st.integers(0, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    acted = rng.random(n) < rng.random()
    acted[:1] = False
    # Every non-positive float32 but -inf and NaN: -0.0, subnormals and the largest included.
    edges = np.array([-0.0, -1e-45, -3.4028235e38, -1.1754944e-38], np.float32)
    logprob = np.where(
        rng.random(n) < 0.3, rng.choice(edges, n), -rng.exponential(size=n).astype(np.float32)
    )
    # Output of a command need not be valid UTF-8: lone surrogates stand for its odd bytes.
    text = st.text(st.characters(exclude_categories=()), max_size=12)
    turn = st.builds(Turn, text, text, st.none() | st.integers(-9, 255))
    result = st.builds(
        CheckResult,
        text,
        st.sampled_from(["effective", "guard"]),
        st.booleans(),
        st.floats(0.1, 9),
    )
    judged = draw(st.booleans())
    return make(
        name,
        n,
        token_ids=rng.integers(0, VOCAB, n, dtype=np.int32),
        acted_t=acted,
        logprob_t=np.where(acted, logprob, np.float32(0)),
        turn_t=np.cumsum(rng.integers(0, 3, n), dtype=np.int32),
        weight_version_t=np.where(acted, rng.integers(0, 9, n), -1).astype(np.int32),
        turns=tuple(draw(st.lists(turn, max_size=2))),
        verdict=Verdict(tuple(draw(st.lists(result, max_size=2)))) if judged else None,
        fault=None if judged else Fault("sandbox-dead", draw(text)),
        finish="done" if judged else "fault",
    )


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_round_trip_is_bit_equal_whatever_the_contents(tmp_path_factory, data) -> None:
    folder = tmp_path_factory.mktemp("store")
    count = data.draw(st.integers(0, 3))
    batch = [data.draw(trajectories(f"t/{i} é")) for i in range(count)]
    SegmentWriter(folder, vocab_size=VOCAB).write("rpr-1/0", batch)
    reader = SegmentReader(folder)
    assert reader.segments() == ("rpr-1/0",)
    for a, b in zip(batch, reader.read("rpr-1/0"), strict=True):
        assert_same(a, b)
    for a, b in zip(batch, reader, strict=True):
        assert_same(a, b)
    for a in batch:
        assert_same(a, reader.get(a.id))


@pytest.mark.parametrize("tokens", [0, 1, 7, 120_000])
def test_arrays_of_any_form_come_back_bit_equal(tmp_path, tokens) -> None:
    # Arrays that repeat themselves, that never do, and a -0.0 where nothing was sampled.
    rng = np.random.default_rng(0)
    acted = (np.arange(tokens) % 2).astype(bool)
    batch = [
        make("repeats", tokens, 1),
        make(
            "never",
            tokens,
            acted_t=acted,
            logprob_t=np.where(acted, -rng.exponential(size=tokens), -0.0).astype(np.float32),
            turn_t=np.arange(tokens, dtype=np.int32),
            weight_version_t=np.where(acted, np.arange(tokens), -1).astype(np.int32),
        ),
    ]
    SegmentWriter(tmp_path, vocab_size=VOCAB).write("s", batch)
    reader = SegmentReader(tmp_path)
    for a, b in zip(batch, reader.read("s"), strict=True):
        assert_same(a, b)
        assert_same(a, reader.get(a.id))
        assert not any(getattr(b, name).flags.writeable for name in layout.TOKEN_FIELDS)


def format_1(data: bytes) -> bytes:
    """The same value as layout 3 wrote it."""
    body = (1).to_bytes(4, "little") + data[16:]
    return zlib.crc32(body).to_bytes(4, "little") + body


@pytest.mark.parametrize("rewritten", [lambda data: data, format_1])
def test_a_value_with_any_bit_changed_or_cut_anywhere_is_refused(rewritten) -> None:
    trajectory = make("a", 40)
    arrays = {name: getattr(trajectory, name) for name in layout.TOKEN_FIELDS}
    data = rewritten(codec.encode(layout.encode_record(trajectory), arrays))
    record, decoded = codec.decode(data)
    assert_same(trajectory, layout.decode_trajectory(record, decoded, 1))
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="damaged"):
            codec.decode(bytes(changed))
    for size in range(len(data)):
        with pytest.raises(ValueError, match="damaged"):
            codec.decode(data[:size])


def test_segments_are_listed_sorted_and_read_in_the_order_written(tmp_path) -> None:
    writer = SegmentWriter(str(tmp_path), vocab_size=VOCAB)
    writer.write("rsr-1/a.b", [make("2"), make("1")])
    writer.write("base/eval", [make("0")])
    writer.write("rsr-1", [])
    reader = SegmentReader(tmp_path)
    assert reader.segments() == ("base/eval", "rsr-1", "rsr-1/a.b")
    assert [t.id for t in reader] == ["0", "2", "1"]
    assert reader.read("rsr-1") == ()
    assert reader.find("1") == ("rsr-1/a.b", 1)


def test_a_repeated_segment_keeps_the_first(tmp_path) -> None:
    first = make("a", seed=1)
    SegmentWriter(tmp_path, vocab_size=VOCAB).write("s", [first])
    again = SegmentWriter(tmp_path, vocab_size=VOCAB)
    again.write("s", [make("a", seed=2), make("b", seed=3)])
    assert [t.id for t in SegmentReader(tmp_path)] == ["a"]
    assert_same(first, SegmentReader(tmp_path).get("a"))


def test_an_id_of_another_segment_is_refused_and_nothing_is_written(tmp_path) -> None:
    writer = SegmentWriter(tmp_path, vocab_size=VOCAB)
    writer.write("s", [make("a")])
    with pytest.raises(StoreError, match=r"segment t: trajectory a .* in segment s"):
        writer.write("t", [make("b"), make("a")])
    reader = SegmentReader(tmp_path)
    assert reader.segments() == ("s",)
    assert reader.find("b") is None


def test_a_pinned_version_never_changes(tmp_path) -> None:
    writer = SegmentWriter(tmp_path, vocab_size=VOCAB)
    writer.write("s0", [make("a")])
    follower = SegmentReader(tmp_path)
    pinned = follower.pinned()
    for i in range(1, 20):  # more commits than the manifest keeps inline
        writer.write(f"s{i}", [make(f"b{i}")])
    assert pinned.segments() == ("s0",)
    assert [t.id for t in pinned] == ["a"]
    assert not pinned.has("s1")
    assert len(follower.segments()) == 20
    assert SegmentReader(tmp_path, version=pinned.version).segments() == ("s0",)
    assert follower.version > pinned.version


def test_a_store_that_does_not_exist_reads_as_empty(tmp_path) -> None:
    reader = SegmentReader(tmp_path / "none")
    assert reader.segments() == ()
    assert reader.version is None
    assert not (tmp_path / "none").exists()
    with pytest.raises(StoreError, match="no trajectory store at"):
        reader.pinned()
    with pytest.raises(StoreError, match="no trajectory 'x'"):
        reader.get("x")
    with pytest.raises(StoreError, match=r"no segment s .* it has none"):
        reader.read("s")


def test_any_key_value_store_works_by_url_and_by_spec() -> None:
    context = ts.Context()
    writer = SegmentWriter("memory://run/store", vocab_size=VOCAB, context=context)
    writer.write("s", [make("a")])
    spec = {"driver": "memory", "path": "run/store"}
    assert_same(make("a"), SegmentReader(spec, context=context).get("a"))
    assert SegmentReader("memory://run/store", context=context).pinned().segments() == ("s",)


def test_columns_lie_beside_the_segment_and_are_written_once(tmp_path) -> None:
    writer = SegmentWriter(tmp_path, vocab_size=VOCAB)
    batch = [make("a", 9), make("b", 0), make("c", 14)]
    writer.write("s", batch)
    value = [np.linspace(0, 1, t.token_ids.size, dtype=np.float32) for t in batch]
    writer.write_columns("s", "value_t", value)
    writer.write_columns("s", "value_t", [v + 1 for v in value])
    reader = SegmentReader(tmp_path)
    assert reader.columns("s") == ("value_t",)
    for a, b in zip(value, reader.read_columns("s", "value_t"), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
    np.testing.assert_array_equal(reader.get_columns("c")["value_t"], value[2])
    for a, b in zip(batch, reader.read("s"), strict=True):
        assert_same(a, b)
    with pytest.raises(StoreError, match=r"no column 'return_t' .* it has value_t"):
        reader.read_columns("s", "return_t")
    with pytest.raises(StoreError, match="got 1 arrays for 3 trajectories"):
        writer.write_columns("s", "return_t", value[:1])
    with pytest.raises(StoreError, match="no segment t"):
        writer.write_columns("t", "value_t", value)
    with pytest.raises(StoreError, match="column name 'acted_t'"):
        writer.write_columns("s", "acted_t", value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda r, a: r.astype(np.int32), "dtype int32"),
        (lambda r, a: r[:-1], r"shape \(11,\)"),
        (lambda r, a: np.where(a, np.float32(np.nan), r), "is nan at token 5"),
        (lambda r, a: np.where(a, r, np.float32(0.5)), "must sit on an acted token"),
    ],
)
def test_a_reward_column_must_be_float_finite_and_on_acted_tokens(
    tmp_path, change, problem
) -> None:
    writer = SegmentWriter(tmp_path, vocab_size=VOCAB)
    trajectory = make("a")
    writer.write("s", [trajectory])
    good = trajectory.acted_t.astype(np.float32)
    with pytest.raises(ContractViolation, match=problem) as caught:
        writer.write_columns("s", "reward_t", [change(good, trajectory.acted_t)])
    assert caught.value.trajectory_id == "a"
    assert SegmentReader(tmp_path).columns("s") == ()
    writer.write_columns("s", "reward_t", [good])


def test_a_newer_schema_is_refused_and_an_older_record_reads(tmp_path) -> None:
    SegmentWriter(tmp_path, vocab_size=VOCAB).write("s", [make("a")])
    database = ts.KvStore.open(f"file://{tmp_path}/|ocdbt:").result()
    header = json.loads(database[layout.header_key("s")])
    database[layout.header_key("s")] = json.dumps(
        {**header, "schema_version": header["schema_version"] + 1}
    )
    with pytest.raises(StoreError, match=r"segment s has schema version 2; .* up to 1"):
        SegmentReader(tmp_path).read("s")
    trajectory = make("a", fault=None, timings={}, provenance={})
    record = layout.record_fields(trajectory)
    for name in ("fault", "timings", "provenance"):
        del record[name]
    arrays = {name: getattr(trajectory, name) for name in layout.TOKEN_FIELDS}
    assert_same(trajectory, layout.decode_trajectory(json.dumps(record).encode(), arrays, 1))


def test_a_manifest_half_written_by_a_killed_writer_does_no_harm(tmp_path) -> None:
    writer = SegmentWriter(tmp_path, vocab_size=VOCAB)
    writer.write("s", [make("a")])
    # What a kill between writing the next manifest and renaming it leaves behind.
    (tmp_path / "manifest.ocdbt.__lock").write_bytes(b"x" * 4000)
    writer.write("t", [make("b")])
    reader = SegmentReader(tmp_path)
    assert reader.segments() == ("s", "t")
    assert_same(make("a"), reader.get("a"))


SILENT = make(
    "b",
    seed=2,
    acted_t=np.zeros(12, bool),
    logprob_t=np.zeros(12, np.float32),
    weight_version_t=np.full(12, -1, np.int32),
    turn_t=np.zeros(12, np.int32),
    verdict=None,
    fault=Fault("sandbox-dead", "gone"),
    finish="fault",
)
OLD = {
    # tests/data/store_layout_1 was written by the first store: no checksums, zeros left out.
    1: {"a": make("a", 12, 1), "b": SILENT, "c": make("c", 40, 3), "d": make("d", 0, 4)},
}
# tests/data/store_layout_2 by the second, an array a field: rsr-1/0 sealed with its column,
# rpr-1/0 sealed before its column was written, rpr-1/1 not sealed.
OLD[2] = OLD[1] | {"e": make("e", 25, 5), "f": make("f", 9, 6)}
# tests/data/store_layout_3 by the third, a value a trajectory with a CRC-32: otherwise like it.
OLD[3] = OLD[2]


@pytest.mark.parametrize("version", OLD)
def test_a_store_of_an_older_layout_reads_and_grows(tmp_path, version) -> None:
    shutil.copytree(ROOT / f"tests/data/store_layout_{version}", tmp_path / "store")
    reader = SegmentReader(tmp_path / "store")
    assert {t.id for t in reader} == set(OLD[version])
    for name, trajectory in OLD[version].items():
        assert_same(trajectory, reader.get(name))
    many = reader.get_many({name: reader.find(name) for name in OLD[version]})
    for name, trajectory in OLD[version].items():
        assert_same(trajectory, many[name][0])
    value = reader.read_columns("rsr-1/0", "value_t")
    np.testing.assert_array_equal(value[0], np.arange(12, dtype=np.float32), strict=True)
    np.testing.assert_array_equal(
        reader.get_columns("b")["value_t"], np.zeros(12, np.float32), strict=True
    )
    writer = SegmentWriter(tmp_path / "store", vocab_size=VOCAB)
    writer.write("rpr-2/0", [make("new")])
    writer.write_columns("rpr-1/0", "value_t", [np.ones(40, np.float32), np.ones(0, np.float32)])
    assert_same(make("new"), reader.get("new"))
    assert reader.columns("rpr-1/0") == ("value_t",)


def test_a_newer_layout_is_refused(tmp_path) -> None:
    SegmentWriter(tmp_path, vocab_size=VOCAB).write("s", [make("a")])
    database = ts.KvStore.open(f"file://{tmp_path}/|ocdbt:").result()
    header = json.loads(database[layout.header_key("s")])
    database[layout.header_key("s")] = json.dumps({**header, "layout_version": 5})
    with pytest.raises(StoreError, match=r"layout version 5; this trsi-jax reads up to 4"):
        SegmentReader(tmp_path).read("s")


def test_a_missing_value_or_chunk_is_an_error_and_never_zeros(tmp_path) -> None:
    writer = SegmentWriter(tmp_path, vocab_size=VOCAB)
    writer.write("s", [make("a", 3000)])
    writer.write_columns("s", "value_t", [np.ones(3000, np.float32)])
    database = ts.KvStore.open(f"file://{tmp_path}/|ocdbt:").result()
    del database[layout.column_path("s", "value_t") + "c/0"]
    with pytest.raises(StoreError, match="missing"):
        SegmentReader(tmp_path).read_columns("s", "value_t")
    del database[layout.trajectory_key("s", 0)]
    with pytest.raises(StoreError, match="trajectory 0 of segment s is missing"):
        SegmentReader(tmp_path).read("s")


def test_a_flipped_bit_is_an_error(tmp_path) -> None:
    SegmentWriter(tmp_path, vocab_size=VOCAB).write("s", [make("a", 3000)])
    (data,) = (tmp_path / "d").iterdir()
    stored = bytearray(data.read_bytes())
    database = ts.KvStore.open(f"file://{tmp_path}/|ocdbt:").result()
    value = database[layout.trajectory_key("s", 0)]
    stored[stored.index(value) + len(value) // 2] ^= 1
    data.write_bytes(stored)
    with pytest.raises(StoreError, match=r"trajectory a of segment s: .* damaged"):
        SegmentReader(tmp_path).read("s")


def test_names_that_would_break_the_keys_are_refused(tmp_path) -> None:
    writer = SegmentWriter(tmp_path, vocab_size=VOCAB)
    for name in ("", "a//b", "/a", "a b", "ä"):
        with pytest.raises(StoreError, match="segment name"):
            writer.write(name, [make("a")])


WRITER = """
import sys
import numpy as np
from rollout.store.segments import SegmentWriter
from tests.store_data import make, VOCAB
folder, worker, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
writer = SegmentWriter(folder, vocab_size=VOCAB)
print("ready", flush=True)
sys.stdin.readline()
for i in range(count):
    name = f"w{worker}/{i:04d}"
    writer.write(name, [make(f"{name}#{k}", 200, worker * 1000 + 10 * i + k) for k in range(4)])
    print(name, flush=True)
"""


def spawn(folder: Path, worker: int, count: int) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(worker), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout.readline() == "ready\n"
    return process


def start(process: subprocess.Popen) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def check_whole(reader: SegmentReader, segments: tuple[str, ...]) -> None:
    for name in segments:
        worker, i = int(name[1]), int(name.split("/")[1])
        found = reader.read(name)
        assert [t.id for t in found] == [f"{name}#{k}" for k in range(4)]
        for k, trajectory in enumerate(found):
            assert_same(make(f"{name}#{k}", 200, worker * 1000 + 10 * i + k), trajectory)


def test_two_writers_and_a_reader_lose_and_tear_nothing(tmp_path) -> None:
    writers = [spawn(tmp_path, worker, 20) for worker in range(2)]
    for process in writers:
        start(process)
    reader = SegmentReader(tmp_path)
    seen: set[str] = set()
    while any(process.poll() is None for process in writers):
        now = reader.segments()
        assert seen <= set(now), "a committed segment vanished"
        check_whole(reader, tuple(set(now) - seen))
        seen = set(now)
        time.sleep(0.01)
    assert [process.wait() for process in writers] == [0, 0]
    expected = {f"w{w}/{i:04d}" for w in range(2) for i in range(20)}
    assert set(reader.segments()) == expected
    check_whole(SegmentReader(tmp_path), tuple(sorted(expected)))


def test_two_writers_of_one_segment_commit_it_once(tmp_path) -> None:
    # Both repeat the same 20 segments, as a run and its twin resumed too early would.
    writers = [spawn(tmp_path, 0, 20) for _ in range(2)]
    for process in writers:
        start(process)
    outputs = [process.communicate()[0].split() for process in writers]
    assert [process.returncode for process in writers] == [0, 0]
    expected = [f"w0/{i:04d}" for i in range(20)]
    assert outputs == [expected, expected]
    reader = SegmentReader(tmp_path)
    assert list(reader.segments()) == expected
    check_whole(reader, reader.segments())


@pytest.mark.parametrize("delay", [0.0, 0.011, 0.029, 0.053])
def test_a_writer_killed_at_any_moment_leaves_whole_segments(tmp_path, delay) -> None:
    process = spawn(tmp_path, 0, 1000)
    start(process)
    acknowledged = [process.stdout.readline().strip()]
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    acknowledged += process.communicate()[0].split()
    reader = SegmentReader(tmp_path)
    segments = reader.segments()
    # What was acknowledged is there; at most the commit under way is there besides.
    assert set(acknowledged) <= set(segments)
    assert len(segments) <= len(acknowledged) + 1
    check_whole(reader, segments)
    # A new writer goes on where the killed one stopped.
    SegmentWriter(tmp_path, vocab_size=VOCAB).write("after", [make("after")])
    assert SegmentReader(tmp_path).has("after")
