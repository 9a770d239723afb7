"""`trsi seeds CONFIG --seeds 0..4`: independent runs and their mean curve."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from rollout.errors import RolloutError, UserError
from trsi_jax.cli import configs
from trsi_jax.cli.run import ConfigArgument, OverrideOption

if TYPE_CHECKING:
    from rich.console import Console

MAX_SEEDS = 1000
_POLL_S = 0.5


class SeedError(RolloutError):
    """A seed's own process failed."""

    kind = "seeds"


def seeds(
    config: ConfigArgument,
    chosen: Annotated[
        str, typer.Option("--seeds", metavar="A..B", help="Both ends included; or a list: 0,3,7.")
    ] = "0..4",
    override: OverrideOption = None,
    out: Annotated[
        Path | None, typer.Option(help="For seeds.md, .svg, .json [default: runs/<config>-seeds].")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Seeds side by side, each on its share of the cores.")
    ] = 1,
) -> None:
    """Run one config under several seeds, then write the mean curve with every seed beside it.

    The same command goes on where it was stopped. XLA splits its sums by the cores it has, so
    another number of jobs gives other, equally valid, figures.
    """
    numbers = parse(chosen)
    resolved = [configs.load(config, override or [], seed) for seed in numbers]
    folders = {one.seed: configs.run_folder(one, None) for one in resolved}
    shares = split_cores(sorted(os.sched_getaffinity(0)), jobs)

    from trsi_jax.cli.console import ConsoleObserver, console, results_table
    from trsi_jax.report import seeds as seeds_report
    from trsi_jax.report.build import build
    from trsi_jax.stages import machine

    screen = console()
    if jobs > 1:
        options = [part for text in override or [] for part in ("-o", text)]
        commands = {
            seed: ["run", str(config), "--seed", str(seed), "--out", str(folder), *options]
            for seed, folder in folders.items()
        }
        _side_by_side(commands, folders, shares, screen)
    runs = []
    for one in resolved:
        folder = folders[one.seed]
        if jobs == 1:
            screen.print(f"\n[bold]seed {one.seed}[/bold]  {folder}")
            machine.run(one, folder, ConsoleObserver(screen))
        runs.append(build(folder))
        screen.print(f"\n[bold]seed {one.seed}[/bold]")
        screen.print(results_table(runs[-1].stages))
    folder = configs.RUNS / f"{resolved[0].name}-seeds" if out is None else out
    for path in seeds_report.write(folder, resolved[0].name, runs):
        screen.print(f"wrote {path}", markup=False, soft_wrap=True)


def split_cores(cores: Sequence[int], jobs: int) -> list[list[int]]:
    """Equal, disjoint shares of the cores, one a job; what does not divide is left idle.

    Raises:
      UserError: for more jobs than cores.
    """
    size = len(cores) // jobs
    if size == 0:
        raise UserError(
            f"--jobs {jobs}: at most {len(cores)}, the number of cores that this process may use"
        )
    return [list(cores[i * size : (i + 1) * size]) for i in range(jobs)]


@dataclass
class _Job:
    """A seed's own process."""

    seed: int
    process: subprocess.Popen[bytes]
    cores: list[int]
    log: Path
    told: set[str] = field(default_factory=set)


def _side_by_side(
    commands: dict[int, list[str]],
    folders: dict[int, Path],
    shares: Sequence[list[int]],
    screen: Console,
) -> None:
    """Run the commands in processes of their own, as many at a time as there are shares.

    Raises:
      SeedError: when one of them fails; the others are stopped and can be resumed.
    """
    waiting, free = deque(commands), list(shares)
    running: list[_Job] = []
    try:
        while waiting or running:
            while waiting and free:
                job = _start(waiting.popleft(), commands, folders, free.pop(0))
                screen.print(f"seed {job.seed}: started, log {job.log}", markup=False)
                running.append(job)
            for job in list(running):
                ended = job.process.poll()
                _tell(job, folders[job.seed], screen)
                if ended is not None:
                    running.remove(job)
                    free.append(job.cores)
                if ended:
                    lines = job.log.read_text(errors="replace").split("\n")
                    last = next((line for line in reversed(lines) if line.strip()), "no output")
                    raise SeedError(f"seed {job.seed} failed: {last.removeprefix('trsi: ')}")
            time.sleep(_POLL_S)
    finally:
        for job in running:
            job.process.terminate()
        for job in running:
            job.process.wait()


def _start(
    seed: int, commands: dict[int, list[str]], folders: dict[int, Path], cores: list[int]
) -> _Job:
    folder = folders[seed]
    log = folder.with_name(f"{folder.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "trsi_jax.cli.main", *commands[seed]]
    with log.open("wb") as sink, _pinned(cores):
        return _Job(seed, _spawn(command, sink), cores, log)


def _spawn(command: Sequence[str], sink: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
    )


@contextmanager
def _pinned(cores: Sequence[int]) -> Iterator[None]:
    """Bind this thread, and so what it starts, to the cores for a while."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _tell(job: _Job, folder: Path, screen: Console) -> None:
    """Print a line for each stage that the seed has finished since the last look."""
    from trsi_jax.stages import record

    for finished in record.read_all(folder):
        row = finished.row
        if row.name not in job.told:
            job.told.add(row.name)
            screen.print(
                f"seed {job.seed}: {row.name}  {100 * row.strict_success:.1f} %"
                f"  {row.seconds:.0f} s",
                markup=False,
            )


def parse(text: str) -> list[int]:
    """The seeds of "A..B" (both ends included) or "A,B,C", without repeats."""
    span = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if span:
        first, last = int(span[1]), int(span[2])
        numbers = list(range(first, min(last, first + MAX_SEEDS) + 1))
    elif re.fullmatch(r"\d+(,\d+)*", text):
        numbers = [int(part) for part in text.split(",")]
    else:
        numbers = []
    if not numbers or len(set(numbers)) != len(numbers) or len(numbers) > MAX_SEEDS:
        raise UserError(
            f"--seeds {text}: give a range such as 0..4 or a list such as 0,3,7,"
            f" at most {MAX_SEEDS} seeds and none twice"
        )
    return numbers
