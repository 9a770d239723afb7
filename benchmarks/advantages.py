"""Speed and error of TB-GAE against a torch loop, google-tunix's scan and a copy of its bytes.

    python -m venv bench && bench/bin/pip install torch chex 'google-tunix>=0.1.7'
    bench/bin/pip install --no-deps .
    bench/bin/python benchmarks/advantages.py --rows 8 --tokens 98304 --json out.json

The reference point is the best of the CPU times of a process pinned to what the machine gives it:
wall-clock is printed beside it. A verdict is given only on a machine that is not loaded.
The peer wants an older transformers than trsi-jax, which the estimators here do not need.
A row of the peers is left out, and said to be, where the package is not installed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trsi_jax.advantages import (
    action_index,
    compact,
    expand,
    gae,
    tb_gae,
    tb_gae_batch,
    tb_gae_compacted,
    turn_starts,
)

GAMMA, LAM = 0.99, 0.95


def make(rows: int, tokens: int, observed: float, turns: int, seed: int) -> dict[str, Any]:
    """Rows of alternating actions and observations, `observed` of all tokens not acted."""
    rng = np.random.default_rng(seed)
    acted = np.zeros((tokens, rows), bool)
    turn = np.zeros((tokens, rows), np.int32)
    for b in range(rows):
        edges = np.sort(rng.choice(np.arange(1, tokens), 2 * turns - 1, replace=False))
        bounds = np.concatenate([[0], edges, [tokens]])
        widths = np.diff(bounds).astype(float)
        # Stretch observations and shrink actions until the share is right.
        widths[0::2] *= (1 - observed) * tokens / widths[0::2].sum()
        widths[1::2] *= observed * tokens / widths[1::2].sum()
        bounds = np.concatenate([[0], np.cumsum(widths)]).round().astype(int)
        for k in range(turns):
            acted[bounds[2 * k] : bounds[2 * k + 1], b] = True
            turn[bounds[2 * k] : bounds[2 * k + 2], b] = k
    reward = np.zeros((tokens, rows), np.float32)
    for b in range(rows):
        reward[np.flatnonzero(acted[:, b])[-1], b] = rng.integers(0, 2)
    value = rng.normal(0.5, 0.3, (tokens, rows)).astype(np.float32)
    return {"reward": reward, "value": value, "acted": acted, "turn": turn}


def oracle(data: dict[str, Any]) -> np.ndarray:
    """The definition, token by token in float64."""
    reward, value, acted, turn = (data[k] for k in ("reward", "value", "acted", "turn"))
    out = np.zeros(value.shape)
    for b in range(value.shape[1]):
        next_v, next_a, next_turn = 0.0, 0.0, -1
        for t in np.flatnonzero(acted[:, b])[::-1]:
            same = turn[t, b] == next_turn
            g, gl = (1.0, 1.0) if same else (GAMMA, GAMMA * LAM)
            v = float(value[t, b])
            next_a = float(reward[t, b]) + g * next_v - v + gl * next_a
            out[t, b], next_v, next_turn = next_a, v, turn[t, b]
    return out


def measure(run: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Milliseconds of CPU and wall-clock; the first call is not counted."""
    run()
    cpu, wall = [], []
    for _ in range(repeats):
        c, w = time.process_time(), time.perf_counter()
        run()
        cpu.append(1e3 * (time.process_time() - c))
        wall.append(1e3 * (time.perf_counter() - w))
    return {
        "cpu_min_ms": min(cpu),
        "cpu_median_ms": statistics.median(cpu),
        "wall_min_ms": min(wall),
        "wall_median_ms": statistics.median(wall),
    }


def donated(fn: Callable[..., Any], first: np.ndarray, *rest: Any, repeats: int) -> Any:
    """Time fn(first, *rest) with `first` donated, so that no page of a new output is touched."""
    jitted = jax.jit(fn, donate_argnums=(0,))
    device = tuple(jax.device_put(x) for x in rest)
    fresh = iter([jax.block_until_ready(jax.device_put(first.copy())) for _ in range(repeats + 1)])
    result = None

    def run() -> None:
        nonlocal result
        result = jax.block_until_ready(jitted(next(fresh), *device))

    return measure(run, repeats), result


