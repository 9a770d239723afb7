"""The small worlds that tasks and demonstrations start in."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from rollout.tasks.pool.lexicon import NAMES

N_FILES = 7
N_DIRECTORIES = 2
_LINE_COUNTS = (1, 2, 3, 3, 4, 4, 4)
_N_WORDS = 9
# The world's own names and words, and as many again for what the sub-goals bring in.
_N_DRAWN = 2 * (N_FILES + N_DIRECTORIES + _N_WORDS)
_REPEAT_SHARE = 0.35


@dataclass(slots=True)
class World:
    """A working directory being planned: one-word lines in plainly named files.

    Names of files and words in files are drawn apart, so that no argument of a task can mean two
    things.

    Attributes:
      files: name -> lines.
      directories: names of the (empty) directories.
      words: the words that the files' lines are drawn from.
      spare: names that nothing uses yet.
    """

    files: dict[str, list[str]]
    directories: list[str]
    words: list[str]
    spare: list[str]

    def fresh(self) -> str:
        """A name or word that occurs nowhere in this world."""
        return self.spare.pop()

    def contents(self) -> dict[str, bytes]:
        """Path -> bytes of every file."""
        return {path: _encode(lines) for path, lines in self.files.items()}

    def plant(self, rng: random.Random, path: str) -> str:
        """Put a word that occurs nowhere else in place of one line of `path`; returns it."""
        word = self.fresh()
        lines = self.files[path]
        lines[rng.randrange(len(lines))] = word
        return word


def _encode(lines: Collection[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def make_world(rng: random.Random) -> World:
    """A fresh random world."""
    names = rng.sample(NAMES, _N_DRAWN)
    files: dict[str, list[str]] = {}
    words = [names.pop() for _ in range(_N_WORDS)]
    for _ in range(N_FILES):
        lines = [rng.choice(words) for _ in range(rng.choice(_LINE_COUNTS))]
        if len(lines) > 1 and rng.random() < _REPEAT_SHARE:
            lines[rng.randrange(1, len(lines))] = lines[0]
        files[names.pop()] = lines
    directories = [names.pop() for _ in range(N_DIRECTORIES)]
    return World(files, directories, words, names)
