"""The boundaries of the acting side. Implementations are held to shared contract suites."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rollout.records import FileTree, Task, Trajectory

# --- generation -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How to sample; every field is always sent.

    Attributes:
      max_new_tokens: most tokens to sample; 0 samples nothing.
      temperature: 0 is greedy.
      top_p: share of the probability that is kept, in (0, 1].
      top_k: number of tokens that are kept; -1 is all.
      stop_token_ids: end the output, and belong to it.
      ignore_eos: `stop_token_ids` end nothing.
      seed: of this request; None: the engine's choice (with `EngineCaps.seeded_sampling` a function
        of the request id).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion. `input_ids` is the whole context; engines reuse what they have cached.

    Attributes:
      request_id: unique among live requests.
      session_id: the trajectory; its requests come one after the other and go to one server.
      deadline_s: seconds from the call on; then the request is aborted where it is.
    """

    request_id: str
    input_ids: tuple[int, ...]
    sampling: SamplingSpec
    session_id: str | None = None
    deadline_s: float | None = None


class FinishKind(StrEnum):
    """Why a generation ended: a stop id, the length asked for, an abort or the deadline."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens [start, end), end > start, were sampled under weights `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """Sampled ids (the stop id included) and their log-probs, of equal length.

    Attributes:
      matched_stop: the last id where `finish` is STOP, else None.
      spans: cover [0, len(output_ids)) in order and without gaps; none of an empty output.
      prompt_tokens: len(input_ids) of the request.
      cached_tokens: leading tokens of the prompt that were not read again.
      engine_id: the engine or server that answered last.
      latency_s: from the call to the result, waiting included.
    """

    request_id: str
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishKind
    matched_stop: int | None
    spans: tuple[VersionSpan, ...]
    prompt_tokens: int
    cached_tokens: int
    engine_id: str
    latency_s: float


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """Weights to serve: a published directory with its manifest, or in-process parameters.

    Attributes:
      version: the trainer's step; any integer that the caller never uses for other weights.
      path: Hugging Face directory of the weights.
      manifest: tensor name -> what the directory must hold.
      params: tree of parameters; an engine in this process prefers it over `path`.
    """

    version: int
    path: Path | None = None
    manifest: Mapping[str, TensorSpec] = field(default_factory=dict)
    params: Any = None


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """Outcome of a weight update, an entry a server: `updated` ids, `failed` id -> reason."""

    version: int
    seconds: float
    updated: tuple[str, ...]
    failed: Mapping[str, str] = field(default_factory=dict)


class EngineState(StrEnum):
    """Whether an engine or server gets requests, and why not.

    STARTING: not reachable yet. READY: serves. PAUSED: holds requests because we asked it to.
    STALE: lives, but with other weights than the newest. POISONED: lives, but its weights are not
    what was published. DEAD: gone. CLOSED: `aclose` was called.
    """

    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"
    STALE = "stale"
    POISONED = "poisoned"
    DEAD = "dead"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State of one engine or server; `running` and `waiting` count requests."""

    engine_id: str
    state: EngineState
    version: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class EngineCaps:
    """What an engine can do.

    Attributes:
      seeded_sampling: request id, seed, ids and weights decide the tokens.
      hybrid: the model has recurrent layers.
      vocab_size: ids are in [0, vocab_size).
      context_len: most tokens of prompt and output together.
      max_sessions: most sessions that are open at once.
    """

    seeded_sampling: bool
    hybrid: bool
    vocab_size: int
    context_len: int
    max_sessions: int


