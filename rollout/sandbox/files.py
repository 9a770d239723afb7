"""Files in and out of a directory that a hostile program may be changing at the same time.

Every step goes from one open directory to a single name in it and never through a link, so no
name, link or rename leads out of the tree. Only regular files are read; sizes are bounded.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import PurePosixPath

from rollout.errors import TransferError
from rollout.records import Entry, FileTree

MAX_ENTRIES = 20_000
MAX_DEPTH = 64

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@contextmanager
def acting_as(uid: int | None) -> Iterator[None]:
    """Make this thread's file accesses those of `uid` (None: leave them).

    A file system of a user namespace takes files of its own users only, root not among them. The
    change is of this thread alone; nothing may await inside.
    """
    if uid is None:
        yield
        return
    libc = _libc()
    gid = libc.setfsgid(uid)
    before = libc.setfsuid(uid)
    try:
        yield
    finally:
        libc.setfsuid(before)
        libc.setfsgid(gid)


def parts_of(path: str) -> tuple[str, ...]:
    """Components of a relative path below the working directory.

    Raises:
      TransferError: for an absolute path, an empty one, or one with "..".
    """
    pure = PurePosixPath(path)
    if pure.is_absolute() or not pure.parts or ".." in pure.parts or "\0" in path:
        raise TransferError(f"path {path!r} is not a relative path below the working directory")
    return pure.parts


def _descend(root: int, parts: tuple[str, ...], make: bool) -> int:
    """A new descriptor of the directory `parts` below `root`."""
    here = os.open(".", _DIRECTORY, dir_fd=root)
    for name in parts:
        try:
            try:
                below = os.open(name, _DIRECTORY, dir_fd=here)
            except FileNotFoundError:
                if not make:
                    raise
                os.mkdir(name, 0o755, dir_fd=here)
                below = os.open(name, _DIRECTORY, dir_fd=here)
                os.fchmod(below, 0o755)
        finally:
            os.close(here)
        here = below
    return here


def write_tree(
    root: int,
    files: Mapping[str, bytes],
    directories: Iterable[str] = (),
    modes: Mapping[str, int] | None = None,
    links: Mapping[str, str] | None = None,
) -> None:
    """Write directories, files and symlinks below `root`, in the order given.

    Args:
      root: descriptor of the directory.
      files: relative path -> content.
      directories: relative paths to make, parents included.
      modes: permission bits by path, of files and directories; 644 and 755 by default.
      links: relative path -> target of a symlink; made last, and nothing is written through it.

    Raises:
      TransferError: for a name or a place that cannot be written to.
    """
    modes = modes or {}
    path = ""
    try:
        for path in directories:
            fd = _descend(root, parts_of(path), make=True)
            try:
                if path in modes:
                    os.fchmod(fd, modes[path])
            finally:
                os.close(fd)
        for path, data in files.items():
            *above, name = parts_of(path)
            parent = _descend(root, tuple(above), make=True)
            try:
                _write(parent, name, data, modes.get(path, 0o644))
            finally:
                os.close(parent)
        for path, target in (links or {}).items():
            *above, name = parts_of(path)
            parent = _descend(root, tuple(above), make=True)
            try:
                os.symlink(target, name, dir_fd=parent)
            finally:
                os.close(parent)
    except OSError as error:
        raise TransferError(f"cannot write {path!r}: {error.strerror}") from error


def _write(parent: int, name: str, data: bytes, mode: int) -> None:
    fd = os.open(name, _WRITE, 0o600, dir_fd=parent)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise TransferError(f"{name!r} is no regular file")
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def read_file(root: int, path: str, max_bytes: int) -> bytes:
    """Read one regular file below `root`.

    Raises:
      TransferError: if there is none, it is reached through a link, or it is larger.
    """
    *above, name = parts_of(path)
    try:
        parent = _descend(root, tuple(above), make=False)
        try:
            return _read(parent, name, max_bytes)
        finally:
            os.close(parent)
    except OSError as error:
        raise TransferError(f"cannot read {path!r}: {error.strerror}") from error


def _read(parent: int, name: str, max_bytes: int) -> bytes:
    fd = os.open(name, _READ, dir_fd=parent)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise TransferError(f"{name!r} is no regular file")
        chunks: list[bytes] = []
        left = max_bytes + 1
        while left > 0 and (chunk := os.read(fd, min(left, 1 << 20))):
            chunks.append(chunk)
            left -= len(chunk)
        if left <= 0:
            raise TransferError(f"{name!r} is larger than {max_bytes} bytes")
        return b"".join(chunks)
    finally:
        os.close(fd)


def read_tree(root: int, max_bytes: int) -> FileTree:
    """Read everything below `root`, whose processes must be gone.

    A file or directory that its owner may not read is made readable first; the tree is a copy
    nobody else uses, and the mode reported is the one found.

    Raises:
      TransferError: if the contents exceed `max_bytes`, or names and depth the module's bounds.
    """
    tree: dict[str, Entry] = {}
    left = max_bytes
    pending: list[tuple[str, tuple[str, ...]]] = [("", ())]
    path = ""
    try:
        while pending:
            prefix, parts = pending.pop()
            if len(parts) > MAX_DEPTH:
                raise TransferError(f"the working directory is deeper than {MAX_DEPTH} levels")
            here = _descend(root, parts, make=False)
            try:
                with os.scandir(here) as names:
                    found = sorted(entry.name for entry in names)
                if len(tree) + len(found) > MAX_ENTRIES:
                    raise TransferError(f"the working directory holds over {MAX_ENTRIES} entries")
                for name in found:
                    path = prefix + name
                    tree[path] = entry = _entry(here, name, left)
                    left -= len(entry.data)
                    if entry.kind == "directory":
                        pending.append((path + "/", (*parts, name)))
            finally:
                os.close(here)
    except OSError as error:
        raise TransferError(f"cannot read {path!r}: {error.strerror}") from error
    return dict(sorted(tree.items()))


def _entry(parent: int, name: str, max_bytes: int) -> Entry:
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        return Entry("symlink", mode, os.fsencode(os.readlink(name, dir_fd=parent)))
    if stat.S_ISDIR(status.st_mode):
        if mode & 0o500 != 0o500:
            os.chmod(name, 0o700, dir_fd=parent)
        return Entry("directory", mode)
    if stat.S_ISREG(status.st_mode):
        if mode & 0o400 == 0:
            os.chmod(name, 0o600, dir_fd=parent)
        return Entry("file", mode, _read(parent, name, max_bytes))
    return Entry("other", mode)
