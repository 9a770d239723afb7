"""The pages of `trsi ablate`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from trsi_jax.evaluate.stats import student_mean
from trsi_jax.lab.online import ArmResult, Result
from trsi_jax.lab.stored import TURN_BINS, Comparison
from trsi_jax.lab.suite import Cell, Study, Task
from trsi_jax.report import page
from trsi_jax.report.page import COLOURS, Page, Section, Table

# --- simulator --------------------------------------------------------------------------------


def simulator_page(study: Study) -> Page:
    """Pass rules, then each task's races and gradient table at every gamma."""
    passed = sum(v.passed for v in study.verdicts)
    lead = (
        f"Exact success and exact gradients of a simulated multi-turn token process; lambda"
        f" {study.lam:g}, {len(study.seeds)} seeds ({', '.join(map(str, study.seeds))}), the same"
        f" keys for every estimator. {passed} of {len(study.verdicts)} pass rules kept."
    )
    rows = [(v.task, v.rule, v.measured, "kept" if v.passed else "BROKEN") for v in study.verdicts]
    sections = [
        Section("Pass rules", table=Table(("task", "rule", "measured", "verdict"), rows)),
    ]
    figures = {}
    for task in study.tasks:
        cells = [c for c in study.cells if c.task == task.name]
        drawn: tuple[str, ...] = ()
        if task.race:
            figures[task.name] = _curves(task, cells, study.gammas)
            drawn = (task.name,)
            races = _side_by_side(cells, study.gammas, _RACE)
            sections.append(Section(task.name, task.question, races, drawn))
        gradients = _side_by_side(cells, study.gammas, _GRADIENT)
        title = "" if task.race else task.name
        text = "The gradient at the initial policy." if task.race else task.question
        sections.append(Section(title, text, gradients))
    return Page("Advantage estimators in the simulator", lead, sections, figures)


def simulator_json(study: Study) -> str:
    """Everything measured, for programs."""
    content: Any = dataclasses.asdict(study)
    return json.dumps(_finite(content), indent=1, allow_nan=False) + "\n"


_STYLES = ("-", "--", ":")
"""Of lines, one after the other when the colours are used up."""

Column = tuple[str, Callable[[Cell], str]]

_RACE: tuple[Column, ...] = (
    ("success", lambda c: f"{sum(c.final) / len(c.final):.3f}±{_standard_error(c.final):.3f}"),
    ("mean", lambda c: f"{sum(c.mean) / len(c.mean):.3f}"),
    ("EV", lambda c: f"{c.explained_variance:.2f}" if c.explained_variance is not None else "-"),
)
_GRADIENT: tuple[Column, ...] = (
    ("cosE", lambda c: f"{c.gradient.cos_expected:.2f}"),
    ("cosB", lambda c: f"{c.gradient.cos_batch:.2f}"),
    ("SNR", lambda c: f"{c.gradient.snr:.3f}"),
    ("early", lambda c: f"{c.gradient.early:.2f}"),
    ("wrong", lambda c: f"{c.gradient.wrong:.2f}"),
)


def _side_by_side(
    cells: Sequence[Cell], gammas: Sequence[float], columns: Sequence[Column]
) -> Table:
    """A row an arm, the columns once for every gamma."""
    head = ["estimator", *(f"{name} {gamma:g}" for gamma in gammas for name, _ in columns)]
    of = {(c.arm, c.gamma): c for c in cells}
    arms = list(dict.fromkeys(c.arm for c in cells))
    rows = [
        [arm, *(show(of[arm, gamma]) for gamma in gammas for _, show in columns)] for arm in arms
    ]
    return Table(head, rows)


def _standard_error(values: Sequence[float]) -> float:
    n = len(values)
    if n < 2:
        return math.nan
    mean = sum(values) / n
    return math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1) / n)


