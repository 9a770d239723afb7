"""A trajectory as one self-contained HTML page: turns, checks, and every token with its numbers.

The page holds the tokens as packed arrays and makes elements only for what is near the screen, so
that a trajectory of 96,000 tokens scrolls like a short one.
"""

from __future__ import annotations

import base64
import importlib.resources
from collections.abc import Mapping
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt

from rollout.records import Trajectory
from trsi_jax.report.charts import PALETTE
from trsi_jax.report.trajectory import TokenText, visible_text

TEMPLATE = "trajectory.html.j2"

_FIRST = ("advantage_t", "value_t", "return_t", "reward_t")
# Beyond this share of all values a colour no longer deepens: one outlier must not pale the rest.
_SCALE_QUANTILE = 0.98


def render(
    trajectory: Trajectory,
    columns: Mapping[str, npt.NDArray[np.float32]],
    *,
    instruction: str | None = None,
    token_text: TokenText | None = None,
) -> str:
    """The page.

    Args:
      trajectory: as the store gives it.
      columns: name -> [T] float32; tokens can be coloured by each.
      instruction: what the agent was asked; None leaves it out.
      token_text: text of a token id; None shows ids.

    Returns:
      A whole HTML document without references to other files.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["visible"] = visible_text
    source = importlib.resources.files(__package__).joinpath("templates", TEMPLATE).read_text()
    verdict = trajectory.verdict
    return environment.from_string(source).render(
        trajectory=trajectory,
        outcome=_outcome(trajectory),
        fault="" if trajectory.fault is None else visible_text(trajectory.fault.message),
        facts=_facts(trajectory),
        instruction=visible_text(instruction or ""),
        sampled=int(trajectory.acted_t.sum()),
        tokens=trajectory.token_ids.size,
        reward=float(columns["reward_t"].sum()) if "reward_t" in columns else None,
        progress=None if verdict is None else verdict.progress,
        checks=[] if verdict is None else verdict.results,
        passed=0 if verdict is None else sum(r.passed for r in verdict.results),
        data=_data(trajectory, columns, token_text),
        palette=PALETTE,
    )


def _outcome(trajectory: Trajectory) -> str:
    if trajectory.fault is not None:
        return "fault"
    success = trajectory.verdict is not None and trajectory.verdict.strict_success
    return "success" if success else "failure"


def _facts(trajectory: Trajectory) -> dict[str, str]:
    versions = np.unique(trajectory.weight_version_t[trajectory.acted_t]).tolist()
    facts = {
        "task": f"{trajectory.task_id} ({trajectory.family}, {trajectory.tier}, "
        f"{trajectory.split})",
        "stage": f"{trajectory.stage}, iteration {trajectory.iteration}, sample "
        f"{trajectory.sample}, seed {trajectory.seed}",
        "sampling": f"{trajectory.harness} harness, {trajectory.engine}, temperature "
        f"{trajectory.temperature:g}, weights {', '.join(map(str, versions)) or 'none'}",
        "ended by": trajectory.finish,
    }
    if trajectory.timings:
        facts["seconds"] = ", ".join(f"{k} {v:.2f}" for k, v in trajectory.timings.items())
    return {name: visible_text(text) for name, text in facts.items()}


def _data(
    trajectory: Trajectory,
    columns: Mapping[str, npt.NDArray[np.float32]],
    token_text: TokenText | None,
) -> dict[str, Any]:
    """What the page's script draws from; arrays are little-endian and base64."""
    known, index_t = np.unique(trajectory.token_ids, return_inverse=True)
    text = token_text or (lambda token: f"{token} ")
    acted = trajectory.acted_t
    names = sorted(columns, key=lambda n: (_FIRST.index(n) if n in _FIRST else len(_FIRST), n))
    scales = {}
    for name in names:
        shown = np.abs(columns[name][acted])
        scales[name] = float(np.quantile(shown, _SCALE_QUANTILE)) if shown.size else 0.0
    return {
        "texts": [visible_text(text(int(i))) for i in known],
        "ids": _packed(known, "<i4"),
        "index": _packed(index_t, "<i4"),
        "acted": _packed(acted, "u1"),
        "turn": _packed(trajectory.turn_t, "<i4"),
        "version": _packed(trajectory.weight_version_t, "<i4"),
        "logprob": _packed(trajectory.logprob_t, "<f4"),
        "columns": {name: _packed(columns[name], "<f4") for name in names},
        "scales": scales,
        "turns": [
            {
                "command": visible_text(t.command),
                "observation": visible_text(t.observation),
                "end": t.status if t.exit_code is None else f"{t.status}, exit {t.exit_code}",
                "ok": t.exit_code in (0, None) and t.status in ("ok", "control"),
            }
            for t in trajectory.turns
        ],
    }


def _packed(array: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode()
