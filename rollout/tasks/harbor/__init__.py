"""Tasks in Harbor's directory layout: read, checked, verified and written by our own code."""

from rollout.tasks.harbor.dataset import Dataset, open_dataset
from rollout.tasks.harbor.task import HarborTask, Step, read_task

__all__ = ["Dataset", "HarborTask", "Step", "open_dataset", "read_task"]
