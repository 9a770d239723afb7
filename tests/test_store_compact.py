"""Compaction: smaller, and nobody can tell, whenever it runs and wherever it is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from rollout.errors import ContractViolation, StoreError
from rollout.store import layout
from rollout.store.compact import LEASE_KEY, compact, sealed_problem, stored_bytes
from rollout.store.reader import SegmentReader
from rollout.store.segments import SegmentWriter
from rollout.store.shards import LocalShards
from tests.store_data import ROOT, VOCAB, assert_same, make
from tests.test_store import OLD

State = dict[str, tuple[list[str], dict[str, list[float]]]]


def state(reader: SegmentReader) -> State:
    """All that a reader sees: ids, and the sum of each column."""
    return {
        name: (
            [t.id for t in reader.read(name)],
            {
                c: [float(x.sum()) for x in reader.read_columns(name, c)]
                for c in reader.columns(name)
            },
        )
        for name in reader.segments()
    }


def fill(folder: Path, start: int, stop: int, *, tokens: int = 60) -> dict[int, State]:
    """Commit segments and columns one by one; what each version showed when it was the newest."""
    writer = SegmentWriter(folder, vocab_size=VOCAB)
    views = {}

    def look() -> None:
        pinned = SegmentReader(folder).pinned()
        views[pinned.version] = state(pinned)

    for i in range(start, stop):
        writer.write(f"s/{i:03d}", [make(f"{i}#{k}", tokens, i) for k in range(2)])
        look()
        if i % 3 == 0:
            of = i // 2 + i % 2
            value = [np.full(tokens, i, np.float32)] * 2
            writer.write_columns(f"s/{of:03d}", f"value{i}_t", value)
            look()
    return views


def check_bits(folder: Path, stop: int, *, tokens: int = 60) -> None:
    reader = SegmentReader(folder)
    for i in range(stop):
        for k, trajectory in enumerate(reader.read(f"s/{i:03d}")):
            assert_same(make(f"{i}#{k}", tokens, i), trajectory)
            assert reader.find(f"{i}#{k}") == (f"s/{i:03d}", k)


def test_every_version_stays_what_it_was_over_several_compactions(tmp_path) -> None:
    views = fill(tmp_path, 0, 12)
    old, follower = SegmentReader(tmp_path).pinned(), SegmentReader(tmp_path)
    assert state(old) == state(follower)
    before = state(old)
    report = compact(tmp_path)
    assert (report.segments, report.columns) == (12, 4)
    assert report.files > 12
    views |= fill(tmp_path, 12, 20)
    assert compact(tmp_path).segments == 8
    assert compact(tmp_path).segments == 0
    views |= fill(tmp_path, 20, 22)
    for version, seen in views.items():
        assert state(SegmentReader(tmp_path, version=version)) == seen, version
    # Readers that were open all the while: one pinned, one that follows.
    assert state(old) == before
    assert list(state(follower)) == [f"s/{i:03d}" for i in range(22)]
    check_bits(tmp_path, 22)
    for name in follower.segments():
        assert sealed_problem(follower, name) is None


def test_sealed_columns_are_plain_sharded_zarr3(tmp_path) -> None:
    writer = SegmentWriter(tmp_path, vocab_size=VOCAB)
    writer.write("s", [make(f"{i}", 50_000, i) for i in range(3)])
    value = [np.random.default_rng(i).normal(size=50_000).astype(np.float32) for i in range(3)]
    writer.write_columns("s", "value_t", value)
    compact(tmp_path)
    (sealed,) = (tmp_path / "sealed").iterdir()
    path = f"{sealed}/columns/value_t/"
    array = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}).result()
    np.testing.assert_array_equal(array[:].read().result(), np.concatenate(value))
    metadata = json.loads((sealed / "columns/value_t/zarr.json").read_text())
    assert metadata["codecs"][0]["name"] == "sharding_indexed"
    # One shard of trajectories, one of the column: few files, whatever they hold.
    assert len([p for p in sealed.rglob("*") if p.is_file() and p.name != "zarr.json"]) == 2


def test_sets_of_several_shards_are_sealed_whole(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(layout, "_SHARD", 4 * layout._SEALED_CHUNK)
    monkeypatch.setattr(layout, "ENTRIES", 3)
    writer = SegmentWriter(tmp_path, vocab_size=VOCAB)
    batch = [make(f"{i}", 30_000, i) for i in range(8)]
    for i in range(0, 8, 2):
        writer.write(f"s/{i}", batch[i : i + 2])
        writer.write_columns(f"s/{i}", "value_t", [np.full(30_000, i, np.float32)] * 2)
    compact(tmp_path)
    assert len(list(tmp_path.glob("sealed/*/trajectories/*"))) == 3
    assert len(list(tmp_path.glob("sealed/*/columns/value_t/c/*"))) == 4
    reader = SegmentReader(tmp_path)
    for i, trajectory in enumerate(batch):
        assert_same(trajectory, reader.get(trajectory.id))
        assert set(reader.get_columns(trajectory.id)["value_t"]) == {i - i % 2}


def test_disk_amplification_is_at_most_1_15(tmp_path) -> None:
    raw = 0
    writer = SegmentWriter(tmp_path, vocab_size=VOCAB)
    rng = np.random.default_rng(0)
    for i in range(40):
        # Incompressible log-probs and ids, so that compression hides nothing of the rest.
        n = 20_000
        acted = np.arange(n) > 0
        trajectory = make(
            f"{i}",
            n,
            acted_t=acted,
            logprob_t=np.where(acted, -rng.exponential(size=n), 0).astype(np.float32),
            weight_version_t=np.where(acted, rng.integers(0, 2**31, n), -1).astype(np.int32),
            turn_t=np.sort(rng.integers(0, 2**31, n)).astype(np.int32),
        )
        raw += sum(getattr(trajectory, f).nbytes for f in layout.TOKEN_FIELDS)
        raw += len(layout.encode_record(trajectory))
        writer.write(f"s/{i:03d}", [trajectory])
    compact(tmp_path)
    assert stored_bytes(tmp_path) / raw <= 1.15


@pytest.mark.parametrize(("version", "moved"), [(1, (3, 2)), (2, (1, 2)), (3, (1, 2))])
def test_a_store_of_an_older_layout_can_be_compacted(tmp_path, version, moved) -> None:
    shutil.copytree(ROOT / f"tests/data/store_layout_{version}", tmp_path / "store")
    reader = SegmentReader(tmp_path / "store")
    before = state(reader)
    # What a compaction took away is shown as of its end.
    oldest = reader._current().compaction.at or 1
    seen = {
        v: state(SegmentReader(tmp_path / "store", version=v))
        for v in range(oldest, reader.version + 1)
    }
    report = compact(tmp_path / "store")
    assert (report.segments, report.columns) == moved
    reader = SegmentReader(tmp_path / "store")
    assert state(reader) == before
    for v, expected in seen.items():
        assert state(SegmentReader(tmp_path / "store", version=v)) == expected
    for name, trajectory in OLD[version].items():
        assert_same(trajectory, reader.get(name))
    # What was sealed stays as it was; everything else has become the newest layout.
    for name in reader.segments():
        old = version > 1 and name != "rpr-1/1"
        assert reader.header(name).layout_version == (version if old else layout.LAYOUT_VERSION)
        assert sealed_problem(reader, name) is None
    assert compact(tmp_path / "store").segments == 0


def test_a_store_in_memory_is_compacted_like_any_other() -> None:
    context = ts.Context()
    writer = SegmentWriter("memory://run/", vocab_size=VOCAB, context=context)
    for i in range(5):
        writer.write(f"s/{i}", [make(f"{i}", 99, i)])
    report = compact("memory://run/", context=context)
    assert (report.segments, report.bytes_after) == (5, None)
    reader = SegmentReader("memory://run/", context=context)
    for i in range(5):
        assert_same(make(f"{i}", 99, i), reader.get(f"{i}"))


def test_writers_and_readers_go_on_while_compactions_run(tmp_path) -> None:
    fill(tmp_path, 0, 10)
    problems: list[BaseException] = []
    done = threading.Event()

    def read(pinned: bool) -> None:
        try:
            reader = SegmentReader(tmp_path)
            reader = reader.pinned() if pinned else reader
            seen: set[str] = set()
            while not done.is_set():
                now = reader.segments()
                assert seen <= set(now), "a segment vanished"
                seen = set(now)
                for name in now[:: max(1, len(now) // 5)]:
                    i = int(name.split("/")[1])
                    for k, trajectory in enumerate(reader.read(name)):
                        assert_same(make(f"{i}#{k}", 60, i), trajectory)
        except BaseException as error:  # noqa: BLE001 - the test's own thread hands it over
            problems.append(error)

    def write() -> None:
        try:
            views.update(fill(tmp_path, 10, 24))
        except BaseException as error:  # noqa: BLE001 - the test's own thread hands it over
            problems.append(error)

    views: dict[int, State] = {}
    threads = [threading.Thread(target=read, args=(pinned,)) for pinned in (False, True)]
    writer = threading.Thread(target=write)
    for thread in (*threads, writer):
        thread.start()
    sealed = 0
    while writer.is_alive():
        sealed += compact(tmp_path).segments
    done.set()
    for thread in threads:
        thread.join()
    assert not problems, problems[0]
    assert sealed + compact(tmp_path).segments == 24
    check_bits(tmp_path, 24)
    for version, seen in views.items():
        assert state(SegmentReader(tmp_path, version=version)) == seen, version


KILLED = """
import os, signal, sys
from rollout.store import compact as module
compactor = module._Compactor
step, when = sys.argv[2], sys.argv[3]
whole = getattr(compactor, step)
def dies(self, *arguments):
    if when == "after":
        whole(self, *arguments)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(compactor, step, dies)
