"""The reward audit: what a reward pays to failures, and how it spreads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Audit:
    """Four rows on one set of trajectories under one reward.

    Attributes:
      trajectories: number of trajectories.
      families: number of families.
      failed_share: share of the total reward that went to failed trajectories; 0 where nothing
        was paid.
      failed_at_least_one: number of failed trajectories with a reward >= 1.
      std_families: standard deviation over families of their mean reward.
      std_trajectories: standard deviation over trajectories.
    """

    trajectories: int
    families: int
    failed_share: float
    failed_at_least_one: int
    std_families: float
    std_trajectories: float


def audit(reward: npt.ArrayLike, strict_success: npt.ArrayLike, family: Sequence[str]) -> Audit:
    """Audit one reward on stored trajectories. Standard deviations divide by n.

    Args:
      reward: [N] float, reward of each trajectory, >= 0.
      strict_success: [N] bool, whether it is a strict success.
      family: [N] names.

    Returns:
      The `Audit`.

    Raises:
      ValueError: for arrays of unequal length or none at all, or a reward that is not finite.

    Source: the four rows of the audit in arXiv 2610.22192; the form of the deviation is our
    reading.
    """
    r = np.asarray(reward, np.float64)
    success = np.asarray(strict_success, np.bool_)
    if r.ndim != 1 or r.shape != success.shape or r.shape[0] != len(family) or not r.size:
        raise ValueError(
            f"need three equally long sequences, got {r.shape}, {success.shape}, {len(family)}"
        )
    if not np.all(np.isfinite(r)):
        raise ValueError(f"trajectory {int(np.argmin(np.isfinite(r)))} has a reward not finite")
    names, index = np.unique(np.asarray(family), return_inverse=True)
    means = np.bincount(index, weights=r) / np.bincount(index)
    total = float(r.sum())
    return Audit(
        trajectories=r.size,
        families=len(names),
        failed_share=float(r[~success].sum()) / total if total else 0.0,
        failed_at_least_one=int(np.sum(~success & (r >= 1.0))),
        std_families=float(means.std()),
        std_trajectories=float(r.std()),
    )
