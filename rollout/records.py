"""What flows between the parts: tasks, verdicts, turns, trajectories. Frozen; numpy and strings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

SCHEMA_VERSION = 1

CheckKind = Literal["effective", "guard"]
Tier = Literal["easy", "medium", "hard", "extreme"]
Split = Literal["train", "validation", "test"]
TIERS: tuple[Tier, ...] = ("easy", "medium", "hard", "extreme")
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

Finish = Literal["done", "turn-limit", "token-limit", "context-limit", "time-limit", "fault"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One node of a sandbox's working directory.

    Attributes:
      kind: "file", "directory", "symlink" or "other" (device, socket, pipe).
      mode: permission bits.
      data: the file's bytes, or the target of a symlink; empty otherwise.
    """

    kind: Literal["file", "directory", "symlink", "other"]
    mode: int = 0o644
    data: bytes = b""


FileTree = Mapping[str, Entry]
"""Relative POSIX path -> entry, for everything below the working directory."""


@dataclass(frozen=True, slots=True)
class Check:
    """One verifiable fact about the final working directory, fixed when the task is made.

    Attributes:
      id: unique within the task.
      kind: "effective" fails on the untouched sandbox; "guard" passes on it.
      predicate: name and arguments of a pure function of the `FileTree`.
      weight: share in the progress of effective checks; > 0.
    """

    id: str
    kind: CheckKind
    predicate: tuple[str, ...]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Task:
    """A generated task: what the agent sees, the world it starts in, and how it is judged.

    Attributes:
      steps: the instruction's sub-goals, in order; joined they are the instruction. Public.
      files: path -> content below the working directory.
      directories: directories to make, parents first.
      checks: the fixed manifest.
      oracle: commands of one reference solution (never shown to the agent).
      difficulty: the structural measures that the tier was computed from.
    """

    id: str
    family: str
    tier: Tier
    split: Split
    seed: int
    instruction: str
    steps: tuple[str, ...]
    files: Mapping[str, bytes]
    directories: tuple[str, ...]
    checks: tuple[Check, ...]
    oracle: tuple[str, ...]
    difficulty: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Outcome of one check; `passed` is the only status that counts."""

    id: str
    kind: CheckKind
    passed: bool
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Per-check results of one final verification."""

    results: tuple[CheckResult, ...]

    @property
    def strict_success(self) -> bool:
        """S: whether every effective and every guard check passes."""
        return all(r.passed for r in self.results)

    @property
    def n_effective(self) -> int:
        """|E|, the number of effective checks."""
        return sum(r.kind == "effective" for r in self.results)

    @property
    def progress(self) -> float:
        """p = q * h: weighted share of E passed, times the share of G held; doing nothing is 0."""
        effective = [r for r in self.results if r.kind == "effective"]
        guards = [r for r in self.results if r.kind == "guard"]
        total = sum(r.weight for r in effective)
        q = sum(r.weight for r in effective if r.passed) / total if total else 0.0
        h = sum(r.passed for r in guards) / len(guards) if guards else 1.0
        return q * h


@dataclass(frozen=True, slots=True)
class Turn:
    """One action and what came back, as text for people; training reads the token arrays.

    Attributes:
      status: "ok", "timeout", "shell-exit", "killed", or "control" for a harness action that
        ran nothing in the sandbox.
    """

    command: str
    observation: str
    exit_code: int | None
    status: str = "ok"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a trajectory is masked: the `kind` of a `RolloutError` and its message."""

    kind: str
    message: str


@dataclass(frozen=True)
class Trajectory:
    """One episode, immutable.

    Attributes:
      id: unique in a run, and the same whenever the episode is repeated.
      token_ids: [T] int32, prompt, actions and observations, as the engine saw them.
      acted_t: [T] bool, true exactly where the policy sampled the token.
      logprob_t: [T] float32, behaviour log-prob under softmax(logits / temperature) over the
        full vocabulary; 0 where not acted.
      turn_t: [T] int32, index of the action turn (0-based, non-decreasing); an observation
        carries the turn it answers, the prompt carries 0.
      weight_version_t: [T] int32, version of the weights that sampled the token; -1 elsewhere.
      verdict: None exactly when `fault` is set.
      fault: infrastructure or verifier fault; the trajectory is then masked everywhere.
    """

    id: str
    task_id: str
    family: str
    tier: str
    split: str
    harness: str
    stage: str
    iteration: int
    sample: int
    seed: int
    engine: str
    temperature: float
    token_ids: npt.NDArray[np.int32]
    acted_t: npt.NDArray[np.bool_]
    logprob_t: npt.NDArray[np.float32]
    turn_t: npt.NDArray[np.int32]
    weight_version_t: npt.NDArray[np.int32]
    turns: tuple[Turn, ...]
    finish: Finish
    verdict: Verdict | None
    fault: Fault | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
