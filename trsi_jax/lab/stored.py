"""Every estimator on the same stored trajectories, rewards and critic's values.

Nothing is sampled and nothing is trained: what differs is the estimator alone. Logs are also
stretched and cut, with the actions, values and rewards as they were, to see what hears of it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from trsi_jax import advantages
from trsi_jax.lab.arms import STANDARD, Arm, Estimate, Rows

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

REFERENCE = "TB"
BASELINE = "MC"
OF_BATCH = Arm("RLOO of batch", "rloo")
"""Stands in for the estimators of groups where no task was tried twice: the group is the batch."""
SLOTS = 1 << 21
"""Tokens, padding included, that one compiled call takes."""


@dataclass(frozen=True)
class Episode:
    """One stored trajectory as an estimator sees it; arrays are [T], token-aligned.

    Attributes:
      task: episodes of one task and batch form a group.
      batch: the collection that an update was made of; "" if it is not known.
      reward_t: float32, 0 off the mask.
      value_t: float32, the critic's value before every token, observations included.
      acted_t: bool, true where the policy sampled the token.
      turn_t: int32, turn of every token.
      success: strict success.
    """

    id: str
    task: str
    reward_t: Floats
    value_t: Floats
    acted_t: npt.NDArray[np.bool_]
    turn_t: npt.NDArray[np.int32]
    success: bool
    batch: str = ""

    def check(self) -> None:
        """Refuse what an estimator would lose or spread. Raises ValueError that names it."""
        advantages.check_tokens(
            self.reward_t, self.acted_t, self.turn_t, where=f"trajectory {self.id}"
        )
        if not np.all(np.isfinite(self.value_t[self.acted_t])):
            raise ValueError(f"trajectory {self.id}: the critic's values are not finite")

    def with_logs(self, factor: float) -> Episode:
        """The same actions with every log between two of them `factor` times as long.

        A log token takes the value of the one at the same relative place; factor 0 takes all of
        them out. The prompt and what follows the last action stay.
        """
        acted = np.flatnonzero(self.acted_t)
        index = [np.arange(acted[0])] if acted.size else [np.arange(self.acted_t.size)]
        for here, following in zip(acted, [*acted[1:], self.acted_t.size], strict=True):
            index.append(np.array([here]))
            size = following - here - 1
            if following == self.acted_t.size:
                index.append(np.arange(here + 1, following))
            elif size:
                wanted = round(factor * size)
                index.append(here + 1 + np.arange(wanted) * size // max(wanted, 1))
        at = np.concatenate(index)
        return Episode(
            self.id,
            self.task,
            self.reward_t[at],
            self.value_t[at],
            self.acted_t[at],
            self.turn_t[at],
            self.success,
            self.batch,
        )


@dataclass(frozen=True)
class Sensitivity:
    """What logs of another length do to an estimator.

    Attributes:
      factor: logs are so many times as long.
      change: root mean square change of the advantages, over their root mean square.
      flipped: share of action tokens whose advantage changes sign.
      rank: Spearman's correlation with the advantages at the stored length.
    """

    factor: float
    change: float
    flipped: float
    rank: float


@dataclass(frozen=True)
class Row:
    """One estimator over all action tokens, before whitening.

    Attributes:
      sign_agreement: share of tokens with the sign that TB-GAE gives.
      rank: Spearman's correlation with TB-GAE.
      variance_ratio: Var(A) over Var(A) of Monte-Carlo.
      return_explained: 1 - Var(R_MC - G) / Var(R_MC), how much of the undiscounted return the
        critic's target holds.
      credit_by_turn: mean of |A| on the k-th of `TURN_BINS` equal parts of the turns, first to
        last, over the mean of all.
      sensitivity: one entry a factor.
    """

    arm: str
    mean: float
    spread: float
    sign_agreement: float
    rank: float
    variance_ratio: float
    return_explained: float
    credit_by_turn: tuple[float, ...]
    sensitivity: tuple[Sensitivity, ...]


@dataclass(frozen=True)
class Comparison:
    """Every estimator on the same episodes.

    Attributes:
      log_tokens: mean number of log tokens between two actions of different turns.
      rank: [arms, arms] Spearman's correlation.
      groups: share of the episodes whose task was tried more than once in their batch.
      notes: what these episodes cannot show, and what stands in for it.
    """

    episodes: int
    tokens: int
    success: float
    log_tokens: float
    gamma: float
    lam: float
    factors: tuple[float, ...]
    rows: tuple[Row, ...]
    rank: Doubles
    groups: float
    notes: tuple[str, ...]


TURN_BINS = 4


def compare(
    episodes: Sequence[Episode],
    *,
    arms: Sequence[Arm] = STANDARD,
    gamma: float = 0.99,
    lam: float = 0.95,
    factors: Sequence[float] = (0.0, 0.25, 4.0),
    advance: Callable[[int], None] = lambda n: None,
) -> Comparison:
    """Run every arm on the same episodes.

    Args:
      episodes: at least two that acted.
      arms: estimators; `REFERENCE` and `BASELINE` must be among them.
      gamma: discount.
      lam: mixing parameter.
      factors: lengths of logs to try, as multiples of the stored ones.
      advance: is called with the number of episodes done, over all lengths.

    Raises:
      ValueError: for what `Episode.check` refuses, fewer than two episodes, or arms without the
        reference.
    """
    names = [arm.name for arm in arms]
    for needed in (REFERENCE, BASELINE):
        if needed not in names:
            raise ValueError(f"a comparison needs the arm {needed!r}, got {', '.join(names)}")
    for episode in episodes:
        episode.check()
    episodes = [e for e in episodes if e.acted_t.any()]
    if len(episodes) < 2:
        raise ValueError(
            f"a comparison needs at least two episodes that acted, got {len(episodes)}"
        )
    arms, shared, notes = _groupable(episodes, arms)
    names = [arm.name for arm in arms]
    run = functools.partial(_estimates, arms=arms, gamma=gamma, lam=lam, advance=advance)
    stored, target = run(episodes)
    by_factor = {f: run([e.with_logs(f) for e in episodes])[0] for f in factors}
    acted = [np.flatnonzero(e.acted_t) for e in episodes]
    part = np.concatenate([_parts(e.turn_t[at]) for e, at in zip(episodes, acted, strict=True)])
    ranks = {name: _ranks(stored[name]) for name in names}
    baseline = target[BASELINE]
    rows = []
    for name in names:
        a = stored[name]
        rows.append(
            Row(
                arm=name,
                mean=float(a.mean()),
                spread=float(a.std()),
                sign_agreement=float(np.mean(np.sign(a) == np.sign(stored[REFERENCE]))),
                rank=_correlation(ranks[name], ranks[REFERENCE]),
                variance_ratio=_ratio(float(a.var()), float(stored[BASELINE].var())),
                return_explained=1.0
                - _ratio(float((baseline - target[name]).var()), float(baseline.var())),
                credit_by_turn=tuple(
                    _ratio(float(np.abs(a[part == k]).mean()), float(np.abs(a).mean()))
                    if np.any(part == k)
                    else 0.0
                    for k in range(TURN_BINS)
                ),
                sensitivity=tuple(
                    _sensitivity(f, a, by_factor[f][name], ranks[name]) for f in factors
                ),
            )
        )
    return Comparison(
        episodes=len(episodes),
        tokens=sum(at.size for at in acted),
        success=float(np.mean([e.success for e in episodes])),
        log_tokens=_mean_log(episodes, acted),
        gamma=gamma,
        lam=lam,
        factors=tuple(factors),
        rows=tuple(rows),
        rank=np.array([[_correlation(ranks[a], ranks[b]) for b in names] for a in names]),
        groups=shared,
        notes=notes,
    )


def drawn(episodes: Sequence[Episode], limit: int, rng: np.random.Generator) -> list[Episode]:
    """At most `limit` episodes, in their order: tasks are drawn, each with all of its episodes."""
    groups: dict[str, list[int]] = {}
    for i, episode in enumerate(episodes):
        groups.setdefault(episode.task, []).append(i)
    every = list(groups.values())
    kept: list[int] = []
    for g in rng.permutation(len(every)):
        if len(kept) + len(every[g]) <= limit:
            kept += every[g]
    return [episodes[i] for i in sorted(kept)]


def _groupable(
    episodes: Sequence[Episode], arms: Sequence[Arm]
) -> tuple[list[Arm], float, tuple[str, ...]]:
    """The arms that these episodes can tell apart, the share in groups, and what to say of it.

    A group of one prefers nothing: its advantage is 0 whatever happened.
    """
    tried = Counter(e.task for e in episodes)
    shared = sum(tried[e.task] > 1 for e in episodes) / len(episodes)
    grouped = [a for a in arms if advantages.entry(a.estimator).kind == "group"]
    if not grouped or shared == 1.0:
        return list(arms), shared, ()
    names = ", ".join(a.name for a in grouped)
    if shared > 0.0:
        alone = f"{100 * (1 - shared):.0f} % of the episodes are the only one of their task"
        return list(arms), shared, (f"{alone}: {names} give them 0.",)
    left = [a for a in arms if a not in grouped]
    note = (
        f"{names}: left out, for every task was tried once and a group of one prefers nothing."
        " Train with stages.<name>.samples above 1 to compare them."
    )
    if max(Counter(e.batch for e in episodes).values()) < 2:
        return left, shared, (note,)
    instead = f"{OF_BATCH.name} takes the other episodes of the same iteration as the baseline."
    # Behind the sound estimators, before those that are wrong on purpose.
    at = sum(not advantages.entry(a.estimator).study for a in left)
    return [*left[:at], OF_BATCH, *left[at:]], shared, (note, instead)


def _estimates(
    episodes: Sequence[Episode],
    *,
    arms: Sequence[Arm],
    gamma: float,
    lam: float,
    advance: Callable[[int], None],
) -> tuple[dict[str, Doubles], dict[str, Doubles]]:
    """Advantages and targets of every arm at all action tokens, episodes end to end."""
    # Powers of two, so that the lengths tried share few compiled programs.
    width = 1 << (max(e.acted_t.size for e in episodes) - 1).bit_length()
    rows = max(1, min(SLOTS // width, 1 << (len(episodes) - 1).bit_length()))
    scores = _group_scores(episodes, arms)
    advantage: dict[str, list[Floats]] = {arm.name: [] for arm in arms}
    target: dict[str, list[Floats]] = {arm.name: [] for arm in arms}
    token_arms = tuple(a for a in arms if a.name not in scores)
    for start in range(0, len(episodes), rows):
        chunk = episodes[start : start + rows]
        acted = _padded([e.acted_t for e in chunk], rows, width)
        batch = Rows(
            jnp.asarray(_padded([e.reward_t for e in chunk], rows, width)),
            jnp.asarray(_padded([e.value_t for e in chunk], rows, width)),
            jnp.asarray(acted),
            jnp.asarray(_padded([e.turn_t for e in chunk], rows, width)),
            jnp.zeros(rows, jnp.float32),
        )
        found = _every(token_arms, batch, jnp.float32(gamma), jnp.float32(lam))
        for arm, estimate in zip(token_arms, found, strict=True):
            advantage[arm.name].append(np.asarray(estimate.advantage)[acted])
            target[arm.name].append(np.asarray(estimate.target)[acted])
        for name, score in scores.items():
            here = score[start : start + rows]
            counts = [int(e.acted_t.sum()) for e in chunk]
            outcome = [float(e.reward_t.sum()) for e in chunk]
            advantage[name].append(np.repeat(here, counts).astype(np.float32))
            target[name].append(np.repeat(outcome, counts).astype(np.float32))
        advance(len(chunk))
    return (
        {name: np.concatenate(parts).astype(np.float64) for name, parts in advantage.items()},
        {name: np.concatenate(parts).astype(np.float64) for name, parts in target.items()},
    )


@functools.partial(jax.jit, static_argnums=0)
def _every(arms: tuple[Arm, ...], rows: Rows, gamma: jax.Array, lam: jax.Array) -> list[Estimate]:
    return [arm.build(1)(rows, gamma, lam) for arm in arms]


def _group_scores(episodes: Sequence[Episode], arms: Sequence[Arm]) -> dict[str, Floats]:
    """The advantage of every episode under each estimator of groups."""
    outcome = np.array([e.reward_t.sum() for e in episodes], np.float32)
    found = {}
    for arm in arms:
        entry = advantages.entry(arm.estimator)
        if entry.kind != "group":
            continue
        members: dict[str, list[int]] = {}
        for i, episode in enumerate(episodes):
            members.setdefault(episode.batch if arm == OF_BATCH else episode.task, []).append(i)
        index = np.full((len(members), max(len(group) for group in members.values())), -1)
        for g, group in enumerate(members.values()):
            index[g, : len(group)] = group
        valid = index >= 0
        fn = functools.partial(entry.fn, **dict(arm.settings))
        got = np.asarray(jax.vmap(fn)(jnp.asarray(outcome[index]), jnp.asarray(valid)))
        score = np.zeros(len(episodes), np.float32)
        score[index[valid]] = got[valid]
        found[arm.name] = score
    return found


def _padded(arrays: Sequence[npt.NDArray[Any]], rows: int, width: int) -> npt.NDArray[Any]:
    out = np.zeros((rows, width), arrays[0].dtype)
    for row, array in zip(out, arrays, strict=False):
        row[: array.size] = array
    return out


def _parts(turn_n: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Which of `TURN_BINS` equal parts of the turns an action token's turn lies in."""
    order = np.unique(turn_n, return_inverse=True)[1]
    parts: npt.NDArray[np.int64] = order * TURN_BINS // max(int(order.max()) + 1, 1)
    return parts


def _mean_log(episodes: Sequence[Episode], acted: Sequence[npt.NDArray[np.int64]]) -> float:
    gaps = [
        np.diff(at)[np.diff(e.turn_t[at]) != 0] - 1 for e, at in zip(episodes, acted, strict=True)
    ]
    every = np.concatenate(gaps)
    return float(every.mean()) if every.size else 0.0


def _sensitivity(factor: float, stored: Doubles, changed: Doubles, ranks: Doubles) -> Sensitivity:
    size = float(np.sqrt(np.mean(stored**2)))
    return Sensitivity(
        factor=factor,
        change=_ratio(float(np.sqrt(np.mean((changed - stored) ** 2))), size),
        flipped=float(np.mean(np.sign(changed) != np.sign(stored))),
        rank=_correlation(_ranks(changed), ranks),
    )


def _ranks(x: Doubles) -> Doubles:
    """Ranks with ties at their mean."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    middle = last - (counts - 1) / 2.0
    ranks: Doubles = middle[inverse]
    return ranks


def _correlation(x: Doubles, y: Doubles) -> float:
    """Pearson's; 0 where one of them is constant."""
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / size if size else 0.0


def _ratio(x: float, y: float) -> float:
    return x / y if y else 0.0
