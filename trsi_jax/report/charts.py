"""Charts as inline SVG whose colours are CSS variables, so that one chart reads in light and dark.

matplotlib draws in place-holder colours; they become `var(--name)` afterwards. Numbers in, a string
out: no files, no global state.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rollout.records import TIERS
from trsi_jax.evaluate.seeds import SeedsStage
from trsi_jax.stages.record import StageRecord

# Names of CSS variables in the template, and the light and dark values of a stand-alone file.
PALETTE = {
    "ink": ("#1c2128", "#e6edf3"),
    "muted": ("#656d76", "#8d96a0"),
    "grid": ("#d8dee4", "#30363d"),
    "surface": ("#ffffff", "#161b22"),
    "c1": ("#1f6feb", "#6cb0ff"),
    "c2": ("#c2570c", "#ffab70"),
    "c3": ("#1a7f4b", "#56d39a"),
    "c4": ("#8250df", "#c9a5ff"),
    "c5": ("#b3246b", "#ff9bce"),
    "c6": ("#0b7285", "#66d9e8"),
    "c7": ("#7a6a00", "#e3cc55"),
}
SERIES = ("c1", "c2", "c3", "c4", "c5", "c6", "c7")

_PLACE_HOLDER = {name: f"#0a0b{index + 16:02x}" for index, name in enumerate(PALETTE)}
_WIDTH = 7.6
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _PLACE_HOLDER["ink"],
    "axes.labelcolor": _PLACE_HOLDER["muted"],
    "axes.edgecolor": _PLACE_HOLDER["grid"],
    "axes.titlesize": 9,
    "axes.titlecolor": _PLACE_HOLDER["ink"],
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _PLACE_HOLDER["grid"],
    "grid.linewidth": 0.6,
    "xtick.color": _PLACE_HOLDER["grid"],
    "ytick.color": _PLACE_HOLDER["grid"],
    "xtick.labelcolor": _PLACE_HOLDER["muted"],
    "ytick.labelcolor": _PLACE_HOLDER["muted"],
    "legend.frameon": False,
    "legend.labelcolor": _PLACE_HOLDER["ink"],
}


def stage_curve(records: Sequence[StageRecord]) -> str:
    """Strict success with its 95 % interval, and progress, by stage."""
    rows = [record.row for record in records]
    x = range(len(rows))
    success = [100 * row.strict_success for row in rows]
    low = [100 * (row.strict_success - row.ci95[0]) for row in rows]
    high = [100 * (row.ci95[1] - row.strict_success) for row in rows]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        progress = [100 * row.progress for row in rows]
        axes.plot(x, progress, ":", color=_colour("muted"), lw=1.4, marker="o", ms=3)
        axes.plot(x, success, color=_colour("c1"), lw=2)
        axes.errorbar(
            x, success, [low, high], fmt="o", color=_colour("c1"), ms=6, capsize=4, elinewidth=1.3
        )
        for at, value in zip(x, success, strict=True):
            axes.annotate(
                f"{value:.1f}",
                (at, value),
                (9, -12),
                textcoords="offset points",
                fontsize=10,
                fontweight="bold",
                color=_colour("c1"),
            )
        last = len(rows) - 1
        for label, values, name in (("progress", progress, "muted"), ("strict", success, "c1")):
            axes.annotate(
                label, (last, values[-1]), (9, 2), textcoords="offset points", color=_colour(name)
            )
        axes.set_xticks(list(x), [row.name for row in rows], fontsize=10)
        axes.set_xlim(-0.3, last + 0.55)
        _percent_axis(axes)

    return _svg("stage-curve", (_WIDTH, 3.3), draw)


def tier_curves(records: Sequence[StageRecord]) -> str:
    """Strict success by stage, a panel a tier."""
    tiers = [t for t in TIERS if any(t in record.row.tiers for record in records)]
    names = [record.row.name for record in records]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(tiers), sharey=True, squeeze=False)[0]
        for index, (axes, tier) in enumerate(zip(panels, tiers, strict=True)):
            values = [100 * record.row.tiers.get(tier, float("nan")) for record in records]
            colour = _colour(SERIES[index])
            axes.plot(
                range(len(values)), values, color=colour, lw=2, marker="o", ms=4, clip_on=False
            )
            axes.annotate(
                f"{values[-1]:.0f}",
                (len(values) - 1, values[-1]),
                (0, 6),
                textcoords="offset points",
                ha="center",
                fontweight="bold",
                color=colour,
            )
            axes.set_title(tier)
            axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
            axes.set_xlim(-0.3, len(names) - 0.6)
            _percent_axis(axes)
            if index:
                axes.set_ylabel("")

    return _svg("tiers", (_WIDTH, 2.5), draw) if tiers else ""


def funnel(name: str, counts: Mapping[str, int]) -> str:
    """How many came through each step of the rewrite, and the share of the step before."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        steps, values = list(counts), list(counts.values())
        most = max(*values, 1)
        y = range(len(steps))
        axes.barh(y, values, height=0.62, color=_colour("c1"), alpha=0.85)
        for at, value in zip(y, values, strict=True):
            before = values[at - 1] if at else 0
            axes.text(value + most * 0.012, at, f"{value:,}", va="center", fontweight="bold")
            if before:
                kept = f"{100 * value / before:.0f} %"
                axes.text(value + most * 0.11, at, kept, va="center", color=_colour("muted"))
        axes.set_yticks(list(y), steps)
        axes.tick_params(axis="y", labelcolor=_colour("ink"), length=0)
        axes.invert_yaxis()
        axes.set_xlim(0, most * 1.2)
        axes.set_xticks([])
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)

    return _svg(f"funnel-{name}", (_WIDTH, 0.5 + 0.3 * len(counts)), draw)


