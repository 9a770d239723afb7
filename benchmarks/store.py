"""Writing, random reading and size of the trajectory store, against files of three other kinds.

    python -m venv bench && bench/bin/pip install . pyarrow array-record
    bench/bin/python benchmarks/store.py --json out.json

The same trajectories (token ids, log-probs, masks, turns, weight versions and the record) go into
the store, into Parquet files, safetensors files and ArrayRecord files; what comes back is compared
bit by bit. A row says whether its writes are durable: flushed to the disk before the next begins.
Rows of a peer are left out, and said to be, where its package is not installed. Wall-clock is the
figure, CPU time of all threads beside it; a verdict is given only on a machine that is not loaded.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from rollout.records import CheckResult, Trajectory, Turn, Verdict
from rollout.store import layout
from rollout.store.compact import compact
from rollout.store.reader import SegmentReader, read_context
from rollout.store.segments import SegmentWriter

VOCAB = 248_320
FIELDS = tuple(layout.TOKEN_FIELDS)
# Far below the data's size: what is measured is reading, not remembering.
CACHE_BYTES = 4_000_000


def make(i: int, n: int, rng: np.random.Generator) -> Trajectory:
    """A trajectory as terminal work makes them: a quarter sampled, zipfian ids, 20 turns."""
    turns = 20
    edges = np.linspace(n // 20, n, turns + 1).astype(int)
    acted, turn = np.zeros(n, bool), np.zeros(n, np.int32)
    for t in range(turns):
        start, stop = edges[t], edges[t + 1]
        acted[start : start + (stop - start) // 4] = True
        turn[start:stop] = t
    return Trajectory(
        id=f"rpr-1/0/{i:05d}",
        task_id="count-lines-0",
        family="count-lines",
        tier="easy",
        split="train",
        harness="general",
        stage="rpr-1",
        iteration=0,
        sample=i,
        seed=i,
        engine="jax",
        temperature=0.6,
        token_ids=np.minimum(rng.zipf(1.2, n), VOCAB - 1).astype(np.int32),
        acted_t=acted,
        logprob_t=np.where(acted, -rng.exponential(size=n), 0).astype(np.float32),
        turn_t=turn,
        weight_version_t=np.where(acted, 3, -1).astype(np.int32),
        turns=tuple(Turn(f"grep -c {t} a.txt", "line of output\n" * 40, 0) for t in range(turns)),
        finish="done",
        verdict=Verdict(tuple(CheckResult(f"c{k}", "effective", k % 2 == 0) for k in range(6))),
        timings={"total": 12.5},
        provenance={"tokenizer": "0af3"},
    )


def raw_bytes(trajectories: Sequence[Trajectory]) -> int:
    """Size of everything without compression, index or padding."""
    arrays = sum(getattr(t, f).nbytes for t in trajectories for f in FIELDS)
    return arrays + sum(len(layout.encode_record(t)) for t in trajectories)


@dataclass
class Store:
    """One way to keep trajectories: write all of a list, then read one by its place."""

    name: str
    durable: bool
    write: Callable[[Path, Sequence[Trajectory]], None]
    opened: Callable[[Path, Sequence[Trajectory]], Callable[[int], Trajectory]]
    prepare: Callable[[Path], object] = lambda folder: None


def segment_store(batch: int) -> Store:
    def write(folder: Path, trajectories: Sequence[Trajectory]) -> None:
        writer = SegmentWriter(folder, vocab_size=VOCAB)
        for start in range(0, len(trajectories), batch):
            writer.write(f"rpr-1/{start:05d}", trajectories[start : start + batch])

    def opened(folder: Path, trajectories: Sequence[Trajectory]) -> Callable[[int], Trajectory]:
        context = read_context(CACHE_BYTES)
        found = SegmentReader(folder, context=context).pinned()
        reader = SegmentReader(folder, version=found.version, context=context)
        return lambda i: reader.get(trajectories[i].id)

    return Store(f"trsi-jax, {batch} a commit", True, write, opened)


def decoded(record: bytes, arrays: dict[str, Any]) -> Trajectory:
    return layout.decode_trajectory(record, arrays, 1)


def flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def parquet_store(compression: str, *, durable: bool) -> Store:
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")

    def write(folder: Path, trajectories: Sequence[Trajectory]) -> None:
        for i, t in enumerate(trajectories):
            columns = {f: arrow.array(getattr(t, f)) for f in FIELDS}
            table = arrow.table(columns).replace_schema_metadata(
                {"record": layout.encode_record(t)}
            )
            part = folder / f"{i}.part"
            parquet.write_table(table, part, compression=compression)
            if durable:
                flush(part)
            part.rename(folder / f"{i}.parquet")

    def opened(folder: Path, _: Sequence[Trajectory]) -> Callable[[int], Trajectory]:
        def read(i: int) -> Trajectory:
            table = parquet.read_table(folder / f"{i}.parquet", use_threads=True)
            arrays = {f: table[f].to_numpy() for f in FIELDS}
            return decoded(table.schema.metadata[b"record"], arrays)

        return read

    return Store(f"parquet, {compression}, a file each", durable, write, opened)


def safetensors_store(*, durable: bool) -> Store:
    files, safe = import_module("safetensors.numpy"), import_module("safetensors")

    def write(folder: Path, trajectories: Sequence[Trajectory]) -> None:
        for i, t in enumerate(trajectories):
            part = folder / f"{i}.part"
            record = {"record": layout.encode_record(t).decode()}
            files.save_file({f: getattr(t, f) for f in FIELDS}, part, metadata=record)
            if durable:
                flush(part)
            part.rename(folder / f"{i}.safetensors")

    def opened(folder: Path, _: Sequence[Trajectory]) -> Callable[[int], Trajectory]:
        def read(i: int) -> Trajectory:
            with safe.safe_open(folder / f"{i}.safetensors", framework="np") as file:
                arrays = {f: file.get_tensor(f) for f in FIELDS}
                return decoded(file.metadata()["record"].encode(), arrays)

        return read

    return Store("safetensors, a file each", durable, write, opened)


def array_record_store(options: str) -> Store:
    module = import_module("array_record.python.array_record_module")

    def write(folder: Path, trajectories: Sequence[Trajectory]) -> None:
        writer = module.ArrayRecordWriter(str(folder / "all.array_record"), options)
        for t in trajectories:
            record = layout.encode_record(t)
            parts = [getattr(t, f).tobytes() for f in FIELDS]
            head = np.array([t.token_ids.size, len(record)], np.int64).tobytes()
            writer.write(b"".join([head, record, *parts]))
        writer.close()

    def opened(folder: Path, _: Sequence[Trajectory]) -> Callable[[int], Trajectory]:
        reader = module.ArrayRecordReader(
            str(folder / "all.array_record"), "readahead_buffer_size:0"
        )

        def read(i: int) -> Trajectory:
            (data,) = reader.read([i])
            n, size = np.frombuffer(data, np.int64, 2).tolist()
            record, at, arrays = data[16 : 16 + size], 16 + size, {}
            for f, dtype in layout.TOKEN_FIELDS.items():
                arrays[f] = np.frombuffer(data, dtype, n, at)
                at += n * dtype.itemsize
            return decoded(record, arrays)

        return read

    return Store(f"ArrayRecord, {options}", False, write, opened)


def stores(batch: int) -> tuple[list[Store], list[str]]:
    """Every row that can be measured here, and what is missing."""
    found, missing = [segment_store(batch), segment_store(1)], []
    compacted = replace(found[0], name="trsi-jax, compacted", prepare=compact)
    found.insert(0, compacted)
    peers: list[tuple[str, Callable[[], Store]]] = [
        ("pyarrow", lambda: parquet_store("snappy", durable=False)),
        ("pyarrow", lambda: parquet_store("snappy", durable=True)),
        ("pyarrow", lambda: parquet_store("zstd", durable=False)),
        ("safetensors", lambda: safetensors_store(durable=False)),
        ("safetensors", lambda: safetensors_store(durable=True)),
        ("array-record", lambda: array_record_store("group_size:1,uncompressed")),
        ("array-record", lambda: array_record_store("group_size:1,zstd:1")),
    ]
    for package, of in peers:
        try:
            found.append(of())
        except ImportError:
            missing.append(package)
    return found, sorted(set(missing))


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def summary(times: Sequence[tuple[float, float]], count: int) -> dict[str, float]:
    wall, cpu = [t[0] for t in times], [t[1] for t in times]
    return {
        "per_s_best": count / min(wall),
        "per_s_median": count / statistics.median(wall),
        "wall_min_s": min(wall),
        "wall_median_s": statistics.median(wall),
        "cpu_min_s": min(cpu),
        "per_cpu_s_best": count / max(min(cpu), 1e-9),
    }


def measure(
    ways: Sequence[Store], trajectories: Sequence[Trajectory], repeats: int, reads: int
) -> list[dict[str, Any]]:
    """Write and read with every store in turn, so that a busy moment strikes all alike."""
    writes: dict[str, list[tuple[float, float]]] = {}
    found: dict[str, list[tuple[float, float]]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    order = np.random.default_rng(1).integers(0, len(trajectories), reads).tolist()
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(repeats):
            for number, way in enumerate(ways):
                key = f"{way.name}{way.durable}"
                folder = Path(scratch) / f"{number}"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                writes.setdefault(key, []).append(
                    timed(lambda w=way, f=folder: w.write(f, trajectories))
                )
                way.prepare(folder)
                if repeat == 0:
                    read = way.opened(folder, trajectories)
                    for i, expected in enumerate(trajectories):
                        same(expected, read(i), way.name)
                read = way.opened(folder, trajectories)
                read(order[0])
                found.setdefault(key, []).append(
                    timed(lambda r=read: [r(i) for i in order] and None)
                )
                files = [p for p in folder.rglob("*") if p.is_file()]
                sizes[key] = (sum(p.stat().st_size for p in files), len(files))
    raw = raw_bytes(trajectories)
    return [
        {
            "name": way.name,
            "durable": way.durable,
            "write": summary(writes[key], len(trajectories)),
            "read": summary(found[key], reads),
            "bytes": sizes[key][0],
            "files": sizes[key][1],
            "amplification": sizes[key][0] / raw,
        }
        for way in ways
        for key in [f"{way.name}{way.durable}"]
    ]


def same(a: Trajectory, b: Trajectory, name: str) -> None:
    for f in FIELDS:
        x, y = np.asarray(getattr(a, f)), np.asarray(getattr(b, f))
        if x.dtype != y.dtype or x.tobytes() != y.tobytes():
            sys.exit(f"{name}: {f} of {a.id} does not come back equal")
    if a.turns != b.turns or a.verdict != b.verdict:
        sys.exit(f"{name}: the record of {a.id} does not come back equal")


def ratios(rows: Sequence[dict[str, Any]], by: str) -> dict[str, float]:
    """What the targets are about; the peer's best row counts."""

    def best(prefix: str, part: str) -> float:
        return max(
            (r[part][by] for r in rows if r["name"].startswith(prefix)), default=float("nan")
        )

    batched = next(r for r in rows if r["name"].endswith("a commit"))
    compacted = rows[0]
    return {
        "write over parquet": batched["write"][by] / best("parquet", "write"),
        "read over safetensors": compacted["read"][by] / best("safetensors", "read"),
        "read over ArrayRecord": compacted["read"][by] / best("ArrayRecord", "read"),
        "read over parquet": compacted["read"][by] / best("parquet", "read"),
    }


