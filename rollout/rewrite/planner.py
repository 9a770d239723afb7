"""Rewrites a verified success into a runbook by rule."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.protocols import Runbook
from rollout.records import Trajectory, Turn
from rollout.rewrite.shell import is_evidence, is_view, words_of


class RulePlanner:
    """Keeps what did the work, and the looks that it depended on.

    Dropped are the harness's own actions, empty and failed commands, repeats, and pure views
    whose output gave no later command a word that the instruction hadn't.
    """

    def __init__(self, instructions: Mapping[str, str]) -> None:
        self._instructions = instructions

    def plan(self, trajectory: Trajectory) -> Runbook | None:
        """The runbook, or None when nothing that changes anything is left."""
        turns: list[Turn] = []
        for turn in trajectory.turns:
            if turn.status != "ok" or turn.exit_code != 0 or not turn.command.strip():
                continue
            # An append said twice was meant twice; anything else is idempotent.
            if turns and turns[-1].command == turn.command and ">>" not in turn.command:
                continue
            turns.append(turn)
        given = words_of([self._instructions[trajectory.task_id]])
        needed: frozenset[str] = frozenset()
        kept: list[str] = []
        for turn in reversed(turns):
            if is_view(turn.command):
                shown = words_of([turn.observation]) - given
                if not is_evidence(turn.command) or shown.isdisjoint(needed):
                    continue
                needed -= shown
            needed |= words_of([turn.command])
            kept.append(turn.command)
        if all(is_view(command) for command in kept):
            return None
        commands = tuple(command.strip() for command in reversed(kept))
        return Runbook(trajectory.task_id, trajectory.id, commands)
