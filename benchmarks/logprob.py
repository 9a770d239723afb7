"""Log-prob of a linear head at a large vocabulary: fused by token chunks against all logits.

    python benchmarks/logprob.py --json logprob.json
    python benchmarks/logprob.py --check        # loose bounds, for CI

Loss and gradients by the hidden states and the head of a weighted cross-entropy, float32. "naive"
makes [T, vocab] logits and lets autodiff do the rest; "fused" is `losses.linear_cross_entropy`,
one pass; "two passes" is `losses.linear_logprob` under the same loss, as PPO needs it, whose
weights follow from the log-probs. Temporaries are XLA's count for the compiled program, without the
gradients.
Processor time decides: the variants take turns in one process, and the figure is the ratio of the
smallest. On a loaded machine wall time means nothing and is printed beside it for honesty.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trsi_jax.losses import linear_cross_entropy, linear_logprob

DIM, VOCAB = 256, 62_080
"""A quarter of the vocabulary of Qwen3.8, what one device of four holds."""

OURS = ("fused", "two passes")
TIME_LIMIT, TEMPORARY_LIMIT = 1.10, 1 / 5
CHECK_TIME_LIMIT, CHECK_TEMPORARY_LIMIT = 1.5, 0.4


def naive(hidden: jax.Array, kernel: jax.Array, target: jax.Array, weight: jax.Array) -> jax.Array:
    """-sum_t w_t log softmax(h_t W)[y_t], by way of all logits."""
    logprob = jax.nn.log_softmax(hidden @ kernel)
    return -jnp.sum(weight * jnp.take_along_axis(logprob, target[:, None], -1)[:, 0])


def two_passes(
    chunk: int, hidden: jax.Array, kernel: jax.Array, target: jax.Array, weight: jax.Array
) -> jax.Array:
    """The same loss by way of log-probs whose backward pass makes the logits anew."""
    logprob, _ = linear_logprob(hidden, kernel, target, chunk=chunk)
    return -jnp.sum(weight * logprob)


def inputs(tokens: int) -> tuple[jax.Array, ...]:
    """Fixed random hidden states, head, targets and weights."""
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(tokens, DIM)), jnp.float32),
        jnp.asarray(rng.normal(size=(DIM, VOCAB)) / DIM**0.5, jnp.float32),
        jnp.asarray(rng.integers(0, VOCAB, tokens), jnp.int32),
        jnp.asarray(rng.random(tokens) / tokens, jnp.float32),
    )


def measure(tokens: int, chunk: int, rounds: int, with_naive: bool) -> dict[str, Any]:
    """Temporaries, times and agreement of the variants at one number of tokens."""
    arguments = inputs(tokens)
    variants: dict[str, Callable[..., jax.Array]] = {
        "fused": partial(linear_cross_entropy, chunk=chunk),
        "two passes": partial(two_passes, chunk),
    }
    if with_naive:
        variants["naive"] = naive
    compiled, rows, results = {}, {}, {}
    for name, loss in variants.items():
        program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments).compile()
        compiled[name] = program
        results[name] = jax.block_until_ready(program(*arguments))
        memory = program.memory_analysis()
        rows[name] = {"temporary_bytes": memory.temp_size_in_bytes, "cpu_s": [], "wall_s": []}
    for _ in range(rounds):
        for name, program in compiled.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(program(*arguments))
            rows[name]["cpu_s"].append(time.process_time() - cpu)
            rows[name]["wall_s"].append(time.perf_counter() - wall)
    for name, row in rows.items():
        loss, gradients = results[name]
        row["loss"] = float(loss)
        row["norms"] = [float(jnp.linalg.norm(g)) for g in gradients]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--naive-up-to", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    load = os.getloadavg()[0]
    found = {
        tokens: measure(tokens, options.chunk, options.rounds, tokens <= options.naive_up_to)
        for tokens in options.tokens
    }
    print(f"D {DIM}, vocabulary {VOCAB}, chunk {options.chunk}, float32, {options.rounds} rounds")
    print(
        f"{'tokens':>7} {'variant':<11} {'temp MB':>8} {'CPU s min':>10} {'median':>7} {'wall':>6}"
    )
    for tokens, rows in found.items():
        for name, row in rows.items():
            cpu, wall = row["cpu_s"], row["wall_s"]
            print(
                f"{tokens:>7} {name:<11} {row['temporary_bytes'] / 1e6:>8.0f} {min(cpu):>10.2f}"
                f" {statistics.median(cpu):>7.2f} {min(wall):>6.2f}"
            )
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    failures = verdict(found, options.check)
    if options.json:
        options.json.write_text(json.dumps({str(k): v for k, v in found.items()}, indent=1) + "\n")
    for line in failures:
        print(f"logprob: {line}", file=sys.stderr)
    return 1 if failures else 0


def verdict(found: dict[int, dict[str, Any]], check: bool) -> list[str]:
    """What misses its bound; prints the ratios."""
    most_time = CHECK_TIME_LIMIT if check else TIME_LIMIT
    most_space = CHECK_TEMPORARY_LIMIT if check else TEMPORARY_LIMIT
    failures = []
    for tokens, rows in found.items():
        if "naive" not in rows:
            continue
        plain = rows["naive"]
        for name in OURS:
            row = rows[name]
            ratio = min(row["cpu_s"]) / min(plain["cpu_s"])
            space = row["temporary_bytes"] / plain["temporary_bytes"]
            print(f"{tokens} tokens: {name} / naive: CPU {ratio:.2f}, temporaries {space:.3f}")
            same = np.allclose(
                [row["loss"], *row["norms"]], [plain["loss"], *plain["norms"]], rtol=1e-5
            )
            if not same:
                failures.append(f"{tokens} tokens: {name} gives another loss or gradient")
            if ratio > most_time:
                failures.append(f"{tokens} tokens: {name}: CPU {ratio:.2f} of naive > {most_time}")
            if space > most_space:
                failures.append(
                    f"{tokens} tokens: {name}: temporaries {space:.2f} of naive > {most_space}"
                )
    for name in OURS:
        sizes = [rows[name]["temporary_bytes"] for rows in found.values()]
        # The gradient by the hidden states is an output; what is left may not grow with the tokens.
        if max(sizes) > 1.1 * min(sizes):
            failures.append(f"{name}: temporaries grow with the tokens: {sizes}")
    return failures


if __name__ == "__main__":
    sys.exit(main())
