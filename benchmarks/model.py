"""Speed of the model against `transformers` on the same cores, and of import against a raw read.

    VENV=bench sh requirements/install.sh parity
    bench/bin/python benchmarks/model.py --tokens 512 2048 --json out.json

One hybrid of four layers with the same weights on both sides: forward, mean next-token negative
log-likelihood, and gradients of all parameters in float32. Each side is a process of its own that
sleeps while the other computes, and they take turns. Import is `load_params` in the stored dtype;
the raw read is a sequential read of the same files; the page cache is dropped before each.

Wall-clock decides where the machine is quiet. On a loaded one only CPU time means anything, and no
verdict is given.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("trsi_jax", "transformers")


def speed_config(vocab: int = 4096) -> Any:
    """A hybrid of about six million parameters: three gated delta nets and one attention."""
    from trsi_jax.model import ModelConfig

    return ModelConfig(
        name="bench",
        vocab_size=vocab,
        hidden_size=256,
        num_layers=4,
        intermediate_size=768,
        layer_pattern=("linear", "linear", "linear", "full"),
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rotary_dim=16,
        rope_theta=1e7,
        gated_attention=True,
        norm_offset=1.0,
        tie_embeddings=False,
        max_position=8192,
        gdn_key_heads=4,
        gdn_value_heads=8,
        gdn_key_dim=32,
        gdn_value_dim=32,
    )


def tokens_of(length: int, vocab: int) -> Any:
    import numpy as np

    return np.random.default_rng(length).integers(0, vocab, (1, length)).astype(np.int32)


def our_step(folder: Path, solver: str, chunk: int) -> Callable[[int], float]:
    import dataclasses

    import jax
    import jax.numpy as jnp

    from trsi_jax.model import ModelConfig, hidden_states, load_params, logits

    config = dataclasses.replace(
        ModelConfig.from_hf(folder), remat=False, gdn_solver=solver, gdn_chunk=chunk
    )
    params = load_params(folder, config)

    def loss(params: Any, ids: Any) -> Any:
        ones, positions = jnp.ones_like(ids), jnp.arange(ids.shape[1])[None]
        scores = logits(config, params, hidden_states(config, params, ids, ones, positions))
        logprob = jax.nn.log_softmax(scores[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logprob, ids[:, 1:, None], axis=-1))

    both = jax.jit(jax.value_and_grad(loss))

    def step(length: int) -> float:
        value, _ = jax.block_until_ready(both(params, tokens_of(length, config.vocab_size)))
        return float(value)

    return step


def their_step(folder: Path, threads: int) -> Callable[[int], float]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def step(length: int) -> float:
        ids = torch.from_numpy(tokens_of(length, model.config.vocab_size)).long()
        model.zero_grad(set_to_none=True)
        scores = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(scores[0, :-1], ids[0, 1:])
        loss.backward()
        return float(loss)

    return step


def work(side: str, folder: Path, args: argparse.Namespace) -> None:
    """A worker: reads a length a line, answers with loss, wall and CPU milliseconds."""
    if side == "trsi_jax":
        step = our_step(folder, args.solver, args.chunk)
    else:
        step = their_step(folder, args.threads)
    for line in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        loss = step(int(line))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(json.dumps([loss, 1e3 * wall, 1e3 * cpu]), flush=True)


class Worker:
    """One side, computing when asked."""

    def __init__(self, side: str, folder: Path, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--worker", side, "--folder", str(folder)]
        command += ["--threads", str(args.threads), "--solver", args.solver]
        command += ["--chunk", str(args.chunk)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(args.threads)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def step(self, length: int) -> tuple[float, float, float]:
        """Loss, wall and CPU milliseconds of one step."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{length}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended; its message is above")
        loss, wall, cpu = json.loads(line)
        return loss, wall, cpu

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def summary(wall: list[float], cpu: list[float]) -> dict[str, float]:
    return {
        "cpu_min_ms": min(cpu),
        "cpu_median_ms": statistics.median(cpu),
        "wall_min_ms": min(wall),
        "wall_median_ms": statistics.median(wall),
    }


