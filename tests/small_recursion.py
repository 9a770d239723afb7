"""configs/tiny.toml made small enough to run whole in tests; the shapes stay, so caches serve.

Base sees single sub-goals without a mistake, so that after 70 updates it solves some easy tasks
and the later stages have successes to work with; PPO gets such tasks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trsi_jax import config

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny.toml"
STAGES = ("base", "rsr-1", "rpr-1", "rsr-2", "rpr-2")
OVERRIDES = (
    *("train_tasks=64", "engine.sessions=16", "checkpoint_every=1"),
    *("evaluation.tasks=16", "evaluation.repeats=2"),
    *("stages.base.steps=70", "stages.base.curriculum_steps=100", "stages.base.mistake_rate=0.0"),
    *("stages.base.warmup_steps=10", "stages.base.learning_rate=4e-3"),
    *(f"stages.{name}.{key}" for name in STAGES[1::2] for key in ("tasks=24", "epochs=2")),
    *(
        f"stages.{name}.{key}"
        for name in STAGES[2::2]
        for key in (
            *("iterations=2", "tasks_per_iteration=12", "samples=2", "warm_up_batches=1"),
            'tiers=["easy", "medium"]',
        )
    ),
)


def small() -> config.Config:
    """The configuration of the small recursion."""
    return config.load(CONFIG, OVERRIDES)


def without_seconds(run: Path) -> dict[str, Any]:
    """What of a run's results must be equal whenever it is repeated."""
    summary = json.loads((run / "summary.json").read_text())
    for stage in summary["stages"]:
        del stage["seconds"]
    records = {}
    for name in STAGES:
        record = json.loads((run / "stages" / f"{name}.json").read_text())
        del record["seconds_by_part"], record["row"]["seconds"]
        records[name] = record
    return {"summary": summary, "records": records}
