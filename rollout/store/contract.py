"""The contract at the store's door: what every trajectory must be before it is written."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.records import SCHEMA_VERSION, Trajectory
from rollout.store.layout import TOKEN_FIELDS, bounds

_SECRET_NAME = re.compile(
    r"(^|[_\-.])(token|secret|passwd|password|credentials?|api_?key|access_?key|private_?key|auth)$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|hf_[A-Za-z0-9]{20,}"
    r"|AKIA[0-9A-Z]{16}|xox[abprs]-[A-Za-z0-9-]{10,}|AIza[0-9A-Za-z_-]{30,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^/\s:@]+:[^/\s:@]+@"
)
# Shorter values of secret-named variables ("1", "true", "none") occur in harmless text.
_MIN_SECRET_LENGTH = 8
_REMOVED = "(removed: looks secret)"


def violations(trajectories: Sequence[Trajectory], *, vocab_size: int) -> dict[int, str]:
    """What each trajectory of a batch does wrong.

    The rules: a unique, non-empty id and the current schema; token arrays of rank one, of equal
    length and of the record's dtypes; ids in [0, vocab_size); log-probs finite and <= 0 where
    acted, 0 elsewhere; turns >= 0 that never go back; a weight version >= 0 where acted, -1
    elsewhere; a first token that was not acted, for nothing predicts it; exactly one of verdict
    and fault; a finite temperature >= 0; no secret in the provenance, nor in what people read.

    Args:
      trajectories: the batch.
      vocab_size: number of token ids.

    Returns:
      Index of each offender -> its first problem.
    """
    found: dict[int, str] = {}
    seen: set[str] = set()
    environment = _secret_environment()
    # Provenance hardly differs within a batch: each distinct entry is searched once.
    searched: dict[tuple[str, str], str | None] = {}
    for i, trajectory in enumerate(trajectories):
        problem = (
            _record_problem(trajectory)
            or _leak(trajectory, environment, searched)
            or _array_problem(trajectory)
        )
        if problem is None and trajectory.id in seen:
            problem = "the id occurs twice in the batch"
        seen.add(trajectory.id)
        if problem is not None:
            found[i] = problem
    sound = [i for i in range(len(trajectories)) if i not in found]
    for j, problem in _token_problems([trajectories[i] for i in sound], vocab_size).items():
        found[sound[j]] = problem
    return dict(sorted(found.items()))


def column_violation(
    name: str, column_t: npt.NDArray[Any], acted_t: npt.NDArray[np.bool_]
) -> str | None:
    """What is wrong with one trajectory's values of a column; None if nothing is.

    A column is [T] float32 and finite. A column whose name begins with "reward" is 0 wherever no
    token was sampled: a reward there would be lost or diluted downstream.
    """
    if column_t.dtype != np.float32:
        return f"column {name} has dtype {column_t.dtype}, must be float32"
    if column_t.shape != acted_t.shape:
        return f"column {name} has shape {column_t.shape}, must be {acted_t.shape}"
    if not np.isfinite(column_t).all():
        t = int(np.argmin(np.isfinite(column_t)))
        return f"column {name} is {column_t[t]} at token {t}, must be finite"
    if name.startswith("reward"):
        stray = np.flatnonzero((column_t != 0) & ~acted_t)
        if stray.size:
            return (
                f"column {name} is {column_t[stray[0]]} at token {stray[0]}, where nothing was "
                "sampled; a reward must sit on an acted token"
            )
    return None


def redacted(trajectory: Trajectory) -> Trajectory:
    """The trajectory without what looks secret in its provenance, its turns and its fault."""
    environment = _secret_environment()

    def clean(text: str) -> str:
        for secret in environment.values():
            text = text.replace(secret, _REMOVED)
        return text

    return dataclasses.replace(
        trajectory,
        provenance={
            k: _REMOVED if _secret_problem(str(k), str(v), environment) else v
            for k, v in trajectory.provenance.items()
        },
        turns=tuple(
            dataclasses.replace(t, command=clean(t.command), observation=clean(t.observation))
            for t in trajectory.turns
        ),
        fault=None
        if trajectory.fault is None
        else dataclasses.replace(trajectory.fault, message=clean(trajectory.fault.message)),
    )


def _record_problem(trajectory: Trajectory) -> str | None:
    if not isinstance(trajectory.id, str) or not trajectory.id or not trajectory.id.isprintable():
        return f"the id is {trajectory.id!r}, must be a non-empty printable string"
    if trajectory.schema_version != SCHEMA_VERSION:
        return f"schema version {trajectory.schema_version}, must be {SCHEMA_VERSION}"
    if (trajectory.verdict is None) == (trajectory.fault is None):
        which = "neither" if trajectory.verdict is None else "both"
        return f"has {which} of verdict and fault, must have exactly one"
    if not (math.isfinite(trajectory.temperature) and trajectory.temperature >= 0):
        return f"temperature is {trajectory.temperature}, must be finite and >= 0"
    return None


def _leak(
    trajectory: Trajectory,
    environment: Mapping[str, str],
    searched: dict[tuple[str, str], str | None],
) -> str | None:
    # The annotation says str; what comes from a harness is checked all the same.
    provenance: Mapping[str, object] = trajectory.provenance
    for key, value in provenance.items():
        if not isinstance(value, str):
            return f"provenance {key!r} is a {type(value).__name__}, must be a string"
        entry = (key, value)
        if entry not in searched:
            searched[entry] = _secret_problem(key, value, environment)
        if searched[entry] is not None:
            return searched[entry]
    for name, secret in environment.items():
        for i, turn in enumerate(trajectory.turns):
            if secret in turn.command or secret in turn.observation:
                return f"turn {i} shows the value of environment variable {name}"
        if trajectory.fault is not None and secret in trajectory.fault.message:
            return f"the fault's message shows the value of environment variable {name}"
    return None


def _array_problem(trajectory: Trajectory) -> str | None:
    shape = np.shape(trajectory.token_ids)
    for name, dtype in TOKEN_FIELDS.items():
        array = getattr(trajectory, name)
        if not isinstance(array, np.ndarray):
            return f"{name} is a {type(array).__name__}, must be a numpy array"
        if array.dtype != dtype:
            return f"{name} has dtype {array.dtype}, must be {dtype}"
        if array.ndim != 1 or array.shape != shape:
            return f"{name} has shape {array.shape}, must be that of token_ids, {shape}, of rank 1"
    return None


def _token_problems(trajectories: Sequence[Trajectory], vocab_size: int) -> dict[int, str]:
    """Rules on token values, for all trajectories laid end to end (a batch is checked at once)."""
    offset = bounds([t.token_ids.size for t in trajectories])
    if offset[-1] == 0:
        return {}
    ids, acted, logprob, turn, version = (
        np.concatenate([getattr(t, name) for t in trajectories]) for name in TOKEN_FIELDS
    )
    first = np.zeros(ids.size, bool)
    first[offset[:-1][np.diff(offset) > 0]] = True
    back = np.zeros(ids.size, bool)
    back[1:] = (turn[1:] < turn[:-1]) & ~first[1:]
    rules = (
        (ids, (ids < 0) | (ids >= vocab_size), f"token id {{}} must be in [0, {vocab_size})"),
        (acted, acted & first, "is acted ({}), but nothing before it could predict it"),
        (
            logprob,
            acted & ~(np.isfinite(logprob) & (logprob <= 0)),
            "log-prob {} of an acted token must be finite and <= 0",
        ),
        (logprob, ~acted & (logprob != 0), "log-prob {} of a token not acted must be 0"),
        (turn, turn < 0, "turn {} must be >= 0"),
        (turn, back, "turn {} goes backwards"),
        (version, acted & (version < 0), "weight version {} of an acted token must be >= 0"),
        (version, ~acted & (version != -1), "weight version {} of a token not acted must be -1"),
    )
    found: dict[int, str] = {}
    for values, bad_t, text in rules:
        if not bad_t.any():
            continue
        places = np.flatnonzero(bad_t)
        owners = np.searchsorted(offset, places, side="right") - 1
        for owner, place in zip(*(a.tolist() for a in _firsts(owners, places)), strict=True):
            found.setdefault(
                owner, f"token {place - int(offset[owner])}: {text.format(values[place])}"
            )
    return found


def _firsts(
    owners: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    unique, where = np.unique(owners, return_index=True)
    return unique, places[where]


def _secret_problem(key: str, value: str, environment: Mapping[str, str]) -> str | None:
    if value and _SECRET_NAME.search(key):
        return f"provenance {key!r} has the name of a secret; leave it out"
    if _SECRET_VALUE.search(value):
        return f"provenance {key!r} holds a value that looks like a secret; leave it out"
    for name, secret in environment.items():
        if secret in value:
            return f"provenance {key!r} holds the value of environment variable {name}"
    return None


def _secret_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if len(value) >= _MIN_SECRET_LENGTH
        and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))
    }
