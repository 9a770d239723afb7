"""Processes of SGLang servers: how one is started, watched, started again, and ended.

Each runs with the interpreter of an environment of its own (requirements/sglang.sh) and in a
process group of its own, so that what it starts ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from rollout import snapshots
from rollout.errors import EngineError, UserError

_CPU_LAUNCH = Path(__file__).with_name("cpu_launch.py")
_CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    # An idle scheduler would spin on a core that others could use.
    "--sleep-on-idle",
)
_CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # A server that crashed would wait 65 s for a GPU to settle and its core to be dumped.
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
}
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server to run.

    Attributes:
      python: interpreter of the environment that sglang is installed in.
      model: Hugging Face directory to start with, when nothing was published yet.
      port: on `host`; the control routes are open to whoever reaches it, so keep it private.
      context_len: most tokens of prompt and output together.
      weights: folder of published snapshots; a server starts with the newest.
      cpu: run without a GPU.
      skip_tokenizer: serve token ids only; then the model needs no tokenizer.
      flags: further options of `sglang.launch_server`.
    """

    python: str
    model: str
    port: int
    context_len: int
    host: str = "127.0.0.1"
    weights: str = ""
    cpu: bool = False
    skip_tokenizer: bool = True
    flags: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self.host}:{self.port}"

    def start_from(self) -> tuple[Path, int]:
        """Directory and version to start with: the newest snapshot, or the model as version 0."""
        newest = snapshots.latest(Path(self.weights)) if self.weights else None
        if newest is None:
            return Path(self.model), 0
        return newest, snapshots.open_snapshot(newest)[0].version

    def command(self) -> list[str]:
        """The command line, for the weights that are newest now."""
        model, version = self.start_from()
        launcher = [str(_CPU_LAUNCH)] if self.cpu else ["-m", "sglang.launch_server"]
        line = [
            *(self.python, *launcher, "--model-path", str(model.resolve())),
            *("--host", self.host, "--port", str(self.port)),
            *("--weight-version", str(version), "--context-length", str(self.context_len)),
            "--skip-server-warmup",
        ]
        line += _CPU_FLAGS if self.cpu else ()
        line += ["--skip-tokenizer-init"] if self.skip_tokenizer else []
        return [*line, *self.flags]


