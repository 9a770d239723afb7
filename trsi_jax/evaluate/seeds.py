"""Several training runs of one config, alike but for the seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trsi_jax.evaluate.stats import Estimate, student_mean


@dataclass(frozen=True, slots=True)
class SeedsStage:
    """One stage over seeds: the mean, its interval over training seeds, and every value."""

    name: str
    strict_success: Estimate
    by_seed: Mapping[int, float]


def aggregate(curve_of_seed: Mapping[int, Mapping[str, float]]) -> tuple[SeedsStage, ...]:
    """Mean curve with Student's interval over seeds; every seed counts, none is picked.

    Args:
      curve_of_seed: seed -> stage name -> strict success, the same stages in the same order.

    Returns:
      A row a stage, in order.

    Raises:
      ValueError: without a seed, or where the stages differ.
    """
    if not curve_of_seed:
        raise ValueError("an aggregate needs at least one seed")
    curves = dict(sorted(curve_of_seed.items()))
    names = {tuple(curve) for curve in curves.values()}
    if len(names) > 1:
        raise ValueError(f"the runs have different stages: {sorted(names)}")
    return tuple(
        SeedsStage(
            name,
            student_mean([curve[name] for curve in curves.values()]),
            {seed: curve[name] for seed, curve in curves.items()},
        )
        for name in names.pop()
    )
