"""What the stage machine tells whoever watches it; watching changes no result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StageRow:
    """One line of the results table: a stage, evaluated on fresh test tasks.

    Attributes:
      name: the stage, for example "rsr-1".
      strict_success: mean@k of strict success, in [0, 1].
      ci95: 95 % interval of it, clustered by task.
      progress: mean of p = q * h, in [0, 1].
      tiers: tier -> strict success; a tier without a graded task is absent.
      explained_variance: of the critic after its last round; None where no critic was trained.
      seconds: wall-clock time of the whole stage.
    """

    name: str
    strict_success: float
    ci95: tuple[float, float]
    progress: float
    tiers: Mapping[str, float] = field(default_factory=dict)
    explained_variance: float | None = None
    seconds: float = 0.0


class Part(Protocol):
    """A long piece of work under way."""

    def advance(self, n: int = 1, **metrics: float) -> None:
        """`n` more units are done; `metrics` replace the values shown under the same names.

        "success" is shown as a percentage, anything else as a plain number.
        """
        ...


class Observer(Protocol):
    """Is told of stages and parts, in order, from one thread."""

    def stage_started(self, name: str, index: int, total: int) -> None:
        """Stage `name`, the `index`-th (from 0) of `total`, begins."""
        ...

    def part(self, name: str, total: int) -> AbstractContextManager[Part]:
        """A part of `total` units; parts may nest. Leaving the context ends it."""
        ...

    def stage_finished(self, row: StageRow) -> None:
        """The stage is done and evaluated."""
        ...

    def note(self, text: str) -> None:
        """One line for people, for example that a run resumes."""
        ...


class NullObserver:
    """Watches nothing; for tests and for code that embeds a run."""

    def stage_started(self, name: str, index: int, total: int) -> None:
        """Ignore it."""

    @contextmanager
    def part(self, name: str, total: int) -> Iterator[Part]:
        """A part that ignores its progress."""
        yield _NullPart()

    def stage_finished(self, row: StageRow) -> None:
        """Ignore it."""

    def note(self, text: str) -> None:
        """Ignore it."""


class _NullPart:
    def advance(self, n: int = 1, **metrics: float) -> None:
        """Ignore it."""
