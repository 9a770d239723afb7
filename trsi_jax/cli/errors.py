"""Turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import typer

from rollout.errors import RolloutError, SandboxUnavailable, UserError

USER_MISTAKE = 2
FAILURE = 1

TRACEBACK = "TRSI_TRACEBACK"


def explain(error: BaseException) -> tuple[str, int]:
    """One line for a person, and the exit code: 2 for their own mistake, 1 for anything else."""
    if isinstance(error, typer.TyperException):
        usage = getattr(error, "format_message", error.__str__)()
        return f"{_one_line(usage)} (`trsi --help` lists what there is)", USER_MISTAKE
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; the same command goes on from the last checkpoint", FAILURE
    full = next((e for e in _chain(error) if _is_full_disk(e)), None)
    if full is not None:
        where = f" at {full.filename}" if isinstance(full, OSError) and full.filename else ""
        return (
            f"the disk is full{where}; free some space (see `df -h`) and run the same command"
            " again, it goes on from the last checkpoint",
            FAILURE,
        )
    if isinstance(error, UserError):
        return _one_line(str(error)), USER_MISTAKE
    if isinstance(error, SandboxUnavailable):
        return f"{_one_line(str(error))} (`trsi doctor` checks this machine)", FAILURE
    if isinstance(error, RolloutError):
        return f"{error.kind}: {_one_line(str(error))}", FAILURE
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}", FAILURE
    if isinstance(error, MemoryError):
        return "out of memory; close other programs or use a smaller config", FAILURE
    problem = f"{type(error).__name__}: {_one_line(str(error))}".removesuffix(": ")
    return f"{problem} (this is a bug; {TRACEBACK}=1 shows where)", FAILURE


def wants_traceback() -> bool:
    """Whether the person asked for the traceback instead of the line."""
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what caused it: libraries wrap the one that matters."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        if isinstance(current, BaseExceptionGroup):
            for member in current.exceptions:
                yield from _chain(member)
        current = current.__cause__ or current.__context__


def _is_full_disk(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    # tensorstore and orbax report the system's error as text in a ValueError.
    return os.strerror(errno.ENOSPC) in str(error)


def _one_line(text: str) -> str:
    return " ".join(text.split())
