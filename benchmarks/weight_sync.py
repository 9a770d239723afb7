"""What a weight push costs, beside a plain copy of the same bytes, on real servers.

    TRSI_SGLANG_PYTHON=.venv-sglang/bin/python python benchmarks/weight_sync.py [--layers N]

A push is everything from parameters in the trainer to verified servers: export, validation,
digests, sync to disk, publication, pause, load, version, checksums, probe, go on. The copy writes
the same files into another folder and syncs them (`copy + sync`), or doesn't (`copy`). Both start
from a warm page cache; rounds alternate, and medians are printed with the load of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import jax

from rollout.engines.sglang import FleetOptions, SGLangFleet
from rollout.protocols import WeightSnapshot
from tests import sglang_real as real
from trsi_jax.model import init_params
from trsi_jax.publish import publish


def copy(source: Path, target: Path, *, sync: bool) -> float:
    began = time.perf_counter()
    shutil.copytree(source, target)
    if sync:
        for path in [*target.iterdir(), target]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return time.perf_counter() - began


async def measure(given: argparse.Namespace, folder: Path) -> None:
    config = replace(
        real.DENSE,
        name="dense-push",
        hidden_size=1024,
        num_layers=given.layers,
        intermediate_size=3072,
        vocab_size=32_000,
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        rotary_dim=64,
    )
    trees = [jax.block_until_ready(init_params(config, jax.random.key(seed))) for seed in (0, 1)]
    weights = folder / "weights"
    base = publish(weights, 0, config, trees[0], dtype="F32")
    assert base.path
    size = sum(path.stat().st_size for path in base.path.iterdir())
    specs = [real.spec(base.path, real.free_port()) for _ in range(given.servers)]
    times: dict[str, list[float]] = defaultdict(list)
    with real.running(specs, folder):
        fleet = SGLangFleet(
            [spec.url for spec in specs],
            vocab_size=config.vocab_size,
            context_len=real.CONTEXT,
            options=FleetOptions(checksums=not given.no_checksums, poll_s=60.0),
        )
        try:
            await fleet.start()
            last: WeightSnapshot = base
            for number in range(1, given.rounds + 2):
                assert last.path
                for name, sync in (("copy", False), ("copy + sync", True)):
                    target = folder / "copied"
                    seconds = copy(last.path, target, sync=sync)
                    shutil.rmtree(target)
                    if number > 1:
                        times[name].append(seconds)
                began = time.perf_counter()
                last = publish(weights, number, config, trees[number % 2], dtype="F32")
                published = time.perf_counter()
                report = await fleet.update_weights(last)
                ended = time.perf_counter()
                assert not report.failed, report.failed
                if number > 1:  # The first one compiles the probe.
                    times["publish"].append(published - began)
                    times["update"].append(ended - published)
                    times["push"].append(ended - began)
        finally:
            await fleet.aclose()
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    print(f"{size / 1e6:.0f} MB, {given.servers} servers, {given.rounds} rounds, load", end=" ")
    print(*(f"{x:.1f}" for x in os.getloadavg()))
    for name, seconds in medians.items():
        spread = f"{min(times[name]):.2f}..{max(times[name]):.2f}"
        print(f"{name:<12}{seconds:6.2f} s  ({spread})  {size / 1e9 / seconds:5.2f} GB/s")
    print(f"push / (copy + sync): {medians['push'] / medians['copy + sync']:.2f}")
    print(f"push / copy:          {medians['push'] / medians['copy']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-checksums", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TRSI_BENCH_DIR")) as folder:
        asyncio.run(measure(given, Path(folder)))


if __name__ == "__main__":
    main()
