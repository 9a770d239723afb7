"""Makes `summary.json` and `report.html` from what the stages of a run left behind."""

from __future__ import annotations

import tomllib
from pathlib import Path

from rollout.errors import UserError
from trsi_jax.report import html, summary
from trsi_jax.stages import record

CONFIG = "config.toml"


def build(run: Path) -> summary.Summary:
    """Write both files into the run's folder; the same stages give the same bytes.

    Args:
      run: a folder with `config.toml` and `stages/*.json`.

    Returns:
      The summary that was written.

    Raises:
      UserError: if the folder holds no run, or no stage is finished.
    """
    config = run / CONFIG
    if not config.is_file():
        raise UserError(f"{run}: no {CONFIG} here; give the folder of a run, such as runs/demo")
    records = record.read_all(run)
    if not records:
        raise UserError(f"{run}: no stage is finished yet; go on with `trsi run`")
    settings = config.read_text(encoding="utf-8")
    result = summary.of_records(records)
    name = str(tomllib.loads(settings).get("name", run.name))
    record.write_text(run / summary.REPORT, html.render(name, result, records, settings))
    summary.write(run, result)
    return result
