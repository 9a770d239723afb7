"""A result as sections of text, tables and plots, written as HTML, Markdown and PNG.

The terminal, the page and the documentation then show the same figures.
"""

from __future__ import annotations

import base64
import importlib.resources
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import matplotlib as mpl
from matplotlib.figure import Figure

from trsi_jax.stages.record import write_text

TEMPLATE = "page.html.j2"

COLOURS = ("#1f6feb", "#c2570c", "#1a7f4b", "#8250df", "#b3246b", "#0b7285", "#7a6a00")
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d8dee4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


@dataclass(frozen=True)
class Table:
    """A head and rows of cells; the first column is of names, the others are numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """One part of a page.

    Attributes:
      title: its heading; "" continues the section before.
      text: a paragraph, may be empty.
      table: or None.
      figures: names in `Page.figures` that stand here.
    """

    title: str
    text: str = ""
    table: Table | None = None
    figures: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """A whole result.

    Attributes:
      figures: name -> PNG.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    figures: Mapping[str, bytes] = field(default_factory=dict)


def png(figure: Figure) -> bytes:
    """The figure as PNG; the same figure gives the same bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
    return out.getvalue()


def new_figure(width: float = 8.0, height: float = 3.2) -> Figure:
    """An empty figure in the page's style; draw inside `style()`."""
    return Figure(figsize=(width, height), layout="constrained")


@contextmanager
def style() -> Iterator[None]:
    """Context in which figures are drawn."""
    with mpl.rc_context(_STYLE):
        yield


def html(page: Page) -> str:
    """The page as one self-contained document."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = importlib.resources.files(__package__).joinpath("templates", TEMPLATE).read_text()
    figures = {name: base64.b64encode(data).decode() for name, data in page.figures.items()}
    return environment.from_string(source).render(page=page, figures=figures)


def markdown(page: Page) -> str:
    """The page as Markdown that refers to the plots beside it."""
    lines = [f"# {page.title}", "", page.lead, ""]
    for section in page.sections:
        if section.title:
            lines += [f"## {section.title}", ""]
        if section.text:
            lines += [section.text, ""]
        if section.table is not None:
            head, *rest = section.table.head
            lines.append(f"| {' | '.join([head, *rest])} |")
            lines.append("| --- |" + " ---: |" * len(rest))
            lines += [f"| {' | '.join(row)} |" for row in section.table.rows]
            lines.append("")
        lines += [f"![{name}]({name}.png)\n" for name in section.figures]
    return "\n".join(lines).rstrip() + "\n"


def write(folder: Path, name: str, page: Page, content: str) -> list[Path]:
    """Write `<name>.json`, `.html`, `.md` and a PNG a plot; returns their paths.

    Args:
      folder: made if missing.
      name: of the files.
      page: for people.
      content: the JSON, for programs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"json": content, "html": html(page), "md": markdown(page)}
    paths = []
    for suffix, text in texts.items():
        paths.append(folder / f"{name}.{suffix}")
        write_text(paths[-1], text)
    for figure, data in page.figures.items():
        paths.append(folder / f"{figure}.png")
        paths[-1].write_bytes(data)
    return paths