def torch_loop(data: dict[str, Any], repeats: int) -> dict[str, float] | None:
    """A step a token column over [B, T], carrying the next action's value and advantage."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    reward, value, turn = (
        torch.from_numpy(np.ascontiguousarray(data[k].T)) for k in ("reward", "value", "turn")
    )
    mask = torch.from_numpy(np.ascontiguousarray(data["acted"].T)).float()

    def run() -> None:
        width, length = value.shape
        next_v, next_a = torch.zeros(width), torch.zeros(width)
        next_turn = torch.full((width,), -1)
        outs = []
        for t in reversed(range(length)):
            same = (turn[:, t] == next_turn).float()
            g = same + (1 - same) * GAMMA
            gl = same + (1 - same) * GAMMA * LAM
            a = reward[:, t] + g * next_v - value[:, t] + gl * next_a
            m = mask[:, t]
            next_v = value[:, t] * m + (1 - m) * next_v
            next_a = a * m + (1 - m) * next_a
            next_turn = torch.where(m > 0, turn[:, t], next_turn)
            outs.append(next_a * m)
        torch.stack(outs[::-1], dim=1)

    return measure(run, repeats)


def tunix_scan(data: dict[str, Any], repeats: int) -> dict[str, float] | None:
    """The peer's jitted token GAE (whitening included) on its own [B, T] layout."""
    try:
        from tunix.rl.algo_core import compute_gae_advantages
    except ImportError:
        return None
    reward, value = (jnp.asarray(data[k].T) for k in ("reward", "value"))
    mask = jnp.asarray(data["acted"].T, jnp.float32)
    return measure(
        lambda: jax.block_until_ready(compute_gae_advantages(reward, value, mask, GAMMA, LAM)),
        repeats,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=98_304)
    parser.add_argument("--observed", type=float, default=0.75)
    parser.add_argument("--turns", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--torch-repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 below a third of a target")
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    data = make(args.rows, args.tokens, args.observed, args.turns, args.seed)
    expected = oracle(data)
    value, reward, acted, turn = (data[k] for k in ("value", "reward", "acted", "turn"))
    rows: dict[str, dict[str, float]] = {}
    errors: dict[str, float] = {}

    def ours(fn: Callable[..., Any], v: Any, r: Any, a: Any, u: Any) -> Any:
        return fn(r, v, a, u)[0]

    def column(fn: Callable[..., Any]) -> Callable[..., Any]:
        bound = functools.partial(fn, gamma=GAMMA, lam=LAM)
        return functools.partial(ours, jax.vmap(bound, in_axes=1, out_axes=1))

    def form(name: str) -> Callable[..., Any]:
        bound = functools.partial(
            tb_gae_batch, gamma=GAMMA, lam=LAM, max_turns=args.turns, form=name
        )
        return functools.partial(ours, bound)

    for name, fn in {
        "tb_gae, scan [T, B]": column(tb_gae),
        "gae, scan [T, B]": column(gae),
        "tb_gae, turns": form("turns"),
        "tb_gae, associative": form("associative"),
    }.items():
        rows[name], got = donated(fn, value, reward, acted, turn, repeats=args.repeats)
        if name.startswith("tb_gae"):
            errors[name] = float(np.abs(np.asarray(got) - expected).max())

    index = jnp.asarray(action_index(acted))
    small = {k: np.asarray(compact(jnp.asarray(data[k]), index)) for k in data}
    small["starts"] = np.asarray(turn_starts(small["acted"], small["turn"]))
    compacted_name = "tb_gae, scan, compacted [N, B]"

    def compacted_only(r: Any, v: Any, a: Any, starts: Any) -> Any:
        return tb_gae_compacted(r, v, a, starts, gamma=GAMMA, lam=LAM)[0]

    compacted = [small[k] for k in ("reward", "value", "acted", "starts")]
    rows[compacted_name], got = donated(compacted_only, *compacted, repeats=args.repeats)
    wide = np.asarray(expand(got, index, length=args.tokens))
    errors[compacted_name] = float(np.abs(wide - expected).max())

    def whole_way(v: Any, r: Any, a: Any, u: Any, at: Any) -> Any:
        columns = [compact(x, at) for x in (r, v, a)]
        starts = turn_starts(columns[2], compact(u, at))
        advantage = tb_gae_compacted(*columns, starts, gamma=GAMMA, lam=LAM)[0]
        return expand(advantage, at, length=args.tokens)

    name = "tb_gae, gather, scan, scatter"
    rows[name], got = donated(whole_way, value, reward, acted, turn, index, repeats=args.repeats)
    errors[name] = float(np.abs(np.asarray(got) - expected).max())

    # Value, reward, turn and mask read, advantage written: 17 bytes a token of the batch.
    for name, size in {
        "copy of the batch's bytes": value.size,
        "copy, compacted": index.size,
    }.items():
        source = np.ones(17 * size // 2, np.uint8)
        target = np.empty_like(source)
        copy = functools.partial(np.copyto, target, source)
        rows[name] = measure(copy, 5 * args.repeats)
    for name, peer in {
        "torch, a step a column": torch_loop(data, args.torch_repeats),
        "google-tunix scan [B, T]": tunix_scan(data, args.repeats),
    }.items():
        if peer is None:
            print(f"{name}: package not installed, no row")
        else:
            rows[name] = peer
    load_after = os.getloadavg()[0]
    cores = os.cpu_count() or 1

    print(
        f"B={args.rows} T={args.tokens} observed={args.observed} turns={args.turns} "
        f"seed={args.seed}"
    )
    print(
        f"{platform.machine()}, {cores} cores, jax {jax.__version__} on {jax.default_backend()}, "
        f"load {load_before:.1f} -> {load_after:.1f}"
    )
    print(f"{'':34}{'CPU min':>10}{'CPU med':>10}{'wall min':>10}{'wall med':>10}  ms{'error':>10}")
    for name, row in rows.items():
        cells = "".join(f"{row[k]:10.3f}" for k in row)
        error = f"{errors[name]:12.1e}" if name in errors else ""
        print(f"{name:34}{cells}    {error}")

    def ratio(slow: str, fast: str) -> float | None:
        if slow not in rows or fast not in rows:
            return None
        return rows[slow]["cpu_min_ms"] / rows[fast]["cpu_min_ms"]

    targets = {
        "times the torch loop": (ratio("torch, a step a column", compacted_name), 1000.0, True),
        "times google-tunix": (ratio("google-tunix scan [B, T]", compacted_name), 1.5, True),
        "copies of the batch": (ratio(compacted_name, "copy of the batch's bytes"), 2.0, False),
        "largest error": (max(errors.values()), 2e-5, False),
    }
    # What the targets leave out: the same ratios with all tokens scanned, and with the gathering.
    others = {
        f"{other}: {figure}": ratio(*(other if x is None else x for x in pair))
        for other in ("tb_gae, scan [T, B]", "tb_gae, gather, scan, scatter")
        for figure, pair in {
            "times the torch loop": ("torch, a step a column", None),
            "times google-tunix": ("google-tunix scan [B, T]", None),
            "copies of the batch": (None, "copy of the batch's bytes"),
        }.items()
    }
    failed = []
    quiet = max(load_before, load_after) <= cores
    for name, (got, target_value, larger) in targets.items():
        if got is None:
            continue
        met = got >= target_value if larger else got <= target_value
        loose = got >= target_value / 3 if larger else got <= target_value * 3
        verdict = ("met" if met else "missed") if quiet else "no verdict: machine loaded"
        sign = ">=" if larger else "<="
        print(f"{name}: {got:.3g} (target {sign} {target_value:g}; {verdict})")
        failed += [] if loose else [name]
    for name, got in others.items():
        if got is not None:
            print(f"{name}: {got:.3g}")
    if args.json:
        report = {
            "settings": {k: str(v) for k, v in vars(args).items()},
            "machine": {"arch": platform.machine(), "cores": cores, "jax": jax.__version__},
            "load": [load_before, load_after],
            "rows": rows,
            "errors": errors,
            "ratios": {k: v[0] for k, v in targets.items()} | others,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if args.check and failed else 0


if __name__ == "__main__":
    sys.exit(main())
