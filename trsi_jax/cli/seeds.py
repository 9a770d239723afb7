"""`trsi seeds CONFIG --seeds 0..4`: independent runs and their mean curve."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from rollout.errors import UserError
from trsi_jax.cli import configs
from trsi_jax.cli.run import ConfigArgument, OverrideOption

MAX_SEEDS = 1000


def seeds(
    config: ConfigArgument,
    chosen: Annotated[
        str, typer.Option("--seeds", metavar="A..B", help="Both ends included; or a list: 0,3,7.")
    ] = "0..4",
    override: OverrideOption = None,
    out: Annotated[
        Path | None, typer.Option(help="For seeds.md, .svg, .json [default: runs/<config>-seeds].")
    ] = None,
) -> None:
    """Run one config under several seeds, then write the mean curve with every seed beside it."""
    numbers = parse(chosen)
    resolved = [configs.load(config, override or [], seed) for seed in numbers]

    from trsi_jax.cli.console import ConsoleObserver, console, results_table
    from trsi_jax.report import seeds as seeds_report
    from trsi_jax.report.build import build
    from trsi_jax.stages import machine

    screen = console()
    runs = []
    for one in resolved:
        folder = configs.run_folder(one, None)
        screen.print(f"\n[bold]seed {one.seed}[/bold]  {folder}")
        machine.run(one, folder, ConsoleObserver(screen))
        runs.append(build(folder))
        screen.print(results_table(runs[-1].stages))
    folder = configs.RUNS / f"{resolved[0].name}-seeds" if out is None else out
    for path in seeds_report.write(folder, resolved[0].name, runs):
        screen.print(f"wrote {path}", markup=False, soft_wrap=True)


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
