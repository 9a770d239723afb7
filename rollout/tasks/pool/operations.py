"""The sixteen operations that sub-goals are made of: wording, solution, and typical mistakes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rollout.records import Entry
from rollout.tasks.pool.lexicon import HEAD_COUNTS, MODES
from rollout.tasks.pool.world import World

Arguments = Mapping[str, str]
Commands = tuple[str, ...]
Product = Literal["file", "directory", "none"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of sub-goal.

    Command templates name the arguments that `plan` gives: `f` the file acted on, `g` a new path,
    `d` a directory, `w` and `v` words, `n` a count, `m` a mode.

    Attributes:
      templates: paraphrases of the sub-goal; the first is its canonical wording.
      commands: the reference solution, one command a turn.
      mistakes: wrong but plausible command sequences, as a weak agent makes them.
      needs: the arguments that name something already there: "f" a file, "d" a directory.
      result: the argument that names this operation's product, which a later sub-goal may consume.
      product: what that product is.
      plan: (rng, world, lines, arguments) -> whether the arguments, completed in place, make this
        operation matter; `lines` are those of the file acted on.
      observes: whether an argument of the solution occurs only in an observation.
    """

    name: str
    templates: tuple[str, ...]
    commands: Commands
    mistakes: tuple[Commands, ...]
    needs: tuple[str, ...]
    result: str
    product: Product
    plan: Callable[[random.Random, World, list[str], dict[str, str]], bool]
    observes: bool = False

    def accepts(self, product: Product) -> str | None:
        """The argument that an earlier sub-goal's product may become, if any."""
        if product == "directory" and "d" in self.needs:
            return "d"
        if product == "file" and "f" in self.needs and not self.observes and self.name != "delete":
            return "f"
        return None


def _nothing(rng: random.Random, world: World, lines: list[str], arguments: dict[str, str]) -> bool:
    return True


def _new_path(
    rng: random.Random, world: World, lines: list[str], arguments: dict[str, str]
) -> bool:
    arguments["g"] = world.fresh()
    return True


def _write(rng: random.Random, world: World, lines: list[str], arguments: dict[str, str]) -> bool:
    arguments["g"] = world.fresh()
    arguments["w"] = world.fresh()
    return True


def _append(rng: random.Random, world: World, lines: list[str], arguments: dict[str, str]) -> bool:
    arguments["w"] = world.fresh()
    return True


def _sort(rng: random.Random, world: World, lines: list[str], arguments: dict[str, str]) -> bool:
    if sorted(lines) == lines:
        return False
    return _new_path(rng, world, lines, arguments)


def _unique(rng: random.Random, world: World, lines: list[str], arguments: dict[str, str]) -> bool:
    if len(set(lines)) == len(lines):
        return False
    return _new_path(rng, world, lines, arguments)


def _grep(rng: random.Random, world: World, lines: list[str], arguments: dict[str, str]) -> bool:
    if len(set(lines)) < 2:
        return False
    arguments["w"] = rng.choice(lines)
    return _new_path(rng, world, lines, arguments)


def _head(rng: random.Random, world: World, lines: list[str], arguments: dict[str, str]) -> bool:
    counts = [n for n in HEAD_COUNTS if int(n) < len(lines)]
    if not counts:
        return False
    arguments["n"] = rng.choice(counts)
    return _new_path(rng, world, lines, arguments)


def _replace(rng: random.Random, world: World, lines: list[str], arguments: dict[str, str]) -> bool:
    words = [line for line in lines if line.isalpha()]
    if not words:
        return False
    arguments["w"] = rng.choice(words)
    arguments["v"] = world.fresh()
    return True


def _chmod(rng: random.Random, world: World, lines: list[str], arguments: dict[str, str]) -> bool:
    arguments["m"] = rng.choice(MODES)
    return True


