"""The filter of system calls: what it does by a machine of our own, and attacks in real sandboxes.

The numbers are those of the kernel's tables (`asm/unistd_64.h`, `asm-generic/unistd.h`).
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import platform
import struct

import pytest

from rollout.protocols import SandboxSpec
from rollout.sandbox import bubblewrap, seccomp
from rollout.sandbox.bubblewrap import BubblewrapBackend

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED, KILLED = "allowed", "killed"
HERE = platform.machine()
pytestmark = pytest.mark.skipif(HERE not in AUDIT, reason=f"no filter for {HERE}")


def judge(machine: str, call: int, *arguments: int, audit: int | None = None) -> str | int:
    """Run the program as the kernel would: "allowed", "killed", or the error a call fails with."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", call, AUDIT[machine] if audit is None else audit, 0, *padded)
    steps = list(struct.iter_unpack("=HBBI", seccomp.program(machine)))
    at = loaded = 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        if code == 0x20:
            loaded = struct.unpack_from("<I", data, value)[0]
        elif code == 0x06:
            kind = value & 0xFFFF0000
            return {0x7FFF0000: ALLOWED, 0x80000000: KILLED}.get(kind, value & 0xFFFF)
        else:
            held = {
                0x15: loaded == value,
                0x25: loaded > value,
                0x45: bool(loaded & value),
            }[code]
            at += yes if held else no


NUMBERS = {
    # name: (x86_64, aarch64)
    "read": (0, 63),
    "openat": (257, 56),
    "execve": (59, 221),
    "wait4": (61, 260),
    "mmap": (9, 222),
    "kill": (62, 129),
    "connect": (42, 203),
    "prctl": (157, 167),
    "ioctl": (16, 29),
    "socket": (41, 198),
    "clone": (56, 220),
    "personality": (135, 92),
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "ptrace": (101, 117),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "syslog": (103, 116),
    "clone3": (435, 435),
    "io_uring_setup": (425, 425),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "pidfd_open": (434, 434),
    "futex_wait": (455, 455),
}
PERMITTED = {"read", "openat", "execve", "wait4", "mmap", "kill", "connect", "prctl"} | {
    "ioctl",
    "socket",
    "clone",
    "personality",
    "pidfd_open",
    "futex_wait",
}
ABSENT = {"clone3", "io_uring_setup"}
CASES = [
    ("clone", (0x11,), ALLOWED),
    # What a thread is started with.
    ("clone", (0x3D0F00,), ALLOWED),
    ("clone", (0x10000000,), errno.EPERM),
    ("clone", (0x20000 | 0x11,), errno.EPERM),
    ("clone", (0x40000000 | 0x3D0F00,), errno.EPERM),
    ("socket", (1,), ALLOWED),
    ("socket", (2,), ALLOWED),
    ("socket", (16,), ALLOWED),
    ("socket", (17,), errno.EAFNOSUPPORT),
    ("socket", (38,), errno.EAFNOSUPPORT),
    ("socket", (40,), errno.EAFNOSUPPORT),
    # The kernel takes an int of it.
    ("socket", (40 | 1 << 32,), errno.EAFNOSUPPORT),
    ("ioctl", (0, 0x5401), ALLOWED),
    ("ioctl", (0, 0x5412), errno.EPERM),
    ("ioctl", (0, 0x5412 | 1 << 32), errno.EPERM),
    ("ioctl", (0, 0x541C), errno.EPERM),
    ("personality", (0xFFFFFFFF,), ALLOWED),
    ("personality", (0x40000,), errno.EPERM),
]


@pytest.mark.parametrize("machine", AUDIT)
def test_the_program_allows_and_denies_by_number_and_argument(machine):
    own = list(AUDIT).index(machine)
    for name, numbers in NUMBERS.items():
        wanted = ALLOWED if name in PERMITTED else errno.ENOSYS if name in ABSENT else errno.EPERM
        first = 1 if name == "socket" else 0
        assert judge(machine, numbers[own], first) == wanted, name
    for name, arguments, wanted in CASES:
        assert judge(machine, NUMBERS[name][own], *arguments) == wanted, (name, arguments)


