"""Opens a directory of generated Harbor tasks for one purpose; the splits hold there, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.errors import ProtectedSplit, UserError
from rollout.records import SPLITS, TIERS, Split, Task
from rollout.tasks.catalog.generate import FAMILIES, split_for
from rollout.tasks.harbor.dataset import open_dataset
from rollout.tasks.harbor.protocol import manifest_of
from rollout.tasks.harbor.support import own_metadata, plan
from rollout.tasks.harbor.task import HarborTask
from rollout.tasks.splits import VISIBLE, Purpose, check_access


def split_of_task(task: HarborTask) -> Split:
    """The split of a generated task, recomputed: what the file says has to agree.

    Raises:
      UserError: a task without the metadata of a generated one.
      ProtectedSplit: the file claims another split than the task's family and seed give.
    """
    found = own_metadata(task)
    where = task.root / "task.toml"
    family, seed, said = found.get("family"), found.get("seed"), found.get("split")
    if said not in SPLITS or not isinstance(family, str) or not isinstance(seed, int):
        raise UserError(
            f"{where}: metadata.trsi needs family, seed and split ({', '.join(SPLITS)}) for a task"
            " to be trained on"
        )
    in_pool = family in FAMILIES and "suite" not in found
    owner: Split = split_for(family, seed) if in_pool else "test"
    if said != owner:
        raise ProtectedSplit(
            f"{where}: metadata.trsi.split = {said!r}, but the task belongs to {owner!r}"
        )
    return owner


def as_task(task: HarborTask) -> Task:
    """A generated task, read back into the record that it was written from.

    Raises:
      UserError: a task of another origin.
    """
    split = split_of_task(task)
    found: Mapping[str, Any] = own_metadata(task)
    manifest = manifest_of(task, task.steps[0])
    if manifest is None or not all(c.predicate for c in manifest.checks):
        raise UserError(f"{task.root}: tests/checks.json has no predicates; not a generated task")
    if found.get("tier") not in TIERS:
        raise UserError(f"{task.root}: metadata.trsi.tier must be one of {', '.join(TIERS)}")
    files = plan(task).files
    instruction = task.steps[0].instruction.rpartition("\n\n")[0]
    oracle = task.solution(task.steps[0])["solve.sh"].data.decode().splitlines()[2:]
    return Task(
        id=task.root.name,
        family=found["family"],
        tier=found["tier"],
        split=split,
        seed=found["seed"],
        instruction=instruction,
        steps=(instruction,),
        files={path: e.data for path, e in files.items() if e.kind == "file"},
        directories=tuple(path for path, e in files.items() if e.kind == "directory"),
        checks=manifest.checks,
        oracle=tuple(oracle),
        difficulty=dict(found.get("difficulty", {})),
    )


class HarborSource:
    """Tasks of a dataset of generated tasks that one purpose may see.

    Args:
      path: what `open_dataset` opens.
      purpose: "train", "select" or "evaluate".
    """

    def __init__(self, path: Path, *, purpose: Purpose = "train") -> None:
        if purpose not in VISIBLE:
            raise UserError(f"purpose {purpose!r} is unknown; allowed: {', '.join(VISIBLE)}")
        self.dataset = open_dataset(path)
        self.purpose = purpose

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of `split`.

        Raises:
          ProtectedSplit: a split that this purpose may not see, or a task that claims a split it
            doesn't belong to.
          UserError: an unknown split or a task of another origin.
        """
        allowed = check_access(split, self.purpose)
        return [as_task(task) for task in self.dataset if split_of_task(task) == allowed]
