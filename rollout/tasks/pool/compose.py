"""Turns a recipe of operations into a concrete world with sub-goals that make sense in it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.records import Entry
from rollout.tasks.pool import simulate
from rollout.tasks.pool.operations import OPERATIONS, Operation, SubGoal, lines_of
from rollout.tasks.pool.world import World, make_world


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one sub-goal: any of `operations`, using the product of slot `after`."""

    operations: tuple[str, ...]
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A world, the sub-goals to reach in it, and the tree before the first and after each one."""

    files: dict[str, bytes]
    directories: tuple[str, ...]
    sub_goals: tuple[SubGoal, ...]
    trees: tuple[dict[str, Entry], ...]

    @property
    def canonical(self) -> str:
        """What is asked for, whatever the wording."""
        return ". ".join(s.canonical for s in self.sub_goals)

    @property
    def commands(self) -> tuple[str, ...]:
        """The reference solution."""
        return tuple(c for s in self.sub_goals for c in s.commands)

    @property
    def longest_chain(self) -> int:
        """Number of sub-goals on the longest path of products."""
        depths: list[int] = []
        for sub_goal in self.sub_goals:
            depths.append(1 if sub_goal.after is None else depths[sub_goal.after] + 1)
        return max(depths)

    @property
    def needs_observation(self) -> bool:
        """Whether some argument of the solution occurs only in sandbox output."""
        return any(OPERATIONS[s.operation].observes for s in self.sub_goals)


def _shuffled(rng: random.Random, slots: Sequence[Slot]) -> list[Slot]:
    """A random order of the slots in which every slot still follows the one it uses."""
    waiting = list(range(len(slots)))
    placed: list[int] = []
    while waiting:
        ready = [i for i in waiting if slots[i].after is None or slots[i].after in placed]
        chosen = rng.choice(ready)
        waiting.remove(chosen)
        placed.append(chosen)
    order: list[Slot] = []
    for i in placed:
        after = slots[i].after
        order.append(Slot(slots[i].operations, None if after is None else placed.index(after)))
    return order


class _Composer:
    """Plans the sub-goals of one world in turn."""

    def __init__(self, rng: random.Random, slots: Sequence[Slot]) -> None:
        self.rng = rng
        self.slots = slots
        self.world: World = make_world(rng)
        self.free = list(self.world.files)
        rng.shuffle(self.free)
        # Words are planted before anything is simulated: they belong to the world.
        self.hunts: dict[int, tuple[str, str]] = {}
        self.choices = [rng.sample(s.operations, len(s.operations)) for s in slots]
        for i, names in enumerate(self.choices):
            if OPERATIONS[names[0]].observes:
                path = self.free.pop()
                self.hunts[i] = (path, self.world.plant(rng, path))
                del names[1:]
        self.files = self.world.contents()
        directories = tuple(self.world.directories)
        self.trees = [simulate.initial_tree(self.files, directories)]
        self.sub_goals: list[SubGoal] = []

    def plan(self) -> Plan | None:
        """The finished plan, or None when no operation of some slot makes sense here."""
        for i, names in enumerate(self.choices):
            after = self.slots[i].after
            sub_goal = next(
                (s for n in names if (s := self._sub_goal(i, OPERATIONS[n], after)) is not None),
                None,
            )
            if sub_goal is None or not self._advance(sub_goal):
                return None
            self.sub_goals.append(sub_goal)
        return Plan(
            self.files, tuple(self.world.directories), tuple(self.sub_goals), tuple(self.trees)
        )

    def _sub_goal(self, i: int, operation: Operation, after: int | None) -> SubGoal | None:
        arguments: dict[str, str] = {}
        if after is not None:
            producer = self.sub_goals[after]
            made = OPERATIONS[producer.operation]
            argument = operation.accepts(made.product)
            if argument is None:
                return None
            arguments[argument] = producer.arguments[made.result]
        elif operation.observes and i not in self.hunts:
            return None
        if i in self.hunts:
            arguments["f"], arguments["w"] = self.hunts[i]
        if "d" in operation.needs and "d" not in arguments:
            arguments["d"] = self.rng.choice(self.world.directories)
        wording = self.rng.randrange(len(operation.templates))
        if "f" not in operation.needs or "f" in arguments:
            return self._filled(operation, arguments, wording, after)
        for path in reversed(self.free):
            sub_goal = self._filled(operation, {**arguments, "f": path}, wording, after)
            if sub_goal is not None:
                self.free.remove(path)
                return sub_goal
        return None

    def _filled(
        self, operation: Operation, arguments: dict[str, str], wording: int, after: int | None
    ) -> SubGoal | None:
        lines = lines_of(self.trees[-1][arguments["f"]]) if "f" in arguments else []
        if not operation.plan(self.rng, self.world, lines, arguments):
            return None
        return SubGoal(operation.name, arguments, wording, after)

    def _advance(self, sub_goal: SubGoal) -> bool:
        """Simulate the reference solution; False if it fails or finds something else."""
        tree = self.trees[-1]
        for position, command in enumerate(sub_goal.commands):
            tree, stdout, exit_code = simulate.run(tree, command)
            if exit_code:
                return False
            if OPERATIONS[sub_goal.operation].observes and position == 0:
                found = stdout.decode().split()
                if found != [sub_goal.arguments["f"]]:
                    return False
        self.trees.append(tree)
        return True


_MAX_TRIES = 200


def attempt(rng: random.Random, slots: Sequence[Slot]) -> Plan | None:
    """A plan for the slots, in their order, in a fresh random world; None if it has no room."""
    return _Composer(rng, slots).plan()


def compose(rng: random.Random, slots: Sequence[Slot]) -> Plan:
    """A plan for the slots in a random allowed order, in a fresh random world.

    Raises:
      ValueError: slots that no world satisfies.
    """
    for _ in range(_MAX_TRIES):
        plan = attempt(rng, _shuffled(rng, slots))
        if plan is not None:
            return plan
    raise ValueError(f"no world satisfies {slots}")