def time_by_part(records: Sequence[StageRecord]) -> str:
    """Seconds of every stage, split by part."""
    parts = parts_by_time(records)
    shown = [*parts[: len(SERIES)]]
    rest = parts[len(SERIES) :]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        y = range(len(records))
        left = [0.0] * len(records)
        for index, part in enumerate([*shown, *(["other"] if rest else [])]):
            names = rest if part == "other" and rest else [part]
            widths = [sum(r.seconds_by_part.get(n, 0.0) for n in names) for r in records]
            colour = _colour(SERIES[index]) if index < len(SERIES) else _colour("muted")
            axes.barh(
                y,
                widths,
                left=left,
                height=0.62,
                color=colour,
                label=part,
                edgecolor=_colour("surface"),
                linewidth=1,
            )
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for at, total in zip(y, left, strict=True):
            axes.text(total + max(left) * 0.012, at, f"{total:.0f} s", va="center")
        axes.set_yticks(list(y), [record.row.name for record in records])
        axes.tick_params(axis="y", labelcolor=_colour("ink"), length=0)
        axes.invert_yaxis()
        axes.set_xlim(0, max(*left, 1e-9) * 1.12)
        axes.grid(visible=False)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.45, -0.02),
            ncols=4,
            handlelength=1,
            handleheight=1,
        )

    return _svg("time", (_WIDTH, 1.1 + 0.36 * len(records)), draw) if parts else ""


def parts_by_time(records: Sequence[StageRecord]) -> list[str]:
    """Names of the parts of all stages, the longest first."""
    total: dict[str, float] = {}
    for record in records:
        for part, seconds in record.seconds_by_part.items():
            total[part] = total.get(part, 0.0) + seconds
    return sorted(total, key=lambda part: (-total[part], part))


def training_curves(name: str, curves: Mapping[str, Sequence[float]]) -> str:
    """One small panel a curve, by iteration."""
    shown = {key: values for key, values in curves.items() if len(values) > 0}
    columns = 3
    rows = -(-len(shown) // columns)

    def draw(figure: Figure) -> None:
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, (key, values) in zip(panels, shown.items(), strict=False):
            x = range(1, len(values) + 1)
            single = "o" if len(values) < 3 else None
            axes.plot(x, values, color=_colour("c1"), lw=1.3, marker=single)
            axes.set_title(key, fontsize=8.5)
            axes.set_title(f"{values[-1]:.3g}", fontsize=8.5, loc="right", fontweight="bold")
            axes.tick_params(labelsize=7.5)
            axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(3))
        for axes in panels[len(shown) :]:
            axes.set_axis_off()

    return _svg(f"curves-{name}", (_WIDTH, 1.55 * rows), draw) if shown else ""


