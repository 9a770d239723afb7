"""`trsi fleet` and its supervisor, over processes that stand in for servers.

They listen like SGLang servers and answer `/model_info`; that sglang's own server starts like this
is shown in tests/test_fleet_real.py, with the same launcher.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from rollout.engines.sglang.servers import (
    Patience,
    ServerSpec,
    Supervisor,
    end_group,
    lives,
    reachable,
    read_state,
)
from tests.sglang_real import free_port
from trsi_jax.cli.main import call

STAND_IN = """#!{python} -S
import json, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
given = dict(zip(sys.argv, sys.argv[1:]))
if {dies}:
    sys.exit(3)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({{"weight_version": given["--weight-version"]}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
HTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def spec(tmp_path):
    """Makes the spec of a stand-in."""

    def make(*, dies: bool = False) -> ServerSpec:
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        program = tmp_path / f"stand-in-{dies}"
        program.write_text(STAND_IN.format(python=sys.executable, dies=dies))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return ServerSpec(python=str(program), model=str(model), port=free_port(), context_len=64)

    return make


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def states(supervisor):
    supervisor.step()
    return [server.state for server in supervisor.servers]


def test_a_supervisor_starts_servers_one_by_one_and_a_killed_one_again(tmp_path, spec):
    supervisor = Supervisor([spec(), spec()], tmp_path, Patience(backoff_s=0.05))
    try:
        assert states(supervisor) == ["starting", "waiting"]
        until(lambda: states(supervisor) == ["ready", "ready"])
        first = supervisor.servers[0]
        group, born = first.group, first.born
        os.killpg(group, signal.SIGKILL)
        until(lambda: states(supervisor)[0] != "ready")
        until(lambda: states(supervisor) == ["ready", "ready"])
        assert first.group != group
        assert not lives(group, born)
        written = read_state(tmp_path)
        assert [entry["ends"] for entry in written["servers"]] == [1, 0]
    finally:
        supervisor.stop()
    assert [reachable(server.spec.url, 0.5) for server in supervisor.servers] == [None, None]


def test_a_server_that_keeps_ending_is_given_up(tmp_path, spec):
    patience = Patience(backoff_s=0.01, backoff_max_s=0.05, ends=3)
    supervisor = Supervisor([spec(dies=True)], tmp_path, patience)
    until(lambda: states(supervisor) == ["given up"])
    assert len(supervisor.servers[0].ends) == 3
    for _ in range(5):
        assert states(supervisor) == ["given up"]
    assert supervisor.servers[0].process is None


def test_a_group_ends_with_all_that_it_started(tmp_path):
    import subprocess

    mark = tmp_path / "child"
    script = f"trap '' TERM; sleep 600 & echo $! > {mark}; wait"
    process = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    child = int(until(lambda: mark.exists() and mark.read_text().strip()))
    end_group(process.pid, 0.3)
    stat_file = Path(f"/proc/{child}/stat")
    assert not stat_file.exists() or stat_file.read_text().rpartition(") ")[2][0] == "Z"


def test_up_status_and_down(tmp_path, spec, capsys):
    one = spec()
    folder = ["--folder", str(tmp_path / "fleet")]
    ports = [one.port]
    start = [
        *("fleet", "up", "--model", one.model, "--python", one.python, "--port", str(one.port)),
        *(*folder, "--wait", "30"),
    ]
    try:
        assert call(start) == 0
        assert "ready" in capsys.readouterr().out
        assert call(["fleet", "status", *folder]) == 0
        assert "ready  weights 0" in capsys.readouterr().out
        assert call(start) == 2
        assert "run already" in capsys.readouterr().err
        # A killed supervisor leaves servers behind; they are found and ended all the same.
        state = read_state(tmp_path / "fleet")
        os.kill(state["supervisor"]["pid"], signal.SIGKILL)
        until(lambda: not lives(**state["supervisor"]))
        assert call(["fleet", "status", *folder]) == 1
        assert "unwatched" in capsys.readouterr().out
    finally:
        assert call(["fleet", "down", *folder]) == 0
    assert [reachable(f"http://127.0.0.1:{port}", 0.5) for port in ports] == [None]
    assert call(["fleet", "status", *folder]) == 2
    assert call(["fleet", "down", *folder]) == 2


def test_mistakes_of_up_are_one_line(tmp_path, spec, capsys):
    one = spec()
    bad = ["fleet", "up", "--model", one.model, "--python", str(tmp_path / "none")]
    assert call(bad) == 2
    assert "requirements/sglang.sh" in capsys.readouterr().err
    bad = ["fleet", "up", "--model", str(tmp_path / "none"), "--python", one.python]
    assert call(bad) == 2
    assert "config.json" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_server_starts_with_the_newest_snapshot(tmp_path, spec):
    from dataclasses import replace

    from rollout import snapshots

    one = replace(spec(), weights=str(tmp_path / "weights"))
    assert one.command()[one.command().index("--weight-version") + 1] == "0"
    target = tmp_path / "weights" / "v000007"
    target.mkdir(parents=True)
    content = {"version": 7, "probe": None, "tensors": {}}
    (target / snapshots.MANIFEST).write_text(json.dumps(content))
    (tmp_path / "weights" / "LATEST").write_text("v000007\n")
    command = one.command()
    assert command[command.index("--weight-version") + 1] == "7"
    assert command[command.index("--model-path") + 1] == str(target)
