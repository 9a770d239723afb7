"""The process that starts the sandboxes of one backend.

It is small and has one thread, so that a start forks a few megabytes and never the trainer, and
the kernel's parent-death signal means "the trainer is gone" and not "some thread ended". It runs
as a script of its own, with nothing but the standard library, and exits when its socket closes.

A request is one JSON message with three descriptors (control socket, output pipe, command file):
`{"argv": [...], "uid": int | null, "join": [files that take a 0 to join a control group],
"lifetime_s": float}`.
"""

import fcntl
import json
import os
import signal
import socket
import sys
from types import FrameType
from typing import NoReturn

MAX_REQUEST = 1 << 20


def _reap(_signum: int, _frame: FrameType | None) -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _become(binary: int, request: dict[str, object], fds: list[int]) -> NoReturn:
    """Turn this child into bubblewrap. Whatever fails is said on the sandbox's output pipe."""
    output = fds[1]
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        # First out of the way of the fixed numbers, then onto them.
        held = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in (null, *fds, binary)]
        null, control, output, command, binary = held
        places = (null, output, output, control, command, control)
        for place, fd in enumerate(places):
            os.dup2(fd, place)
        os.closerange(len(places), 64)
        join = request["join"]
        assert isinstance(join, list)
        for path in join:
            with open(path, "w") as group:  # noqa: PTH123
                group.write("0")
        uid = request["uid"]
        if isinstance(uid, int):
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        os.write(control, b"p\n")
        # The alarm outlives the exec and ends bubblewrap's outer process, which takes the sandbox
        # with it: a timer that nothing inside can reach and that needs nobody outside.
        lifetime_s = request["lifetime_s"]
        assert isinstance(lifetime_s, float)
        signal.setitimer(signal.ITIMER_REAL, lifetime_s)
        argv = request["argv"]
        assert isinstance(argv, list)
        os.execve(binary, argv, {})
    except OSError as error:
        os.write(output, f"cannot start bubblewrap: {error}".encode())
    finally:
        os._exit(127)


def main() -> None:
    """Serve requests on the socket whose descriptor is the first argument."""
    host = socket.socket(fileno=int(sys.argv[1]))
    # The binary may lie where the unprivileged user of a sandbox cannot look: it is run by its
    # descriptor.
    binary = os.open(sys.argv[2], os.O_RDONLY | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        message, fds, _, _ = socket.recv_fds(host, MAX_REQUEST, 3)
        if not message:
            return
        request = json.loads(message)
        try:
            if os.fork() == 0:
                _become(binary, request, fds)
        except OSError as error:
            os.write(fds[1], f"cannot fork: {error}".encode())
        finally:
            for fd in fds:
                os.close(fd)


if __name__ == "__main__":
    main()
