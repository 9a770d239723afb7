"""Writes small Harbor task directories for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

TOML = """\
schema_version = "1.4"
[metadata.trsi]
userland = "host"
[agent]
timeout_sec = 30.0
[verifier]
timeout_sec = 20.0
[environment]
network_mode = "no-network"
"""

PASS_IF_DONE = """\
#!/bin/bash
if [ "$(cat /app/answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write(root: Path, files: Mapping[str, str | bytes] | None = None) -> Path:
    """A task whose answer is the number 42 in answer.txt; `files` replace or add to its files."""
    content: dict[str, str | bytes] = {
        "task.toml": TOML,
        "instruction.md": "Write 42 to answer.txt.\n",
        "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n",
        "tests/test.sh": PASS_IF_DONE,
        "solution/solve.sh": "echo 42 > answer.txt\n",
        **(files or {}),
    }
    for name, text in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return root
