"""`summary.json`: the results of a run for programs, and nothing that differs between machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollout.errors import StoreError, UserError
from trsi_jax.stages.observer import StageRow
from trsi_jax.stages.record import StageRecord, write_text

FILE = "summary.json"
REPORT = "report.html"


@dataclass(frozen=True, slots=True)
class Summary:
    """A run's seed, config digest, stage rows and the path of its report, relative to the run.

    Two runs of the same config and seed have equal summaries but for the seconds.
    """

    seed: int
    config_digest: str
    stages: tuple[StageRow, ...]
    report: str = REPORT

    def to_json(self) -> dict[str, Any]:
        """The summary as JSON types; the inverse of `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Summary:
        """The summary that `to_json` gave. Raises KeyError or TypeError for anything else."""
        stages = []
        for stage in value["stages"]:
            lo, hi = stage["ci95"]
            stages.append(StageRow(**{**stage, "ci95": (float(lo), float(hi))}))
        return cls(**{**value, "stages": tuple(stages)})


def of_records(records: Sequence[StageRecord]) -> Summary:
    """The summary of finished stages, in order.

    Raises:
      StoreError: without a record, or where they are not of one run.
    """
    if not records:
        raise StoreError("no finished stage to summarise")
    origins = {(record.seed, record.config_digest) for record in records}
    if len(origins) > 1:
        raise StoreError(f"stages of different runs in one folder: {sorted(origins)}")
    seed, digest = origins.pop()
    return Summary(seed, digest, tuple(record.row for record in records))


def write(run: Path, summary: Summary) -> Path:
    """Write `<run>/summary.json` atomically; returns its path."""
    path = run / FILE
    write_text(path, json.dumps(summary.to_json(), indent=2, allow_nan=False) + "\n")
    return path


def read(run: Path) -> Summary:
    """Read `<run>/summary.json`.

    Raises:
      UserError: where the folder holds no summary.
      StoreError: where the file is no summary.
    """
    path = run / FILE
    if not path.is_file():
        raise UserError(f"{run}: no {FILE} here; give the folder of a run that `trsi run` finished")
    try:
        return Summary.from_json(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as problem:
        raise StoreError(f"{path} is no summary: {problem!r}") from problem
