"""Splits by content hash, and who may open which of them."""

from __future__ import annotations

import hashlib
from typing import Literal

from rollout.errors import ProtectedSplit, UserError
from rollout.records import SPLITS, Split

Purpose = Literal["train", "select", "evaluate"]

VISIBLE: dict[Purpose, Split] = {"train": "train", "select": "validation", "evaluate": "test"}
"""Purpose -> the one split that may be opened for it."""

TRAIN_SHARE = 0.7
VALIDATION_SHARE = 0.1


def split_of(key: str) -> Split:
    """The split that owns `key`, the canonical text of a task's sub-goals.

    Two tasks that ask for the same thing have the same key, whatever their seeds, files and
    paraphrases: no text is in two splits, and a larger pool never moves a task to another one.
    """
    digest = hashlib.sha256(f"split/{key}".encode()).digest()
    position = int.from_bytes(digest[:8], "big") / 2**64
    if position < TRAIN_SHARE:
        return "train"
    return "validation" if position < TRAIN_SHARE + VALIDATION_SHARE else "test"


def check_access(split: str, purpose: str) -> Split:
    """`split`, if it may be opened for `purpose`.

    Raises:
      UserError: an unknown split or purpose.
      ProtectedSplit: a split that this purpose may not see.
    """
    if purpose not in VISIBLE:
        raise UserError(f"purpose {purpose!r} is unknown; allowed: {', '.join(VISIBLE)}")
    if split not in SPLITS:
        raise UserError(f"split {split!r} is unknown; allowed: {', '.join(SPLITS)}")
    visible = VISIBLE[purpose]
    if split != visible:
        raise ProtectedSplit(
            f"split {split!r} can't be opened for the purpose {purpose!r}, which sees {visible!r}"
        )
    return visible
