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
        kept = {i for i, turn in enumerate(turns) if not is_view(turn.command)}
        if not kept:
            return None
        for i in range(len(turns) - 1, -1, -1):
            if i in kept:
                kept |= _looks_behind(turns, i, words_of([turns[i].command]) - given)
        commands = tuple(turns[i].command.strip() for i in sorted(kept))
        return Runbook(trajectory.task_id, trajectory.id, commands)


def _looks_behind(turns: list[Turn], i: int, words: frozenset[str]) -> set[int]:
    """The looks before turn i that showed its words: for each word the one that shows least.

    A search that names a file tells why it is meant; a listing that also holds it doesn't.
    """
    found: set[int] = set()
    shown = [
        (j, words_of([turn.observation]))
        for j, turn in enumerate(turns[:i])
        if is_view(turn.command) and is_evidence(turn.command)
    ]
    for word in words:
        sources = [(len(output), -j) for j, output in shown if word in output]
        if sources:
            found.add(-min(sources)[1])
    return found
