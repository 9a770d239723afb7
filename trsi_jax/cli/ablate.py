"""`trsi ablate`: advantage estimators against each other, in three tiers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout.errors import RolloutError, UserError
from trsi_jax.cli import configs, seeds
from trsi_jax.cli.run import OverrideOption

if TYPE_CHECKING:
    from rich.console import Console

    from trsi_jax.lab.stored import Episode
    from trsi_jax.report.page import Page

app = typer.Typer()

OutOption = Annotated[
    Path | None, typer.Option(help="For the table, page, JSON and plots [default: in runs].")
]
SeedsOption = Annotated[
    str, typer.Option("--seeds", metavar="A..B", help="Both ends included; or a list: 0,3,7.")
]


class RuleBroken(RolloutError):
    """A pass rule of the study was not kept."""

    kind = "ablate"


@app.callback(invoke_without_command=True)
def simulator(
    context: typer.Context,
    task: Annotated[
        list[str] | None, typer.Option(help="Only this task; may be repeated [default: all].")
    ] = None,
    chosen: SeedsOption = "0..4",
    batches: Annotated[int, typer.Option(min=2, help="Gradient estimates a seed.")] = 64,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Tasks side by side [default: one a core].")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Fail if a pass rule is not kept.")
    ] = False,
    out: OutOption = None,
) -> None:
    """Compare advantage estimators: in the simulator, on a run's trajectories, or by training.

    Without a command: the simulator, some minutes on two cores.
    """
    if context.invoked_subcommand is not None:
        return
    numbers = seeds.parse(chosen)
    from trsi_jax.cli.console import ConsoleObserver, console
    from trsi_jax.lab import suite
    from trsi_jax.lab.arms import STANDARD
    from trsi_jax.report import ablations

    known = {t.name: t for t in suite.TASKS}
    for name in task or ():
        if name not in known:
            raise UserError(f"--task {name}: must be one of {', '.join(known)}")
    tasks = [known[name] for name in dict.fromkeys(task)] if task else list(suite.TASKS)
    gammas = (0.99, 1.0)
    screen = console()
    cells = len(gammas) * sum(len(t.of(STANDARD)) for t in tasks)
    with ConsoleObserver(screen).part("simulator", cells) as bar:
        study = suite.run(
            tasks,
            seeds=numbers,
            gammas=gammas,
            batches=batches,
            jobs=jobs or len(os.sched_getaffinity(0)),
            advance=lambda name: bar.advance(1),
        )
    folder = configs.RUNS / "ablate-simulator" if out is None else out
    _finish(
        screen,
        folder,
        "simulator",
        ablations.simulator_page(study),
        ablations.simulator_json(study),
    )
    broken = [v for v in study.verdicts if not v.passed]
    if check and broken:
        raise RuleBroken(f"{broken[0].task}: not kept: {broken[0].rule} ({broken[0].measured})")


@app.command("stored")
def stored(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run with a finished RPR stage.")
    ],
    stage: Annotated[
        str | None, typer.Option(help="Trajectories of this stage [default: the first RPR stage].")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=2, help="At most so many, whole groups, drawn by the seed.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw.")] = 0,
    gamma: Annotated[float, typer.Option(min=0.0, max=1.0, help="Discount.")] = 0.99,
    lam: Annotated[float, typer.Option(min=0.0, max=1.0, help="Mixing parameter.")] = 0.95,
    factor: Annotated[
        list[float] | None,
        typer.Option(min=0.0, help="Length of logs to try, as a multiple; may be repeated."),
    ] = None,
    out: OutOption = None,
) -> None:
    """Put every estimator on the same stored trajectories, rewards and critic's values."""
    from trsi_jax.cli.console import ConsoleObserver, console
    from trsi_jax.lab.stored import compare
    from trsi_jax.report import ablations

    factors = tuple(dict.fromkeys(factor or (0.0, 0.25, 4.0)))
    screen = console()
    episodes, name = _episodes(run, stage, limit, seed)
    with ConsoleObserver(screen).part("stored", len(episodes) * (1 + len(factors))) as bar:
        try:
            result = compare(episodes, gamma=gamma, lam=lam, factors=factors, advance=bar.advance)
        except ValueError as error:
            raise UserError(f"{run}: {error}") from None
    folder = run / "ablate-stored" if out is None else out
    _finish(
        screen,
        folder,
        "stored",
        ablations.stored_page(result, name),
        ablations.stored_json(result, name),
    )


