"""The process that keeps a folder's servers running: `python -m rollout.engines.sglang.supervise`.

`trsi fleet up` starts it apart from the terminal. It ends, with its servers, at SIGTERM or SIGINT.
"""

from __future__ import annotations

import fcntl
import json
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rollout.engines.sglang.servers import ServerSpec, Supervisor
from rollout.errors import UserError

SPECS = "specs.json"


def write_specs(folder: Path, specs: Sequence[ServerSpec]) -> None:
    """Say what a supervisor of this folder is to run."""
    text = json.dumps([asdict(spec) for spec in specs], indent=1) + "\n"
    (folder / SPECS).write_text(text, "utf-8")


def main(folder: Path) -> None:
    """Supervise until a signal.

    Raises:
      UserError: another supervisor has the folder.
    """
    entries = json.loads((folder / SPECS).read_text("utf-8"))
    specs = [ServerSpec(**entry | {"flags": tuple(entry["flags"])}) for entry in entries]
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{folder}: another supervisor runs here") from None
        Supervisor(specs, folder).run(stop.is_set)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