class RolloutEngine(Protocol):
    """Token ids in, token ids and log-probs out.

    Invariants, held by `tests/engine_contract.py`:

    - len(logprobs) == len(output_ids); a stop id is included.
    - Log-probs are of softmax(logits / temperature) over the full vocabulary, truncated or not
      (temperature 0: greedy, log-probs of softmax(logits)); `score` gives the same numbers.
    - `abort` and a deadline return what was sampled so far; unknown ids are no error.
    - Spans cover the output in order and without gaps.
    - After `update_weights(v)` returns, no later request starts on an older version, and nothing is
      sampled from a cache of older weights. A request that runs meanwhile ends on the old weights
      or goes on with the new ones, and its spans say which.
    - Requests sent while paused wait. One that was running is finished, held or sent again; none
      of its tokens is lost.
    - An over-long prompt, an id outside the vocabulary, a sampling setting that cannot be served or
      the id of a live request raises `InvalidRequest` before anything is done.
    - With `caps.seeded_sampling`, request id, seed, ids and weights decide the tokens, whatever
      else runs beside.
    """

    @property
    def caps(self) -> EngineCaps:
        """Static capabilities."""
        ...

    async def open_sessions(self, session_ids: Sequence[str]) -> None:
        """Announce trajectories, in a fixed order, before their first request."""
        ...

    async def close_session(self, session_id: str) -> None:
        """The session sends no more requests; its cache may go. Unknown ids are no error."""
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one completion.

        Raises:
          InvalidRequest: for a request that no engine can serve.
          EngineError: when no server is left that could, or the engine is closed.
        """
        ...

    async def score(self, ids: Sequence[int], start: int, temperature: float) -> tuple[float, ...]:
        """Log-probs of ids[start:] given what precedes each, 1 <= start <= len(ids).

        Raises:
          InvalidRequest: for ids or a start that cannot be scored.
        """
        ...

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Stop requests (None: all); their partial output is returned to their callers."""
        ...

    async def pause(self) -> None:
        """Hold new requests. Idempotent."""
        ...

    async def resume(self) -> None:
        """Serve held requests. Idempotent."""
        ...

    async def update_weights(self, snapshot: WeightSnapshot) -> UpdateReport:
        """Swap the weights and drop every cache; works paused or not.

        Raises:
          EngineError: when nothing was updated; the old weights are served on.
        """
        ...

    async def status(self) -> tuple[EngineStatus, ...]:
        """One entry a server."""
        ...

    async def aclose(self) -> None:
        """Release everything."""
        ...


# --- sandboxes --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox must be; a limit named in `require` that cannot be enforced is an error.

    Attributes:
      directories: further absolute directories, empty, each on a file system of its own.
      network: "none", or "allowlist:NAME,*.NAME,..." of hosts that a proxy lets through.
      profile: "strict", or "compat" for images that want their own user and a writable system.
      terminal: programs may open terminals of their own (`rollout.sandbox.terminal`).
    """

    image: str | None = None
    workdir: str = "/app"
    directories: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    network: str = "none"
    memory_mb: int = 512
    cpus: float = 1.0
    pids: int = 64
    disk_mb: int = 64
    lifetime_s: float = 600.0
    profile: str = "strict"
    terminal: bool = False
    require: frozenset[str] = frozenset({"network"})


@dataclass(frozen=True, slots=True)
class ExecResult:
    """Outcome of one command: data, whatever it was.

    Attributes:
      exit_code: None when the command did not exit by itself.
      output: standard output and standard error together, the first and the last half of at most
        `max_output` bytes.
      status: "ok", "timeout", "oom", "shell-exit" or "killed".
    """

    exit_code: int | None
    output: bytes
    status: str
    truncated: bool
    total_bytes: int
    duration_s: float


class Sandbox(Protocol):
    """One fresh, isolated machine with a persistent shell, made and closed once."""

    @property
    def enforced(self) -> frozenset[str]:
        """What really holds: of network, memory, pids, cpu, disk, lifetime, syscalls."""
        ...

    async def exec(
        self, command: str, *, timeout_s: float = 10.0, max_output: int = 10_000
    ) -> ExecResult:
        """Run one command in the persistent shell; after a time-out none of its processes lives.

        Args:
          command: bash text; NUL characters are dropped, as a terminal does.
          timeout_s: seconds until its processes are killed. The shell and its state survive,
            unless it is the shell itself that does not come back.
          max_output: bytes of output to keep.

        Returns:
          The outcome. "shell-exit": the command ended the shell, a new one serves the next.

        Raises:
          SandboxDead: the sandbox is closed or has ended.
          SandboxPoisoned: its processes could not be brought under control; close it.
        """
        ...

    async def put_files(
        self,
        files: Mapping[str, bytes],
        *,
        directories: Iterable[str] = (),
        modes: Mapping[str, int] | None = None,
        links: Mapping[str, str] | None = None,
        below: str | None = None,
    ) -> None:
        """Write files, and symlinks last, making parents. Never follows links.

        `below` is the working directory or one of the spec's `directories`, here and in what
        follows; None is the working directory.

        Raises:
          TransferError: for a name that leads out, or a place that cannot be written to.
          SandboxDead: the sandbox is closed or has ended.
        """
        ...

    async def get_file(
        self, path: str, *, max_bytes: int = 1_000_000, below: str | None = None
    ) -> bytes:
        """Read one regular file. Never follows links.

        Raises:
          TransferError: if there is none, or it is larger than `max_bytes`.
          SandboxDead: the sandbox is closed.
        """
        ...

    async def snapshot(self, *, max_bytes: int = 16_000_000, below: str | None = None) -> FileTree:
        """Kill every process of the agent, then read a directory. Ends the shell.

        Raises:
          TransferError: the directory is beyond the bounds.
          SandboxDead: the sandbox is closed.
          SandboxPoisoned: a process could not be ended.
        """
        ...

    async def close(self) -> None:
        """Remove the sandbox and verify that it is gone. Idempotent."""
        ...


class SandboxBackend(Protocol):
    """Makes sandboxes of one kind."""

    @property
    def name(self) -> str:
        """Short name: "bubblewrap", "docker"."""
        ...

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A fresh sandbox, ready for commands.

        Raises:
          SandboxUnavailable: with the reason and the hint that mends it.
        """
        ...

    async def aclose(self) -> None:
        """Close every sandbox of this backend that still lives."""
        ...


