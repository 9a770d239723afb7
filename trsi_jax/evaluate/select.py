"""Chooses among checkpoints by validation results, and by nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout.errors import UserError
from rollout.records import Trajectory
from rollout.tasks.splits import check_results
from trsi_jax.evaluate.protocol import evaluate


def select_checkpoint(candidates: Mapping[str, Sequence[Trajectory]]) -> str:
    """The candidate of most strict success; among equals of most progress, and then the first.

    Args:
      candidates: checkpoint -> its attempts at the validation tasks, the same tasks for each.

    Raises:
      ProtectedSplit: an attempt at a test or training task.
      UserError: no candidate, or candidates that were tried on different tasks.
      VerifierError: a candidate none of whose attempts was graded.
    """
    if not candidates:
        raise UserError("there is no checkpoint to select from")
    for trajectories in candidates.values():
        check_results(trajectories, "select")
    tried = {name: {t.task_id for t in found} for name, found in candidates.items()}
    first = next(iter(tried))
    for name, tasks in tried.items():
        if tasks != tried[first]:
            raise UserError(f"checkpoints {first!r} and {name!r} were tried on different tasks")
    scores = {name: evaluate(found) for name, found in candidates.items()}
    return max(scores, key=lambda name: (scores[name].strict_success.mean, scores[name].progress))
