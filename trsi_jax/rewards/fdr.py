"""Family dense reward: partial credit on one ruler for families of different check scale."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.records import CheckResult, Task, Verdict

Real = float | npt.NDArray[Any]


def fdr(progress: Real, n_effective: Real, median_effective: Real) -> Any:
    """r_fdr = p |E| / median |E|.

    Doing nothing scores 0; a failed task with more checks than its family's median can pass 1.

    Args:
      progress: p = q h in [0, 1], scalar or array.
      n_effective: |E|, number of effective checks in the task's manifest, >= 1.
      median_effective: median |E| over the tasks of the family, from their manifests, > 0.

    Returns:
      A float, or a float64 array of the broadcast shape.

    Raises:
      ValueError: for a value outside its range or not finite.

    Source: arXiv 2610.22192 describes it in words and in its audit; the formula is our reading.
    """
    p, n, m = (np.asarray(x, np.float64) for x in (progress, n_effective, median_effective))
    _require(p, "progress", (p >= 0) & (p <= 1), "in [0, 1]")
    _require(n, "n_effective", (n >= 1) & np.isfinite(n), ">= 1")
    _require(m, "median_effective", (m > 0) & np.isfinite(m), "> 0")
    reward = p * n / m
    return float(reward) if reward.ndim == 0 else reward


def family_medians(tasks: Iterable[Task]) -> dict[str, float]:
    """Median number of effective checks a family, from the tasks' manifests.

    Taken over the pool once, never over a batch: a reward must not depend on what else was
    sampled.

    Raises:
      ValueError: for a task without an effective check.
    """
    counts: defaultdict[str, list[int]] = defaultdict(list)
    for task in tasks:
        n = len({check.id for check in task.checks if check.kind == "effective"})
        if n == 0:
            raise ValueError(f"task {task.id} has no effective check")
        counts[task.family].append(n)
    return {family: float(statistics.median(n)) for family, n in sorted(counts.items())}


def distinct(verdict: Verdict) -> Verdict:
    """A verdict in which every check counts once: reported repeatedly, it passed if always so."""
    merged: dict[str, CheckResult] = {}
    for result in verdict.results:
        before = merged.get(result.id, result)
        merged[result.id] = replace(before, passed=before.passed and result.passed)
    return Verdict(tuple(merged.values()))


def verdict_fdr(verdict: Verdict, family: str, medians: Mapping[str, float]) -> float:
    """`fdr` of one verdict; a check that occurs twice counts once.

    Raises:
      ValueError: for a family without a median, or a verdict without an effective check.
    """
    if family not in medians:
        raise ValueError(f"no median for family {family!r}; known: {', '.join(sorted(medians))}")
    once = distinct(verdict)
    return float(fdr(once.progress, once.n_effective, medians[family]))


def _require(x: npt.NDArray[np.float64], name: str, good: Any, allowed: str) -> None:
    if not np.all(good):
        bad = np.extract(~np.asarray(good, bool), x)[0]
        raise ValueError(f"{name} must be {allowed}, got {bad}")
