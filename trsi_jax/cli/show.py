"""`trsi show RUN [ID]`: read one trajectory of a run, or list them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from rollout.records import Trajectory
    from rollout.store.reader import SegmentReader
    from trsi_jax.report.trajectory import TokenText

_DEFAULT_LIMIT = 20
_SUGGESTIONS = 3
# Into a pipe or a file a line is as long as it must be.
_PIPE_WIDTH = 240


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    trajectory_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A trajectory; without one, a list.")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="List only this stage.")] = None,
    harness: Annotated[str | None, typer.Option(help="List only this harness.")] = None,
    success: Annotated[
        bool | None,
        typer.Option("--success/--failure", help="List only strict successes, or only failures."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="List at most so many.")] = _DEFAULT_LIMIT,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the trajectory as one HTML page.")
    ] = None,
) -> None:
    """Print one trajectory readably: turns, commands, output, checks, reward, value by token."""
    from rich.console import Console

    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen = Console(highlight=False, width=_PIPE_WIDTH)
    show_run(
        run,
        trajectory_id,
        stage=stage,
        harness=harness,
        success=success,
        limit=limit,
        console=screen,
        html=html,
    )


def show_run(
    run: Path,
    trajectory_id: str | None,
    *,
    console: Console,
    stage: str | None = None,
    harness: str | None = None,
    success: bool | None = None,
    limit: int = _DEFAULT_LIMIT,
    html: Path | None = None,
) -> None:
    """Print one trajectory of a run, or list those that match.

    Args:
      run: folder of a run, whose trajectories lie in its folder "store".
      trajectory_id: which one; None lists.
      console: where to print.
      stage: list only this stage.
      harness: list only this harness.
      success: list only strict successes (true) or failures (false); faults are neither.
      limit: list at most so many.
      html: write the trajectory there as one page, instead of printing it.

    Raises:
      UserError: for a folder without trajectories, an unknown id, stage or harness.
    """
    from rollout.store.reader import SegmentReader

    if not run.is_dir():
        raise UserError(f"no run at {run}; RUN is the folder that `trsi run` names at its end")
    reader = SegmentReader(run / "store")
    if reader.version is None:
        raise UserError(f"run {run} has stored no trajectory yet (no store at {run / 'store'})")
    reader = reader.pinned()
    if trajectory_id is None and html is not None:
        raise UserError(f"--html shows one trajectory: name its id (`trsi show {run}` lists them)")
    if trajectory_id is None:
        _list(reader, run, console, stage=stage, harness=harness, success=success, limit=limit)
    else:
        _print_one(reader, run, trajectory_id, console, html)


def _print_one(
    reader: SegmentReader, run: Path, trajectory_id: str, console: Console, html: Path | None
) -> None:
    from trsi_jax.report.trajectory import trajectory_view

    if reader.find(trajectory_id) is None:
        ids = reader.ids()
        near = [i for i in ids if trajectory_id in i] or list(ids)
        known = ", ".join(near[:_SUGGESTIONS]) + (", ..." if len(near) > _SUGGESTIONS else "")
        raise UserError(
            f"run {run} has no trajectory {trajectory_id!r}; it has {known or 'none'}"
            f" (`trsi show {run}` lists them)"
        )
    trajectory = reader.get(trajectory_id)
    text = token_text(run)
    asked = instruction(trajectory, text)
    columns = reader.get_columns(trajectory_id)
    if html is None:
        console.print(trajectory_view(trajectory, columns, instruction=asked, token_text=text))
        return
    from trsi_jax.report.viewer import render

    html.parent.mkdir(parents=True, exist_ok=True)
    html.write_text(render(trajectory, columns, instruction=asked, token_text=text))
    console.print(f"trajectory   {html}", markup=False, soft_wrap=True)


def _list(
    reader: SegmentReader,
    run: Path,
    console: Console,
    *,
    stage: str | None,
    harness: str | None,
    success: bool | None,
    limit: int,
) -> None:
    from trsi_jax.report.trajectory import trajectory_table

    found: list[Trajectory] = []
    more = False
    stages: set[str] = set()
    harnesses: set[str] = set()
    for trajectory in reader:
        stages.add(trajectory.stage)
        harnesses.add(trajectory.harness)
        if stage not in (None, trajectory.stage) or harness not in (None, trajectory.harness):
            continue
        verdict = trajectory.verdict
        if success is not None and (verdict is None or verdict.strict_success != success):
            continue
        if len(found) == limit:
            more = True
            break
        found.append(trajectory)
    if not found:
        for name, asked, known in (("stage", stage, stages), ("harness", harness, harnesses)):
            if asked is not None and asked not in known:
                raise UserError(
                    f"run {run} has no {name} {asked!r}; it has "
                    f"{', '.join(sorted(known)) or 'no trajectory'}"
                )
        console.print("no trajectory matches")
        return
    console.print(trajectory_table((t, reader.get_columns(t.id)) for t in found))
    if more:
        console.print(f"the first {limit} of more; --limit shows others", markup=False)


def instruction(trajectory: Trajectory, text: TokenText | None) -> str | None:
    """What the agent was asked: recorded, or else the tokens before the first that it sampled."""
    if "instruction" in trajectory.provenance:
        return trajectory.provenance["instruction"]
    if text is None:
        return None
    start = int(trajectory.acted_t.argmax()) if trajectory.acted_t.any() else None
    return "".join(text(int(i)) for i in trajectory.token_ids[:start])


def token_text(run: Path) -> TokenText | None:
    """Text of a token by the run's tokenizer; None where the run has none."""
    path = run / "tokenizer" / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))
