"""One task directory: what it holds, and that nothing of it lies elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollout.errors import UserError
from rollout.records import Entry
from rollout.tasks.harbor.config import StepConfig, TaskConfig, read_config

MAX_FOLDER_BYTES = 64 << 20
MAX_FOLDER_FILES = 10_000

_CANARY = re.compile(r"\s*(<!--.*?-->|#[^\n]*)[^\S\n]*\n?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Step:
    """One request of a task; most tasks have one, without a name.

    Attributes:
      folders: where its tests lie, task's first: later ones override.
      solutions: where its solution lies, own first.
      workdir: files to add to the working directory before the step.
    """

    name: str
    instruction: str
    config: StepConfig
    folders: tuple[Path, ...]
    solutions: tuple[Path, ...]
    workdir: Path | None = None


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task read from a directory.

    Attributes:
      root: the directory.
      name: "org/name" of task.toml, or the directory's name.
      unknown_keys: keys of task.toml that this reader doesn't know.
      notes: further things of the task that have no effect here.
    """

    root: Path
    name: str
    config: TaskConfig
    steps: tuple[Step, ...]
    unknown_keys: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def environment(self) -> Path:
        """The build context of the task's environment; it may be missing."""
        return self.root / "environment"

    def tests(self, step: Step) -> Mapping[str, Entry]:
        """Files of a step's tests, relative to /tests."""
        merged: dict[str, Entry] = {}
        for folder in step.folders:
            merged |= self._folder(folder)
        return merged

    def solution(self, step: Step) -> Mapping[str, Entry]:
        """Files of a step's reference solution, relative to /solution; empty without one."""
        return next((self._folder(f) for f in step.solutions if f.is_dir()), {})

    def workdir(self, step: Step) -> Mapping[str, Entry]:
        """Files that a step adds to the working directory."""
        return {} if step.workdir is None else self._folder(step.workdir)

    def context(self) -> Mapping[str, Entry]:
        """Files of the environment's build context."""
        return self._folder(self.environment) if self.environment.is_dir() else {}

    def _folder(self, folder: Path) -> dict[str, Entry]:
        return read_folder(self.root, folder)


def contained(root: Path, path: Path) -> Path:
    """`path`, if it lies below `root` once every link is followed.

    Raises:
      UserError: for a path that leads out.
    """
    inside = root.resolve()
    if not path.resolve().is_relative_to(inside):
        raise UserError(f"{path}: leads out of {root}")
    return path


def read_folder(root: Path, folder: Path) -> dict[str, Entry]:
    """Files and directories below `folder`, by relative path.

    Raises:
      UserError: for a link that leads out of the task, something that is neither file nor
        directory, or more than the module's bounds.
    """
    contained(root, folder)
    tree: dict[str, Entry] = {}
    left = MAX_FOLDER_BYTES
    for path in sorted(folder.rglob("*")):
        contained(root, path)
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            tree[name] = Entry("directory", 0o755)
        elif path.is_file():
            left -= path.stat().st_size
            if left < 0 or len(tree) == MAX_FOLDER_FILES:
                raise UserError(
                    f"{folder}: holds more than {MAX_FOLDER_BYTES >> 20} MiB"
                    f" or {MAX_FOLDER_FILES} entries"
                )
            mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            tree[name] = Entry("file", mode, path.read_bytes())
        else:
            raise UserError(f"{path}: is neither a file nor a directory")
    return tree


def _instruction(root: Path, path: Path) -> str:
    """The request without leading canary lines, which mark a data set for crawlers."""
    if not contained(root, path).is_file():
        raise UserError(f"{path}: no such file; every task and step has an instruction.md")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error})") from None
    while (match := _CANARY.match(text)) and "canary" in match[1].lower():
        text = text[match.end() :]
    return text.strip()


def _need_tests(root: Path, folders: tuple[Path, ...]) -> None:
    for folder in folders:
        if contained(root, folder / "test.sh").is_file():
            return
    if any((folder / "test.bat").is_file() for folder in folders):
        raise UserError(f"{folders[-1]}: has a test.bat; only test.sh is supported")
    raise UserError(f"{folders[-1] / 'test.sh'}: no such file; it is what verifies a task")


def read_task(root: Path) -> HarborTask:
    """Read a task directory.

    Raises:
      UserError: naming file, key and what is allowed; or the path that leads out of the task.
    """
    config = read_config(contained(root, root / "task.toml"))
    notes = [f"{name} is not read" for name in ("trajectory.json",) if (root / name).exists()]
    tests, solution = root / "tests", root / "solution"
    steps: list[Step] = []
    if config.steps:
        for own in config.steps:
            folder = contained(root, root / "steps" / own.name)
            folders = tuple(f for f in (tests, folder / "tests") if f.is_dir())
            _need_tests(root, folders or (folder / "tests",))
            workdir = folder / "workdir"
            steps.append(
                Step(
                    name=own.name,
                    instruction=_instruction(root, folder / "instruction.md"),
                    config=_inherit(own, config),
                    folders=folders,
                    solutions=(folder / "solution", solution),
                    workdir=workdir if workdir.is_dir() else None,
                )
            )
    else:
        _need_tests(root, (tests,))
        whole = StepConfig(name="task", agent=config.agent, verifier=config.verifier)
        instruction = _instruction(root, root / "instruction.md")
        steps.append(Step("", instruction, whole, (tests,), (solution,)))
    return HarborTask(
        root=root,
        name=config.task.name if config.task else root.resolve().name,
        config=config,
        steps=tuple(steps),
        unknown_keys=config.unknown_keys,
        notes=tuple(notes),
    )


def _inherit(step: StepConfig, config: TaskConfig) -> StepConfig:
    """A step with the task's agent and verifier where it doesn't say otherwise."""
    said = step.model_fields_set
    return step.model_copy(
        update={k: getattr(config, k) for k in ("agent", "verifier") if k not in said}
    )
