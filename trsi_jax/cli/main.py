"""The command `trsi`. Every command is a file beside this one and imports heavy parts inside."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from trsi_jax.cli import (
    ablate,
    doctor,
    fleet,
    plan,
    report,
    rescore,
    run,
    seeds,
    serve,
    show,
    store,
    tasks,
)
from trsi_jax.cli.environment import clash, with_huge_pages
from trsi_jax.cli.errors import FAILURE, USER_MISTAKE, explain, wants_traceback

app = typer.Typer(
    name="trsi",
    help="Terminal-RSI in JAX: a terminal agent made better from its own verified work.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.command("seeds")(seeds.seeds)
app.command("report")(report.report)
app.command("show")(show.show)
app.command("serve")(serve.serve)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("rescore")(rescore.rescore)
app.add_typer(ablate.app, name="ablate")
app.add_typer(tasks.app, name="tasks")
app.add_typer(store.app, name="store")
app.add_typer(fleet.app, name="fleet")


def main() -> None:
    """Entry point of the console script."""
    if sys.argv[1:2] in (["run"], ["ablate"]):
        environment = with_huge_pages(os.environ)
        if environment is not None:
            # The same process, so whoever waits for it or kills it sees no difference.
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    sys.exit(call(sys.argv[1:]))


def call(arguments: Sequence[str]) -> int:
    """Run one command; a failure is one line on standard error, never a traceback.

    Args:
      arguments: the command line without the program's name.

    Returns:
      The exit code: 0, 2 for a mistake of the person, 1 for any other failure.
    """
    problem = clash()
    if problem is not None and "doctor" not in arguments:
        return _complain(problem, FAILURE)
    try:
        result = app(list(arguments), prog_name="trsi", standalone_mode=False)
    except typer.Exit as stop:
        return int(stop.exit_code)
    except typer.TyperException as mistake:
        # Without arguments the help is already on the screen and there is nothing to add.
        return _complain(*explain(mistake)) if str(mistake) else USER_MISTAKE
    except (Exception, KeyboardInterrupt) as error:
        if wants_traceback():
            raise
        return _complain(*explain(error))
    return result if isinstance(result, int) else 0


def _complain(line: str, code: int) -> int:
    print(f"trsi: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