def seeds_curve(stages: Sequence[SeedsStage]) -> str:
    """Mean strict success over seeds with its interval and every seed, as a stand-alone file."""
    x = list(range(len(stages)))
    mean = [100 * stage.strict_success.mean for stage in stages]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for seed in stages[0].by_seed:
            values = [100 * stage.by_seed[seed] for stage in stages]
            axes.plot(x, values, color=_colour("muted"), lw=0.9, alpha=0.7, marker="o", ms=2.5)
        if stages[0].strict_success.n > 1:
            low = [100 * max(0.0, stage.strict_success.lo) for stage in stages]
            high = [100 * min(1.0, stage.strict_success.hi) for stage in stages]
            axes.fill_between(x, low, high, color=_colour("c1"), alpha=0.18, lw=0)
        axes.plot(x, mean, color=_colour("c1"), lw=2.2, marker="o", ms=5)
        for at, value, stage in zip(x, mean, stages, strict=True):
            # Above the highest seed, clear of the lines.
            top = 100 * max(stage.by_seed.values())
            axes.annotate(
                f"{value:.1f}",
                (at, top),
                (0, 8),
                textcoords="offset points",
                ha="center",
                fontweight="bold",
                color=_colour("c1"),
            )
        axes.set_xticks(x, [stage.name for stage in stages], fontsize=10)
        axes.set_xlim(-0.3, len(x) - 0.7)
        _percent_axis(axes)

    chart = _svg("seeds", (_WIDTH, 3.3), draw)
    return chart.replace(">", f"><style>{stand_alone_css()}</style>", 1)


def stand_alone_css() -> str:
    """The palette as CSS variables, light by default and dark where the reader prefers it."""
    light, dark = (
        ";".join(f"--{name}:{pair[scheme]}" for name, pair in PALETTE.items()) for scheme in (0, 1)
    )
    return (
        f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        "text{font-family:system-ui,sans-serif!important}"
    )


def _percent_axis(axes: Any) -> None:
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
    axes.tick_params(length=0)


def _colour(name: str) -> str:
    return _PLACE_HOLDER[name]


def _svg(name: str, size: tuple[float, float], draw: Any) -> str:
    # A salt of its own keeps ids unique within the page and equal from run to run.
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        out = io.StringIO()
        empty = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(out, format="svg", transparent=True, metadata=empty)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s(id|xlink:href|clip-path)="(#|url\(#)?', rf' \1="\2{name}-', text)
    for key, place_holder in _PLACE_HOLDER.items():
        text = text.replace(place_holder, f"var(--{key})")
    return text.replace("<svg ", f'<svg class="chart" role="img" aria-label="{name}" ', 1)


def reward_spread(success: Any, by_reward: Mapping[str, Any]) -> str:
    """What failures and successes get under each reward, as a stand-alone file.

    Args:
      success: [N] bool.
      by_reward: name -> [N] float.
    """
    highest = max(1.0, *(float(reward.max()) for reward in by_reward.values()))
    edges = [highest * i / 24 for i in range(25)]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(by_reward), sharey=True, squeeze=False)[0]
        for axes, (name, reward) in zip(panels, by_reward.items(), strict=True):
            axes.hist(
                [reward[~success], reward[success]],
                edges,
                stacked=True,
                color=[_colour("c2"), _colour("c1")],
                label=["failed", "strict success"],
            )
            axes.axvline(1.0, color=_colour("muted"), lw=1, ls=":")
            axes.set_title(name)
            axes.set_xlabel("reward")
        panels[0].set_ylabel("trajectories")
        panels[-1].legend(loc="upper right")

    chart = _svg("reward-spread", (_WIDTH, 2.8), draw)
    return chart.replace(">", f"><style>{stand_alone_css()}</style>", 1)


def reward_by_group(by_group: Mapping[str, Mapping[str, float]]) -> str:
    """Mean reward of every group under each reward, as a stand-alone file.

    Args:
      by_group: group -> reward's name -> mean.
    """
    groups = list(by_group)
    names = list(by_group[groups[0]])

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        y = range(len(groups))
        for index, name in enumerate(names):
            axes.plot(
                [by_group[group][name] for group in groups],
                y,
                "o",
                ms=4.5,
                color=_colour(SERIES[index]),
                label=name,
            )
        axes.set_yticks(list(y), groups)
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel("mean reward")
        axes.grid(axis="x")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(names))

    chart = _svg("reward-by-group", (_WIDTH, 0.9 + 0.2 * len(groups)), draw)
    return chart.replace(">", f"><style>{stand_alone_css()}</style>", 1)
