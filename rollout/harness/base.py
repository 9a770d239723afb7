"""What a harness is: a prompt from public text, and a reply to each command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from rollout.records import Task


@dataclass(frozen=True, slots=True)
class PublicTask:
    """All that a harness may show of a task.

    Attributes:
      listing: names in the working directory at the start, sorted, as `ls` shows them.
    """

    instruction: str
    steps: tuple[str, ...]
    listing: tuple[str, ...]


def public_view(task: Task) -> PublicTask:
    """The public part of `task`: no checks, no oracle, no file contents."""
    names = {path.split("/", 1)[0] for path in (*task.files, *task.directories)}
    return PublicTask(task.instruction, task.steps, tuple(sorted(names)))


@dataclass(frozen=True, slots=True)
class Reply:
    """What happens to a command: run it, show a text of the controller, or finish."""

    kind: Literal["run", "show", "finish"]
    text: str = ""


RUN = Reply("run")
FINISH = Reply("finish")


class Harness(Protocol):
    """A controller without state of its own; everything it shows is public.

    Attributes:
      name: what trajectories and configs call it.
      control_words: commands that the controller takes for itself.
      capabilities: what it gives beyond a shell, of "listing" and "steps".
    """

    name: str
    control_words: frozenset[str]
    capabilities: frozenset[str]

    def prompt(self, task: PublicTask) -> str:
        """Text of the first user turn."""
        ...

    def reply(self, task: PublicTask, command: str, n_control: int) -> Reply:
        """What becomes of `command`, after `n_control` control words were said before it."""
        ...
