"""The system calls that programs in a bubblewrap sandbox may not make, as a filter for the kernel.

Namespaces and missing capabilities leave parts of the kernel that know neither: the keyrings that
a process inherits, sockets to the hypervisor, the kernel's log, and interfaces with a history of
holes (user namespaces, bpf, io_uring, userfaultfd, perf). Those calls fail here as not permitted,
or as not there where programs know how to do without. So do calls newer than this list.

Of the arguments only numbers can be judged, never what a pointer leads to: clone3 hides its flags
behind one and is therefore not there, and the C library takes clone.

Source: the tables and `struct seccomp_data` of the Linux headers. What is denied follows
Docker's default profile; with its capabilities gone that one lets ptrace through, and in engines of
some years ago io_uring and AF_VSOCK, too.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass
from functools import cache

NEWEST = 469
"""Numbers above it were not looked at; new calls have the same number on every architecture."""

# --- the machine: struct sock_filter, one instruction -------------------------------------------

_INSTRUCTION = struct.Struct("=HBBI")
_LOAD, _EQUAL, _GREATER, _SET, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _ERROR, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_CALL, _MACHINE = 0, 4


def _low(argument: int) -> int:
    """Offset of the low half of an argument; the machines below are little-endian."""
    return 16 + 8 * argument


@dataclass(frozen=True, slots=True)
class _Table:
    """What a machine calls itself in the audit system, and its numbers of the calls named here."""

    audit: int
    numbers: dict[str, int]


# From number 424 on every machine has the same.
_COMMON = {
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "clone3": 435,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "open_tree_attr": 467,
}

_TABLES = {
    "x86_64": _Table(
        0xC000003E,
        _COMMON
        | {
            "ioctl": 16,
            "socket": 41,
            "socketpair": 53,
            "clone": 56,
            "ptrace": 101,
            "syslog": 103,
            "personality": 135,
            "vhangup": 153,
            "modify_ldt": 154,
            "pivot_root": 155,
            "chroot": 161,
            "acct": 163,
            "settimeofday": 164,
            "mount": 165,
            "umount2": 166,
            "swapon": 167,
            "swapoff": 168,
            "reboot": 169,
            "sethostname": 170,
            "setdomainname": 171,
            "iopl": 172,
            "ioperm": 173,
            "init_module": 175,
            "delete_module": 176,
            "quotactl": 179,
            "lookup_dcookie": 212,
            "clock_settime": 227,
            "kexec_load": 246,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "unshare": 272,
            "perf_event_open": 298,
            "fanotify_init": 300,
            "open_by_handle_at": 304,
            "setns": 308,
            "process_vm_readv": 310,
            "process_vm_writev": 311,
            "kcmp": 312,
            "finit_module": 313,
            "kexec_file_load": 320,
            "bpf": 321,
            "userfaultfd": 323,
        },
    ),
    "aarch64": _Table(
        0xC00000B7,
        _COMMON
        | {
            "lookup_dcookie": 18,
            "ioctl": 29,
            "umount2": 39,
            "mount": 40,
            "pivot_root": 41,
            "chroot": 51,
            "vhangup": 58,
            "quotactl": 60,
            "acct": 89,
            "personality": 92,
            "unshare": 97,
            "kexec_load": 104,
            "init_module": 105,
            "delete_module": 106,
            "clock_settime": 112,
            "syslog": 116,
            "ptrace": 117,
            "reboot": 142,
            "sethostname": 161,
            "setdomainname": 162,
            "settimeofday": 170,
            "socket": 198,
            "socketpair": 199,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "clone": 220,
            "swapon": 224,
            "swapoff": 225,
            "perf_event_open": 241,
            "fanotify_init": 262,
            "open_by_handle_at": 265,
            "setns": 268,
            "process_vm_readv": 270,
            "process_vm_writev": 271,
            "kcmp": 272,
            "finit_module": 273,
            "bpf": 280,
            "userfaultfd": 282,
            "kexec_file_load": 294,
        },
    ),
}

# --- the rules ----------------------------------------------------------------------------------

_JUDGED = ("ioctl", "socket", "socketpair", "clone", "personality")
_ABSENT = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register")
"""Programs that find these missing take another way."""

# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NAMESPACES = 0x7E020000
_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK are bound to the network namespace. AF_VSOCK, for one,
is not: it reaches the hypervisor."""
_TERMINAL = (0x5412, 0x541C, 0x5423)
"""TIOCSTI and TIOCLINUX type for others; TIOCSETD loads a driver of the kernel's."""
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return _INSTRUCTION.pack(code, yes, no, value)


def _fail(number: int) -> bytes:
    return _step(_RETURN, _ERROR | number)


def _block(call: int, body: list[bytes]) -> list[bytes]:
    """Judge one call by `body`, which returns; go on behind it for every other."""
    return [_step(_EQUAL, call, no=len(body)), *body]


def _among(argument: int, allowed: tuple[int, ...], error: int) -> list[bytes]:
    """Allow some values of an argument."""
    tests = [_step(_EQUAL, v, yes=len(allowed) - i) for i, v in enumerate(allowed)]
    return [_step(_LOAD, _low(argument)), *tests, _fail(error), _step(_RETURN, _ALLOW)]


@cache
def program(machine: str) -> bytes | None:
    """The filter for one machine, as the array of `struct sock_filter` that the kernel takes.

    Args:
      machine: as `os.uname` names it.

    Returns:
      The program; None for a machine whose numbers are not known here.
    """
    table = _TABLES.get(machine)
    if table is None:
        return None
    number = table.numbers
    steps = [
        # Another calling convention has other numbers: nothing that is meant for this machine.
        _step(_LOAD, _MACHINE),
        _step(_EQUAL, table.audit, yes=1),
        _step(_RETURN, _KILL_PROCESS),
        _step(_LOAD, _CALL),
        _step(_GREATER, NEWEST, no=1),
        _fail(errno.ENOSYS),
    ]
    steps += _block(
        number["clone"],
        [
            _step(_LOAD, _low(0)),
            _step(_SET, _NAMESPACES, no=1),
            _fail(errno.EPERM),
            _step(_RETURN, _ALLOW),
        ],
    )
    denied = [_step(_EQUAL, request, yes=len(_TERMINAL) - i) for i, request in enumerate(_TERMINAL)]
    steps += _block(
        number["ioctl"],
        [_step(_LOAD, _low(1)), *denied, _step(_RETURN, _ALLOW), _fail(errno.EPERM)],
    )
    for name in ("socket", "socketpair"):
        steps += _block(number[name], _among(0, _FAMILIES, errno.EAFNOSUPPORT))
    steps += _block(number["personality"], _among(0, _PERSONALITIES, errno.EPERM))
    for name, call in sorted(number.items()):
        if name not in _JUDGED:
            error = errno.ENOSYS if name in _ABSENT else errno.EPERM
            steps += _block(call, [_fail(error)])
    steps.append(_step(_RETURN, _ALLOW))
    return b"".join(steps)
