"""From evaluation trajectories to numbers: mean@k of strict success, by tier and by family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollout.errors import VerifierError
from rollout.records import Trajectory
from trsi_jax.evaluate import tiers
from trsi_jax.evaluate.stats import Estimate, clustered_proportion, mean_at_k, paired_difference
from trsi_jax.evaluate.tiers import TaskResult


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One policy on one set of tasks.

    Attributes:
      strict_success: mean@k with its 95 % interval, clustered by task.
      progress: mean over tasks of the mean p = q * h.
      tiers: tier -> strict success.
      families: family -> strict success.
      results: one entry a task, by task id.
      attempts: graded attempts.
      masked: attempts that a fault masked; they are in no number above.
      ungraded_tasks: tasks all of whose attempts were masked.
    """

    strict_success: Estimate
    progress: float
    tiers: Mapping[str, Estimate]
    families: Mapping[str, Estimate]
    results: Mapping[str, TaskResult]
    attempts: int
    masked: int
    ungraded_tasks: tuple[str, ...]


def evaluate(trajectories: Iterable[Trajectory]) -> Evaluation:
    """Grade a set of attempts; the order they come in does not matter.

    Args:
      trajectories: k attempts at each task. Masked ones are counted and left out; a task that
        loses some attempts keeps its full weight.

    Returns:
      The evaluation.

    Raises:
      ValueError: if a trajectory is given twice, or a task appears under two families or tiers.
      VerifierError: if not a single attempt was graded.
    """
    attempts_of: dict[str, list[Trajectory]] = {}
    seen: set[str] = set()
    faults = []
    for trajectory in trajectories:
        if trajectory.id in seen:
            raise ValueError(f"trajectory {trajectory.id} was given twice")
        seen.add(trajectory.id)
        graded = attempts_of.setdefault(trajectory.task_id, [])
        if trajectory.fault is None:
            graded.append(trajectory)
        else:
            faults.append(trajectory.fault)
    ungraded = tuple(sorted(task for task, graded in attempts_of.items() if not graded))
    if len(ungraded) == len(attempts_of):
        first = f"; the first fault is {faults[0].kind}: {faults[0].message}" if faults else ""
        raise VerifierError(f"none of {len(seen)} attempts could be graded{first}")

    results = {
        task: _grade(task, attempts_of[task]) for task in sorted(attempts_of) if attempts_of[task]
    }
    rows = tuple(results.values())
    return Evaluation(
        strict_success=clustered_proportion([r.strict_success for r in rows]),
        progress=sum(r.progress for r in rows) / len(rows),
        tiers=tiers.by("tier", rows),
        families=tiers.by("family", rows),
        results=results,
        attempts=sum(r.attempts for r in rows),
        masked=len(faults),
        ungraded_tasks=ungraded,
    )


def gain(before: Evaluation, after: Evaluation) -> Estimate:
    """Change of strict success from one evaluation to another over the tasks they share."""
    return paired_difference(
        {task: r.strict_success for task, r in before.results.items()},
        {task: r.strict_success for task, r in after.results.items()},
    )


def _grade(task: str, graded: list[Trajectory]) -> TaskResult:
    kinds = {(t.family, t.tier) for t in graded}
    if len(kinds) > 1:
        raise ValueError(f"task {task} appears as {sorted(kinds)}")
    family, tier = kinds.pop()
    verdicts = sorted(
        (v.strict_success, v.progress) for t in graded if (v := t.verdict) is not None
    )
    # Sorted, so that the float sums do not depend on the order of collection.
    success = mean_at_k([[float(strict) for strict, _ in verdicts]])[0]
    progress = mean_at_k([[progress for _, progress in verdicts]])[0]
    return TaskResult(task, family, tier, len(verdicts), float(success), float(progress))
