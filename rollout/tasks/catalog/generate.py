"""Makes the catalogue's tasks: the request, the fixed checks, the gate, the pool of a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count

from rollout.errors import TaskError, UserError
from rollout.records import Check, Entry, Split, Task
from rollout.tasks import predicates
from rollout.tasks.catalog import composed, simple
from rollout.tasks.catalog.difficulty import measures, tier_of
from rollout.tasks.catalog.lexicon import OPEN_WORDS, RESERVED_WORDS
from rollout.tasks.catalog.world import Arguments, Family, World
from rollout.tasks.splits import split_of
from rollout.tasks.verifier import judge

FAMILIES: Mapping[str, Family] = {f.name: f for f in (*simple.FAMILIES, *composed.FAMILIES)}

HELD_OUT = frozenset({"count_words", "json_get_field", "two_branch", "env_file_source"})
"""Families that are in no training or validation split: one digest, one of each other kind."""

TASKS_PER_FAMILY = {"checks": 60, "binary": 100}

_MAX_DRAWS_PER_TASK = 20


def split_for(family: str, seed: int) -> Split:
    """The split of a task: by hash of family and seed, or test for a family held out."""
    return "test" if family in HELD_OUT else split_of(f"catalog/{family}/{seed}")


def _request(family: Family, world: World, clauses: Sequence[Arguments]) -> str:
    """The instruction: one sentence."""
    parts = [world.rng.choice(family.templates).format_map(a) for a in clauses]
    text = "; then ".join(parts)
    # A sentence may begin with a file name, whose case is not ours to change.
    head = text.split(" ", 1)[0]
    return (text if "." in head or "`" in head or "/" in head else text[0].upper() + text[1:]) + "."


def _tree(world: World) -> dict[str, Entry]:
    """The untouched working directory."""
    tree: dict[str, Entry] = {d: Entry("directory", 0o755) for d in world.directories}
    tree |= {f: Entry("file", 0o644, text.encode()) for f, text in world.files.items()}
    return tree


def _checks(world: World, family: Family, tree: Mapping[str, Entry]) -> tuple[Check, ...]:
    """Effective checks for what is asked; guards for everything that is to stay as it is."""
    checks = [Check(f"goal-{label}", "effective", p) for label, p in world.goals]
    if family.form == "binary":
        return tuple(checks)
    spoken_of = {path for _, p in world.goals for path in predicates.paths_of(p)}
    checks += [Check(f"keep-{label}", "guard", p) for label, p in world.guards]
    for path, entry in tree.items():
        if path in spoken_of:
            continue
        kept = ("directory", path) if entry.kind == "directory" else ("text", path)
        text = () if entry.kind == "directory" else (entry.data.decode(),)
        checks.append(Check(f"keep-{path}", "guard", (*kept, *text)))
    parents = {path[:i] for path in spoken_of for i, c in enumerate(path) if c == "/"}
    allowed = sorted({*tree, *spoken_of, *world.scratch, *parents})
    checks.append(Check("nothing-else", "guard", ("only", *allowed)))
    return tuple(checks)


def _gate(task: Task, world: World, tree: Mapping[str, Entry]) -> None:
    """Refuse a task that scores untouched.

    Raises:
      TaskError: naming the task and the check.
    """
    for predicate in world.unmet:
        if predicates.holds(predicate, tree, {}):
            raise TaskError(f"task {task.id}: passes untouched ({predicate[0]})")
    judged = [c for c in task.checks if predicates.run_of(c.predicate) is None]
    if len(judged) < len(task.checks) and not world.unmet:
        raise TaskError(f"task {task.id}: nothing shows that its command fails untouched")
    if judged and any(c.kind == "effective" for c in judged):
        for result in judge(judged, tree).results:
            if result.passed != (result.kind == "guard"):
                raise TaskError(f"task {task.id}: untouched, the check {result.id} is off")


def build(family: Family, key: str, *, seed: int, variant: int, split: Split) -> Task:
    """The task that a family makes of a key.

    Args:
      family: the recipe.
      key: decides names, sizes and the request.
      seed: recorded in the task.
      variant: decides the contents; another one gives a sibling.
      split: recorded in the task; test tasks use the reserved words alone.

    Raises:
      TaskError: the task scores untouched.
    """
    world = World(key, variant, RESERVED_WORDS if split == "test" else OPEN_WORDS)
    clauses = [family.build(world) for _ in range(world.rng.choice(family.clauses))]
    before = len(world.files)
    world.distract()
    tree = _tree(world)
    checks = _checks(world, family, tree)
    instruction = _request(family, world, clauses)
    found = measures(
        instruction,
        world.oracle,
        n_effective=sum(c.kind == "effective" for c in checks),
        distractors=len(world.files) - before,
    )
    content = repr((instruction, sorted(world.files.items()), world.directories))
    task = Task(
        id=f"{family.name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}",
        family=family.name,
        tier=tier_of(found["score"]),
        split=split,
        seed=seed,
        instruction=instruction,
        steps=(instruction,),
        files={path: text.encode() for path, text in world.files.items()},
        directories=tuple(sorted(world.directories)),
        checks=checks,
        oracle=tuple(world.oracle),
        difficulty=found,
    )
    _gate(task, world, tree)
    return task


def make_task(family: str, seed: int, *, variant: int = 0) -> Task:
    """The pool's task of a family and a seed; another variant asks the same of other contents.

    A runbook that carries results instead of computing them passes one variant and fails the next.

    Raises:
      UserError: an unknown family.
      TaskError: the task scores untouched.
    """
    if family not in FAMILIES:
        raise UserError(f"family {family!r} is unknown; allowed: {', '.join(FAMILIES)}")
    return build(
        FAMILIES[family],
        f"pool/{family}/{seed}",
        seed=seed,
        variant=variant,
        split=split_for(family, seed),
    )


def sibling(task: Task, variant: int = 1) -> Task:
    """The same request over other contents.

    Raises:
      UserError: a task of another pool.
    """
    return make_task(task.family, task.seed, variant=variant)


def _seeds(family: str, seed: int) -> Iterator[int]:
    """An endless stream of task seeds of 48 bits."""
    for i in count():
        digest = hashlib.sha256(f"catalog/{seed}/{family}/{i}".encode()).digest()
        yield int.from_bytes(digest[:6], "big")


def generate(seed: int, counts: Mapping[str, int] | None = None) -> tuple[Task, ...]:
    """The pool of a seed: 40 families of 60 tasks and 6 of 100, all different.

    Args:
      seed: decides every task.
      counts: family -> number of tasks, for a smaller or larger pool; a larger one extends it.

    Raises:
      UserError: an unknown family.
      TaskError: a family has not that many different tasks that fail untouched.
    """
    counts = counts or {name: TASKS_PER_FAMILY[f.form] for name, f in FAMILIES.items()}
    tasks: list[Task] = []
    ids: set[str] = set()
    for family, wanted in counts.items():
        seeds = _seeds(family, seed)
        found = 0
        for _ in range(wanted * _MAX_DRAWS_PER_TASK):
            if found == wanted:
                break
            try:
                task = make_task(family, next(seeds))
            except TaskError:
                continue
            if task.id in ids:
                continue
            ids.add(task.id)
            tasks.append(task)
            found += 1
        if found < wanted:
            raise TaskError(f"family {family}: only {found} of {wanted} different tasks found")
    return tuple(tasks)
