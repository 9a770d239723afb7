"""Results split by what a task is: its tier or its family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from rollout.records import TIERS
from trsi_jax.evaluate.stats import Estimate, clustered_proportion


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task's graded attempts: how many, and the means of strict success and progress."""

    task_id: str
    family: str
    tier: str
    attempts: int
    strict_success: float
    progress: float


def by(key: Literal["tier", "family"], results: Iterable[TaskResult]) -> Mapping[str, Estimate]:
    """Strict success of each tier (easy first) or family (by name) that has a graded task."""
    groups: dict[str, list[float]] = {}
    for result in results:
        groups.setdefault(getattr(result, key), []).append(result.strict_success)
    names: list[str] = [t for t in TIERS if t in groups] if key == "tier" else []
    names += sorted(groups.keys() - set(names))
    return {name: clustered_proportion(groups[name]) for name in names}
