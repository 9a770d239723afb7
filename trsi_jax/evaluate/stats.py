"""Means and intervals of repeated attempts at sampled tasks, and of repeated runs.

Attempts at one task are not independent: the task decides most of the outcome. So the task is the
unit everywhere: an interval describes what other tasks of the same kind would have given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

Z_95 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval; `n` counts the units that were drawn (tasks or seeds)."""

    mean: float
    lo: float
    hi: float
    n: int


def mean_at_k(outcome_of_task: Sequence[Sequence[float]]) -> FloatArray:
    """Mean of each task's attempts.

    m_i = (1 / k_i) sum_a x_ia; mean@k is the plain mean of m_i over tasks, so a task that lost an
    attempt to a fault weighs as much as any other.

    Args:
      outcome_of_task: outcomes in [0, 1] of the graded attempts, a sequence a task, none empty.

    Returns:
      [tasks] float64.

    Raises:
      ValueError: without a task, or for a task without an attempt.
    """
    if not outcome_of_task:
        raise ValueError("mean_at_k needs at least one task")
    for index, outcomes in enumerate(outcome_of_task):
        if len(outcomes) == 0:
            raise ValueError(f"task {index} has no graded attempt")
    return np.array([float(np.mean(np.asarray(o, np.float64))) for o in outcome_of_task])


def clustered_proportion(task_mean: npt.ArrayLike) -> Estimate:
    """Mean of task means in [0, 1] with a Wilson interval of the effective sample size.

    p = mean(m_i),  SE^2 = sum_i (m_i - p)^2 / (n (n - 1)),  n_eff = p (1 - p) / SE^2,
    interval: all pi with (p - pi)^2 <= z^2 pi (1 - pi) / n_eff.

    SE is the cluster-robust standard error with a task as the cluster. Wilson's form keeps the
    interval inside [0, 1], and keeps it from collapsing when all tasks agree (SE = 0): then
    n_eff = n, as if a task's attempts were one. n_eff is never below 1.

    Args:
      task_mean: [tasks] mean outcome of each task, in [0, 1].

    Returns:
      Mean and 95 % interval over tasks.

    Raises:
      ValueError: for no task, or a mean outside [0, 1].

    Source: Wilson (1927); Kish's effective sample size as in Korn and Graubard (1998).
    """
    m = _vector(task_mean)
    if m.min() < 0.0 or m.max() > 1.0:
        raise ValueError(f"task means must lie in [0, 1], got {m.min()} to {m.max()}")
    n, p = len(m), float(m.mean())
    squared_error = float(m.var(ddof=1)) / n if n > 1 else 0.0
    n_eff = p * (1.0 - p) / squared_error if squared_error > 0.0 else float(n)
    n_eff = max(n_eff, 1.0)
    share = Z_95**2 / n_eff
    centre = (p + share / 2.0) / (1.0 + share)
    half = math.sqrt(share * p * (1.0 - p) + share**2 / 4.0) / (1.0 + share)
    return Estimate(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)), n)


def paired_difference(before: Mapping[str, float], after: Mapping[str, float]) -> Estimate:
    """Mean change over the tasks that both have, with Student's interval over tasks.

    d_i = after_i - before_i,  mean(d) +- t_{0.975, n-1} sd(d) / sqrt(n).

    Pairing takes the tasks' difficulty out of the interval.

    Args:
      before: task id -> mean outcome.
      after: task id -> mean outcome.

    Returns:
      Mean change and its 95 % interval; [-1, 1] if only one task is shared.

    Raises:
      ValueError: if no task is shared.
    """
    shared = sorted(before.keys() & after.keys())
    if not shared:
        raise ValueError("a paired difference needs a task that both evaluations have")
    estimate = student_mean([after[task] - before[task] for task in shared])
    return Estimate(estimate.mean, max(-1.0, estimate.lo), min(1.0, estimate.hi), estimate.n)


def student_mean(values: npt.ArrayLike) -> Estimate:
    """Mean of independent values, such as one a seed, with Student's 95 % interval.

    mean(x) +- t_{0.975, n-1} sd(x) / sqrt(n); infinite for a single value, which says nothing
    about its spread.

    Args:
      values: [n] float.

    Returns:
      Mean and interval.

    Raises:
      ValueError: for no value.
    """
    x = _vector(values)
    mean, n = float(x.mean()), len(x)
    if n == 1:
        return Estimate(mean, -math.inf, math.inf, 1)
    half = student_quantile_975(n - 1) * float(x.std(ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def student_quantile_975(degrees: int) -> float:
    """The 97.5 % quantile of Student's t with whole degrees of freedom, by bisection.

    Args:
      degrees: degrees of freedom, at least 1.

    Returns:
      t with P(T <= t) = 0.975, to about 1e-12.

    Raises:
      ValueError: for degrees below 1.
    """
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1, got {degrees}")
    lo, hi = 0.0, 16.0
    for _ in range(60):
        middle = (lo + hi) / 2.0
        lo, hi = (middle, hi) if _student_central(middle, degrees) < 0.95 else (lo, middle)
    return (lo + hi) / 2.0


def _student_central(t: float, degrees: int) -> float:
    """P(|T| <= t): the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    theta = math.atan2(t, math.sqrt(degrees))
    cos2 = math.cos(theta) ** 2
    odd = degrees % 2
    term = math.cos(theta) if odd else 1.0
    total = 0.0
    for j in range(1, degrees // 2 + 1):
        total += term
        term *= cos2 * (2 * j / (2 * j + 1) if odd else (2 * j - 1) / (2 * j))
    if odd:
        return 2.0 / math.pi * (theta + math.sin(theta) * total)
    return math.sin(theta) * total


def _vector(values: npt.ArrayLike) -> FloatArray:
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or x.size == 0:
        raise ValueError(f"expected a non-empty vector, got shape {x.shape}")
    return x
