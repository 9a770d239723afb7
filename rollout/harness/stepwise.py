"""The stepwise harness: the controller keeps the plan and shows one step at a time."""

from __future__ import annotations

from rollout.harness.base import FINISH, RUN, PublicTask, Reply


class Stepwise:
    """Shows the first step; each `next` shows the following one, the last `next` finishes."""

    name = "stepwise"
    control_words = frozenset({"next"})
    capabilities = frozenset({"steps"})

    def prompt(self, task: PublicTask) -> str:
        """The first step, marked as one, since a one-step task reads alike elsewhere."""
        return f"step: {task.steps[0]}"

    def reply(self, task: PublicTask, command: str, n_control: int) -> Reply:
        """`next` is the controller's; everything else goes to the shell."""
        if command not in self.control_words:
            return RUN
        shown = n_control + 1
        if shown == len(task.steps):
            return FINISH
        return Reply("show", f"step: {task.steps[shown]}")
