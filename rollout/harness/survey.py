"""The survey harness: the files are listed before the first action."""

from __future__ import annotations

from rollout.harness.base import PublicTask
from rollout.harness.general import General


class Survey(General):
    """Shows the instruction and the file list, then is like the general harness."""

    name = "survey"
    capabilities = frozenset({"listing"})

    def prompt(self, task: PublicTask) -> str:
        """The instruction and one line with the names of the files."""
        return f"{task.instruction}\nfiles: {' '.join(task.listing)}"
