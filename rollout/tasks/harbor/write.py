"""Writes generated tasks as Harbor task directories, which Harbor itself can run."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.errors import UserError
from rollout.records import Task
from rollout.tasks import predicates
from rollout.tasks.harbor.dataset import TREE_DIGEST, tree_digest

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


def task_files(task: Task, *, form: str = "checks", suite: str = "") -> dict[str, bytes]:
    """Path -> content of every file of a task's directory.

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
    solution = ["#!/bin/bash", "cd /app", *task.oracle]
    made = {
        "task.toml": _task_toml(task, form, suite),
        "instruction.md": f"{task.instruction}\n\nWork in the directory /app.\n",
        "environment/Dockerfile": _DOCKERFILE,
        "tests/test.sh": _TEST,
        "tests/checks.py": inspect.getsource(predicates),
        "tests/checks.json": json.dumps(manifest, indent=1) + "\n",
        "solution/solve.sh": "\n".join(solution) + "\n",
    }
    files = {path: text.encode() for path, text in made.items()}
    return files | {f"environment/files/{path}": data for path, data in task.files.items()}


def write_task(root: Path, task: Task, *, form: str = "checks", suite: str = "") -> None:
    """Write a task's directory.

    Raises:
      UserError: there is something at `root` already.
    """
    if root.exists():
        raise UserError(f"{root}: is there already")
    for directory in ("environment/files", *(f"environment/files/{d}" for d in task.directories)):
        (root / directory).mkdir(parents=True, exist_ok=True)
    for path, data in task_files(task, form=form, suite=suite).items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o755 if path.endswith(("/test.sh", "/solve.sh")) else 0o644)


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
        write_task(out / task.id, task, form=forms.get(task.family, "checks"), suite=suite)
        digest = tree_digest(out / task.id)
        lines += ["", "[[tasks]]", f"name = {_value(_full_name(task))}"]
        lines += [f"path = {_value(task.id)}", f"digest = {_value(digest)}"]
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