def _curves(task: Task, cells: Sequence[Cell], gammas: Sequence[float]) -> bytes:
    arms = list(dict.fromkeys(c.arm for c in cells))
    with page.style():
        figure = page.new_figure(9.0, 3.6)
        panels = figure.subplots(1, len(gammas), sharey=True, squeeze=False)[0]
        for axes, gamma in zip(panels, gammas, strict=True):
            for cell in cells:
                if cell.gamma != gamma:
                    continue
                index = arms.index(cell.arm)
                axes.plot(
                    cell.curve,
                    color=COLOURS[index % len(COLOURS)],
                    ls=_STYLES[index // len(COLOURS)],
                    lw=1.4,
                    label=cell.arm,
                )
            axes.set_title(f"{task.name}, gamma {gamma:g}", loc="left")
            axes.set_xlabel("update")
            axes.set_ylim(0, 1)
        panels[0].set_ylabel("exact success")
        panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
        return page.png(figure)


# --- stored trajectories ----------------------------------------------------------------------


def stored_page(result: Comparison, stage: str) -> Page:
    """One table of the advantages, one of what the length of logs does to them, and two plots."""
    lead = (
        f"{result.episodes} trajectories of {stage} ({result.tokens} action tokens, success"
        f" {100 * result.success:.1f} %, {result.log_tokens:.1f} log tokens between turns), the"
        f" same rewards and critic's values under every estimator; gamma {result.gamma:g}, lambda"
        f" {result.lam:g}, before whitening. Signs and ranks are compared with TB."
    )
    head = ("estimator", "mean", "spread", "sign = TB", "rank TB", "var / MC", "return held")
    rows = [
        (
            row.arm,
            f"{row.mean:+.4f}",
            f"{row.spread:.4f}",
            f"{row.sign_agreement:.3f}",
            f"{row.rank:.3f}",
            f"{row.variance_ratio:.3f}",
            f"{row.return_explained:.3f}",
        )
        for row in result.rows
    ]
    lengths = ["estimator"]
    for factor in result.factors:
        lengths += [f"change x{factor:g}", f"sign x{factor:g}", f"rank x{factor:g}"]
    moved = []
    for row in result.rows:
        cells = [row.arm]
        for s in row.sensitivity:
            cells += [f"{s.change:.4f}", f"{s.flipped:.4f}", f"{s.rank:.4f}"]
        moved.append(cells)
    sections = [
        Section("Advantages", " ".join(result.notes), Table(head, rows), ("rank", "credit")),
        Section(
            "Length of logs",
            "The same actions, values and rewards with logs so many times as long: relative change"
            " of the advantages, share that change sign, rank correlation with the stored length.",
            Table(lengths, moved),
        ),
    ]
    figures = {"rank": _rank_figure(result), "credit": _credit_figure(result)}
    return Page("Advantage estimators on stored trajectories", lead, sections, figures)


def stored_json(result: Comparison, stage: str) -> str:
    """Everything measured, for programs."""
    content = dataclasses.asdict(result) | {"rank": result.rank.tolist(), "stage": stage}
    return json.dumps(_finite(content), indent=1, allow_nan=False) + "\n"


def _rank_figure(result: Comparison) -> bytes:
    names = [row.arm for row in result.rows]
    with page.style():
        figure = page.new_figure(7.8, 6.6)
        axes = figure.add_subplot()
        shown = axes.imshow(result.rank, vmin=-1, vmax=1, cmap="RdBu")
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), names)
        axes.grid(visible=False)
        for i, values in enumerate(result.rank):
            for j, value in enumerate(values):
                dark = abs(value) > 0.6
                axes.text(
                    j,
                    i,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if dark else "black",
                )
        axes.set_title("rank correlation of advantages", loc="left")
        figure.colorbar(shown, ax=axes, shrink=0.8)
        return page.png(figure)


