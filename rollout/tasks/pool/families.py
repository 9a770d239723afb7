"""Families of tasks, and the tier that a task's structure puts it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollout.records import Tier
from rollout.tasks.pool.compose import Plan, Slot

ARRANGE = ("mkdir", "move", "copy", "rename", "delete")
NOTE = ("write", "append")
AMEND = ("replace", "chmod", "append")
DIGEST = ("count", "sort", "unique", "grep", "head")
CARRY = ("move", "copy", "rename", "chmod")
HUNT = ("find_delete", "find_move")

TIER_WEIGHTS: Mapping[Tier, float] = {"easy": 0.15, "medium": 0.35, "hard": 0.35, "extreme": 0.15}
"""Shares of the tiers in a pool."""


@dataclass(frozen=True, slots=True)
class Family:
    """A recipe: sub-goals by groups of operations, and which of them build on which."""

    name: str
    tier: Tier
    slots: tuple[Slot, ...]


_FAMILIES = (
    Family("arrange", "easy", (Slot(ARRANGE),)),
    Family("note", "easy", (Slot(NOTE),)),
    Family("amend", "easy", (Slot(AMEND),)),
    Family("digest", "easy", (Slot(DIGEST),)),
    Family("arrange_pair", "medium", (Slot(ARRANGE), Slot(ARRANGE))),
    Family("note_and_arrange", "medium", (Slot(NOTE), Slot(ARRANGE))),
    Family("digest_and_arrange", "medium", (Slot(DIGEST), Slot(ARRANGE))),
    Family("amend_and_digest", "medium", (Slot(AMEND), Slot(DIGEST))),
    Family("digest_pair", "medium", (Slot(DIGEST), Slot(DIGEST))),
    Family("seek", "hard", (Slot(HUNT),)),
    Family("tidy_up", "hard", (Slot(ARRANGE), Slot(ARRANGE), Slot(ARRANGE))),
    Family("report", "hard", (Slot(DIGEST), Slot(DIGEST), Slot(NOTE))),
    Family("edit_round", "hard", (Slot(AMEND), Slot(NOTE), Slot(DIGEST))),
    Family("pipeline", "hard", (Slot(DIGEST), Slot(CARRY, after=0), Slot(ARRANGE))),
    Family("refine", "hard", (Slot(DIGEST), Slot(DIGEST, after=0), Slot(NOTE))),
    Family("furnish", "hard", (Slot(("mkdir",)), Slot(("move",), after=0), Slot(DIGEST))),
    Family(
        "hunt_and_clear",
        "extreme",
        (Slot(("find_delete",)), Slot(DIGEST), Slot(CARRY, after=1)),
    ),
    Family(
        "hunt_and_file",
        "extreme",
        (Slot(("mkdir",)), Slot(("find_move",), after=0), Slot(DIGEST)),
    ),
    Family(
        "long_pipeline",
        "extreme",
        (
            Slot(("sort", "unique", "head")),
            Slot(("grep", "count", "head"), after=0),
            Slot(CARRY, after=1),
            Slot(HUNT),
        ),
    ),
    Family(
        "audit",
        "extreme",
        (Slot(HUNT), Slot(DIGEST), Slot(("append",), after=1), Slot(ARRANGE)),
    ),
)

FAMILIES: Mapping[str, Family] = {f.name: f for f in _FAMILIES}

_MEDIUM_FROM = 1.5
_HARD_FROM = 2.5
_EXTREME_FROM = 5.25


def difficulty(plan: Plan, n_effective: int) -> dict[str, float]:
    """Structural measures of a task; `score` is what the tier is cut from.

    score = (turns + |E|) / 2 + (chain - 1) + 2 * needs_observation (our own scale).
    """
    turns = len(plan.commands)
    chain = plan.longest_chain
    observes = int(plan.needs_observation)
    return {
        "turns": turns,
        "n_effective": n_effective,
        "chain": chain,
        "needs_observation": observes,
        "score": (turns + n_effective) / 2 + (chain - 1) + 2 * observes,
    }


def tier_of(score: float) -> Tier:
    """The tier of a difficulty score."""
    if score < _MEDIUM_FROM:
        return "easy"
    if score < _HARD_FROM:
        return "medium"
    return "hard" if score < _EXTREME_FROM else "extreme"


def matches(plan: Plan, family: Family) -> bool:
    """Whether the plan is a composition of this family, in some order of its slots."""
    if len(plan.sub_goals) != len(family.slots):
        return False

    def assign(position: int, taken: tuple[int, ...]) -> bool:
        if position == len(plan.sub_goals):
            return True
        sub_goal = plan.sub_goals[position]
        for i, slot in enumerate(family.slots):
            after = None if sub_goal.after is None else taken[sub_goal.after]
            if (
                i not in taken
                and sub_goal.operation in slot.operations
                and slot.after == after
                and assign(position + 1, (*taken, i))
            ):
                return True
        return False

    return assign(0, ())
