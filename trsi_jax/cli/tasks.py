"""`trsi tasks make|check`: generate tasks as Harbor directories, and try any such directory."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from rollout.records import Task
    from rollout.tasks.harbor.gates import Checked
    from trsi_jax.stages.observer import Part

_LISTED = 40
_BAD_EXIT = 1

app = typer.Typer(
    help="Make tasks, and check that they can be solved and don't pass by themselves.",
    no_args_is_help=True,
)


@app.command("make")
def make(
    seed: Annotated[int, typer.Option(min=0, help="Decides every task.")],
    out: Annotated[Path, typer.Option(help="A new directory.")],
    suite: Annotated[
        str | None, typer.Option(help="An evaluation suite in place of the pool: open, steep, ...")
    ] = None,
) -> None:
    """Generate the 3,000 tasks of the pool, or a suite, as Harbor task directories."""
    from rollout.tasks.catalog.generate import FAMILIES, generate
    from rollout.tasks.catalog.suites import generate_suite
    from rollout.tasks.harbor.write import write_dataset
    from trsi_jax.cli.console import ConsoleObserver, console

    screen = console()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: is not an empty directory; give a new one")
    tasks = generate(seed) if suite is None else generate_suite(suite, seed)
    name = f"trsi/{suite or 'pool'}-{seed}"
    with ConsoleObserver(screen).part("write", len(tasks)) as part:
        write_dataset(
            out,
            name,
            tasks,
            {f.name: f.form for f in FAMILIES.values()},
            suite=suite or "",
            progress=lambda: part.advance(1),
        )
    screen.print(_summary(tasks))
    screen.print(f"wrote {len(tasks)} tasks to {out}", markup=False, soft_wrap=True)


@app.command("check")
def check(
    dataset: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A task, a directory of tasks, a dataset.toml or a registry.json."
        ),
    ],
    repeats: Annotated[int, typer.Option(min=1, help="Attempts of each kind a task.")] = 1,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Tasks at a time [default: twice the cores].")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Only so many tasks of each family.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Which ones --sample takes.")] = 0,
    name: Annotated[
        str | None, typer.Option(help="In a registry: which dataset, as NAME or NAME@VERSION.")
    ] = None,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Run tasks that don't say so without a network, too."),
    ] = False,
    backend: Annotated[
        str, typer.Option(help="auto: an image of a task runs in Docker, the rest in bubblewrap.")
    ] = "auto",
    build_network: Annotated[
        bool, typer.Option("--build-network", help="Let the commands of a Dockerfile fetch.")
    ] = False,
    pass_env: Annotated[
        list[str] | None, typer.Option(help="A variable that tasks may take from this machine.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write what was found there as JSON.")] = None,
) -> None:
    """Try every task in real sandboxes: its solution must pass, doing nothing must not."""
    from rollout.sandbox import make_backend
    from rollout.tasks.harbor import gates
    from rollout.tasks.harbor.dataset import open_dataset
    from trsi_jax.cli.console import ConsoleObserver, console

    screen = console()
    found = open_dataset(dataset, name)
    roots = list(found.roots)
    if sample is not None:
        roots = gates.sample(roots, sample, seed)
    host_env = {key: os.environ[key] for key in pass_env or [] if key in os.environ}
    at_once = jobs or 2 * (os.cpu_count() or 1)
    bad = 0
    sandboxes = make_backend(backend)

    async def run(part: Part) -> list[Checked]:
        def progress(checked: Checked) -> None:
            nonlocal bad
            bad += checked.state != "ok"
            part.advance(1, not_ok=bad)

        try:
            return await gates.check_all(
                roots,
                sandboxes,
                jobs=at_once,
                repeats=repeats,
                offline=offline,
                host_env=host_env,
                build_network="default" if build_network else "none",
                progress=progress,
            )
        finally:
            await sandboxes.aclose()

    with ConsoleObserver(screen).part("check", len(roots)) as part:
        checked = asyncio.run(run(part))
    _report(screen, found.notes, checked)
    if out is not None:
        _write(out, checked)
        screen.print(f"wrote {out}", markup=False, soft_wrap=True)
    if bad:
        raise typer.Exit(_BAD_EXIT)


def _summary(tasks: Sequence[Task]) -> Table:
    """Number of tasks by tier and split."""
    from rich.table import Table

    from rollout.records import SPLITS, TIERS

    table = Table("tier", *SPLITS, "all", box=None, pad_edge=False)
    for tier in TIERS:
        of_tier = [t for t in tasks if t.tier == tier]
        counts = [str(sum(t.split == s for t in of_tier)) for s in SPLITS]
        table.add_row(tier, *counts, str(len(of_tier)))
    return table


def _report(screen: Console, notes: Sequence[str], checked: Sequence[Checked]) -> None:
    from collections import Counter

    from rollout.tasks.harbor.gates import MEANING

    bad = [c for c in checked if c.state != "ok"]
    for one in bad[:_LISTED]:
        screen.print(f"{one.state:<12} {one.root}: {one.reason}", markup=False, soft_wrap=True)
    if len(bad) > _LISTED:
        screen.print(f"... and {len(bad) - _LISTED} more; --out FILE has all of them")
    paying = [c for c in checked if c.state == "ok" and c.untouched]
    for one in paying[:_LISTED]:
        screen.print(
            f"note         {one.root}: doing nothing gives {one.untouched:g}",
            markup=False,
            soft_wrap=True,
        )
    unknown = Counter(key for c in checked for key in c.unknown_keys)
    for key, n in sorted(unknown.items()):
        screen.print(f"note         unknown key {key} in {n} task.toml: no effect", markup=False)
    for note in notes:
        screen.print(f"note         {note}", markup=False)
    counts = Counter(c.state for c in checked)
    for state, meaning in MEANING.items():
        if counts[state]:
            screen.print(f"{counts[state]:>6} {state:<12} {meaning}", markup=False)


def _write(path: Path, checked: Sequence[Checked]) -> None:
    import json
    from dataclasses import asdict

    rows = [asdict(c) | {"root": str(c.root)} for c in checked]
    path.write_text(json.dumps(rows, indent=1) + "\n")
