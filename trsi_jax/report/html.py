"""`report.html`: one self-contained page of a run, readable offline, in light and in dark."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from typing import Any

import jinja2

from rollout.records import TIERS
from trsi_jax.report import charts
from trsi_jax.report.summary import Summary
from trsi_jax.stages.record import StageRecord

TEMPLATE = "report.html.j2"


def render(name: str, summary: Summary, records: Sequence[StageRecord], settings: str) -> str:
    """The page.

    Args:
      name: of the config.
      summary: of the same records.
      records: the finished stages, in order; at least one.
      settings: the resolved config as TOML.

    Returns:
      A whole HTML document without references to other files.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["percent"] = lambda share: f"{100 * share:.1f}"
    environment.filters["points"] = lambda share: f"{100 * share:+.1f}"
    environment.filters["clock"] = lambda s: f"{round(s) // 60}:{round(s) % 60:02}"
    source = importlib.resources.files(__package__).joinpath("templates", TEMPLATE).read_text()
    return environment.from_string(source).render(
        name=name,
        summary=summary,
        records=records,
        settings=settings,
        palette=charts.PALETTE,
        first=records[0],
        last=records[-1],
        seconds=sum(record.row.seconds for record in records),
        tiers=[t for t in TIERS if any(t in record.row.tiers for record in records)],
        families=sorted({family for record in records for family in record.families}),
        parts=_parts(records),
        stage_curve=charts.stage_curve(records),
        tier_curves=charts.tier_curves(records),
        funnels={r.row.name: charts.funnel(r.row.name, r.funnel) for r in records if r.funnel},
        time_chart=charts.time_by_part(records),
        curves={r.row.name: charts.training_curves(r.row.name, r.curves) for r in records},
    )


def _parts(records: Sequence[StageRecord]) -> list[dict[str, Any]]:
    """Seconds and share of each part over the whole run, the longest first."""
    rows = []
    whole = sum(seconds for record in records for seconds in record.seconds_by_part.values())
    for part in charts.parts_by_time(records):
        seconds = sum(record.seconds_by_part.get(part, 0.0) for record in records)
        rows.append({"name": part, "seconds": seconds, "share": seconds / whole if whole else 0.0})
    return rows
