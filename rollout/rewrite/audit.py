"""The reviewer by rule, and the check of a replay for values that came from nowhere."""

from __future__ import annotations

import re
from collections.abc import Collection

from rollout.harness import HARNESSES
from rollout.protocols import Review, Runbook
from rollout.records import Task, Trajectory
from rollout.rewrite.runbook import problems
from rollout.rewrite.shell import CHANGES, VIEWS, heads, is_evidence, is_view, literals, parse
from rollout.rewrite.shell import words_of as words

_CONTROL_WORDS = frozenset().union(*(h.control_words for h in HARNESSES.values()))
_PRIVATE = re.compile(
    r"/(?:tests?|solution|oracle|logs)\b|verifier|reward\.(?:txt|json)|ctrf\.json"
)
_ABSOLUTE = re.compile(r"(?<![\w.*?~/-])/(?!app\b|tmp\b|dev/null\b|/)[A-Za-z]\S*")


class RuleReviewer:
    """Sees the public task and the runbook; rejects what could not have been worked out.

    Rejected are places of the verifier, results written down where they had to be computed,
    prose, and actions that only a harness understands.
    """

    def review(self, instruction: str, files: Collection[str], runbook: Runbook) -> Review:
        """Accept, or reject with every reason."""
        reasons = list(problems(runbook))
        known = words((instruction, *files))
        public = " ".join((instruction, *files))
        looked = False
        for command in runbook.commands:
            if command in _CONTROL_WORDS:
                reasons.append(f"harness: {command!r} is an action of a harness")
                continue
            if parse(command) is None:
                reasons.append(f"prose: {command!r} is no shell command")
                continue
            reasons += [
                f"verifier: {command!r} names {match.group()!r}"
                for match in _PRIVATE.finditer(command)
                if match.group() not in public
            ]
            reasons += [
                f"outside: {command!r} names {match.group()!r}, outside the working directory"
                for match in _ABSOLUTE.finditer(_without_scripts(command))
            ]
            unknown = [name for name in heads(command) if name not in VIEWS | CHANGES]
            if unknown or not heads(command) or _has_comment(command):
                reasons.append(f"prose: {command!r} is no plain shell command")
            elif is_view(command) and not is_evidence(command):
                reasons.append(f"prose: {command!r} only talks")
            # What an earlier look may have shown is left to the check of the replay.
            invented = literals(command) - known
            if invented and not looked:
                reasons.append(f"literal: {command!r} writes {', '.join(sorted(invented))}")
            looked |= is_view(command) and is_evidence(command)
        return Review(not reasons, tuple(reasons))


def ungrounded(trajectory: Trajectory, task: Task) -> tuple[str, ...]:
    """Values in a replay's commands that follow from neither the instruction nor an output.

    These are literals that a command writes, and names of the sandbox, that no earlier output
    had shown. Trained on, they would teach to guess.
    """
    names = words((*task.files, *task.directories))
    seen = words([task.instruction])
    found: list[str] = []
    for turn in trajectory.turns:
        used = literals(turn.command) | (words([turn.command]) & names)
        found += sorted(used - seen)
        if is_evidence(turn.command):
            seen |= words([turn.observation])
    return tuple(found)


def _has_comment(command: str) -> bool:
    return re.search(r"(?:^|\s)#", command) is not None


def _without_scripts(command: str) -> str:
    """The line without quoted text and substitutions, whose slashes are no paths."""
    return re.sub(r"'[^']*'|\bs/\S*", " ", command)
