"""Judges a final working directory against a task's fixed checks; runs nothing of the agent.

A predicate is data: a name and string arguments, evaluated over a `FileTree` snapshot that was
taken after the agent's processes ended. Only regular files count as files, so a symlink to the
expected content, or a directory behind a link, never passes for the thing itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rollout.errors import VerifierError
from rollout.records import Check, CheckResult, Entry, FileTree, Task, Verdict

_KINDS = ("file", "directory", "symlink", "other")
_MODE_MASK = 0o7777


def _has_text(tree: FileTree, path: str, text: str) -> bool:
    entry = tree.get(path)
    return entry is not None and entry.kind == "file" and entry.data == text.encode()


def _text(tree: FileTree, arguments: Sequence[str]) -> bool:
    """Any of the (path, text) pairs is a regular file with exactly that text."""
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    return any(_has_text(tree, path, text) for path, text in pairs)


def _moved(tree: FileTree, arguments: Sequence[str]) -> bool:
    """The first path is gone, and any of the (path, text) pairs after it holds."""
    return arguments[0] not in tree and _text(tree, arguments[1:])


def _absent(tree: FileTree, arguments: Sequence[str]) -> bool:
    """Nothing is at the path."""
    return arguments[0] not in tree


def _directory(tree: FileTree, arguments: Sequence[str]) -> bool:
    """The path is a real directory."""
    entry = tree.get(arguments[0])
    return entry is not None and entry.kind == "directory"


def _mode(tree: FileTree, arguments: Sequence[str]) -> bool:
    """Any of the paths after the octal mode is a regular file with these permission bits."""
    wanted = int(arguments[0], 8)
    entries = [tree.get(path) for path in arguments[1:]]
    return any(e is not None and e.kind == "file" and e.mode == wanted for e in entries)


def _only(tree: FileTree, arguments: Sequence[str]) -> bool:
    """Nothing is in the tree but (some of) the paths."""
    return set(tree) <= set(arguments)


def _is_octal(text: str) -> bool:
    return 0 < len(text) <= 4 and all(c in "01234567" for c in text)


_PREDICATES: dict[
    str,
    tuple[Callable[[FileTree, Sequence[str]], bool], Callable[[Sequence[str]], bool]],
] = {
    "text": (_text, lambda a: len(a) >= 2 and len(a) % 2 == 0),
    "moved": (_moved, lambda a: len(a) >= 3 and len(a) % 2 == 1),
    "absent": (_absent, lambda a: len(a) == 1),
    "directory": (_directory, lambda a: len(a) == 1),
    "mode": (_mode, lambda a: len(a) >= 2 and _is_octal(a[0])),
    "only": (_only, lambda a: True),
}


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
        if not check.predicate or check.predicate[0] not in _PREDICATES:
            raise VerifierError(f"check {check.id!r}: unknown predicate {check.predicate[:1]!r}")
        arguments = check.predicate[1:]
        if not all(isinstance(a, str) for a in arguments) or not _PREDICATES[check.predicate[0]][1](
            arguments
        ):
            raise VerifierError(f"check {check.id!r}: bad arguments of {check.predicate[0]!r}")


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


def judge(checks: Sequence[Check], tree: FileTree) -> Verdict:
    """Evaluate every check of a manifest, in its order.

    Raises:
      VerifierError: a malformed manifest or snapshot; the attempt has no verdict then.
    """
    check_manifest(checks)
    check_snapshot(tree)
    return Verdict(
        tuple(
            CheckResult(
                c.id, c.kind, _PREDICATES[c.predicate[0]][0](tree, c.predicate[1:]), c.weight
            )
            for c in checks
        )
    )


def verify(task: Task, tree: FileTree) -> Verdict:
    """The verdict on the working directory that an attempt at `task` left behind.

    Raises:
      VerifierError: a malformed manifest or snapshot; the attempt is masked, never scored 0.
    """
    return judge(task.checks, tree)