@pytest.mark.parametrize("machine", AUDIT)
def test_other_conventions_and_newer_calls_are_not_let_through(machine):
    # i386, and the other machine.
    for audit in (0x40000003, *(set(AUDIT.values()) - {AUDIT[machine]})):
        assert judge(machine, 1, audit=audit) == KILLED
    # x32, and numbers that nobody has looked at.
    for call in (0x40000000, 0x40000000 + 41, 1000, 0xFFFFFFFF):
        assert judge(machine, call) == errno.ENOSYS


def test_an_unknown_machine_has_no_filter():
    assert seccomp.program("riscv64") is None


# --- attacks ----------------------------------------------------------------------------------

PRELUDE = """
import ctypes, errno, fcntl, os, signal, socket, sys, termios, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    got = libc.syscall(number, *map(lambda a: ctypes.c_long(a) if type(a) is int else a, arguments))
    if got < 0:
        raise OSError(ctypes.get_errno(), "")
    return got
try:
{attack}
    print("worked")
except OSError as error:
    print("refused", errno.errorcode[error.errno])
"""

SECRET = b"open sesame"
ATTACKS = {
    "the keys of the process that started it": (
        """
    key = call({keyctl}, 10, -3, b"user", b"trsi-test", 0)
    held = ctypes.create_string_buffer(100)
    assert call({keyctl}, 11, key, held, 100) == 11 and held.value == b"open sesame"
""",
        "EPERM",
    ),
    "a socket to the hypervisor": ("    socket.socket(40, socket.SOCK_STREAM)", "EAFNOSUPPORT"),
    "io_uring, whose calls no filter sees": (
        "    call({io_uring_setup}, 4, ctypes.create_string_buffer(120))",
        "ENOSYS",
    ),
    "faults served by a program": ("    call({userfaultfd}, 1)", "EPERM"),
    "control of another program": (
        """
    pid = os.fork()
    if not pid:
        time.sleep(9)
        os._exit(0)
    try:
        call({ptrace}, 16, pid, 0, 0)
        os.waitpid(pid, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
""",
        "EPERM",
    ),
    "keystrokes for whoever reads the terminal next": (
        """
    import pty
    os.setsid()
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for letter in b"reboot\\n":
        fcntl.ioctl(slave, termios.TIOCSTI, bytes([letter]))
    assert os.read(slave, 100) == b"reboot\\n"
""",
        "EPERM",
    ),
    "addresses that repeat": ("    call({personality}, 0x40000)", "EPERM"),
}


def tried(attack: str) -> str:
    """What an attack comes to in a fresh sandbox."""

    async def main() -> str:
        backend = BubblewrapBackend()
        try:
            box = await backend.start(SandboxSpec(terminal=True))
            body = attack.format(**seccomp._TABLES[HERE].numbers)
            await box.put_files({"attack.py": PRELUDE.replace("{attack}", body).encode()})
            # A leader of a group can't start a session: its child can.
            said = await box.exec("python3 attack.py & wait $!")
            return said.output.decode().strip()
        finally:
            await backend.aclose()

    return asyncio.run(main())


@pytest.fixture
def host_key() -> None:
    """A key in the session keyring of this process, as a login leaves them there."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = seccomp._TABLES[HERE].numbers
    join = libc.syscall(number["keyctl"], 1, ctypes.c_char_p(None))
    made = libc.syscall(
        number["add_key"], b"user", b"trsi-test", SECRET, len(SECRET), ctypes.c_long(-3)
    )
    if join < 0 or made < 0:
        pytest.skip(f"no keyrings here: {os.strerror(ctypes.get_errno())}")


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_works_without_the_filter_and_fails_with_it(name, request, monkeypatch):
    attack, error = ATTACKS[name]
    if "keys" in name:
        request.getfixturevalue("host_key")
    with monkeypatch.context() as without:
        without.setattr(bubblewrap.seccomp, "program", lambda machine: None)
        bare = tried(attack)
    if bare.startswith("refused"):
        pytest.skip(f"this kernel refuses it by itself: {bare}")
    assert bare == "worked"
    assert tried(attack) == f"refused {error}"


def test_the_filter_is_named_among_what_holds():
    async def main():
        backend = BubblewrapBackend()
        try:
            box = await backend.start(SandboxSpec(require=frozenset({"syscalls"})))
            assert "syscalls" in box.enforced
            status = await box.exec("cat /proc/self/status")
            assert b"Seccomp:\t2\n" in status.output
        finally:
            await backend.aclose()

    asyncio.run(main())
