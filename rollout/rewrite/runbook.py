"""The schema of a runbook: one-line commands and nothing else, bounded."""

from __future__ import annotations

from rollout.protocols import Runbook

MAX_COMMANDS = 9
MAX_CHARS = 200


def problems(runbook: Runbook) -> tuple[str, ...]:
    """What breaks the schema; empty for a well-formed runbook."""
    found = []
    if not runbook.commands:
        found.append("schema: no command")
    if len(runbook.commands) > MAX_COMMANDS:
        found.append(f"schema: {len(runbook.commands)} commands, at most {MAX_COMMANDS}")
    for command in runbook.commands:
        if not command or command != command.strip():
            found.append(f"schema: {command!r} is empty or padded")
        elif not command.isprintable():
            found.append(f"schema: {command!r} is not one printable line")
        elif len(command) > MAX_CHARS:
            found.append(f"schema: a command of {len(command)} characters, at most {MAX_CHARS}")
    return tuple(found)