def _credit_figure(result: Comparison) -> bytes:
    with page.style():
        figure = page.new_figure(7.0, 3.4)
        axes = figure.add_subplot()
        for i, row in enumerate(result.rows):
            axes.plot(
                range(1, TURN_BINS + 1),
                row.credit_by_turn,
                marker="o",
                ms=3,
                ls=_STYLES[i // len(COLOURS)],
                color=COLOURS[i % len(COLOURS)],
                label=row.arm,
            )
        axes.set_xticks(range(1, TURN_BINS + 1))
        axes.set_xlabel("quarter of the turns, first to last")
        axes.set_ylabel("mean |A| / overall")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
        return page.png(figure)


# --- trained arms -----------------------------------------------------------------------------


def online_page(result: Result) -> Page:
    """The arms side by side, every seed, and the curves of training."""
    ablation = result.plan.ablation
    reference = ablation.reference
    shared = [s.name for s in next(iter(result.plan.arms.values())).stages[: result.plan.shared]]
    tasks = {len(r.by_task) for of_seed in result.results.values() for r in of_seed.values()}
    lead = (
        f"{ablation.question} {len(result.seeds)} seeds; each arm from the same"
        f" {', '.join(shared) or 'nothing'} of its seed, on the same tasks; strict success on"
        f" {max(tasks)} held-out tasks. Differences from {reference} are paired by seed and task,"
        " with a 95 % bootstrap interval over both."
    )
    head = (
        *("arm", "success %", f"- {reference}", "95 % interval", "EV", "commands"),
        *("iterations", "updates", "episodes", "sampled tokens"),
    )
    rows = []
    for name, of_seed in result.results.items():
        arms = list(of_seed.values())
        difference = result.differences.get(name)
        shown = ("", "")
        if difference is not None:
            lo, hi = 100 * difference.lo, 100 * difference.hi
            shown = (f"{100 * difference.mean:+.1f}", f"{lo:+.1f} to {hi:+.1f}")
        rows.append(
            (
                name,
                f"{100 * student_mean([a.success for a in arms]).mean:.1f}",
                *shown,
                f"{_mean([_mean(a.explained_variance) for a in arms]):.2f}",
                f"{_mean([a.commands for a in arms]):.2f}",
                f"{_mean([a.iterations for a in arms]):.0f}",
                f"{_mean([a.updates for a in arms]):.0f}",
                f"{_mean([a.episodes for a in arms]):.0f}",
                f"{_mean([a.tokens for a in arms]):.0f}",
            )
        )
    seeds_head = ["seed", *(["start"] if result.start else []), *result.results]
    by_seed = []
    for seed in result.seeds:
        start = [f"{100 * result.start[seed]:.1f}"] if result.start else []
        cells = [f"{100 * of_seed[seed].success:.1f}" for of_seed in result.results.values()]
        by_seed.append([str(seed), *start, *cells])
    sections = [
        Section(
            "Arms",
            "EV: of the undiscounted return by the critic, mean over the PPO iterations. Commands:"
            " a held-out episode, after training.",
            Table(head, rows),
            ("training",),
        ),
        Section("Success by seed, %", table=Table(seeds_head, by_seed)),
    ]
    return Page(f"Ablation: {ablation.name}", lead, sections, {"training": _training(result)})


def online_json(result: Result) -> str:
    """Everything measured, for programs."""
    content: Any = {
        "ablation": result.plan.ablation.model_dump(mode="json"),
        "digests": {name: config.digest() for name, config in result.plan.arms.items()},
        "seeds": result.seeds,
        "start": result.start,
        "differences": {name: dataclasses.asdict(d) for name, d in result.differences.items()},
        "results": {
            name: {str(seed): dataclasses.asdict(r) for seed, r in of_seed.items()}
            for name, of_seed in result.results.items()
        },
    }
    return json.dumps(_finite(content), indent=1, allow_nan=False) + "\n"


def _training(result: Result) -> bytes:
    curves: tuple[tuple[str, Callable[[ArmResult], Sequence[float]]], ...] = (
        ("success in training", lambda r: r.training_success),
        ("explained variance", lambda r: r.explained_variance),
    )
    with page.style():
        figure = page.new_figure(8.5, 3.2)
        for axes, (title, of) in zip(figure.subplots(1, 2), curves, strict=True):
            for i, (name, of_seed) in enumerate(result.results.items()):
                colour = COLOURS[i % len(COLOURS)]
                lines = [of(r) for r in of_seed.values()]
                for line in lines:
                    axes.plot(line, color=colour, lw=0.7, alpha=0.35)
                size = min(len(line) for line in lines)
                mean = [_mean([line[t] for line in lines]) for t in range(size)]
                axes.plot(mean, color=colour, lw=2, label=name)
            axes.set_title(title, loc="left")
            axes.set_xlabel("iteration")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
        return page.png(figure)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _finite(value: Any) -> Any:
    """The value with what JSON cannot say as null."""
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
