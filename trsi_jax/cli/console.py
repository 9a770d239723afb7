"""What a person sees of a run: bars, a row a stage, the table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from rollout.records import TIERS
from trsi_jax.stages.observer import Part, StageRow

LOG_EVERY_S = 10.0
LOG_WIDTH = 100


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for the table in a log."""
    plain = Console(stderr=stderr, highlight=False)
    return plain if plain.is_terminal else Console(stderr=stderr, highlight=False, width=LOG_WIDTH)


class ConsoleObserver:
    """Shows bars on a terminal; elsewhere a line when a part ends, and one every ten seconds."""

    def __init__(self, to: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = to
        self._clock = clock
        self._depth = 0
        self._progress = Progress(
            TextColumn("  {task.description:<22}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            console=to,
            transient=True,
            auto_refresh=to.is_terminal,
            disable=not to.is_terminal,
        )

    def stage_started(self, name: str, index: int, total: int) -> None:
        """Announce the stage."""
        self._console.print(f"\n[bold]{name}[/bold]  stage {index + 1} of {total}")

    @contextmanager
    def part(self, name: str, total: int) -> Iterator[Part]:
        """A bar that goes when the part ends, and the line that stays."""
        task = self._progress.add_task(name, total=total, state="")
        if self._depth == 0:
            self._progress.start()
        self._depth += 1
        part = _ConsolePart(self, task, name, total)
        try:
            yield part
        finally:
            self._depth -= 1
            self._progress.remove_task(task)
            if self._depth == 0:
                self._progress.stop()
            part.close()

    def stage_finished(self, row: StageRow) -> None:
        """Print the stage's row."""
        self._console.print(results_table([row]))

    def note(self, text: str) -> None:
        """Print the line."""
        self._console.print(f"  {text}", markup=False)


class _ConsolePart:
    def __init__(self, observer: ConsoleObserver, task: TaskID, name: str, total: int) -> None:
        self._observer = observer
        self._task = task
        self._name = name
        self._total = total
        self._done = 0
        self._metrics: dict[str, float] = {}
        self._begun = self._logged = observer._clock()

    def advance(self, n: int = 1, **metrics: float) -> None:
        """Move the bar; on no terminal print a line if the last is old enough."""
        self._done += n
        self._metrics.update(metrics)
        now = self._observer._clock()
        self._observer._progress.update(self._task, advance=n, state=self._state(now))
        due = now - self._logged >= LOG_EVERY_S and self._done < self._total
        if due and not self._observer._console.is_terminal:
            self._logged = now
            self._print(now)

    def close(self) -> None:
        """Print the line that stays."""
        self._print(self._observer._clock())

    def _print(self, now: float) -> None:
        count = f"{self._done}/{self._total}"
        line = f"  {self._name:<22} {count:>11}  {self._state(now)}"
        self._observer._console.print(line, markup=False)

    def _state(self, now: float) -> str:
        seconds = now - self._begun
        shown = [f"{name} {_metric(name, value)}" for name, value in self._metrics.items()]
        if self._done and seconds > 0:
            shown.append(_speed(self._done / seconds))
        return "  ".join([*shown, duration(seconds)])


def results_table(rows: Sequence[StageRow]) -> Table:
    """The stages as a table; percentages are of strict success but for the progress."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("stage", min_width=7)
    table.add_column("success %", min_width=17)
    table.add_column("progress", justify="right")
    for tier in TIERS:
        table.add_column(tier, justify="right")
    table.add_column("critic EV", justify="right")
    table.add_column("time", justify="right", min_width=7)
    for row in rows:
        lo, hi = row.ci95
        ev = row.explained_variance
        table.add_row(
            row.name,
            f"{percent(row.strict_success)} [{percent(lo)}, {percent(hi)}]".replace("[", "\\["),
            percent(row.progress),
            *(percent(row.tiers[tier]) if tier in row.tiers else "-" for tier in TIERS),
            "-" if ev is None else f"{ev:.2f}",
            duration(row.seconds),
        )
    return table


def percent(share: float) -> str:
    """A share as a percentage with one decimal, without the sign."""
    return f"{100 * share:.1f}"


def duration(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _metric(name: str, value: float) -> str:
    return f"{percent(value)} %" if name.endswith("success") else f"{value:.3g}"


def _speed(per_second: float) -> str:
    return f"{per_second:.1f}/s" if per_second >= 1 else f"{1 / per_second:.1f} s each"
