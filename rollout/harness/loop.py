"""The turn loop that all harnesses share, live against an engine or rendered from a text."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rollout.chat import Chat, shell_tokenizer
from rollout.errors import EngineError, HarnessError
from rollout.harness.base import Harness, PublicTask
from rollout.protocols import (
    FinishKind,
    GenerateRequest,
    GenerateResult,
    RolloutEngine,
    SamplingSpec,
    Sandbox,
)
from rollout.records import Finish, Turn

OBSERVATION_WORDS = 8
OBSERVATION_CHARS = 96

HARNESS_WORDS = (
    *("done", "next", "step", "files", "err"),
    *("empty", "malformed", "timeout", "oom", "exit", "killed"),
    *("1", "2", "126", "127"),
)
"""Words that harnesses say by themselves, for the vocabulary of a small tokenizer."""

_STATUS_WORDS = {"timeout": "timeout", "oom": "oom", "shell-exit": "exit", "killed": "killed"}


def shell_chat(pieces: Iterable[str]) -> Chat:
    """The chat of the embedded run: the small tokenizer over `pieces` and what harnesses say."""
    return Chat(shell_tokenizer((*pieces, *HARNESS_WORDS)))


@dataclass(frozen=True, slots=True)
class Limits:
    """Where an episode ends by itself; it is graded all the same.

    Attributes:
      turns: actions.
      turn_tokens: sampled tokens of one action, its stop token included.
      context: tokens of the whole episode.
      command_s: time-out of one command.
      commands_s: time of all commands together; None: no limit.
      output_bytes: what is kept of one command's output.
    """

    turns: int = 10
    turn_tokens: int = 24
    context: int = 128
    command_s: float = 2.0
    commands_s: float | None = None
    output_bytes: int = 4_000


class DemonstrationTurn(Protocol):
    """One command of a demonstration and what it gave."""

    @property
    def command(self) -> str:
        """What was typed; a control word of the harness for a controller's action."""
        ...

    @property
    def stdout(self) -> bytes:
        """What the command printed."""
        ...

    @property
    def exit_code(self) -> int | None:
        """How it ended; None for a control word."""
        ...


class Demonstration(Protocol):
    """A transcript as text: what was public, and the turns."""

    @property
    def instruction(self) -> str:
        """The whole instruction."""
        ...

    @property
    def steps(self) -> tuple[str, ...]:
        """Its sub-goals."""
        ...

    @property
    def listing(self) -> tuple[str, ...]:
        """Names in the working directory at the start, sorted."""
        ...

    @property
    def turns(self) -> Sequence[DemonstrationTurn]:
        """Commands in order."""
        ...


@dataclass(frozen=True)
class Rendered:
    """Token arrays of one episode, without what only sampling knows.

    Attributes:
      token_ids: [T] int32.
      acted_t: [T] bool, the tokens that a policy samples.
      turn_t: [T] int32, the turn of each token.
    """

    token_ids: npt.NDArray[np.int32]
    acted_t: npt.NDArray[np.bool_]
    turn_t: npt.NDArray[np.int32]


def observe(output: bytes, exit_code: int | None, status: str = "ok") -> str:
    """The short text that an agent sees of a command's outcome.

    The first eight words of the output on success, `err N` after a failure, `err timeout` and
    the like when the command did not end by itself.
    """
    if status != "ok" or exit_code is None:
        return f"err {_STATUS_WORDS.get(status, 'killed')}"
    if exit_code != 0:
        return f"err {exit_code}"
    words = output.decode("utf-8", "replace").split(maxsplit=OBSERVATION_WORDS)
    return " ".join(words[:OBSERVATION_WORDS])[:OBSERVATION_CHARS]


