"""The result over several seeds as Markdown, SVG and JSON for the documentation."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from trsi_jax.evaluate.seeds import SeedsStage, aggregate
from trsi_jax.report import charts
from trsi_jax.report.summary import Summary
from trsi_jax.stages.record import write_text


def write(folder: Path, name: str, runs: Sequence[Summary]) -> tuple[Path, Path, Path]:
    """Write seeds.md, seeds.svg and seeds.json.

    Args:
      folder: made if missing.
      name: of the config.
      runs: one summary a seed.

    Returns:
      The three paths.

    Raises:
      ValueError: if the runs are not of one config, or a seed appears twice.
    """
    digests = {run.config_digest for run in runs}
    if len(digests) != 1 or len({run.seed for run in runs}) != len(runs):
        raise ValueError("seeds are compared over runs of one config, each seed once")
    stages = aggregate({r.seed: {row.name: row.strict_success for row in r.stages} for r in runs})
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "seeds.md", folder / "seeds.svg", folder / "seeds.json"
    write_text(paths[0], markdown(name, runs, stages))
    write_text(paths[1], charts.seeds_curve(stages) + "\n")
    content = {
        "config": name,
        "config_digest": digests.pop(),
        "seeds": [run.seed for run in runs],
        "stages": [_finite(asdict(stage)) for stage in stages],
        "runs": [run.to_json() for run in runs],
    }
    write_text(paths[2], json.dumps(content, indent=2, allow_nan=False) + "\n")
    return paths


def markdown(name: str, runs: Sequence[Summary], stages: Sequence[SeedsStage]) -> str:
    """The table: every seed a row, then the mean and its interval over seeds."""
    heads = [stage.name for stage in stages]
    lines = [
        "![Strict success by stage: mean over seeds, its 95 % interval, every seed](seeds.svg)",
        "",
        "| seed | " + " | ".join(heads) + " | minutes |",
        "| --- |" + " ---: |" * (len(heads) + 1),
    ]
    for run in runs:
        cells = [f"{100 * row.strict_success:.1f}" for row in run.stages]
        minutes = sum(row.seconds for row in run.stages) / 60
        lines.append(f"| {run.seed} | " + " | ".join(cells) + f" | {minutes:.1f} |")
    means = [f"**{100 * stage.strict_success.mean:.1f}**" for stage in stages]
    total = sum(row.seconds for run in runs for row in run.stages) / 60 / len(runs)
    lines.append("| **mean** | " + " | ".join(means) + f" | {total:.1f} |")
    if len(runs) > 1:
        bounds = [(max(0.0, s.strict_success.lo), min(1.0, s.strict_success.hi)) for s in stages]
        spans = [f"{100 * lo:.1f} to {100 * hi:.1f}" for lo, hi in bounds]
        lines.append("| 95 % interval | " + " | ".join(spans) + " | |")
    lines += [
        "",
        f"Strict success in percent on fresh test tasks; config `{name}`, digest"
        f" `{runs[0].config_digest}`, {len(runs)} seed{'s' if len(runs) > 1 else ''}. The interval"
        " is Student's over training seeds.",
        "",
    ]
    return "\n".join(lines)


def _finite(value: object) -> object:
    """The value with what JSON cannot say (an infinite bound) as null."""
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
