"""Tokens a second of `JaxEngine` against `transformers.generate`, and against what must be done.

    VENV=.venv-bench sh requirements/install.sh parity
    .venv-bench/bin/python benchmarks/decode.py --json decode.json

One tiny hybrid (the embedded run's preset) with the same float32 weights on both sides, 32 prompts
at once, sampling at temperature 1 from the full vocabulary, no stop: seconds from the first
request to the last result, contexts read included. Each side is a process of its own that sleeps
while the other computes, and they take turns; the figure is the ratio of the shortest.

The bound is what one step of the batch cannot do without: its matrix products, timed alone in the
same process by the same library at the same shapes, in as many threads as the engine has streams;
and every number of the caches that must move once (recurrent states in and out, visible keys and
values in) at the bandwidth of passes over as many bytes as a step touches, timed likewise. Norms,
gates, softmax, sampling and all bookkeeping are not in it.

CPU time is the steadier figure where others use the machine; both are printed, with the load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("wall", "cpu")
SIDES = ("trsi_jax", "transformers")
VOCAB = 512
LEAST_RATIO, MOST_OF_BOUND = 5.0, 2.0
CHECK_RATIO, CHECK_OF_BOUND = 5.0 / 3, 6.0


def prompts(batch: int, length: int) -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(0, VOCAB, (batch, length)).astype(np.int32)


def ours(folder: Path, args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    import dataclasses

    from rollout.protocols import GenerateRequest, SamplingSpec
    from trsi_jax.engine import JaxEngine
    from trsi_jax.model import ModelConfig, load_params, preset

    # The preset's own chunk and solver, which a directory does not say.
    config = preset("tiny", vocab_size=VOCAB)
    assert dataclasses.replace(ModelConfig.from_hf(folder), name="tiny").num_layers == 4
    params = load_params(folder, config)
    context = args.prompt + args.new
    loop = asyncio.new_event_loop()

    async def make() -> JaxEngine:
        return JaxEngine(
            config,
            params,
            context_len=context,
            max_sessions=args.batch,
            block_width=-(-args.batch // args.streams),
            linger_s=0.0,
            prefill_chunk=args.chunk,
            prefill_width=-(-args.batch // args.streams),
            streams=args.streams,
        )

    engine = loop.run_until_complete(make())
    ids = [tuple(row.tolist()) for row in prompts(args.batch, args.prompt)]
    count = iter(range(1_000_000))

    async def generate() -> int:
        await engine.flush_cache()
        spec = SamplingSpec(max_new_tokens=args.new, ignore_eos=True)
        results = await asyncio.gather(
            *(engine.generate(GenerateRequest(f"{next(count)}", row, spec)) for row in ids)
        )
        return sum(len(result.output_ids) for result in results)

    return {
        "run": lambda: loop.run_until_complete(generate()),
        "bound": lambda: bound(config, params, args),
    }


def theirs(folder: Path, args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(prompts(args.batch, args.prompt)).long()

    def run() -> int:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=args.new,
                min_new_tokens=args.new,
                pad_token_id=0,
                eos_token_id=None,
            )
        return int((out.shape[1] - ids.shape[1]) * out.shape[0])

    return {"run": run}


def bound(config: Any, params: Any, args: argparse.Namespace) -> dict[str, float]:
    """Wall and CPU seconds of the products and of the bytes of one batch, and their rates."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    steps, rows = 64, -(-args.batch // args.streams)
    kernels = [params["lm_head"]["kernel"]]
    for kind, stacked in (("gdn", 2), ("attention", 1)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(params["groups"][kind]):
            name = jax.tree_util.keystr(path)
            if not name.endswith("['kernel']"):
                continue
            for one in leaf.reshape(-1, *leaf.shape[stacked:]):
                ins = one.shape[0] * one.shape[1] if "o_proj" in name else one.shape[0]
                kernels.append(one.reshape(ins, -1))

    def products(rows: int, repeat: int) -> Callable[[], Any]:
        widths = {side for kernel in kernels for side in kernel.shape}
        inputs = {width: jnp.full((rows, width), 1e-3) for width in widths}

        def body(_: int, carry: Any) -> Any:
            # Every product is added whole to what later ones read, so none can be left out.
            carry = {width: 0.5 * x for width, x in carry.items()}
            for kernel in kernels:
                carry[kernel.shape[1]] += carry[kernel.shape[0]] @ kernel
            return carry

        looped = jax.jit(lambda carry: lax.fori_loop(0, repeat, body, carry))
        return lambda: jax.block_until_ready(looped(inputs))

    layers = config.num_groups * config.linear_per_group
    state = 4 * rows * layers * config.gdn_value_heads * config.gdn_key_dim * config.gdn_value_dim
    visible = args.prompt + args.new / 2
    keys = 2 * 4 * rows * config.num_groups * config.num_kv_heads * config.head_dim * visible
    moved = 2 * state + keys
    # A step touches the weights, too: what it comes back to has left the nearest cache.
    touched = state + keys + sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    def passes() -> Callable[[], None]:
        numbers = jnp.ones(int(touched / 4), jnp.float32)
        program = jax.jit(
            lambda x: lax.fori_loop(0, steps, lambda _, y: y * 1.0000001, x), donate_argnums=0
        )

        def run() -> None:
            nonlocal numbers
            numbers = jax.block_until_ready(program(numbers))

        return run

    step = least([products(rows, steps) for _ in range(args.streams)])
    # The contexts: all rows and tokens in one product each.
    prompt = least([products(rows * args.prompt, 1) for _ in range(args.streams)])
    over = least([passes() for _ in range(args.streams)])
    share = moved / (2 * touched)
    parts = {
        "products": [x / steps * args.new for x in step],
        "prompt": list(prompt),
        "bytes": [x / steps * share * args.new for x in over],
    }
    flops = sum(2 * args.batch * kernel.size for kernel in kernels)
    return {
        **{
            f"{part}_{kind}": x
            for part, xs in parts.items()
            for kind, x in zip(KINDS, xs, strict=True)
        },
        "gflop_per_s": flops * steps / step[0] / 1e9,
        "gbyte_per_s": 2 * touched * args.streams * steps / over[0] / 1e9,
    }


def least(runs: list[Callable[[], Any]], rounds: int = 7) -> tuple[float, float]:
    """Shortest wall and CPU seconds of all of `runs`, each in a thread of its own."""
    best = (float("inf"), float("inf"))
    with ThreadPoolExecutor(len(runs)) as pool:
        for _ in range(rounds + 1):
            wall, cpu = time.perf_counter(), time.process_time()
            for future in [pool.submit(run) for run in runs]:
                future.result()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            best = (min(best[0], wall), min(best[1], cpu))
    return best


def work(side: str, folder: Path, args: argparse.Namespace) -> None:
    """A worker: reads a task a line, answers with its result, wall and CPU seconds."""
    tasks = (ours if side == "trsi_jax" else theirs)(folder, args)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        result = tasks[line.strip()]()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(json.dumps({"result": result, "wall": wall, "cpu": cpu}), flush=True)


class Worker:
    """One side in a process of its own."""

    def __init__(self, side: str, folder: Path) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
        environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
        self.process = subprocess.Popen(
            [*command, "--side", side, "--folder", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self.read()

    def read(self) -> Any:
        """Its next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a worker ended; run it with --side to see why")
        return json.loads(line)

    def ask(self, task: str) -> Any:
        """Let it do one of its tasks."""
        assert self.process.stdin is not None
        self.process.stdin.write(task + "\n")
        self.process.stdin.flush()
        return self.read()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=33)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--streams", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--check", action="store_true", help="loose bounds, for CI")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.side:
        work(args.side, args.folder, args)
        return 0

    sys.path.insert(0, str(ROOT))
    import jax

    from trsi_jax.model import init_params, preset, save_params

    with tempfile.TemporaryDirectory() as scratch:
        config = preset("tiny", vocab_size=VOCAB)
        params = init_params(config, jax.random.key(0))
        folder = save_params(Path(scratch) / "tiny", config, params, dtype="F32")
        before = os.getloadavg()[0]
        workers = {side: Worker(side, folder) for side in SIDES}
        found: dict[str, Any] = {side: [] for side in SIDES}
        bounds = []
        for worker in workers.values():
            worker.ask("run")
        for _ in range(args.rounds):
            for side, worker in workers.items():
                found[side].append(worker.ask("run"))
            bounds.append(workers["trsi_jax"].ask("bound")["result"])
        for worker in workers.values():
            worker.process.terminate()
            worker.process.wait(30)
    load = (before, os.getloadavg()[0])
    return report(found, bounds, load, args)


def report(found: Any, bounds: Any, load: tuple[float, float], args: argparse.Namespace) -> int:
    made = args.batch * args.new
    print(f"batch {args.batch}, {args.prompt} + {args.new} tokens, float32, {args.rounds} rounds")
    print(f"{'':<14} {'tokens/s':>9} {'tokens/CPU-s':>13} {'wall s':>8} {'CPU s':>8}")
    wall, cpu = {}, {}
    for side in SIDES:
        assert all(entry["result"] == made for entry in found[side])
        wall[side] = min(entry["wall"] for entry in found[side])
        cpu[side] = min(entry["cpu"] for entry in found[side])
        print(
            f"{side:<14} {made / wall[side]:>9.0f} {made / cpu[side]:>13.0f}"
            f" {wall[side]:>8.3f} {cpu[side]:>8.3f}"
        )
    part = {
        f"{name}_{kind}": min(b[f"{name}_{kind}"] for b in bounds)
        for name in ("products", "prompt", "bytes")
        for kind in KINDS
    }
    limit = {kind: sum(x for name, x in part.items() if name.endswith(kind)) for kind in KINDS}
    rates = {key: max(b[key] for b in bounds) for key in ("gflop_per_s", "gbyte_per_s")}
    print(
        f"{'bound':<14} {made / limit['wall']:>9.0f} {made / limit['cpu']:>13.0f}"
        f" {limit['wall']:>8.3f} {limit['cpu']:>8.3f}\n"
        f"  by wall: products {part['products_wall']:.3f} s at {rates['gflop_per_s']:.0f} GFLOP/s,"
        f" contexts {part['prompt_wall']:.3f} s, bytes {part['bytes_wall']:.3f} s at"
        f" {rates['gbyte_per_s']:.0f} GB/s"
    )
    ratio = wall["transformers"] / wall["trsi_jax"]
    ratio_cpu = cpu["transformers"] / cpu["trsi_jax"]
    of_bound = wall["trsi_jax"] / limit["wall"]
    of_bound_cpu = cpu["trsi_jax"] / limit["cpu"]
    print(f"trsi_jax / transformers: {ratio:.1f} by wall, {ratio_cpu:.1f} by CPU; target >= 5")
    print(f"trsi_jax over bound: {of_bound:.2f} by wall, {of_bound_cpu:.2f} by CPU; target <= 2")
    print(f"load average {load[0]:.1f} before, {load[1]:.1f} after, {os.cpu_count()} cores")
    if args.json:
        content = {"found": found, "bounds": bounds, "load": load}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    least_ratio = CHECK_RATIO if args.check else LEAST_RATIO
    most = CHECK_OF_BOUND if args.check else MOST_OF_BOUND
    failures = []
    if ratio < least_ratio:
        failures.append(f"{ratio:.2f} times transformers < {least_ratio:.2f}")
    if of_bound > most:
        failures.append(f"{of_bound:.2f} times the bound > {most}")
    for line in failures:
        print(f"decode: {line}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