module.compact(sys.argv[1], lease_s=0.5)
"""


@pytest.mark.parametrize(
    ("step", "when"),
    [
        ("_take_lease", "after"),
        ("_write_shard", "before"),
        ("_write_shard", "after"),
        ("_write_column", "after"),
        ("_check", "after"),
        ("_move", "after"),
        ("_rewrite", "before"),
        ("_rewrite", "after"),
        ("_settle", "after"),
        ("_give_lease_back", "before"),
    ],
)
def test_a_compactor_killed_at_any_step_changes_nothing_that_is_read(tmp_path, step, when) -> None:
    # What is in quarantine stays in the database: it pins its data file, and `_rewrite` frees it.
    refused = make("bad", turn_t=np.arange(12, dtype=np.int32)[::-1].copy())
    with pytest.raises(ContractViolation):
        SegmentWriter(tmp_path, vocab_size=VOCAB).write("refused", [refused])
    views = fill(tmp_path, 0, 6)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), step, when],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, "the compactor never came to where it is killed"
    views |= fill(tmp_path, 6, 8)
    for version, seen in views.items():
        assert state(SegmentReader(tmp_path, version=version)) == seen
    time.sleep(0.6)
    compact(tmp_path)
    for version, seen in views.items():
        assert state(SegmentReader(tmp_path, version=version)) == seen
    check_bits(tmp_path, 8)
    assert [q.id for q in SegmentReader(tmp_path).quarantined()] == ["bad"]
    used = {SegmentReader(tmp_path).header(f"s/{i:03d}").sealed.set for i in range(8)}
    left = {p.relative_to(tmp_path).parts[1] for p in tmp_path.rglob("sealed/**/*") if p.is_file()}
    assert left == used


def test_one_compactor_at_a_time(tmp_path) -> None:
    fill(tmp_path, 0, 3)
    database = ts.KvStore.open(f"file://{tmp_path}/|ocdbt:").result()
    other = {"name": "x", "host": "there", "process": 7, "until": time.time() + 60}
    database[LEASE_KEY] = json.dumps(other)
    with pytest.raises(StoreError, match=r"process 7 on there is at it; .* may take over from"):
        compact(tmp_path)
    database[LEASE_KEY] = json.dumps(other | {"until": time.time() - 1})
    assert compact(tmp_path).segments == 3
    assert LEASE_KEY.encode() not in database.list().result()


def test_a_compactor_whose_lease_was_taken_over_moves_nothing(tmp_path, monkeypatch) -> None:
    from rollout.store.compact import _Compactor

    views = fill(tmp_path, 0, 6)
    move = _Compactor._move
    taken = []

    def late(self, *arguments) -> None:
        if not taken:
            taken.append(True)
            database = ts.KvStore.open(f"file://{tmp_path}/|ocdbt:").result()
            database[LEASE_KEY] = json.dumps(json.loads(database[LEASE_KEY]) | {"until": 0})
            taken.append(compact(tmp_path).segments)
        move(self, *arguments)

    monkeypatch.setattr(_Compactor, "_move", late)
    with pytest.raises(StoreError, match="another compactor took over"):
        compact(tmp_path)
    assert taken == [True, 6]
    for version, seen in views.items():
        assert state(SegmentReader(tmp_path, version=version)) == seen
    check_bits(tmp_path, 6)


def test_a_damaged_shard_is_found_by_reading_and_by_its_digest(tmp_path) -> None:
    fill(tmp_path, 0, 4)
    compact(tmp_path)
    (shard,) = tmp_path.glob("sealed/*/trajectories/0")
    whole = shard.read_bytes()
    data = bytearray(whole)
    data[len(data) // 3] ^= 4
    shard.write_bytes(data)
    with pytest.raises(StoreError, match="reading the store"):
        [SegmentReader(tmp_path).read(f"s/{i:03d}") for i in range(4)]
    # A shard that is whole and wrong: entries of a shard are found by their order.
    kvstore = ts.KvStore.open(f"file://{tmp_path}/").result()
    sealed_set = shard.parents[1].name
    entries = ts.KvStore.open(layout.shard_spec(kvstore, sealed_set, 0)).result()
    shard.write_bytes(whole)
    first, second = (layout.shard_entry(i)[1] for i in range(2))
    entries[first] = entries[second]
    assert "does not read back equal" in sealed_problem(SegmentReader(tmp_path), "s/000")
    assert sealed_problem(SegmentReader(tmp_path), "s/001") is None


def test_a_local_shard_reads_as_tensorstore_reads_it(tmp_path) -> None:
    # The reader takes a local shard apart itself: every entry must be what the format's own driver
    # finds, those included that the shard lacks.
    fill(tmp_path, 0, 4)
    compact(tmp_path)
    (shard,) = tmp_path.glob("sealed/*/trajectories/0")
    sealed_set = shard.parents[1].name
    kvstore = ts.KvStore.open(f"file://{tmp_path}/").result()
    entries = ts.KvStore.open(layout.shard_spec(kvstore, sealed_set, 0)).result()
    local = LocalShards(f"{tmp_path}/")
    found = [local.read(sealed_set, i) for i in range(layout.ENTRIES)]
    keys = [layout.shard_entry(i)[1] for i in range(layout.ENTRIES)]
    assert found == [entries.read(key).result().value for key in keys]
    assert 0 < sum(map(bool, found)) == len(SegmentReader(tmp_path).ids())
    assert local.read(sealed_set, layout.ENTRIES) == b""
    assert local.read("none", 0) == b""


def test_a_local_shard_that_is_damaged_cut_or_gone_is_one_clear_line(tmp_path) -> None:
    SegmentWriter(tmp_path, vocab_size=VOCAB).write("s", [make("a", 40)])
    compact(tmp_path)
    (shard,) = tmp_path.glob("sealed/*/trajectories/0")
    whole = shard.read_bytes()

    def problem() -> str:
        with pytest.raises(StoreError, match=r"^reading the store: ") as caught:
            SegmentReader(tmp_path).get("a")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    # A bit in every seventh byte of the value and in every fortieth of the index.
    index = len(whole) - (16 * layout.ENTRIES + 4)
    for at in [*range(0, index, 7), *range(index, len(whole), 40), len(whole) - 1]:
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert ("damaged" if at < index else "Digest mismatch") in problem()
    for size in (0, 100, index, len(whole) - 1):
        shard.write_bytes(whole[:size])
        assert problem()
    shard.unlink()
    assert "trajectory 0 of segment s is missing" in problem()
    shard.write_bytes(whole)
    assert_same(make("a", 40), SegmentReader(tmp_path).get("a"))


def test_compacting_says_what_is_wrong(tmp_path) -> None:
    with pytest.raises(StoreError, match="no trajectory store at"):
        compact(tmp_path / "none")
    assert not (tmp_path / "none").exists()
