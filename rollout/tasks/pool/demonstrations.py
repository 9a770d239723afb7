"""Noisy transcripts of shell work, from which Base learns: fluent, and wrong in typical ways.

The mistakes are systematic (one or two wrong variants an operation) rather than diffuse, so that
they outlive sampling at a low temperature and leave the recursion something to correct.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rollout.errors import UserError
from rollout.tasks.pool import simulate
from rollout.tasks.pool.compose import Plan, Slot, attempt
from rollout.tasks.pool.families import FAMILIES, matches
from rollout.tasks.pool.lexicon import NAMES
from rollout.tasks.pool.operations import OPERATIONS, SubGoal
from rollout.tasks.splits import split_of

HarnessName = Literal["general", "survey", "stepwise"]

DONE = "done"
NEXT = "next"


@dataclass(frozen=True, slots=True)
class Teaching:
    """What the demonstrations show; higher mistake rates make a weaker Base.

    Attributes:
      general, survey, stepwise: shares of the three transcript formats.
      max_sub_goals: 1 to this many sub-goals a document; 1 gives the curriculum's first part.
      chain: how often a sub-goal builds on the product of the one before, where it can.
      mistake: how often a sub-goal is done in a wrong but plausible way.
      stepwise_mistake: the same where one sub-goal is shown at a time.
      skip: how often a sub-goal is passed over; never in "stepwise".
      stop: how often the work ends after a sub-goal that isn't the last; never in "stepwise".
      random_argument: how often one name in a sub-goal's commands is a random one.
      exclude_families: families whose compositions of operations are never shown.
    """

    general: float = 0.5
    survey: float = 0.25
    stepwise: float = 0.25
    max_sub_goals: int = 3
    chain: float = 0.35
    mistake: float = 0.45
    stepwise_mistake: float = 0.27
    skip: float = 0.15
    stop: float = 0.05
    random_argument: float = 0.03
    exclude_families: tuple[str, ...] = ("report", "refine", "hunt_and_clear", "hunt_and_file")

    def __post_init__(self) -> None:
        for name in ("chain", "mistake", "stepwise_mistake", "skip", "stop", "random_argument"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UserError(f"teaching.{name} = {getattr(self, name)} is not in [0, 1]")
        shares = (self.general, self.survey, self.stepwise)
        if min(shares) < 0 or sum(shares) <= 0:
            raise UserError(f"teaching: shares of the formats {shares} are not usable as weights")
        if not 1 <= self.max_sub_goals <= 3:
            raise UserError(f"teaching.max_sub_goals = {self.max_sub_goals} is not in 1..3")
        unknown = set(self.exclude_families) - set(FAMILIES)
        if unknown:
            raise UserError(
                f"teaching.exclude_families: unknown {', '.join(sorted(unknown))};"
                f" allowed: {', '.join(FAMILIES)}"
            )


class DemonstrationTurn(NamedTuple):
    """One command and what it gave; a control word ("done", "next") has no exit code."""

    command: str
    stdout: bytes
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One transcript, still without the markup of a harness.

    Attributes:
      harness: "general" (instruction, then commands, then `done`), "survey" (the same with the
        listing up front) or "stepwise" (one step shown at a time; `next` ends each, the last too).
      steps: the sub-goals; joined they are the instruction.
      listing: names in the working directory at the start, sorted.
      files, directories: the world it starts in, as in a `Task`.
    """

    harness: HarnessName
    instruction: str
    steps: tuple[str, ...]
    listing: tuple[str, ...]
    turns: tuple[DemonstrationTurn, ...]
    files: Mapping[str, bytes]
    directories: tuple[str, ...]


_NAME = re.compile(r"[a-z]+")
_IS_NAME = frozenset(NAMES)
_ALL = tuple(OPERATIONS)


def _recipe(rng: random.Random, teaching: Teaching) -> list[Slot]:
    """A random sequence of operations, some chained to the one before."""
    slots: list[Slot] = []
    for i in range(rng.randint(1, teaching.max_sub_goals)):
        followers: list[str] = []
        if i and rng.random() < teaching.chain:
            product = OPERATIONS[slots[-1].operations[0]].product
            followers = [n for n in _ALL if OPERATIONS[n].accepts(product) is not None]
        slots.append(
            Slot((rng.choice(followers),), i - 1) if followers else Slot((rng.choice(_ALL),))
        )
    return slots


def _scatter(rng: random.Random, command: str, names: Collection[str]) -> str:
    """The command with one of its names replaced by another name of the world."""
    found = [m for m in _NAME.finditer(command) if m.group() in _IS_NAME]
    if not found:
        return command
    match = rng.choice(found)
    return command[: match.start()] + rng.choice(sorted(names)) + command[match.end() :]


def _attempt_at(
    rng: random.Random,
    sub_goal: SubGoal,
    mistake: float,
    teaching: Teaching,
    names: Collection[str],
) -> list[str]:
    commands = list(
        rng.choice(sub_goal.mistakes()) if rng.random() < mistake else sub_goal.commands
    )
    if rng.random() < teaching.random_argument:
        i = rng.randrange(len(commands))
        commands[i] = _scatter(rng, commands[i], names)
    return commands


def _script(rng: random.Random, plan: Plan, harness: HarnessName, teaching: Teaching) -> list[str]:
    """The commands of one noisy attempt, control words included."""
    names = [path for path in plan.trees[-1] if "/" not in path]
    script: list[str] = []
    if harness == "stepwise":
        for sub_goal in plan.sub_goals:
            script += _attempt_at(rng, sub_goal, teaching.stepwise_mistake, teaching, names)
            script.append(NEXT)
        return script
    for i, sub_goal in enumerate(plan.sub_goals):
        if i and rng.random() < teaching.stop:
            break
        if rng.random() >= teaching.skip:
            script += _attempt_at(rng, sub_goal, teaching.mistake, teaching, names)
    return [*script, DONE]


def _perform(plan: Plan, script: list[str]) -> tuple[DemonstrationTurn, ...] | None:
    """The turns of a script in the plan's world; None where the model of the shell gives up."""
    tree = plan.trees[0]
    turns: list[DemonstrationTurn] = []
    for command in script:
        if command in (DONE, NEXT):
            turns.append(DemonstrationTurn(command, b"", None))
            continue
        try:
            tree, stdout, exit_code = simulate.run(tree, command)
        except simulate.UnsupportedCommand:
            return None
        turns.append(DemonstrationTurn(command, stdout, exit_code))
    return tuple(turns)


def demonstrations(seed: int, teaching: Teaching = Teaching()) -> Iterator[Demonstration]:
    """An endless stream of transcripts in fresh random worlds, the same for the same seed.

    No document asks for what a validation or test task asks for.
    """
    rng = random.Random(f"demonstrations/{seed}")
    harnesses: tuple[HarnessName, ...] = ("general", "survey", "stepwise")
    shares = (teaching.general, teaching.survey, teaching.stepwise)
    excluded = [FAMILIES[name] for name in teaching.exclude_families]
    while True:
        plan = attempt(rng, _recipe(rng, teaching))
        if plan is None or any(matches(plan, family) for family in excluded):
            continue
        if split_of(plan.canonical) != "train":
            continue
        harness = rng.choices(harnesses, shares)[0]
        turns = _perform(plan, _script(rng, plan, harness, teaching))
        if turns is None:
            continue
        steps = tuple(s.text for s in plan.sub_goals)
        listing = tuple(sorted(path for path in plan.trees[0] if "/" not in path))
        yield Demonstration(
            harness, ". ".join(steps), steps, listing, turns, plan.files, plan.directories
        )
