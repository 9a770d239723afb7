"""Qwen's chat markup as token ids: thinking off, appended turn by turn, never rendered again."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from rollout import tokenizer as tok
from rollout.tokenizer import Tokenizer

_ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
SYSTEM_OPEN = "<|im_start|>system\n"
SYSTEM_CLOSE = "<|im_end|>\n"
USER_OPEN = "<|im_start|>user\n"
USER_CLOSE = _ASSISTANT
STOP = "<|im_end|>"
OBSERVATION_OPEN = "\n<|im_start|>user\n<tool_response>\n"
OBSERVATION_CLOSE = "\n</tool_response>" + _ASSISTANT

MARKUP_RUNS = (USER_OPEN, USER_CLOSE, OBSERVATION_OPEN, OBSERVATION_CLOSE)
"""What the small tokenizer holds as single tokens: two for a prompt, two for an observation."""


def shell_tokenizer(pieces: Iterable[str]) -> Tokenizer:
    """The small tokenizer of the embedded run: Qwen's markup in as few tokens as possible."""
    return tok.shell_tokenizer(pieces, runs=MARKUP_RUNS)


class Chat:
    """Token ids of the parts of a conversation; joined in order they are Qwen's layout.

    The empty think block is part of the prompt (`enable_thinking=false`), so it is never
    sampled. A tool result is a user turn. What the policy samples is the action and the stop
    token; the newline after the stop belongs to the next observation.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an action."""
        return self.tokenizer.stop_ids

    @cached_property
    def _runs(self) -> dict[str, tuple[int, ...]]:
        runs = (SYSTEM_OPEN, SYSTEM_CLOSE, *MARKUP_RUNS)
        return {run: tuple(self.tokenizer.control(run)) for run in runs}

    def prompt(self, text: str, *, system: str = "") -> tuple[int, ...]:
        """The first user turn and the opening of the first assistant turn."""
        runs, encode = self._runs, self.tokenizer.encode
        head: tuple[int, ...] = ()
        if system:
            head = (*runs[SYSTEM_OPEN], *encode(system), *runs[SYSTEM_CLOSE])
        return (*head, *runs[USER_OPEN], *encode(text), *runs[USER_CLOSE])

    def action(self, command: str) -> tuple[int, ...]:
        """What a policy that says `command` samples, its stop token included."""
        return (*self.tokenizer.encode(command), self.stop_ids[0])

    def observation(self, text: str) -> tuple[int, ...]:
        """A tool result after a stopped action, and the opening of the next assistant turn."""
        runs = self._runs
        return (*runs[OBSERVATION_OPEN], *self.tokenizer.encode(text), *runs[OBSERVATION_CLOSE])

    def command(self, action_ids: tuple[int, ...]) -> str:
        """The text of a sampled action, without its stop token."""
        body = (
            action_ids[:-1] if action_ids[-1:] and action_ids[-1] in self.stop_ids else action_ids
        )
        return self.tokenizer.decode(body)
