"""Trajectories for the tests of the store; light, for many processes import it."""

import dataclasses
from pathlib import Path

import numpy as np

from rollout.records import CheckResult, Trajectory, Turn, Verdict

VOCAB = 384
ROOT = Path(__file__).parent.parent


def make(name: str, n_tokens: int = 12, seed: int = 0, **changes) -> Trajectory:
    """A valid trajectory: a third is prompt, then acted and observed pairs, a turn a pair."""
    rng = np.random.default_rng(seed)
    place = np.arange(n_tokens) - n_tokens // 3 - 1
    acted = (place >= 0) & (place % 4 < 2)
    fields = {
        "id": name,
        "task_id": "count-lines-0",
        "family": "count-lines",
        "tier": "easy",
        "split": "train",
        "harness": "general",
        "stage": "rpr-1",
        "iteration": 2,
        "sample": 1,
        "seed": seed,
        "engine": "jax",
        "temperature": 0.6,
        "token_ids": rng.integers(0, VOCAB, n_tokens, dtype=np.int32),
        "acted_t": acted,
        "logprob_t": np.where(acted, -rng.exponential(size=n_tokens), 0).astype(np.float32),
        "turn_t": np.maximum(place // 4, 0).astype(np.int32),
        "weight_version_t": np.where(acted, 3, -1).astype(np.int32),
        "turns": (Turn("wc -l < a", "3\n", 0), Turn("done", "", None, "control")),
        "finish": "done",
        "verdict": Verdict((CheckResult("a", "effective", True, 0.5),)),
        "timings": {"total": 0.25},
        "provenance": {"tokenizer": "abc"},
    }
    return Trajectory(**{**fields, **changes})


def assert_same(a: Trajectory, b: Trajectory) -> None:
    for field in dataclasses.fields(Trajectory):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert x.tobytes() == y.tobytes(), field.name
        else:
            assert x == y, field.name
            assert type(x) is type(y), field.name
