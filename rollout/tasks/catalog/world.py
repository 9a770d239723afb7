"""The working directory that a task is built in, and what its builder says about it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rollout.tasks.catalog.lexicon import EXTENSIONS

Form = Literal["checks", "binary"]
Arguments = dict[str, str]

_MAX_DISTRACTORS = 4
_NAME_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Family:
    """A recipe for tasks of one kind.

    Attributes:
      templates: paraphrases of one request, with the names of the arguments that `build` returns.
      build: fills a world and returns the arguments.
      form: "checks" has effective and guard checks; "binary" has one command, whose exit status
        is the verdict.
      clauses: how many requests of the kind one task may make.
      logs: whether its commands print logs of 200 to 2,000 tokens.
    """

    name: str
    templates: tuple[str, ...]
    build: Callable[[World], Arguments]
    form: Form = "checks"
    clauses: tuple[int, ...] = (1,)
    logs: bool = False


class World:
    """A working directory in the making.

    Names and the request come from one stream of randomness and contents from another, so that a
    sibling asks for the same with the same names over other contents.

    Attributes:
      rng: decides names, sizes and wording.
      data: decides contents.
      files: path -> text.
      directories: directories, parents first.
      goals: (label, predicate) of the effective checks.
      guards: (label, predicate) of guard checks beyond those that follow from the files.
      oracle: commands of the reference solution, one a turn.
      scratch: paths that may be left behind and that no check speaks of.
      unmet: predicates that fail on the untouched directory and without which no "exit" passes.
    """

    def __init__(self, key: str, variant: int, words: Sequence[str]) -> None:
        self.rng = random.Random(f"catalog/{key}")
        self.data = random.Random(f"catalog/{key}/{variant}")
        shuffled = self.rng.sample(words, len(words))
        cut = int(_NAME_SHARE * len(shuffled))
        # Apart, so that no word of a task can mean two things.
        self._names, self._contents = shuffled[:cut], shuffled[cut:]
        self.files: dict[str, str] = {}
        self.directories: list[str] = []
        self.goals: list[tuple[str, tuple[str, ...]]] = []
        self.guards: list[tuple[str, tuple[str, ...]]] = []
        self.oracle: list[str] = []
        self.scratch: list[str] = []
        self.unmet: list[tuple[str, ...]] = []

    # --- names --------------------------------------------------------------------------------

    def name(self) -> str:
        """A word that occurs nowhere in this world."""
        return self._names.pop()

    def path(self, *extensions: str) -> str:
        """A file name that occurs nowhere in this world."""
        return f"{self.name()}.{self.rng.choice(extensions or EXTENSIONS[:5])}"

    # --- contents -----------------------------------------------------------------------------

    def word(self) -> str:
        """A word for the inside of files."""
        return self.data.choice(self._contents)

    def keyword(self) -> str:
        """A word for the inside of files that the request names."""
        return self._contents.pop(self.rng.randrange(len(self._contents)))

    def lines(self, low: int = 4, high: int = 12, *, words: int = 3) -> list[str]:
        """Random lines of up to `words` words, some of them repeated."""
        made = [
            " ".join(self.word() for _ in range(self.data.randint(1, words)))
            for _ in range(self.data.randint(low, high))
        ]
        return [self.data.choice(made) if self.data.random() < 0.25 else line for line in made]

    def add(self, path: str, lines: Sequence[str]) -> str:
        """Put a file of these lines there; returns the path."""
        self.files[path] = "".join(f"{line}\n" for line in lines)
        return path

    def source(self, *extensions: str, low: int = 4, high: int = 12) -> tuple[str, list[str]]:
        """A new file of random lines: its path and the lines."""
        path, lines = self.path(*extensions), self.lines(low, high)
        self.add(path, lines)
        return path, lines

    def folder(self, parent: str = "") -> str:
        """A new empty directory."""
        path = f"{parent}/{self.name()}" if parent else self.name()
        self.directories.append(path)
        return path

    def distract(self) -> None:
        """Add files that have nothing to do with the request."""
        for _ in range(self.rng.randint(0, _MAX_DISTRACTORS)):
            self.source(low=1, high=6)

    # --- what is asked ------------------------------------------------------------------------

    def do(self, *commands: str) -> None:
        """Add commands to the reference solution."""
        self.oracle.extend(commands)

    def goal(self, label: str, *predicate: str) -> None:
        """Add an effective check."""
        self.goals.append((label, predicate))

    def guard(self, label: str, *predicate: str) -> None:
        """Add a guard check."""
        self.guards.append((label, predicate))

    def made(self, path: str, lines: Sequence[str]) -> None:
        """A new file is to hold these lines: one check that it is there, one of what it says."""
        self.goal(f"made-{path}", "file", path)
        self.goal(f"right-{path}", "lines", path, "".join(f"{line}\n" for line in lines))
