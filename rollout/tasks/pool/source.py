"""Opens the generated pool for one purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout.errors import UserError
from rollout.records import Split, Task
from rollout.tasks.pool.generate import generate
from rollout.tasks.splits import VISIBLE, Purpose, check_access

DEFAULT_COUNTS: Mapping[Split, int] = {"train": 600, "validation": 128, "test": 128}


class PoolSource:
    """Tasks of the pool of one seed: only the split that `purpose` may see is ever generated.

    The trainer opens it for "train", checkpoint selection for "select" (validation), and a final
    evaluation for "evaluate" (test).
    """

    def __init__(
        self,
        seed: int,
        *,
        purpose: Purpose = "train",
        counts: Mapping[Split, int] = DEFAULT_COUNTS,
    ) -> None:
        if purpose not in VISIBLE:
            raise UserError(f"purpose {purpose!r} is unknown; allowed: {', '.join(VISIBLE)}")
        self.seed = seed
        self.purpose = purpose
        self.counts = dict(counts)
        self._tasks: tuple[Task, ...] | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of `split`, always the same.

        Raises:
          ProtectedSplit: a split that this purpose may not see.
          UserError: an unknown split.
        """
        allowed = check_access(split, self.purpose)
        if self._tasks is None:
            self._tasks = generate(allowed, self.counts[allowed], self.seed)
        return self._tasks
