"""`trsi run CONFIG`: the whole recursion, resumable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trsi_jax.cli import configs

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file.")]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option(
        "-o", "--override", metavar="KEY=VALUE", help="Replace a value, as evaluation.tasks=64."
    ),
]


def run(
    config: ConfigArgument,
    override: OverrideOption = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder [default: runs/<config>-<seed>].")
    ] = None,
    seed: Annotated[
        str | None, typer.Option(metavar="N", help="Replace the config's seed.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming.")] = False,
) -> None:
    """Run the whole recursion; the same command resumes a run that was stopped."""
    resolved = configs.load(config, override or [], seed)
    folder = configs.run_folder(resolved, out)
    if fresh:
        configs.clear(folder)

    from trsi_jax.cli.console import ConsoleObserver, console, results_table
    from trsi_jax.report.build import build
    from trsi_jax.stages import machine

    screen = console()
    machine.run(resolved, folder, ConsoleObserver(screen))
    summary = build(folder)
    screen.print(f"\n[bold]{resolved.name}[/bold]  seed {summary.seed}")
    screen.print(results_table(summary.stages))
    screen.print(f"report   {folder / summary.report}", markup=False, soft_wrap=True)
    screen.print(f"summary  {folder / 'summary.json'}", markup=False, soft_wrap=True)
