"""Scores the same stored trajectories under several rewards, and audits each of them."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import numpy as np
import numpy.typing as npt

from rollout.records import Trajectory
from trsi_jax.rewards.audit import Audit, audit
from trsi_jax.rewards.fdr import distinct, verdict_fdr
from trsi_jax.rewards.spr import spr

Kind = Literal["strict", "progress", "fdr", "spr"]
Key = Literal["family", "stage", "tier"]
KINDS: tuple[Kind, ...] = ("strict", "progress", "fdr", "spr")
KEYS: tuple[Key, ...] = ("stage", "tier", "family")


@dataclass(frozen=True)
class Scores:
    """Graded trajectories under every reward; all sequences are of length N.

    Attributes:
      success: [N] bool, strict success.
      rewards: kind -> [N] float64.
      masked: trajectories that a fault masked; they are in no other field.
    """

    ids: tuple[str, ...]
    family: tuple[str, ...]
    stage: tuple[str, ...]
    tier: tuple[str, ...]
    success: npt.NDArray[np.bool_]
    rewards: Mapping[Kind, npt.NDArray[np.float64]]
    masked: int

    def audits(self) -> dict[Kind, Audit]:
        """The audit of each reward."""
        return {kind: audit(r, self.success, self.family) for kind, r in self.rewards.items()}

    def groups(self, key: Key) -> dict[str, Group]:
        """One entry a family, stage or tier, in the order of their first trajectory."""
        names = getattr(self, key)
        found: dict[str, Group] = {}
        for name in dict.fromkeys(names):
            inside = np.array([n == name for n in names])
            success = self.success[inside]
            by_kind = {kind: r[inside] for kind, r in self.rewards.items()}
            found[name] = Group(
                trajectories=int(inside.sum()),
                success=float(success.mean()),
                mean={kind: float(r.mean()) for kind, r in by_kind.items()},
                failed_share={kind: _failed_share(r, success) for kind, r in by_kind.items()},
            )
        return found


@dataclass(frozen=True, slots=True)
class Group:
    """Some of the trajectories: how many, share of strict success, and each reward's mean.

    Attributes:
      failed_share: kind -> share of the group's reward that failures got; 0 where none was paid.
    """

    trajectories: int
    success: float
    mean: Mapping[Kind, float]
    failed_share: Mapping[Kind, float]


def _failed_share(reward: npt.NDArray[np.float64], success: npt.NDArray[np.bool_]) -> float:
    total = float(reward.sum())
    return float(reward[~success].sum()) / total if total else 0.0


def stored_medians(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Median number of effective checks a family, over the different tasks that were attempted.

    The pool's own medians (`family_medians`) are to be preferred where the pool is known.
    """
    counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for t in trajectories:
        if t.verdict is not None:
            counts[t.family][t.task_id] = distinct(t.verdict).n_effective
    return {f: float(statistics.median(n.values())) for f, n in sorted(counts.items())}


def rescore(
    trajectories: Iterable[Trajectory],
    medians: Mapping[str, float],
    *,
    success_reward: float = 1.0,
    beta: float,
    cap: float,
) -> Scores:
    """Score stored trajectories under strict success, progress, FDR and SPR.

    Args:
      trajectories: as the store gives them; masked ones are counted and left out.
      medians: family -> median number of effective checks.
      success_reward: of SPR.
      beta: of SPR.
      cap: of SPR.

    Raises:
      ValueError: not a single trajectory was graded, one is given twice, a family has no median,
        or a setting of SPR is impossible.
    """
    graded: list[Trajectory] = []
    masked = 0
    seen: set[str] = set()
    for t in trajectories:
        if t.id in seen:
            raise ValueError(f"trajectory {t.id} was given twice")
        seen.add(t.id)
        if t.verdict is None:
            masked += 1
        else:
            graded.append(t)
    if not graded:
        raise ValueError(f"none of {masked} trajectories was graded")
    verdicts = [distinct(t.verdict) for t in graded if t.verdict is not None]
    success = np.array([v.strict_success for v in verdicts])
    dense = np.array(
        [verdict_fdr(v, t.family, medians) for t, v in zip(graded, verdicts, strict=True)]
    )
    return Scores(
        ids=tuple(t.id for t in graded),
        family=tuple(t.family for t in graded),
        stage=tuple(t.stage for t in graded),
        tier=tuple(t.tier for t in graded),
        success=success,
        rewards={
            "strict": success.astype(np.float64),
            "progress": np.array([v.progress for v in verdicts]),
            "fdr": dense,
            "spr": np.asarray(
                spr(success, dense, success_reward=success_reward, beta=beta, cap=cap)
            ),
        },
        masked=masked,
    )


def published() -> dict[Kind, Audit]:
    """The paper's audit under FDR and SPR, as reported publicly; none of it was measured here.

    Source: arXiv 2610.22192.
    """
    text = resources.files("trsi_jax.rewards").joinpath("published.json").read_text()
    content = json.loads(text)
    kinds: Sequence[Kind] = ("fdr", "spr")
    counts = {key: content[key] for key in ("trajectories", "families")}
    return {kind: Audit(**counts, **content[kind]) for kind in kinds}
