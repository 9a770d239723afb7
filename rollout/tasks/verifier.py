"""Judges a final working directory against a task's fixed checks; runs nothing of the agent.

A predicate (`rollout.tasks.predicates`) is evaluated over a `FileTree` snapshot that was taken
after the agent's processes ended. What a predicate's command gave comes from whoever ran it, in a
sandbox of its own (`rollout.tasks.harbor.protocol`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rollout.errors import VerifierError
from rollout.records import Check, CheckResult, Entry, FileTree, Task, Verdict
from rollout.tasks import predicates
from rollout.tasks.predicates import Ran, Run

_KINDS = ("file", "directory", "symlink", "other")
_MODE_MASK = 0o7777


def check_manifest(checks: Sequence[Check]) -> None:
    """Refuse a manifest that can't be judged.

    Raises:
      VerifierError: no effective check, a repeated id, an unknown kind or predicate, arguments
        that the predicate doesn't take, or a weight that is not finite and positive.
    """
    if not any(c.kind == "effective" for c in checks):
        raise VerifierError("the manifest has no effective check")
    seen: set[str] = set()
    for check in checks:
        if check.id in seen:
            raise VerifierError(f"check id {check.id!r} occurs twice")
        seen.add(check.id)
        if check.kind not in ("effective", "guard"):
            raise VerifierError(f"check {check.id!r}: unknown kind {check.kind!r}")
        if not (math.isfinite(check.weight) and check.weight > 0):
            raise VerifierError(f"check {check.id!r}: weight {check.weight!r} is not positive")
        if problem := predicates.problem(check.predicate):
            raise VerifierError(f"check {check.id!r}: {problem}")


def check_snapshot(tree: FileTree) -> None:
    """Refuse a snapshot that no directory can have given.

    Raises:
      VerifierError: a path that is absolute or not in its plain form, an entry of unknown kind or
        impossible mode, or an entry whose parent is no directory of the snapshot.
    """
    for path, entry in tree.items():
        if not isinstance(path, str) or "\0" in path:
            raise VerifierError(f"snapshot: {path!r} is no path")
        if any(part in ("", ".", "..") for part in path.split("/")):
            raise VerifierError(f"snapshot: path {path!r} is not relative and plain")
        if not isinstance(entry, Entry) or entry.kind not in _KINDS:
            raise VerifierError(f"snapshot: {path!r} has no valid entry")
        if not isinstance(entry.data, bytes) or not 0 <= entry.mode <= _MODE_MASK:
            raise VerifierError(f"snapshot: {path!r} has invalid data or mode")
        parent = path.rpartition("/")[0]
        if parent and (parent not in tree or tree[parent].kind != "directory"):
            raise VerifierError(f"snapshot: the parent of {path!r} is no directory of it")


def judge(
    checks: Sequence[Check], tree: FileTree, runs: Mapping[Run, Ran] | None = None
) -> Verdict:
    """Evaluate every check of a manifest, in its order.

    Args:
      checks: the manifest.
      tree: the final working directory.
      runs: what each command of `predicates.runs_of` gave.

    Raises:
      VerifierError: a malformed manifest or snapshot, or a command whose outcome is missing; the
        attempt has no verdict then.
    """
    check_manifest(checks)
    check_snapshot(tree)
    runs = runs or {}
    for run in predicates.runs_of(c.predicate for c in checks):
        if run not in runs:
            raise VerifierError(f"nobody ran {run.command!r}, which a check judges")
    return Verdict(
        tuple(
            CheckResult(c.id, c.kind, predicates.holds(c.predicate, tree, runs), c.weight)
            for c in checks
        )
    )


def verify(task: Task, tree: FileTree) -> Verdict:
    """The verdict on the working directory that an attempt at `task` left behind.

    Raises:
      VerifierError: a malformed manifest or snapshot; the attempt is masked, never scored 0.
    """
    return judge(task.checks, tree)