TARGETS = {"write over parquet": 2.0, "read over safetensors": 0.8}
MAX_AMPLIFICATION = 1.15


def table(rows: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    print(
        "| store | durable | write /s best (median) | write /CPU-s | random read /s best (median) "
        "| read /CPU-s | size / raw | files |\n|---|---|---|---|---|---|---|---|",
        file=out,
    )
    for r in rows:
        w, d = r["write"], r["read"]
        print(
            f"| {r['name']} | {'yes' if r['durable'] else 'no'} "
            f"| {w['per_s_best']:.0f} ({w['per_s_median']:.0f}) | {w['per_cpu_s_best']:.0f} "
            f"| {d['per_s_best']:.0f} ({d['per_s_median']:.0f}) | {d['per_cpu_s_best']:.0f} "
            f"| {r['amplification']:.2f} | {r['files']} |",
            file=out,
        )
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trajectories", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="trajectories a commit")
    parser.add_argument("--reads", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(np.log(23_000), 0.6, arguments.trajectories), 73_000)
    trajectories = [make(i, int(n), rng) for i, n in enumerate(lengths)]
    ways, missing = stores(arguments.batch)
    before = os.getloadavg()[0]
    rows = measure(ways, trajectories, arguments.repeats, arguments.reads)
    load = max(before, os.getloadavg()[0])
    wall, cpu = ratios(rows, "per_s_best"), ratios(rows, "per_cpu_s_best")
    median = ratios(rows, "per_s_median")
    print(table(rows))
    for name in missing:
        print(f"left out: {name} is not installed")
    for name, value in wall.items():
        print(
            f"{name}: {value:.2f} by wall-clock, {median[name]:.2f} by its median, "
            f"{cpu[name]:.2f} by CPU time"
        )
    print(f"size after compaction: {rows[0]['amplification']:.2f} of raw")
    cores = os.cpu_count() or 1
    if load > cores:
        print(f"load average {load:.1f} on {cores} cores: no verdict")
    else:
        met = all(wall[name] >= least for name, least in TARGETS.items())
        met = met and rows[0]["amplification"] <= MAX_AMPLIFICATION
        print("targets met" if met else "targets missed")
    if arguments.json:
        result = {
            "rows": rows,
            "ratios_wall": wall,
            "ratios_wall_median": median,
            "ratios_cpu": cpu,
            "raw_bytes": raw_bytes(trajectories),
            "load_average": load,
            "cores": cores,
            "machine": platform.machine(),
            "packages": {
                p: installed(p)
                for p in (
                    "tensorstore",
                    "xxhash",
                    "pyarrow",
                    "safetensors",
                    "array-record",
                    "numpy",
                )
            },
        }
        arguments.json.write_text(json.dumps(result, indent=2))


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