@runtime_checkable
class ImageBackend(Protocol):
    """A backend whose sandboxes can run on images."""

    async def build(
        self,
        context: FileTree,
        *,
        dockerfile: str = "Dockerfile",
        network: str = "none",
        timeout_s: float = 600.0,
    ) -> str:
        """Build a Dockerfile, once for a content; the image's name for `SandboxSpec.image`.

        Raises:
          SandboxUnavailable: no engine, a base image that is not there, or a build that failed.
        """
        ...

    async def workdir_of(self, image: str) -> str:
        """The working directory that an image names; empty if it names none.

        Raises:
          SandboxUnavailable: no engine, or the image is not there.
        """
        ...


# --- trajectories -----------------------------------------------------------------------------


class TrajectoryWriter(Protocol):
    """Appends immutable trajectories; a batch is committed whole or not at all."""

    def write(self, segment: str, trajectories: Sequence[Trajectory]) -> None:
        """Commit one segment atomically; committing the same segment again replaces nothing.

        Raises:
          ContractViolation: for a record that breaks the contract; the others are not written.
        """
        ...


class TrajectoryReader(Protocol):
    """Reads whole trajectories of committed segments."""

    def segments(self) -> tuple[str, ...]:
        """Names of the committed segments, sorted."""
        ...

    def read(self, segment: str) -> tuple[Trajectory, ...]:
        """All trajectories of a segment, in the order written."""
        ...

    def get(self, trajectory_id: str) -> Trajectory:
        """One trajectory by id. Raises `StoreError` that names the id if there is none."""
        ...

    def __iter__(self) -> Iterator[Trajectory]:
        """Every trajectory, segment by segment."""
        ...


# --- rewriting --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Runbook:
    """An action sequence and nothing else, rewritten from one verified success."""

    task_id: str
    source_id: str
    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Review:
    """The reviewer's judgement; a rejection names its reasons."""

    accepted: bool
    reasons: tuple[str, ...] = ()


class Planner(Protocol):
    """Rewrites a verified success into a runbook."""

    def plan(self, trajectory: Trajectory) -> Runbook | None:
        """None when nothing executable is left."""
        ...


class Reviewer(Protocol):
    """Sees only the public task and the runbook."""

    def review(self, instruction: str, files: Collection[str], runbook: Runbook) -> Review:
        """Reject leaks of the verifier's answers, harness-specific actions and prose."""
        ...


class TaskSource(Protocol):
    """Gives the tasks of one split."""

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of `split`. Raises `ProtectedSplit` where the caller may not see them."""
        ...
