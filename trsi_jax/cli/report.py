"""`trsi report RUN`: make the report and the summary of a run anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
) -> None:
    """Write report.html and summary.json from the stages that a run has finished."""
    from trsi_jax.cli.console import console, results_table
    from trsi_jax.report.build import build

    summary = build(run)
    screen = console()
    screen.print(results_table(summary.stages))
    screen.print(f"report   {run / summary.report}", markup=False, soft_wrap=True)