class Episode:
    """An episode in the making: the one place where its tokens, masks and turns are laid.

    The caller alternates `request` and `act`, and answers a command that `act` hands out with
    `observed`. An observation enters the tokens only when an action follows it, so an episode
    ends with its last action.
    """

    def __init__(self, harness: Harness, chat: Chat, task: PublicTask, limits: Limits) -> None:
        self._harness = harness
        self._chat = chat
        self._task = task
        self._limits = limits
        self._n_control = 0
        self._commands_s = 0.0
        self._pending: tuple[int, ...] = ()
        self._command: str | None = None
        self._ids = list(chat.prompt(harness.prompt(task)))
        self._logprob = [0.0] * len(self._ids)
        self._version = [-1] * len(self._ids)
        self._acted = [False] * len(self._ids)
        self._turn_t = [0] * len(self._ids)
        self.turns: list[Turn] = []
        self.finish: Finish | None = None

    def request(self) -> tuple[tuple[int, ...], int] | None:
        """The whole context and the number of tokens to sample; None when the episode is over."""
        if self.finish is not None:
            return None
        if len(self.turns) == self._limits.turns:
            self.finish = "turn-limit"
            return None
        limit = self._limits.commands_s
        if limit is not None and self._commands_s >= limit:
            self.finish = "time-limit"
            return None
        room = self._limits.context - len(self._ids) - len(self._pending)
        if room < 1:
            self.finish = "context-limit"
            return None
        self._append(self._pending, turn=max(len(self.turns) - 1, 0))
        self._pending = ()
        return tuple(self._ids), min(self._limits.turn_tokens, room)

    def act(
        self,
        action: tuple[int, ...],
        *,
        stopped: bool,
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
    ) -> str | None:
        """Lay one sampled action; returns the command to run in the sandbox, if there is one."""
        turn = len(self.turns)
        self._append(action, turn=turn, acted=True, logprobs=logprobs, versions=versions)
        command = self._chat.command(action).strip()
        if not stopped:
            full = len(self._ids) >= self._limits.context
            self.finish = "context-limit" if full else "token-limit"
            self._say(command, "")
            return None
        # U+FFFD stands for sampled bytes that are no text; no shell takes NUL.
        malformed = "\ufffd" in command or "\0" in command
        if not command or malformed:
            self._say(command, "err malformed" if malformed else "err empty")
            return None
        reply = self._harness.reply(self._task, command, self._n_control)
        if reply.kind == "run":
            self._command = command
            return command
        self._n_control += 1
        if reply.kind == "finish":
            self.finish = "done"
        self._say(command, reply.text)
        return None

    def observed(
        self, output: bytes, exit_code: int | None, status: str = "ok", seconds: float = 0.0
    ) -> None:
        """Lay what came of the command that `act` handed out."""
        if self._command is None:
            raise HarnessError("an observation without a command")
        text = observe(output, exit_code, status)
        self.turns.append(Turn(self._command, text, exit_code, status))
        self._command = None
        self._commands_s += seconds
        self._pending = self._chat.observation(text)

    def tokens(self) -> Rendered:
        """The tokens laid so far."""
        return Rendered(
            token_ids=np.asarray(self._ids, np.int32),
            acted_t=np.asarray(self._acted, np.bool_),
            turn_t=np.asarray(self._turn_t, np.int32),
        )

    def behaviour(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Log-probs [T] and weight versions [T] of the sampled tokens; 0 and -1 elsewhere."""
        return np.asarray(self._logprob, np.float32), np.asarray(self._version, np.int32)

    def _say(self, command: str, text: str) -> None:
        self.turns.append(Turn(command, text, None, "control"))
        self._pending = self._chat.observation(text)

    def _append(
        self,
        ids: tuple[int, ...],
        *,
        turn: int,
        acted: bool = False,
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
    ) -> None:
        n = len(ids)
        for given in (logprobs, versions):
            if given is not None and len(given) != n:
                raise HarnessError(f"{len(given)} log-probs or versions for {n} sampled tokens")
        self._ids += ids
        self._acted += [acted] * n
        self._turn_t += [turn] * n
        self._logprob += [0.0] * n if logprobs is None else logprobs
        self._version += [-1] * n if versions is None else versions


async def run_episode(
    episode: Episode,
    engine: RolloutEngine,
    sandbox: Sandbox,
    *,
    chat: Chat,
    limits: Limits,
    episode_id: str,
    seed: int,
    temperature: float,
    part: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> str:
    """Drive `episode` to its end; returns the name of the engine that sampled it.

    Args:
      episode: at its start.
      engine: samples; the session `episode_id` is open.
      sandbox: with the task's files in place.
      chat: whose stop tokens end an action.
      limits: those of `episode`.
      episode_id: session of all requests; request k is `episode_id/k`.
      seed: every turn's sampling seed derives from it.
      temperature: of the sampling.
      part: entered with "generate" or "sandbox" around each wait, to book the time.

    Raises:
      EngineError, SandboxError: infrastructure faults; `episode` then holds what was laid.
    """
    engine_id = ""
    while (request := episode.request()) is not None:
        ids, room = request
        turn = len(episode.turns)
        call = GenerateRequest(
            request_id=f"{episode_id}/{turn}",
            input_ids=ids,
            sampling=SamplingSpec(
                max_new_tokens=room,
                temperature=temperature,
                stop_token_ids=chat.stop_ids,
                seed=zlib.crc32(f"{seed}/{turn}".encode()) & 0x7FFFFFFF,
            ),
            session_id=episode_id,
        )
        with part("generate"):
            result = await engine.generate(call)
        engine_id = result.engine_id
        command = episode.act(
            result.output_ids,
            stopped=_stopped(result, chat.stop_ids),
            logprobs=result.logprobs,
            versions=_versions(result),
        )
        if command is not None:
            with part("sandbox"):
                outcome = await sandbox.exec(
                    command, timeout_s=limits.command_s, max_output=limits.output_bytes
                )
            episode.observed(outcome.output, outcome.exit_code, outcome.status, outcome.duration_s)
    return engine_id


def render(
    harness: Harness, chat: Chat, demonstration: Demonstration, *, limits: Limits | None = None
) -> Rendered:
    """The tokens that a live episode with these commands and outputs would have.

    Raises:
      HarnessError: when the demonstration does not fit into `limits`, or goes on after its end.
    """
    limits = limits or Limits()
    task = PublicTask(demonstration.instruction, demonstration.steps, demonstration.listing)
    episode = Episode(harness, chat, task, limits)
    for index, turn in enumerate(demonstration.turns):
        request = episode.request()
        action = chat.action(turn.command)
        if request is None or len(action) > request[1]:
            why = episode.finish or "token-limit"
            raise HarnessError(f"turn {index} of a demonstration comes after its end: {why}")
        if episode.act(action, stopped=True) is not None:
            episode.observed(turn.stdout, turn.exit_code)
    return episode.tokens()


def _stopped(result: GenerateResult, stop_ids: tuple[int, ...]) -> bool:
    if result.finish is FinishKind.ABORT:
        raise EngineError(f"request {result.request_id} was aborted")
    return result.output_ids[-1:] != () and result.output_ids[-1] in stop_ids


def _versions(result: GenerateResult) -> list[int]:
    versions = [-1] * len(result.output_ids)
    for span in result.spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return versions
