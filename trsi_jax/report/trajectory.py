"""One trajectory, or a list of them, for people: rich renderables, no reading and no printing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rollout.records import Trajectory

TokenText = Callable[[int], str]

_SHOWN_COLUMNS = {"value_t": "value", "advantage_t": "advantage", "return_t": "return"}


def visible_text(text: str) -> str:
    """Text of a sandbox, safe to show: control characters and odd bytes are shown, not obeyed."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def visible(text: str) -> Text:
    """`visible_text`, without markup."""
    return Text(visible_text(text))


def trajectory_view(
    trajectory: Trajectory,
    columns: Mapping[str, npt.NDArray[np.float32]],
    *,
    instruction: str | None = None,
    token_text: TokenText | None = None,
) -> RenderableType:
    """A whole trajectory.

    Args:
      trajectory: as the store gives it.
      columns: name -> [T] float32; "reward_t", "value_t", "advantage_t" and "return_t" are shown.
      instruction: what the agent was asked; None leaves it out.
      token_text: text of a token id; None shows ids.

    Returns:
      Facts, instruction, turns, checks, and the sampled tokens with what is known of each.
    """
    parts: list[RenderableType] = [_facts(trajectory, columns)]
    if instruction:
        parts += [_title("instruction"), visible(instruction)]
    for i, turn in enumerate(trajectory.turns):
        end = turn.status if turn.exit_code is None else f"{turn.status}, exit {turn.exit_code}"
        parts += [
            _title(f"turn {i}"),
            Text.assemble(("$ ", "bold green"), visible(turn.command)),
            *([visible(turn.observation.rstrip("\n"))] if turn.observation else []),
            Text(f"[{end}]", style="dim"),
        ]
    parts.append(_title("checks"))
    if trajectory.verdict is None:
        parts.append(Text("none: the trajectory has a fault and is masked", style="yellow"))
    else:
        parts.append(_checks(trajectory))
    parts += [_title("sampled tokens"), _tokens(trajectory, columns, token_text)]
    return Group(*parts)


def trajectory_table(
    entries: Iterable[tuple[Trajectory, Mapping[str, npt.NDArray[np.float32]]]],
) -> Table:
    """A row a trajectory."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    # The id is what a person copies into the next command: it is never cut, the rest may be.
    table.add_column("id", no_wrap=True)
    for name in ("stage", "task", "harness"):
        table.add_column(name, overflow="fold")
    for name in ("turns", "sampled", "progress", "reward"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for t, columns in entries:
        table.add_row(
            visible(t.id),
            *(Text(part) for part in (t.stage, t.task_id, t.harness)),
            str(len(t.turns)),
            str(int(t.acted_t.sum())),
            "" if t.verdict is None else f"{t.verdict.progress:.2f}",
            _reward(columns),
            _outcome(t) if t.fault is None else Text(f"fault {t.fault.kind}", style="yellow"),
        )
    return table


def _title(text: str) -> Rule:
    return Rule(text, align="left", style="dim")


def _facts(trajectory: Trajectory, columns: Mapping[str, npt.NDArray[Any]]) -> Table:
    acted = trajectory.acted_t
    versions = np.unique(trajectory.weight_version_t[acted]).tolist()
    facts: dict[str, str | Text] = {
        "id": visible(trajectory.id),
        "outcome": _outcome(trajectory),
        "task": f"{trajectory.task_id} ({trajectory.family}, {trajectory.tier}, "
        f"{trajectory.split})",
        "stage": f"{trajectory.stage}, iteration {trajectory.iteration}, sample "
        f"{trajectory.sample}, seed {trajectory.seed}",
        "sampling": f"{trajectory.harness} harness, {trajectory.engine}, temperature "
        f"{trajectory.temperature:g}, weights {', '.join(map(str, versions)) or 'none'}",
        "tokens": f"{acted.size}, {int(acted.sum())} of them sampled in {len(trajectory.turns)} "
        f"turns, ended by {trajectory.finish}",
    }
    if trajectory.verdict is not None:
        facts["progress"] = f"{trajectory.verdict.progress:.3f}"
    if "reward_t" in columns:
        facts["reward"] = _reward(columns)
    if trajectory.timings:
        facts["seconds"] = ", ".join(f"{k} {v:.2f}" for k, v in trajectory.timings.items())
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value if isinstance(value, Text) else Text(value))
    return table


def _checks(trajectory: Trajectory) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("check", "kind", "weight", "result"):
        table.add_column(name, justify="right" if name == "weight" else "left")
    for check in trajectory.verdict.results if trajectory.verdict else ():
        result = Text("passed", "green") if check.passed else Text("failed", "red")
        table.add_row(visible(check.id), check.kind, f"{check.weight:g}", result)
    return table


def _tokens(
    trajectory: Trajectory,
    columns: Mapping[str, npt.NDArray[Any]],
    token_text: TokenText | None,
) -> Table:
    shown = {title: columns[name] for name, title in _SHOWN_COLUMNS.items() if name in columns}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("position", "turn"):
        table.add_column(name, justify="right")
    table.add_column("token", overflow="fold")
    for name in ("log-prob", *shown):
        table.add_column(name, justify="right")
    places = np.flatnonzero(trajectory.acted_t).tolist()
    for place, following in zip(places, [*places[1:], None], strict=True):
        token = int(trajectory.token_ids[place])
        turn = trajectory.turn_t[place]
        table.add_row(
            str(place),
            str(turn),
            str(token) if token_text is None else visible(repr(token_text(token))[1:-1]),
            f"{trajectory.logprob_t[place]:.3f}",
            *(_signed(title, values[place]) for title, values in shown.items()),
            end_section=following is not None and trajectory.turn_t[following] != turn,
        )
    return table


def _signed(title: str, value: float) -> Text:
    if title != "advantage":
        return Text(f"{value:.3f}")
    return Text(f"{value:+.3f}", style="green" if value > 0 else "red" if value < 0 else "")


def _reward(columns: Mapping[str, npt.NDArray[Any]]) -> str:
    return f"{float(columns['reward_t'].sum()):.3f}" if "reward_t" in columns else ""


def _outcome(trajectory: Trajectory) -> Text:
    if trajectory.fault is not None:
        line = Text(f"fault {trajectory.fault.kind}: ", style="yellow")
        return line.append_text(visible(trajectory.fault.message))
    if trajectory.verdict is not None and trajectory.verdict.strict_success:
        return Text("success", style="green")
    return Text("failure", style="red")