_OPERATIONS = (
    Operation(
        name="mkdir",
        templates=("make directory {g}", "create folder {g}"),
        commands=("mkdir {g}",),
        mistakes=(("touch {g}",),),
        needs=(),
        result="g",
        product="directory",
        plan=_new_path,
    ),
    Operation(
        name="move",
        templates=("move {f} into {d}", "put {f} in {d}"),
        commands=("mv {f} {d}",),
        mistakes=(("cp {f} {d}",),),
        needs=("f", "d"),
        result="",
        product="none",
        plan=_nothing,
    ),
    Operation(
        name="copy",
        templates=("copy {f} to {g}", "duplicate {f} as {g}"),
        commands=("cp {f} {g}",),
        mistakes=(("mv {f} {g}",),),
        needs=("f",),
        result="g",
        product="file",
        plan=_new_path,
    ),
    Operation(
        name="rename",
        templates=("rename {f} to {g}", "give {f} the name {g}"),
        commands=("mv {f} {g}",),
        mistakes=(("cp {f} {g}",),),
        needs=("f",),
        result="g",
        product="file",
        plan=_new_path,
    ),
    Operation(
        name="delete",
        templates=("delete {f}", "remove {f}"),
        commands=("rm {f}",),
        mistakes=(("rmdir {f}",),),
        needs=("f",),
        result="",
        product="none",
        plan=_nothing,
    ),
    Operation(
        name="write",
        templates=("write {w} to {g}", "save {w} in {g}"),
        commands=("echo {w} > {g}",),
        mistakes=(("echo {w}",), ("touch {g}",)),
        needs=(),
        result="g",
        product="file",
        plan=_write,
    ),
    Operation(
        name="append",
        templates=("append {w} to {f}", "add {w} at the end of {f}"),
        commands=("echo {w} >> {f}",),
        mistakes=(("echo {w} > {f}",),),
        needs=("f",),
        result="f",
        product="file",
        plan=_append,
    ),
    Operation(
        name="count",
        templates=("count lines of {f} into {g}", "save the line count of {f} in {g}"),
        commands=("wc -l < {f} > {g}",),
        mistakes=(("wc -l {f} > {g}",), ("wc -l < {f}",)),
        needs=("f",),
        result="g",
        product="file",
        plan=_new_path,
    ),
    Operation(
        name="sort",
        templates=("sort {f} into {g}", "save sorted lines of {f} in {g}"),
        commands=("sort {f} > {g}",),
        mistakes=(("sort {f}",),),
        needs=("f",),
        result="g",
        product="file",
        plan=_sort,
    ),
    Operation(
        name="unique",
        templates=(
            "sort {f} without repeats into {g}",
            "save unique sorted lines of {f} in {g}",
        ),
        commands=("sort -u {f} > {g}",),
        mistakes=(("sort {f} > {g}",), ("sort -u {f}",)),
        needs=("f",),
        result="g",
        product="file",
        plan=_unique,
    ),
    Operation(
        name="grep",
        templates=("keep lines of {f} with {w} in {g}", "save lines of {f} with {w} in {g}"),
        commands=("grep {w} {f} > {g}",),
        mistakes=(("grep {w} {f}",), ("grep {f} {w} > {g}",)),
        needs=("f",),
        result="g",
        product="file",
        plan=_grep,
    ),
    Operation(
        name="replace",
        # Quoted, the words are spelled without a leading space, as they are in the command.
        templates=('replace "{w}" with "{v}" in {f}', 'change "{w}" to "{v}" in {f}'),
        commands=("sed -i s/{w}/{v}/ {f}",),
        mistakes=(("sed s/{w}/{v}/ {f}",), ("sed -i s/{v}/{w}/ {f}",)),
        needs=("f",),
        result="f",
        product="file",
        plan=_replace,
    ),
    Operation(
        name="chmod",
        templates=("set mode {m} on {f}", "give {f} mode {m}"),
        commands=("chmod {m} {f}",),
        mistakes=(("chmod {f} {m}",),),
        needs=("f",),
        result="f",
        product="file",
        plan=_chmod,
    ),
    Operation(
        name="head",
        templates=("copy first {n} lines of {f} to {g}", "save first {n} lines of {f} in {g}"),
        commands=("head -{n} {f} > {g}",),
        mistakes=(("head -{n} {f}",), ("head {f} > {g}",)),
        needs=("f",),
        result="g",
        product="file",
        plan=_head,
    ),
    Operation(
        name="find_delete",
        templates=("delete the file with {w}", "find {w} and remove its file"),
        commands=("grep -rl {w}", "rm {f}"),
        mistakes=(("grep -rl {w}", "cat {f}"), ("rm {w}",)),
        needs=("f",),
        result="",
        product="none",
        plan=_nothing,
        observes=True,
    ),
    Operation(
        name="find_move",
        templates=("move the file with {w} into {d}", "find {w} and put its file in {d}"),
        commands=("grep -rl {w}", "mv {f} {d}"),
        mistakes=(("grep -rl {w}", "cp {f} {d}"), ("mv {w} {d}",)),
        needs=("f", "d"),
        result="",
        product="none",
        plan=_nothing,
        observes=True,
    ),
)

OPERATIONS: Mapping[str, Operation] = {o.name: o for o in _OPERATIONS}


@dataclass(frozen=True, slots=True)
class SubGoal:
    """One operation with its arguments; `after` is the earlier sub-goal whose product it uses."""

    operation: str
    arguments: Arguments
    wording: int
    after: int | None = None

    @property
    def text(self) -> str:
        """The sentence that asks for it."""
        return OPERATIONS[self.operation].templates[self.wording].format_map(self.arguments)

    @property
    def canonical(self) -> str:
        """The same in the first wording, equal for all paraphrases."""
        return OPERATIONS[self.operation].templates[0].format_map(self.arguments)

    @property
    def commands(self) -> Commands:
        """The reference solution."""
        return tuple(c.format_map(self.arguments) for c in OPERATIONS[self.operation].commands)

    def mistakes(self) -> tuple[Commands, ...]:
        """The wrong variants."""
        return tuple(
            tuple(c.format_map(self.arguments) for c in commands)
            for commands in OPERATIONS[self.operation].mistakes
        )


def lines_of(entry: Entry) -> list[str]:
    """The lines of a file, as text."""
    return entry.data.decode().splitlines()
