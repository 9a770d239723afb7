"""`trsi store stat|verify|compact|export`: look after a trajectory store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout.errors import StoreError, UserError

if TYPE_CHECKING:
    from rollout.store.inspect import Statistics

app = typer.Typer(
    help="Look after a trajectory store: count, verify, compact, export.", no_args_is_help=True
)

_SHOWN = 20

Store = Annotated[
    str,
    typer.Argument(
        metavar="STORE", help="The folder of a run or of a store, or a URL (gs://, s3://, ...)."
    ),
]


@app.command()
def stat(store: Store) -> None:
    """Count what a store holds, and list what its door refused."""
    from rollout.store.inspect import statistics

    _print_statistics(statistics(location(store)))


@app.command()
def verify(
    store: Store,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Number of token ids; any by default.")
    ] = None,
) -> None:
    """Read everything and hold it to the contract, its checksums and its digests."""
    from rollout.store.inspect import verify as problems_of

    place = location(store)
    with _bar("verifying") as progress:
        problems = list(problems_of(place, vocab_size=vocab_size, progress=progress))
    for problem in problems:
        typer.echo(f"{problem.segment or place}: {problem.text}")
    if problems:
        raise StoreError(f"{len(problems)} problem{'s' * (len(problems) > 1)} in {place}")
    typer.echo("no problem found")


@app.command()
def compact(store: Store) -> None:
    """Move segments into sealed zarr3 shards and give space back; others may go on writing."""
    from rollout.store.compact import compact as run

    place = location(store)
    with _bar("compacting") as progress:
        report = run(place, progress=progress)
    line = f"sealed {report.segments} segments and {report.columns} columns"
    if report.bytes_before is not None and report.bytes_after is not None:
        line += f", {_size(report.bytes_before)} before, {_size(report.bytes_after)} after"
    typer.echo(line)


@app.command()
def export(
    store: Store,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder to write into.")],
    form: Annotated[str, typer.Option("--format", help="atif or parquet.")] = "atif",
    segment: Annotated[str, typer.Option(help="Export only segments whose names begin so.")] = "",
) -> None:
    """Write trajectories for other programs: ATIF documents, or Parquet files."""
    import importlib.metadata

    from rollout.store.export import FORMATS, export_atif, export_parquet
    from rollout.store.reader import SegmentReader
    from trsi_jax.cli.show import instruction, token_text

    if form not in FORMATS:
        raise UserError(f"--format {form!r}: allowed are {', '.join(FORMATS)}")
    reader = SegmentReader(location(store)).pinned()

    def chosen(name: str) -> bool:
        return name.startswith(segment)

    if form == "parquet":
        count = sum(1 for _ in export_parquet(reader, out, chosen=chosen))
    else:
        text = token_text(Path(store))
        documents = export_atif(
            reader,
            out,
            session=Path(store).name,
            version=importlib.metadata.version("trsi-jax"),
            instruction=lambda t: instruction(t, text),
            chosen=chosen,
        )
        count = sum(1 for _ in documents)
    typer.echo(f"{count} files in {out}")


def location(store: str) -> str:
    """The store that a person means: a URL, the folder of a run, or the store's own.

    Raises:
      UserError: for a folder that is not there.
    """
    if "://" in store:
        return store
    folder = Path(store)
    if not folder.is_dir():
        raise UserError(f"no store at {store}; STORE is a folder of a run or of a store, or a URL")
    return str(folder / "store") if (folder / "store").is_dir() else store


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, whole: progress.update(task, completed=done, total=whole)


def _print_statistics(found: Statistics) -> None:
    lines = [
        f"version       {found.version}",
        f"segments      {found.segments}, {found.sealed} of them sealed",
        f"trajectories  {found.trajectories}",
        f"tokens        {found.tokens}",
    ]
    size = f"{_size(found.raw_bytes)} without compression"
    if found.stored_bytes is not None:
        size += f", {_size(found.stored_bytes)} on disk"
        if found.raw_bytes:
            size += f" ({found.stored_bytes / found.raw_bytes:.2f} times)"
    lines.append(f"size          {size}")
    columns = ", ".join(f"{name} ({count})" for name, count in found.columns.items())
    lines.append(f"columns       {columns or 'none'}")
    for name, (segments, trajectories, tokens) in found.groups.items():
        lines.append(
            f"  {name:<12}{segments} segments, {trajectories} trajectories, {tokens} tokens"
        )
    lines.append(f"quarantined   {len(found.quarantined)}")
    for kept in found.quarantined[:_SHOWN]:
        lines.append(f"  {_shown(kept.id)} ({kept.segment}): {_shown(kept.problem)}")
    if len(found.quarantined) > _SHOWN:
        lines.append(f"  and {len(found.quarantined) - _SHOWN} more")
    typer.echo("\n".join(lines))


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
