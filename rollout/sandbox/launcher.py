"""The process that starts the sandboxes of one backend.

It is small and has one thread, so that a start never copies the trainer's memory map, and the
kernel's parent-death signal means "the launcher is gone" and not "some thread ended". It runs as a
script of its own, with nothing but the standard library, ends with its socket, and every sandbox
ends with it. It also is their dead-man timer: a sandbox whose lifetime is over is killed here,
whatever the trainer does.

A request is one JSON message with three descriptors (control socket, output pipe, command file):

  argv: bubblewrap's arguments, program name first.
  uid: the unprivileged user and group to run as, or null.
  join: files that take a 0 to move the writing process into a control group.
  leave: the same for the launcher's own groups; null if moving is slow here (version 2), then a
    forked child moves instead of the launcher itself.
  filter: file with the filter of system calls, or null; bubblewrap gets it as descriptor 5.
  lifetime_s: seconds until the sandbox is killed.
"""

import fcntl
import heapq
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Any

MAX_REQUEST = 1 << 20
START_S = 3.0
END_TIMEOUT_S = 6.0
FILTER = 5


class Launcher:
    """Starts bubblewrap, reaps it, and ends what has outlived its time."""

    def __init__(self, host: socket.socket, binary: str) -> None:
        self._host = host
        self._binary = binary
        # Above the fixed numbers, as the descriptors that arrive are made to be: a start puts
        # them in place one after the other.
        self._null = fcntl.fcntl(os.open(os.devnull, os.O_RDONLY), fcntl.F_DUPFD_CLOEXEC, 16)
        self._alive: dict[int, float] = {}
        self._deadlines: list[tuple[float, int]] = []

    def serve(self) -> None:
        """Answer requests until the socket closes."""
        signal.signal(signal.SIGCHLD, self._on_child)
        signal.signal(signal.SIGALRM, self._on_alarm)
        while True:
            message, fds, _, _ = socket.recv_fds(self._host, MAX_REQUEST, 3)
            if not message:
                self._end_all()
                return
            low, fds = fds, [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in fds]
            for fd in low:
                os.close(fd)
            try:
                self._start(json.loads(message), fds)
            except OSError as error:
                # Nobody may be there to read it: then the socket's end comes next.
                with suppress(OSError):
                    os.write(fds[1], f"cannot start bubblewrap: {error}".encode())
            finally:
                for fd in fds:
                    os.close(fd)

    def _start(self, request: dict[str, Any], fds: list[int]) -> None:
        # Held back until the child is on record: a signal between the two would miss it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGALRM})
        try:
            if request["leave"] is None:
                pid = self._fork(request, fds)
            else:
                pid = self._spawn(request, fds)
            self._alive[pid] = time.monotonic()
            heapq.heappush(self._deadlines, (time.monotonic() + request["lifetime_s"], pid))
            self._set_alarm()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGALRM})
        with suppress(OSError):
            os.write(fds[0], b"p %d\n" % pid)

    def _places(self, fds: list[int]) -> tuple[int, ...]:
        """What descriptors 0, 1 and on are to be."""
        control, output, command = fds
        return (self._null, output, output, control, command)

    def _fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """Start bubblewrap by a child that moves itself into its control groups."""
        pid = os.fork()
        if pid:
            return pid
        try:
            move(request["join"])
            if (uid := request["uid"]) is not None:
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            for place, fd in enumerate(self._places(fds)):
                os.dup2(fd, place)
            if request["filter"] is not None:
                os.dup2(os.open(request["filter"], os.O_RDONLY), FILTER)
                # It may have been opened under this very number.
                os.set_inheritable(FILTER, True)
            for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.execve(self._binary, request["argv"], {})
        except OSError as error:
            os.write(fds[1], f"cannot start bubblewrap: {error}".encode())
        finally:
            os._exit(127)

    def _spawn(self, request: dict[str, Any], fds: list[int]) -> int:
        """Start bubblewrap without a fork of this interpreter, which would cost 1 ms more.

        The launcher itself takes on the user and the groups for the moment of the start.
        """
        uid = request["uid"]
        actions: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_DUP2, fd, n) for n, fd in enumerate(self._places(fds))
        ]
        if request["filter"] is not None:
            # Opened anew for every start: reading it moves the position of all who share it.
            actions.append((os.POSIX_SPAWN_OPEN, FILTER, request["filter"], os.O_RDONLY, 0))
        move(request["join"])
        try:
            if uid is not None:
                os.setresgid(uid, uid, 0)
                os.setresuid(uid, uid, 0)
            return os.posix_spawn(
                self._binary,
                request["argv"],
                {},
                file_actions=actions,
                setsigmask=[],
                setsigdef=[signal.SIGCHLD, signal.SIGALRM, signal.SIGPIPE],
            )
        finally:
            if uid is not None:
                os.setresuid(0, 0, 0)
                os.setresgid(0, 0, 0)
            move(request["leave"])

    def _on_child(self, _signum: int, _frame: FrameType | None) -> None:
        with suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                self._alive.pop(pid, None)

    def _on_alarm(self, _signum: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, pid = heapq.heappop(self._deadlines)
            if pid in self._alive:
                os.kill(pid, signal.SIGKILL)
        self._set_alarm()

    def _end_all(self) -> None:
        """End every sandbox, but not in the middle of a start.

        bubblewrap's inner process asks for its death with the outer one late; killed before, the
        outer one leaves an orphan. A start that finishes finds its socket closed, and ends.
        """
        deadline = time.monotonic() + END_TIMEOUT_S
        while self._alive and (now := time.monotonic()) < deadline:
            for pid, started in list(self._alive.items()):
                if now - started > START_S:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)

    def _set_alarm(self) -> None:
        while self._deadlines and self._deadlines[0][1] not in self._alive:
            heapq.heappop(self._deadlines)
        if self._deadlines:
            left = self._deadlines[0][0] - time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.001))


def move(files: list[str]) -> None:
    """Move this process into control groups."""
    for path in files:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"0")
        finally:
            os.close(fd)


def main() -> None:
    """Serve on the socket whose descriptor is the first argument, with the binary of the second.

    A third one says that the sandboxes' users are others than this process's.
    """
    if sys.argv[3:]:
        os.setgroups([])
    host = socket.socket(fileno=int(sys.argv[1]))
    # It was handed over as one to inherit. In a sandbox it would take the requests of others.
    host.set_inheritable(False)
    Launcher(host, sys.argv[2]).serve()


if __name__ == "__main__":
    main()