def launch(spec: ServerSpec, log: Path) -> subprocess.Popen[bytes]:
    """Start the process of a server; it answers later (`reachable`).

    Raises:
      UserError: there is no such interpreter or model.
    """
    if not Path(spec.python).is_file():
        raise UserError(
            f"no interpreter {spec.python}; `sh requirements/sglang.sh` makes an environment"
        )
    model, _ = spec.start_from()
    if not (model / "config.json").is_file():
        raise UserError(f"no config.json in {model}; a server starts with a model directory")
    environment = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1")
    # What this project's processes need says nothing about the server's.
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        environment.pop(name, None)
    if spec.cpu:
        environment |= _CPU_ENVIRONMENT
        environment.setdefault("OMP_NUM_THREADS", "1")
    with log.open("ab") as output:
        return subprocess.Popen(
            spec.command(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def end_group(group: int, wait_s: float = _STOP_S) -> None:
    """End a server and all that it started: asked first, then killed."""
    for number, patience in ((signal.SIGTERM, wait_s), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
        until = time.monotonic() + patience
        while time.monotonic() < until:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(group, os.WNOHANG)
            if not _group_lives(group):
                return
            time.sleep(0.05)


def _group_lives(group: int) -> bool:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
                if int(fields[2]) == group and fields[0] != "Z":
                    return True
    return False


def reachable(url: str, timeout_s: float = 5.0) -> str | None:
    """The weight version that a server claims; None if it doesn't answer.

    `/model_info` answers while weights are replaced too; `/health` would not.
    """
    try:
        reply = httpx.get(f"{url}/model_info", timeout=timeout_s, trust_env=False)
        return str(reply.json()["weight_version"]) if reply.status_code == 200 else None
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


# --- supervision ------------------------------------------------------------------------------


@dataclass(slots=True)
class Watched:
    """A server that a supervisor keeps running.

    Attributes:
      state: "starting", "ready", "waiting" for its next start, or "given up".
      group: its process group; 0 while it has none.
      born: start time of the group's leader in clock ticks since boot, which tells it from a
        later process of the same number.
      ends: times at which it ended by itself.
    """

    spec: ServerSpec
    log: Path
    process: subprocess.Popen[bytes] | None = None
    state: str = "waiting"
    group: int = 0
    born: int = 0
    since: float = 0.0
    next_start: float = 0.0
    ends: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Patience:
    """Bounds of a supervisor.

    Attributes:
      start_s: how long a server may take to answer.
      backoff_s, backoff_max_s: the doubling waits before it is started again.
      ends, within_s: as many ends within this time, and it is given up.
    """

    start_s: float = 600.0
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0
    ends: int = 5
    within_s: float = 900.0


class Supervisor:
    """Keeps servers running, and writes down in `fleet.json` what runs.

    They start one after the other, since importing sglang takes all cores, and always with the
    newest published weights. One that ends by itself is started again after a wait that doubles;
    one that keeps ending is given up, and said so.
    """

    def __init__(
        self, specs: Sequence[ServerSpec], folder: Path, patience: Patience | None = None
    ) -> None:
        self._folder = folder
        self._patience = patience or Patience()
        self.servers = [Watched(s, folder / f"server-{s.port}.log") for s in specs]

    def step(self) -> None:
        """Look at every server once, and start at most one."""
        now = time.monotonic()
        for server in self.servers:
            if server.process is not None and server.process.poll() is not None:
                self._ended(server, now)
            elif server.state == "starting":
                if reachable(server.spec.url, 1.0) is not None:
                    server.state = "ready"
                elif now - server.since > self._patience.start_s:
                    end_group(server.group)
                    self._ended(server, now)
        if not any(server.state == "starting" for server in self.servers):
            due = [s for s in self.servers if s.state == "waiting" and s.next_start <= now]
            if due:
                self._start(due[0], now)
        self._write()

    def stop(self) -> None:
        """End every server."""
        for server in self.servers:
            if server.group:
                end_group(server.group)
                server.process, server.group, server.state = None, 0, "stopped"
        self._write()

    def run(self, stopped: Callable[[], bool], pause_s: float = 0.5) -> None:
        """`step` until `stopped`, then `stop`."""
        try:
            while not stopped():
                self.step()
                time.sleep(pause_s)
        finally:
            self.stop()

    def _start(self, server: Watched, now: float) -> None:
        server.process = launch(server.spec, server.log)
        server.group = server.process.pid
        server.born = _born(server.group)
        server.state, server.since = "starting", now

    def _ended(self, server: Watched, now: float) -> None:
        # Its main process is gone; the ones that it started may not be.
        end_group(server.group, 2.0)
        patience = self._patience
        server.process, server.group = None, 0
        server.ends = [t for t in server.ends if now - t < patience.within_s] + [now]
        if len(server.ends) >= patience.ends:
            server.state = "given up"
            return
        wait = patience.backoff_s * 2.0 ** (len(server.ends) - 1)
        server.state, server.next_start = "waiting", now + min(wait, patience.backoff_max_s)

    def _write(self) -> None:
        content = {
            "supervisor": {"pid": os.getpid(), "born": _born(os.getpid())},
            "servers": [
                {
                    "url": s.spec.url,
                    "state": s.state,
                    "group": s.group,
                    "born": s.born,
                    "ends": len(s.ends),
                    "log": str(s.log),
                    "spec": asdict(s.spec),
                }
                for s in self.servers
            ],
        }
        partial = self._folder / ".fleet.json.partial"
        partial.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        partial.rename(self._folder / "fleet.json")


def read_state(folder: Path) -> Mapping[str, Any] | None:
    """What a supervisor last wrote; None if there is nothing.

    Raises:
      EngineError: for a file that is no state.
    """
    path = folder / "fleet.json"
    try:
        content: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise EngineError(f"{path}: unreadable ({error})") from error
    return content


def lives(pid: int, born: int) -> bool:
    """Whether the process that had this number when it was written down still runs."""
    return pid > 0 and _born(pid) == born


def _born(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] == "Z" else int(fields[19])