def _episodes(run: Path, stage: str | None, limit: int, seed: int) -> tuple[list[Episode], str]:
    """Stored trajectories with the reward and the values that training saw."""
    from rollout.store.reader import SegmentReader
    from trsi_jax import prng
    from trsi_jax.lab.stored import Episode, drawn

    folder = run / "store" if (run / "store").is_dir() else run
    reader = SegmentReader(folder)
    if not folder.is_dir() or reader.version is None:
        raise UserError(f"no trajectory store at {folder}; RUN is a run's folder or its store")
    reader = reader.pinned()
    usable: dict[str, list[str]] = {}
    for segment in reader.segments():
        if {"reward_t", "value_t"} <= set(reader.columns(segment)):
            usable.setdefault(segment.partition("/")[0], []).append(segment)
    if not usable:
        raise UserError(f"{folder}: no trajectory has values yet; an RPR stage writes them")
    name = next(iter(usable)) if stage is None else stage
    if name not in usable:
        raise UserError(f"--stage {name}: {folder} has values of {', '.join(usable)}")
    episodes = []
    for segment in usable[name]:
        arrays = (reader.read_columns(segment, column) for column in ("reward_t", "value_t"))
        for t, reward_t, value_t in zip(reader.read(segment), *arrays, strict=True):
            if t.verdict is None:
                continue
            collected = segment.rpartition(".")[0]
            task = f"{collected}/{t.task_id}"
            good = t.verdict.strict_success
            episodes.append(
                Episode(t.id, task, reward_t, value_t, t.acted_t, t.turn_t, good, collected)
            )
    return drawn(episodes, limit, prng.generator(seed, "ablate", "stored")), name


@app.command("online")
def online(
    ablation: Annotated[
        Path, typer.Argument(metavar="FILE", help="Such as configs/ablations/estimators.toml.")
    ],
    override: OverrideOption = None,
    chosen: SeedsOption = "0..2",
    out: OutOption = None,
) -> None:
    """Train the arms of a file from the same start and compare them on held-out tasks.

    The same command goes on where it was stopped.
    """
    numbers = seeds.parse(chosen)
    from trsi_jax.cli.console import ConsoleObserver, console
    from trsi_jax.lab import online as trained
    from trsi_jax.report import ablations

    plan = trained.load(configs.find(ablation), override or [])
    screen = console()
    folder = configs.RUNS / f"ablate-{plan.ablation.name}" if out is None else out
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder}: is a file; give a folder")
    result = trained.run(plan, numbers, folder, ConsoleObserver(screen))
    _finish(
        screen,
        folder,
        plan.ablation.name,
        ablations.online_page(result),
        ablations.online_json(result),
    )


def _finish(screen: Console, folder: Path, name: str, page: Page, content: str) -> None:
    """Write a result and print its tables."""
    from rich.table import Table

    from trsi_jax.report.page import write

    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder}: is a file; give a folder")
    paths = write(folder, name, page, content)
    screen.print(page.lead, markup=False)
    for section in page.sections:
        if section.title:
            screen.print(f"\n{section.title}", style="bold", markup=False)
        if section.text:
            screen.print(section.text, markup=False)
        if section.table is not None:
            table = Table(box=None, pad_edge=False)
            for i, head in enumerate(section.table.head):
                table.add_column(head, justify="right" if i else "left")
            for row in section.table.rows:
                table.add_row(*row)
            screen.print(table, soft_wrap=True)
    for path in paths:
        screen.print(f"wrote {path}", markup=False, soft_wrap=True)
