"""Trajectories for other programs: ATIF documents and Parquet files.

ATIF, the Agent Trajectory Interchange Format, has standard places for commands, observations,
token ids and log-probs of each agent step; what it has no place for (rewards, values, advantages,
weight versions, checks) goes under `extra`. Documents keep to version 1.7, which 1.8 contains.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.errors import StoreError, UserError
from rollout.records import Trajectory
from rollout.store import layout
from rollout.store.location import store_errors
from rollout.store.reader import SegmentReader

ATIF_VERSION = "ATIF-v1.7"
FORMATS = ("atif", "parquet")

Columns = Mapping[str, npt.NDArray[np.float32]]


def atif_document(
    trajectory: Trajectory,
    columns: Columns,
    *,
    instruction: str = "",
    session: str = "",
    version: str = "",
) -> dict[str, Any]:
    """One trajectory as an ATIF document.

    Args:
      trajectory: as the store gives it.
      columns: name -> [T] float32; agent steps get the values on their sampled tokens.
      instruction: what the agent was asked; empty takes what the provenance says.
      session: name of the run.
      version: of the program that acted.

    Returns:
      Plain dicts, lists, strings and numbers.

    Raises:
      StoreError: for a log-prob or column value that is not finite, which JSON cannot hold.
    """
    asked = instruction or trajectory.provenance.get("instruction", "")
    steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": _text(asked)}]
    acted = trajectory.acted_t
    turns = len(trajectory.turns)
    if acted.any():
        turns = max(turns, int(trajectory.turn_t[acted].max()) + 1)
    for i in range(turns):
        steps.append(_agent_step(trajectory, columns, i) | {"step_id": i + 2})
    verdict = trajectory.verdict
    extra = layout.record_fields(trajectory) | {
        "strict_success": None if verdict is None else verdict.strict_success,
        "progress": None if verdict is None else verdict.progress,
        "reward": float(columns["reward_t"].sum()) if "reward_t" in columns else None,
    }
    del extra["turns"], extra["id"], extra["harness"], extra["engine"]
    return {
        "schema_version": ATIF_VERSION,
        "session_id": session or trajectory.stage,
        "trajectory_id": trajectory.id,
        "agent": {
            "name": trajectory.harness,
            "version": version or "unknown",
            "model_name": trajectory.engine,
        },
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": int((~acted).sum()),
            "total_completion_tokens": int(acted.sum()),
            "total_steps": len(steps),
        },
        "extra": _clean(extra),
    }


def export_atif(
    reader: SegmentReader,
    folder: Path,
    *,
    session: str = "",
    version: str = "",
    instruction: Callable[[Trajectory], str | None] = lambda trajectory: None,
    chosen: Callable[[str], bool] = lambda segment: True,
) -> Iterator[Path]:
    """Write one JSON document a trajectory: `<segment>/<id>.json`, names percent-encoded.

    Yields:
      Each file, whole when it is given.

    Raises:
      StoreError: for a full disk, a missing permission, a value that JSON cannot hold.
    """
    for segment in reader.segments():
        if not chosen(segment):
            continue
        columns = {name: reader.read_columns(segment, name) for name in reader.columns(segment)}
        for i, trajectory in enumerate(reader.read(segment)):
            document = atif_document(
                trajectory,
                {name: values[i] for name, values in columns.items()},
                instruction=instruction(trajectory) or "",
                session=session,
                version=version,
            )
            path = folder / layout.segment_key(segment) / f"{layout.file_name(trajectory.id)}.json"
            text = json.dumps(document, allow_nan=False)
            with _whole(path) as part:
                part.write_text(text)
            yield path


def export_parquet(
    reader: SegmentReader, folder: Path, *, chosen: Callable[[str], bool] = lambda segment: True
) -> Iterator[Path]:
    """Write one Parquet file a segment, a row a trajectory, arrays and columns as lists.

    Yields:
      Each file, whole when it is given.

    Raises:
      UserError: where pyarrow is not installed.
      StoreError: for a full disk, a missing permission.
    """
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UserError(
            "Parquet needs pyarrow; install it with `pip install 'trsi-jax[parquet]'`"
        ) from None
    for segment in reader.segments():
        if not chosen(segment):
            continue
        trajectories = reader.read(segment)
        data: dict[str, Any] = {"id": [t.id for t in trajectories]}
        for name in layout.TOKEN_FIELDS:
            data[name] = _lists(arrow, [getattr(t, name) for t in trajectories])
        for name in reader.columns(segment):
            data[name] = _lists(arrow, list(reader.read_columns(segment, name)))
        data["record"] = [json.dumps(_clean(layout.record_fields(t))) for t in trajectories]
        path = folder / f"{layout.segment_key(segment)}.parquet"
        with _whole(path) as part:
            parquet.write_table(arrow.table(data), part, compression="zstd")
        yield path


def _agent_step(trajectory: Trajectory, columns: Columns, i: int) -> dict[str, Any]:
    places = np.flatnonzero(trajectory.acted_t & (trajectory.turn_t == i))
    metrics: dict[str, Any] = {
        "completion_token_ids": trajectory.token_ids[places].tolist(),
        "logprobs": _finite(trajectory.id, "logprob_t", trajectory.logprob_t[places]),
        "completion_tokens": int(places.size),
    }
    if places.size:
        metrics["prompt_tokens"] = int(places[0])
    extra: dict[str, Any] = {
        "turn": i,
        "weight_versions": np.unique(trajectory.weight_version_t[places]).tolist(),
        "columns": {n: _finite(trajectory.id, n, c[places]) for n, c in columns.items()},
    }
    step: dict[str, Any] = {"source": "agent", "message": "", "metrics": metrics, "extra": extra}
    if i < len(trajectory.turns):
        turn = trajectory.turns[i]
        call = f"turn-{i}"
        step["message"] = _text(turn.command)
        step["tool_calls"] = [
            {
                "tool_call_id": call,
                "function_name": "control" if turn.status == "control" else "shell",
                "arguments": {"command": _text(turn.command)},
            }
        ]
        step["observation"] = {
            "results": [{"source_call_id": call, "content": _text(turn.observation)}]
        }
        extra |= {"exit_code": turn.exit_code, "status": turn.status}
    return step


def _finite(trajectory_id: str, name: str, values: npt.NDArray[Any]) -> list[float]:
    found: list[float] = values.tolist()
    for value in found:
        if not math.isfinite(value):
            raise StoreError(f"trajectory {trajectory_id}: {name} is {value}, must be finite")
    return found


def _text(text: str) -> str:
    """Text that every JSON parser takes: an undecodable byte of an output becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return {_text(str(k)): _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    return value


def _lists(arrow: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    offsets = layout.bounds([a.size for a in arrays]).astype(np.int32)
    flat = np.concatenate(arrays) if arrays else np.zeros(0, np.float32)
    return arrow.ListArray.from_arrays(arrow.array(offsets), arrow.array(flat))


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, which takes its name at the end: what is there is whole."""
    with store_errors(path.parent, "exporting"):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        yield part
        part.replace(path)
