"""Datasets: a directory of tasks, a local registry, or a dataset.toml. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.errors import UserError
from rollout.records import Entry
from rollout.tasks.harbor.task import HarborTask, contained, read_folder, read_task

TREE_DIGEST = "trsi-tree-1"


@dataclass(frozen=True, slots=True)
class Dataset:
    """Tasks that belong together.

    Attributes:
      name: as its manifest says, or the directory's name.
      roots: directories of the tasks.
      notes: what of the manifest has no effect here.
    """

    name: str
    roots: tuple[Path, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[HarborTask]:
        """Every task, read as it comes. Raises `UserError` at the first bad one."""
        return (read_task(root) for root in self.roots)

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self.roots)


def digest_of(files: Mapping[str, Entry]) -> str:
    """Digest of a task's files: sha256 over sorted paths, executable bits and contents."""
    digest = hashlib.sha256()
    for path, entry in sorted(files.items()):
        if entry.kind == "file":
            head = f"{path}\0{entry.mode:o}\0{len(entry.data)}\0"
            digest.update(head.encode() + entry.data)
    return f"sha256:{digest.hexdigest()}"


def open_dataset(path: Path, name: str | None = None) -> Dataset:
    """The dataset at a path.

    Args:
      path: a directory of task directories, one task directory, a `dataset.toml` or a directory
        with one, or a registry (a JSON file).
      name: in a registry, which dataset: "name" or "name@version".

    Raises:
      UserError: naming the file, the key and what is allowed.
    """
    if path.is_dir():
        if (path / "task.toml").is_file():
            return Dataset(path.resolve().name, (path,))
        if (path / "dataset.toml").is_file():
            return _manifest(path / "dataset.toml")
        roots = sorted(p for p in path.iterdir() if (p / "task.toml").is_file())
        if not roots:
            raise UserError(f"{path}: holds no task; a task is a directory with a task.toml")
        return Dataset(path.resolve().name, tuple(roots))
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    if path.suffix == ".toml":
        return _manifest(path)
    if path.suffix == ".json":
        return _registry(path, name)
    raise UserError(f"{path}: is no dataset; allowed: a directory, a .toml or a .json file")


def _manifest(path: Path) -> Dataset:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    head = content.get("dataset", {})
    tasks = content.get("tasks", [])
    if not isinstance(head, dict) or not isinstance(tasks, list) or not tasks:
        raise UserError(f"{path}: needs a table [dataset] and tables [[tasks]]")
    checked = head.get("digest_kind") == TREE_DIGEST
    roots = []
    for i, task in enumerate(tasks):
        folder = _text(task, "path", None) or _text(task, "name", "").rpartition("/")[2]
        if not folder:
            raise UserError(f"{path}: tasks.{i}: key name is missing")
        root = contained(path.parent, path.parent / folder)
        if not (root / "task.toml").is_file():
            raise UserError(f"{path}: tasks.{i}: no task at {root}")
        if checked and (found := digest_of(read_folder(root, root))) != task.get("digest"):
            raise UserError(f"{path}: tasks.{i}: {root} has digest {found}, not the one recorded")
        roots.append(root)
    foreign = not checked and any(isinstance(t, dict) and "digest" in t for t in tasks)
    notes = ("digests are of a kind that is not checked here",) if foreign else ()
    return Dataset(_text(head, "name", path.parent.resolve().name), tuple(roots), notes)


def _text(table: object, key: str, default: str | None) -> Any:
    value = table.get(key, default) if isinstance(table, Mapping) else default
    return value if isinstance(value, str) else default


def _registry(path: Path, wanted: str | None) -> Dataset:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(entries, list) or not all(
        isinstance(e, dict) and isinstance(e.get("name"), str) for e in entries
    ):
        raise UserError(f"{path}: a registry is a list of objects with a name")
    names = sorted({f"{e['name']}@{e.get('version', 'head')}" for e in entries})
    asked, _, version = (wanted or "").partition("@")
    chosen = [e for e in entries if not asked or e["name"] == asked]
    if version:
        chosen = [e for e in chosen if str(e.get("version", "head")) == version]
    if not chosen or len({e["name"] for e in chosen}) > 1:
        raise UserError(f"{path}: name one of its datasets: {', '.join(names)}")
    entry = max(chosen, key=lambda e: _order(path, str(e.get("version", "head"))))
    roots = []
    for i, task in enumerate(entry.get("tasks", [])):
        at = f"{path}: {entry['name']}: tasks.{i}"
        if not isinstance(task, dict) or not isinstance(task.get("path"), str):
            raise UserError(f"{at}: key path is missing")
        if task.get("git_url"):
            raise UserError(
                f"{at}: git_url = {task['git_url']!r}: nothing is downloaded here; clone it and"
                " name its directory"
            )
        root = contained(path.parent, path.parent / task["path"])
        if not (root / "task.toml").is_file():
            raise UserError(f"{at}: no task at {root}")
        roots.append(root)
    notes = ("metrics are not read",) if entry.get("metrics") else ()
    return Dataset(entry["name"], tuple(roots), notes)


def _order(path: Path, version: str) -> tuple[int, ...]:
    """Sorts versions; "head" beats every number."""
    if version == "head":
        return (1,)
    if not all(part.isdigit() for part in version.split(".")):
        raise UserError(
            f"{path}: version {version!r} has no order here; name the dataset with @{version}"
        )
    return (0, *map(int, version.split(".")))
