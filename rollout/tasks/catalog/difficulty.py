"""How hard a task is by its structure: computed from what it is, never declared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rollout.records import Tier
from rollout.tasks.catalog.lexicon import WORDS

WEIGHTS: Mapping[str, float] = {
    "turns": 0.5,
    "n_effective": 0.5,
    "chain": 1.0,
    "needs_observation": 1.5,
    "syntax": 0.15,
    "distractors": 0.1,
}
"""score = sum of weight x measure (our own scale)."""

MEDIUM_FROM = 3.05
HARD_FROM = 5.3
EXTREME_FROM = 8.0

_TOKEN = re.compile(r"(?<![A-Za-z0-9])(?:[A-Za-z]+|E?[0-9]{3,})(?![A-Za-z0-9])")
_KNOWN = frozenset(WORDS)


def _names(text: str) -> set[str]:
    """The catalogue's words in a text, and its codes and larger numbers."""
    found = {token.lower() for token in _TOKEN.findall(text)}
    return {token for token in found if token in _KNOWN or token[-1].isdigit()}


def measures(
    instruction: str, oracle: Sequence[str], *, n_effective: int, distractors: int
) -> dict[str, float]:
    """Structural measures of a task.

    Args:
      instruction: the request.
      oracle: commands of the reference solution.
      n_effective: number of effective checks.
      distractors: number of files that have nothing to do with the request.

    Returns:
      turns; n_effective; chain, the commands on the longest path of dependencies;
      needs_observation, 1 where a command has a name or a value that the request doesn't say, so
      that only sandbox output can have told it; syntax, the words of the longest command;
      distractors; score.
    """
    asked = _names(instruction)
    depth: list[int] = []
    used_by: dict[str, int] = {}
    observed = False
    for i, command in enumerate(oracle):
        names = _names(command)
        # What an earlier command names may be its product, what nobody named is its output.
        needs = [used_by[name] for name in names if name in used_by]
        if names - asked - used_by.keys():
            observed = True
            needs.append(i - 1)
        depth.append(1 + max((depth[j] for j in needs if j >= 0), default=0))
        used_by |= dict.fromkeys(names, i)
    found: dict[str, float] = {
        "turns": len(oracle),
        "n_effective": n_effective,
        "chain": max(depth),
        "needs_observation": int(observed),
        "syntax": max(len(command.split()) for command in oracle),
        "distractors": distractors,
    }
    return found | {"score": round(sum(WEIGHTS[name] * x for name, x in found.items()), 6)}


def tier_of(score: float) -> Tier:
    """The tier of a score."""
    if score < MEDIUM_FROM:
        return "easy"
    if score < HARD_FROM:
        return "medium"
    return "hard" if score < EXTREME_FROM else "extreme"
