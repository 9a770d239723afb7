"""What a finished stage leaves behind: `<run>/stages/<name>.json`.

It lies beside the stages, not beside the report, because the machine writes it and the report only
reads it. The report and the summary are functions of these files and of `config.toml` alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollout.errors import StoreError
from trsi_jax.stages.observer import StageRow

FOLDER = "stages"


@dataclass(frozen=True, slots=True)
class PairedGain:
    """Gain in strict success over the stage before, paired by task, with its 95 % interval."""

    gain: float
    lo: float
    hi: float


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A finished stage.

    Attributes:
      index: position in the recursion, from 0.
      row: the line of the results table.
      seed: the run's seed.
      config_digest: digest of the resolved config.
      actor_digest: digest of the actor's parameters that the stage left.
      critic_digest: of the critic's; None before the first stage that trains one.
      funnel: name of a step of the rewrite -> how many came through, in order; empty for a stage
        that rewrites nothing.
      curves: name -> value by iteration of training; names may be grouped as "actor/loss".
      seconds_by_part: part -> seconds; parts do not overlap.
      families: family -> strict success on test tasks.
      paired_gain: against the stage before; None for the first.
      masked: evaluation attempts that a fault masked, out of the numbers above.
      tasks: test tasks evaluated.
      samples: attempts a task.
    """

    index: int
    row: StageRow
    seed: int
    config_digest: str
    actor_digest: str
    critic_digest: str | None
    funnel: Mapping[str, int] = field(default_factory=dict)
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    seconds_by_part: Mapping[str, float] = field(default_factory=dict)
    families: Mapping[str, float] = field(default_factory=dict)
    paired_gain: PairedGain | None = None
    masked: int = 0
    tasks: int = 0
    samples: int = 0

    def to_json(self) -> dict[str, Any]:
        """The record as JSON types; the inverse of `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StageRecord:
        """The record that `to_json` gave. Raises KeyError or TypeError for anything else."""
        row = dict(value["row"])
        lo, hi = row["ci95"]
        gain = value["paired_gain"]
        fields = dict(value)
        fields["row"] = StageRow(**{**row, "ci95": (float(lo), float(hi))})
        fields["paired_gain"] = None if gain is None else PairedGain(**gain)
        return cls(**fields)


def write(run: Path, record: StageRecord) -> Path:
    """Write `<run>/stages/<name>.json` whole or not at all; returns its path."""
    path = run / FOLDER / f"{record.row.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(record.to_json(), indent=2, allow_nan=False) + "\n")
    return path


def read(path: Path) -> StageRecord:
    """Read one record.

    Raises:
      StoreError: naming the file, where it is no stage record.
    """
    try:
        return StageRecord.from_json(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as problem:
        raise StoreError(f"{path} is no stage record: {problem!r}") from problem


def read_all(run: Path) -> tuple[StageRecord, ...]:
    """The records of a run's finished stages, in the order of the recursion."""
    records = [read(path) for path in (run / FOLDER).glob("*.json")]
    return tuple(sorted(records, key=lambda record: record.index))


def write_text(path: Path, text: str) -> None:
    """Replace the file `path` atomically: a reader sees the old text or the new, never half."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
