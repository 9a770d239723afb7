"""Four evaluation suites beside the pool.

They mirror the roles of published benchmarks, not their tasks, and their scores say nothing about
those benchmarks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from rollout.errors import TaskError, UserError
from rollout.records import Task
from rollout.tasks.catalog.generate import FAMILIES, build
from rollout.tasks.catalog.world import Arguments, Family, World

STEEP_FROM = 4.0
"""Structural score from which a task is in the harder half of the pool."""

_MAX_DRAWS_PER_TASK = 20


@dataclass(frozen=True, slots=True)
class _Stage:
    """One transformation of text: how it is asked for, as a shell pipeline, and in Python."""

    text: str
    command: str
    result: Callable[[list[str]], list[str]]


_STAGES = (
    _Stage("sorted", "sort", sorted),
    _Stage("sorted without repeats", "sort -u", lambda lines: sorted(set(lines))),
    _Stage("in reverse order", "tac", lambda lines: lines[::-1]),
    _Stage("in upper case", "tr a-z A-Z", lambda lines: [line.upper() for line in lines]),
    _Stage("without the first line", "tail -n +2", lambda lines: lines[1:]),
    _Stage("without the last line", "head -n -1", lambda lines: lines[:-1]),
    _Stage(
        "cut to the first word of each line",
        "cut -d' ' -f1",
        lambda lines: [line.split()[0] for line in lines],
    ),
    _Stage(
        "with a dash before each line",
        "sed 's/^/-/'",
        lambda lines: [f"-{line}" for line in lines],
    ),
    _Stage(
        "with a dot after each line",
        "sed 's/$/./'",
        lambda lines: [f"{line}." for line in lines],
    ),
)


def _long_chain(w: World) -> Arguments:
    """6 to 12 stages, each over the file before it, each checked: progress is a process reward."""
    n = w.rng.randint(6, 12)
    path, lines = w.source(low=16, high=20)
    asked = []
    stage = None
    for _ in range(n):
        stage = w.rng.choice([s for s in _STAGES if s is not stage])
        lines = stage.result(lines)
        product = w.path("txt")
        asked.append(f"{product} is {path} {stage.text}")
        w.do(f"{stage.command} < {path} > {product}")
        w.goal(f"stage-{product}", "lines", product, "".join(f"{line}\n" for line in lines))
        path = product
    return {"stages": "; ".join(asked)}


def _rebuild(w: World) -> Arguments:
    """A program known by examples alone: hidden inputs decide."""
    program = w.rng.sample(_STAGES, w.rng.randint(1, 3))
    script, d = "run.sh", w.folder()

    def example() -> tuple[str, str]:
        lines = w.lines(6, 10)
        result = lines
        for stage in program:
            result = stage.result(result)
        return ("".join(f"{x}\n" for x in lines), "".join(f"{x}\n" for x in result))

    shown, hidden = [example() for _ in range(3)], [example() for _ in range(5)]
    for i, (given, expected) in enumerate(shown):
        w.files[f"{d}/{i}.in"], w.files[f"{d}/{i}.out"] = given, expected
    pipeline = " | ".join(stage.command for stage in program)
    quoted = pipeline.replace("'", "'\\''")
    w.do(f"cat {d}/0.in", f"cat {d}/0.out", f"echo '{quoted}' > {script}")
    w.goal("script", "file", script)
    # What an example gives, written into the script, is no program.
    w.goal("no-examples-inside", "lacks", script, *(expected for _, expected in shown), d)
    for i, (given, expected) in enumerate(hidden):
        w.goal(f"hidden-{i + 1}", "prints", f"sh {script}", given, expected)
    w.unmet.append(("file", script))
    return {"d": d, "script": script}


_LONG_CHAIN = Family(
    "long_chain",
    (
        "make these files, each from the one before: {stages}",
        "work through these stages in order: {stages}",
        "the following files are wanted: {stages}",
    ),
    _long_chain,
)
_REBUILD = Family(
    "rebuild_io",
    (
        "{d} has inputs (.in) and what a program made of them (.out); write {script}, a shell"
        " script that does the same from standard input to standard output for any input",
        "write {script} so that `sh {script} < {d}/0.in` prints {d}/0.out, likewise for the"
        " other examples there and for inputs you have not seen",
        "find out from the examples in {d} what turns each .in into its .out and write it as"
        " {script}, from standard input to standard output, for inputs of any length",
    ),
    _rebuild,
)


@dataclass(frozen=True, slots=True)
class Suite:
    """An evaluation suite.

    Attributes:
      role: what kind of benchmark it stands in for.
      families: where its tasks come from, in turn.
      tasks: how many.
      at_least: the structural score that a task must have.
    """

    name: str
    role: str
    families: Sequence[Family]
    tasks: int
    at_least: float = 0.0


SUITES: Mapping[str, Suite] = {
    s.name: s
    for s in (
        Suite(
            "open",
            "everyday terminal work: the pool's families, unseen seeds and words",
            tuple(FAMILIES.values()),
            138,
        ),
        Suite(
            "steep",
            "the harder half by structure: the pool's families, unseen seeds and words",
            tuple(FAMILIES.values()),
            100,
            at_least=STEEP_FROM,
        ),
        Suite(
            "marathon",
            "long horizon: 6 to 12 stages that build on each other, process reward and strict",
            (_LONG_CHAIN,),
            46,
        ),
        Suite(
            "rebuild",
            "rebuild a program from input and output examples, judged on hidden inputs",
            (_REBUILD,),
            100,
        ),
    )
}


def generate_suite(name: str, seed: int) -> tuple[Task, ...]:
    """The tasks of a suite, all different, all of the split "test" and in words reserved for it.

    Raises:
      UserError: an unknown suite.
      TaskError: the suite has not that many different tasks.
    """
    if name not in SUITES:
        raise UserError(f"suite {name!r} is unknown; allowed: {', '.join(SUITES)}")
    suite = SUITES[name]
    tasks: dict[str, Task] = {}
    for i in count():
        if len(tasks) == suite.tasks:
            return tuple(tasks.values())
        if i == suite.tasks * _MAX_DRAWS_PER_TASK:
            raise TaskError(f"suite {name}: only {len(tasks)} of {suite.tasks} tasks found")
        family = suite.families[i % len(suite.families)]
        digest = hashlib.sha256(f"suite/{name}/{seed}/{i}".encode()).digest()
        task_seed = int.from_bytes(digest[:6], "big")
        key = f"suite/{name}/{family.name}/{task_seed}"
        try:
            task = build(family, key, seed=task_seed, variant=0, split="test")
        except TaskError:
            continue
        if task.difficulty["score"] >= suite.at_least:
            tasks.setdefault(task.id, task)
    raise AssertionError("count() never ends")
