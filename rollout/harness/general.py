"""The general harness: an instruction and a shell. Deployment and replay use this one."""

from __future__ import annotations

from rollout.harness.base import FINISH, RUN, PublicTask, Reply


class General:
    """Shows the instruction; `done` finishes."""

    name = "general"
    control_words = frozenset({"done"})
    capabilities: frozenset[str] = frozenset()

    def prompt(self, task: PublicTask) -> str:
        """The instruction alone."""
        return task.instruction

    def reply(self, task: PublicTask, command: str, n_control: int) -> Reply:
        """Everything but `done` goes to the shell."""
        return FINISH if command in self.control_words else RUN