def measure_speed(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Rows "<side>, T=<tokens>"; the first step of each is not counted."""
    import jax

    from trsi_jax.model import init_params, save_params

    rows = {}
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder, config = Path(scratch) / "bench", speed_config()
        save_params(folder, config, init_params(config, jax.random.key(0)), dtype="F32")
        workers = {side: Worker(side, folder, args) for side in SIDES}
        for length in args.tokens:
            losses = {side: worker.step(length)[0] for side, worker in workers.items()}
            if abs(losses[SIDES[0]] - losses[SIDES[1]]) > 2e-3:
                raise SystemExit(f"the two sides do not compute the same loss: {losses}")
            times: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
            for _ in range(args.repeats):
                for side, worker in workers.items():
                    times[side].append(worker.step(length)[1:])
            for side, pairs in times.items():
                rows[f"{side}, T={length}"] = summary(*map(list, zip(*pairs, strict=True)))
        for worker in workers.values():
            worker.close()
    return rows


def drop_cache(folder: Path) -> None:
    """Let the kernel forget the files' pages; they are written back first."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def touch_memory(size: int) -> None:
    """Use and free so much memory.

    A virtual machine gives free pages back to its host after a while, and to get one again takes
    longer than to read it: what is timed next would measure that, or not, by chance.
    """
    import numpy as np

    np.ones(size, np.uint8)


def raw_read(folder: Path) -> None:
    block = bytearray(16 << 20)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def private_bytes() -> int:
    with Path("/proc/self/status").open() as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@contextmanager
def peak_memory(found: list[int]) -> Iterator[None]:
    """Appends the largest growth of private memory inside the block."""
    before, over = private_bytes(), threading.Event()
    peak = [before]

    def watch() -> None:
        while not over.wait(0.01):
            peak.append(private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        found.append(max(peak) - before)


def measure_import(args: argparse.Namespace) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Cold and warm import and a raw read of the same files, taking turns."""
    import dataclasses

    import jax
    import jax.numpy as jnp

    from trsi_jax.model import abstract_params, load_params, save_params

    wide = dataclasses.replace(
        speed_config(32_768),
        hidden_size=1024,
        intermediate_size=4096,
        param_dtype="bfloat16",
        gdn_key_heads=8,
        gdn_value_heads=16,
        gdn_key_dim=64,
        gdn_value_dim=64,
        num_heads=16,
        num_kv_heads=4,
    )
    group = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(wide)["groups"]))
    groups = max(1, round((args.import_mb * 5e5 - 2 * 32_768 * 1024) / group))
    config = dataclasses.replace(wide, num_layers=4 * groups)
    abstract = abstract_params(config)
    shards = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    times: dict[str, list[tuple[float, float]]] = {}
    growth: list[int] = []

    def timed(name: str, run: Callable[[], Any]) -> None:
        gc.collect()  # JAX lets go of host buffers here, and not before.
        cpu, wall = time.process_time(), time.perf_counter()
        run()
        pair = 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)
        times.setdefault(name, []).append(pair)

    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch) / "weights"
        params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.5, leaf.dtype), abstract)
        save_params(folder, config, params, dtype="BF16", shard_bytes=256_000_000)
        del params
        stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))

        def load() -> None:
            jax.block_until_ready(load_params(folder, config))

        load()
        for _ in range(args.repeats):
            drop_cache(folder)
            touch_memory(3 * stored)
            timed("raw read, cold", lambda: raw_read(folder))
            gc.collect()
            drop_cache(folder)
            touch_memory(3 * stored)
            with peak_memory(growth):
                timed("import, cold", load)
            timed("import, warm", load)
    rows = {name: summary(*map(list, zip(*pairs, strict=True))) for name, pairs in times.items()}
    sizes = {"stored": stored, "shards": shards, "peak": max(growth), "largest": 32_768 * 1024 * 2}
    return rows, sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--solver", choices=("solve", "ladder"), default="solve")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--import-mb", type=int, default=800, help="0 leaves import out")
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 below half of a target")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.folder, args)
        return 0
    load_before = os.getloadavg()[0]
    rows = measure_speed(args) if args.tokens else {}
    sizes: dict[str, int] = {}
    if args.import_mb:
        more, sizes = measure_import(args)
        rows |= more
    load_after = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    print(
        f"{platform.machine()}, {cores} cores, {args.threads} threads, solver {args.solver}, "
        f"chunk {args.chunk}, load {load_before:.1f} -> {load_after:.1f}"
    )
    print(f"{'':26}{'CPU min':>10}{'CPU med':>10}{'wall min':>10}{'wall med':>10}  ms")
    for name, row in rows.items():
        print(f"{name:26}" + "".join(f"{row[key]:10.1f}" for key in row))
    if sizes:
        print(
            f"{sizes['stored'] / 1e6:.0f} MB stored; private memory grew by at most "
            f"{sizes['peak'] / 1e6:.0f} MB for shards of {sizes['shards'] / 1e6:.0f} MB and a "
            f"largest tensor of {sizes['largest'] / 1e6:.0f} MB"
        )
    quiet = max(load_before, load_after) <= cores
    targets: dict[str, tuple[float, float | None, float]] = {}
    for length in args.tokens:
        ours, theirs = (rows[f"{side}, T={length}"] for side in SIDES)
        targets[f"times transformers, T={length}"] = (
            theirs["wall_min_ms"] / ours["wall_min_ms"],
            theirs["cpu_min_ms"] / ours["cpu_min_ms"],
            1.0,
        )
    if sizes:
        raw, cold = rows["raw read, cold"], rows["import, cold"]
        targets["share of a raw cold read"] = (raw["wall_min_ms"] / cold["wall_min_ms"], None, 0.6)
    failed = []
    for name, (wall, cpu, target) in targets.items():
        verdict = ("met" if wall >= target else "missed") if quiet else "no verdict: machine loaded"
        by_cpu = "" if cpu is None else f", by CPU time {cpu:.2f}"
        print(f"{name}: {wall:.2f}{by_cpu} (target >= {target:g}; {verdict})")
        failed += [name] if quiet and wall < target / 2 else []
    if args.json:
        report = {
            "settings": {k: str(v) for k, v in vars(args).items()},
            "machine": {"arch": platform.machine(), "cores": cores},
            "load": [load_before, load_after],
            "rows": rows,
            "bytes": sizes,
            "ratios": {
                name: {"wall": wall, "cpu": cpu} for name, (wall, cpu, _) in targets.items()
            },
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if args.check and failed else 0


if __name__ == "__main__":
    sys.exit(main())
