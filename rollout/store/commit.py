"""Commits: atomic transactions that any number of writers make side by side."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorstore as ts

from rollout.errors import StoreError
from rollout.store.location import MANIFEST, Location, base_spec, store_errors

_LOCK = "commit.lock"
_COLLISIONS = ("ABORTED", "ALREADY_EXISTS", "Generation mismatch")
# Writers of disjoint keys rarely collide; each round of a collision commits at least one of them.
_ATTEMPTS = 64


def commit(
    location: Location,
    database: Any,
    stage: Callable[[Any], None],
    *,
    action: str,
    settled: Callable[[], bool] = lambda: False,
) -> None:
    """Make one atomic transaction, again after each collision with another commit.

    Args:
      location: of the store.
      database: handle of it.
      stage: writes to the transaction's handle; called once an attempt.
      action: what is being done, for errors.
      settled: asked after a collision; whether somebody else wrote the same thing.

    Raises:
      StoreError: for a full disk, a missing permission, too many collisions, and what `stage` and
        `settled` raise; nothing was written then.
    """
    with store_errors(location, action):
        for attempt in range(_ATTEMPTS):
            transaction = ts.Transaction(atomic=True)
            try:
                stage(database.with_transaction(transaction))
                with commit_lock(location):
                    transaction.commit_sync()
                return
            except ValueError as error:
                transaction.abort()
                if not any(mark in str(error) for mark in _COLLISIONS):
                    raise
                if settled():
                    return
                time.sleep(0.002 * (attempt + 1))
            except BaseException:
                transaction.abort()
                raise
    raise StoreError(f"{action}: gave up after {_ATTEMPTS} collisions with other writers")


@contextmanager
def commit_lock(location: Location) -> Iterator[None]:
    """Hold off the other writers of a local store while one commits; elsewhere do nothing.

    tensorstore writes the manifest into a file "manifest.ocdbt.__lock" and renames it, under a
    lock that dies with its holder. What a killed writer had written there stays, and the next
    writer of a shorter manifest does not cut it off: the manifest is then torn and the store lost
    (seen with tensorstore 0.1.86). So every commit takes this lock first, under which nobody
    writes a manifest and what is left of one can go. Object stores put objects whole.

    Raises:
      OSError: for a missing permission.
    """
    base = base_spec(location)
    if base["driver"] != "file":
        yield
        return
    folder = Path(base["path"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("wb") as file:
        # Closing the file, by this program or by the system that kills it, gives the lock back.
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / f"{MANIFEST}.__lock").unlink(missing_ok=True)
        yield
