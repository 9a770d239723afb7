"""Makes tasks from families: the instruction, the fixed checks, and the gates."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from itertools import count

from rollout.errors import TaskError, UserError
from rollout.records import SPLITS, Check, Entry, Split, Task
from rollout.tasks.pool.compose import Plan, compose
from rollout.tasks.pool.families import FAMILIES, TIER_WEIGHTS, difficulty, tier_of
from rollout.tasks.pool.operations import OPERATIONS, SubGoal
from rollout.tasks.splits import split_of
from rollout.tasks.verifier import verify

_MAX_DRAWS_PER_TASK = 1_000


def _lineage(plan: Plan, made_by: int, path: str) -> list[tuple[str, Entry]]:
    """(path, entry) of a file after sub-goal `made_by` and after each later one it lives through.

    Later sub-goals may edit or move the product of an earlier one; each of these states shows
    that the earlier sub-goal was reached.
    """
    states = [(path, plan.trees[made_by + 1][path])]
    for sub_goal, tree in zip(
        plan.sub_goals[made_by + 1 :], plan.trees[made_by + 2 :], strict=True
    ):
        if sub_goal.arguments.get("f") == path and sub_goal.operation in ("move", "rename"):
            path = _destination(sub_goal)
        if path in tree and (path, tree[path]) != states[-1]:
            states.append((path, tree[path]))
    return states


def _destination(sub_goal: SubGoal) -> str:
    """Where a sub-goal that moves a file puts it."""
    arguments = sub_goal.arguments
    if sub_goal.operation == "rename":
        return arguments["g"]
    return f"{arguments['d']}/{arguments['f']}"


def _pairs(states: list[tuple[str, Entry]]) -> list[str]:
    pairs = dict.fromkeys((path, entry.data.decode()) for path, entry in states)
    return [part for pair in pairs for part in pair]


def _effective(plan: Plan, i: int) -> tuple[str, ...]:
    """The predicate that holds once sub-goal `i` is reached, and not before."""
    sub_goal = plan.sub_goals[i]
    arguments = sub_goal.arguments
    operation = sub_goal.operation
    if operation == "mkdir":
        return ("directory", arguments["g"])
    if operation in ("delete", "find_delete"):
        return ("absent", arguments["f"])
    if operation in ("move", "rename", "find_move"):
        # The content is the duty of whatever sub-goal changed it: all its states count here.
        before = [t[arguments["f"]] for t in plan.trees[: i + 1] if arguments["f"] in t]
        states = _lineage(plan, i, _destination(sub_goal))
        contents = [*before, *(entry for _, entry in states)]
        paths = dict.fromkeys(path for path, _ in states)
        return ("moved", arguments["f"], *_pairs([(p, e) for p in paths for e in contents]))
    if operation == "chmod":
        states = _lineage(plan, i, arguments["f"])
        return ("mode", arguments["m"], *dict.fromkeys(path for path, _ in states))
    return ("text", *_pairs(_lineage(plan, i, arguments[OPERATIONS[operation].result])))


def _checks(plan: Plan) -> tuple[Check, ...]:
    """One effective check a sub-goal; guards for all that is to stay as it is."""
    checks = [
        Check(f"goal-{i + 1}-{s.operation}", "effective", _effective(plan, i))
        for i, s in enumerate(plan.sub_goals)
    ]
    start, end = plan.trees[0], plan.trees[-1]
    for path, entry in start.items():
        if entry.kind == "directory":
            checks.append(Check(f"keep-{path}", "guard", ("directory", path)))
        elif path in end and end[path].data == entry.data:
            checks.append(Check(f"keep-{path}", "guard", ("text", path, entry.data.decode())))
    allowed = dict.fromkeys(path for tree in plan.trees for path in tree)
    checks.append(Check("nothing-else", "guard", ("only", *allowed)))
    return tuple(checks)


def _gate(task: Task, plan: Plan) -> None:
    """Refuse a task that its reference solution fails, or that scores untouched.

    Raises:
      TaskError: naming the task and the check.
    """
    for result in verify(task, plan.trees[0]).results:
        if result.passed != (result.kind == "guard"):
            raise TaskError(
                f"task {task.id}: untouched, the {result.kind} check {result.id} is off"
            )
    for result in verify(task, plan.trees[-1]).results:
        if not result.passed:
            raise TaskError(f"task {task.id}: the reference solution fails {result.id}")


def _finish(plan: Plan, family: str, seed: int) -> Task:
    checks = _checks(plan)
    measures = difficulty(plan, sum(c.kind == "effective" for c in checks))
    steps = tuple(s.text for s in plan.sub_goals)
    content = repr((plan.canonical, sorted(plan.files.items()), plan.directories))
    task = Task(
        id=f"{family}-{hashlib.sha256(content.encode()).hexdigest()[:12]}",
        family=family,
        tier=tier_of(measures["score"]),
        split=split_of(plan.canonical),
        seed=seed,
        instruction=". ".join(steps),
        steps=steps,
        files=plan.files,
        directories=plan.directories,
        checks=checks,
        oracle=plan.commands,
        difficulty=measures,
    )
    _gate(task, plan)
    return task


def _plan(family: str, seed: int) -> Plan:
    return compose(random.Random(f"task/{family}/{seed}"), FAMILIES[family].slots)


def make_task(family: str, seed: int) -> Task:
    """The task that a family makes of a seed; another seed gives a sibling.

    Raises:
      UserError: an unknown family.
      TaskError: the task fails a gate.
    """
    if family not in FAMILIES:
        raise UserError(f"family {family!r} is unknown; allowed: {', '.join(FAMILIES)}")
    return _finish(_plan(family, seed), family, seed)


def _candidates(seed: int) -> Iterator[tuple[str, int]]:
    """An endless stream of (family, task seed) in the pool's mix, the same for every split."""
    by_tier = {t: [f.name for f in FAMILIES.values() if f.tier == t] for t in TIER_WEIGHTS}
    tiers, weights = list(TIER_WEIGHTS), list(TIER_WEIGHTS.values())
    for i in count():
        rng = random.Random(f"pool/{seed}/{i}")
        tier = rng.choices(tiers, weights)[0]
        yield rng.choice(by_tier[tier]), rng.getrandbits(48)


def generate(split: Split, n: int, seed: int) -> tuple[Task, ...]:
    """The first `n` tasks of a split in the pool of a seed, all different.

    A larger `n` extends a smaller one. Which split a task is in follows from what it asks for, so
    the splits of any two seeds are disjoint in text.

    Raises:
      UserError: an unknown split or a negative `n`.
      TaskError: a task fails a gate, or the pool has not that many different tasks.
    """
    if split not in SPLITS:
        raise UserError(f"split {split!r} is unknown; allowed: {', '.join(SPLITS)}")
    if n < 0:
        raise UserError(f"number of tasks {n} is negative")
    tasks: list[Task] = []
    seen: set[str] = set()
    candidates = _candidates(seed)
    for _ in range((n + 1) * _MAX_DRAWS_PER_TASK):
        if len(tasks) == n:
            return tuple(tasks)
        family, task_seed = next(candidates)
        plan = _plan(family, task_seed)
        if plan.canonical in seen or split_of(plan.canonical) != split:
            continue
        seen.add(plan.canonical)
        tasks.append(_finish(plan, family, task_seed))
    raise TaskError(f"only {len(tasks)} different {split} tasks found, {n} were asked for")
