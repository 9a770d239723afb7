"""Writes generated tasks as Harbor task directories, which Harbor itself can run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rollout.errors import UserError
from rollout.records import Entry, Task
from rollout.tasks import predicates
from rollout.tasks.harbor.dataset import TREE_DIGEST, digest_of

IMAGE = "python:3.12-bookworm"
AGENT_S = 600.0
VERIFIER_S = 60.0

_TEST = """\
#!/bin/sh
# What counts is the result that this writes, never an exit status.
exec python3 -I -S /tests/checks.py /app /logs/verifier
"""
_DOCKERFILE = f"""\
FROM {IMAGE}
WORKDIR /app
COPY files/ /app/
"""


@cache
def _checker() -> bytes:
    """The program that judges a generated task: the module of the predicates itself."""
    return Path(predicates.__file__).read_bytes()


def task_files(task: Task, *, form: str = "checks", suite: str = "") -> dict[str, Entry]:
    """Path -> entry of every file and empty directory of a task's directory.

    Args:
      task: the task.
      form: "checks" for results a check, "binary" for one number.
      suite: evaluation suite that the task belongs to; "" for the pool.
    """
    manifest = {
        "schema": predicates.MANIFEST_SCHEMA,
        "form": form,
        "checks": [
            {"id": c.id, "kind": c.kind, "weight": c.weight, "predicate": list(c.predicate)}
            for c in task.checks
        ],
    }
    solution = "\n".join(("#!/bin/bash", "cd /app", *task.oracle))
    folders = ("", *(f"/{d}" for d in task.directories))
    return {
        **{f"environment/files{d}": Entry("directory", 0o755) for d in folders},
        "task.toml": Entry("file", 0o644, _task_toml(task, form, suite).encode()),
        "instruction.md": Entry(
            "file", 0o644, f"{task.instruction}\n\nWork in the directory /app.\n".encode()
        ),
        "environment/Dockerfile": Entry("file", 0o644, _DOCKERFILE.encode()),
        "tests/test.sh": Entry("file", 0o755, _TEST.encode()),
        "tests/checks.py": Entry("file", 0o644, _checker()),
        "tests/checks.json": Entry("file", 0o644, (json.dumps(manifest) + "\n").encode()),
        "solution/solve.sh": Entry("file", 0o755, f"{solution}\n".encode()),
        **{f"environment/files/{p}": Entry("file", 0o644, d) for p, d in task.files.items()},
    }


def write_files(root: Path, files: Mapping[str, Entry]) -> None:
    """Write a task's files.

    Raises:
      UserError: there is something at `root` already.
    """
    if root.exists():
        raise UserError(f"{root}: is there already")
    folders = {root / path for path, e in files.items() if e.kind == "directory"}
    folders |= {(root / path).parent for path, e in files.items() if e.kind == "file"}
    for folder in sorted(folders):
        folder.mkdir(parents=True, exist_ok=True)
    for path, entry in files.items():
        if entry.kind == "file":
            (root / path).write_bytes(entry.data)
            if entry.mode & 0o100:
                (root / path).chmod(entry.mode)


def write_dataset(
    out: Path,
    name: str,
    tasks: Sequence[Task],
    forms: Mapping[str, str],
    *,
    suite: str = "",
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Write many tasks and their `dataset.toml`, whose digests say what belongs to them.

    Args:
      out: a new or empty directory.
      name: "org/name" of the dataset.
      tasks: the tasks; each goes to a directory named by its id.
      forms: family -> form of its verifier, "checks" where there is none.
      suite: evaluation suite that the tasks belong to.
      progress: called after each task.

    Raises:
      UserError: the directory has something in it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is not an empty directory; give a new one")
    out.mkdir(parents=True, exist_ok=True)
    lines = ["[dataset]", f"name = {_value(name)}", f"digest_kind = {_value(TREE_DIGEST)}"]
    for task in tasks:
        files = task_files(task, form=forms.get(task.family, "checks"), suite=suite)
        write_files(out / task.id, files)
        lines += ["", "[[tasks]]", f"name = {_value(_full_name(task))}"]
        lines += [f"path = {_value(task.id)}", f"digest = {_value(digest_of(files))}"]
        progress()
    (out / "dataset.toml").write_text("\n".join(lines) + "\n")


def _full_name(task: Task) -> str:
    return f"trsi/{task.id}"


def _task_toml(task: Task, form: str, suite: str) -> str:
    tables: dict[str, dict[str, Any]] = {
        "task": {"name": _full_name(task), "keywords": ["shell", task.family]},
        "metadata": {"difficulty": task.tier, "category": "shell"},
        "metadata.trsi": {
            "userland": "host",
            "family": task.family,
            "tier": task.tier,
            "split": task.split,
            "seed": task.seed,
            "form": form,
            **({"suite": suite} if suite else {}),
        },
        "metadata.trsi.difficulty": dict(task.difficulty),
        "agent": {"timeout_sec": AGENT_S},
        "verifier": {"timeout_sec": VERIFIER_S},
        "environment": {
            "network_mode": "no-network",
            "cpus": 1,
            "memory_mb": 512,
            "storage_mb": 64,
        },
    }
    lines = ['schema_version = "1.4"']
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(v)}" for key, v in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    # Texts, numbers and flat lists are the same in JSON and TOML.
    return json.dumps(value)
