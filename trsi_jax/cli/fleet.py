"""`trsi fleet up|status|down`: SGLang servers on this machine, started, watched, ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout.errors import EngineError, UserError

app = typer.Typer(
    help="SGLang servers on this machine, in an environment of their own: start, look, end.",
    no_args_is_help=True,
)

Folder = Annotated[
    Path, typer.Option(help="Where logs and the state of this machine's servers are kept.")
]
_FOLDER = Path("runs/fleet")
_DOWN_S = 60.0


@app.command()
def up(
    model: Annotated[Path, typer.Option(help="Hugging Face directory that servers start with.")],
    weights: Annotated[
        Path | None,
        typer.Option(help="Folder of published snapshots; servers start with its newest."),
    ] = None,
    servers: Annotated[int, typer.Option(min=1, max=64, help="How many.")] = 1,
    port: Annotated[int, typer.Option(min=1, max=65_000, help="Of the first; others follow.")] = (
        30_000
    ),
    host: Annotated[
        str, typer.Option(help="Address to listen on; who reaches it can replace the weights.")
    ] = "127.0.0.1",
    context: Annotated[int, typer.Option(min=8, help="Tokens of prompt and output.")] = 4096,
    python: Annotated[Path, typer.Option(help="Interpreter of the servers' environment.")] = Path(
        ".venv-sglang/bin/python"
    ),
    cpu: Annotated[bool, typer.Option("--cpu", help="Run without a GPU (dense Qwen3 only).")] = (
        False
    ),
    folder: Folder = _FOLDER,
    wait: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for all servers; 0: don't.")
    ] = 900.0,
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- FLAGS", help="Further options of sglang.launch_server."),
    ] = None,
) -> None:
    """Start servers and a supervisor that starts them again when they end."""
    import subprocess
    import sys

    from rollout.engines.sglang import supervise
    from rollout.engines.sglang.servers import ServerSpec

    if _supervisor(folder):
        raise UserError(f"{folder}: its servers run already; `trsi fleet down` ends them")
    for what, path in (("--python", python), ("--model", model / "config.json")):
        if not path.is_file():
            hint = "; `sh requirements/sglang.sh` makes one" if what == "--python" else ""
            raise UserError(f"{what}: no {path}{hint}")
    specs = [
        ServerSpec(
            # Not resolved: the interpreter of an environment is a link that must be called itself.
            python=str(python.absolute()),
            model=str(model.resolve()),
            port=port + number,
            host=host,
            context_len=context,
            weights=str(weights.resolve()) if weights else "",
            cpu=cpu,
            flags=tuple(flags or ()),
        )
        for number in range(servers)
    ]
    _end_leftovers(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fleet.json").unlink(missing_ok=True)
    supervise.write_specs(folder, specs)
    with (folder / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", supervise.__name__, str(folder.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    until = time.monotonic() + wait
    said: dict[str, str] = {}
    while time.monotonic() < until:
        if process.poll() is not None:
            raise EngineError(f"the supervisor ended; see {folder / 'supervisor.log'}")
        entries = _entries(folder)
        for entry in entries:
            if said.get(entry["url"]) != entry["state"]:
                said[entry["url"]] = entry["state"]
                typer.echo(f"{entry['url']}  {entry['state']}")
        if any(entry["state"] == "given up" for entry in entries):
            raise EngineError(f"a server keeps ending; see its log in {folder}")
        if entries and all(entry["state"] == "ready" for entry in entries):
            return
        time.sleep(0.2)
    if wait:
        raise EngineError(f"not all servers answer after {wait:g} s; see the logs in {folder}")


@app.command()
def status(folder: Folder = _FOLDER) -> int:
    """Say of each server whether it answers, and which weights it claims."""
    from rollout.engines.sglang.servers import reachable

    entries = _entries(folder)
    if not entries:
        raise UserError(f"no servers in {folder}; `trsi fleet up` starts some")
    watched = _supervisor(folder)
    typer.echo(f"supervisor  {f'process {watched}' if watched else 'gone'}")
    healthy = bool(watched)
    for entry in entries:
        version = reachable(entry["url"])
        healthy &= version is not None
        answer = f"weights {version}" if version is not None else "no answer"
        state = entry["state"] if watched else "unwatched"
        typer.echo(f"{entry['url']}  {state}  {answer}  ended {entry['ends']} times")
    return 0 if healthy else 1


@app.command()
def down(folder: Folder = _FOLDER) -> None:
    """End the servers and their supervisor; nothing of them stays behind."""
    import os
    import signal

    entries = _entries(folder)
    if not entries:
        raise UserError(f"no servers in {folder}")
    pid = _supervisor(folder)
    if pid:
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + _DOWN_S
        while _supervisor(folder) and time.monotonic() < until:
            time.sleep(0.1)
    _end_leftovers(folder)
    (folder / "fleet.json").unlink(missing_ok=True)
    typer.echo(f"{len(entries)} server{'s' * (len(entries) > 1)} ended")


def _state(folder: Path) -> Mapping[str, Any]:
    from rollout.engines.sglang.servers import read_state

    return read_state(folder) or {}


def _entries(folder: Path) -> list[dict[str, Any]]:
    return list(_state(folder).get("servers", ()))


def _supervisor(folder: Path) -> int:
    """Process id of the living supervisor of a folder; 0 if there is none."""
    from rollout.engines.sglang.servers import lives

    written = _state(folder).get("supervisor", {})
    pid = int(written.get("pid", 0))
    return pid if lives(pid, int(written.get("born", -1))) else 0


def _end_leftovers(folder: Path) -> None:
    """End what a killed supervisor left running."""
    from rollout.engines.sglang.servers import end_group, lives

    for entry in _entries(folder):
        if lives(entry["group"], entry["born"]):
            end_group(entry["group"])
