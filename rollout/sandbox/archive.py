"""Files in and out of a container as tar streams; nothing of one ever touches the host's disk."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping

from rollout.errors import TransferError
from rollout.records import Entry, FileTree
from rollout.sandbox.files import MAX_DEPTH, MAX_ENTRIES, parts_of

MEMBER_BYTES = 1536
"""A member's header, with that of a long name and the padding of its content."""


def _clean(path: str) -> str:
    return "/".join(parts_of(path))


def pack(
    files: Mapping[str, bytes],
    directories: Iterable[str],
    modes: Mapping[str, int],
    links: Mapping[str, str],
    *,
    uid: int = 0,
) -> bytes:
    """What `container_driver.PUT` takes: three lists of paths, then a tar.

    Raises:
      TransferError: for a name that leads out.
    """
    folders = [(path, _clean(path)) for path in directories]
    plain = [(path, _clean(path)) for path in files]
    linked = [(path, _clean(path)) for path in links]
    lists = b""
    for pairs in (folders, plain, linked):
        lists += b"".join(_bytes(clean) + b"\0" for _, clean in pairs) + b"\0"
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path, clean in folders:
            if path in modes:
                _member(tar, clean, tarfile.DIRTYPE, modes[path], uid)
        for path, clean in plain:
            _member(tar, clean, tarfile.REGTYPE, modes.get(path, 0o644), uid, files[path])
        for path, clean in linked:
            _member(tar, clean, tarfile.SYMTYPE, 0o777, uid, link=links[path])
    return lists + out.getvalue()


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _member(
    tar: tarfile.TarFile,
    name: str,
    kind: bytes,
    mode: int,
    uid: int,
    data: bytes = b"",
    link: str = "",
) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.linkname = kind, mode, link
    member.uid = member.gid = uid
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def unpack(data: bytes, max_bytes: int) -> FileTree:
    """Read what `container_driver.SNAPSHOT` gives. It may be the work of a hostile program.

    Args:
      data: a list of modes, then a tar.
      max_bytes: of all contents together.

    Raises:
      TransferError: it is malformed, or beyond the bounds.
    """
    if data.startswith(b"\0"):
        listed, archive = b"", data[1:]
    else:
        listed, _, archive = data.partition(b"\0\0")
    modes: dict[str, int] = {}
    tree: dict[str, Entry] = {}
    try:
        for item in filter(None, listed.split(b"\0")):
            listed_mode, _, path = item.decode("utf-8", "surrogateescape").partition(" ")
            if listed_mode.startswith("s"):
                tree[path] = Entry("other", int(listed_mode[1:], 8) & 0o7777)
            else:
                modes[path] = int(listed_mode, 8) & 0o7777
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            left = max_bytes
            for member in tar:
                path = member.name.removeprefix("./")
                if path in (".", ""):
                    continue
                if len(tree) >= MAX_ENTRIES:
                    raise TransferError(f"the directory holds over {MAX_ENTRIES} entries")
                if len(parts_of(path)) > MAX_DEPTH:
                    raise TransferError(f"the directory is deeper than {MAX_DEPTH} levels")
                tree[path] = entry = _entry(tar, member, tree, left)
                left -= len(entry.data)
    except (tarfile.TarError, ValueError, EOFError, OSError) as error:
        raise TransferError(f"a container gave a malformed archive: {error}") from error
    for path, mode in modes.items():
        if path in tree:
            tree[path] = Entry(tree[path].kind, mode, tree[path].data)
    for path in tree:
        parent = path.rpartition("/")[0]
        if parent and (parent not in tree or tree[parent].kind != "directory"):
            raise TransferError(f"a container gave an archive in which {parent!r} is no directory")
    return dict(sorted(tree.items()))


def _entry(
    tar: tarfile.TarFile, member: tarfile.TarInfo, tree: Mapping[str, Entry], max_bytes: int
) -> Entry:
    mode = member.mode & 0o7777
    if member.issym():
        return Entry("symlink", 0o777, member.linkname.encode("utf-8", "surrogateescape"))
    if member.isdir():
        return Entry("directory", mode)
    if member.islnk():
        target = tree.get(member.linkname.removeprefix("./"))
        if target is None or target.kind != "file":
            raise TransferError(f"{member.name!r} is a hard link to nothing")
        if len(target.data) > max_bytes:
            raise TransferError(f"{member.name!r} is larger than the {max_bytes} bytes left")
        return Entry("file", mode, target.data)
    if member.isreg():
        # Of a sparse member the size is what it claims to unfold to.
        if member.size > max_bytes:
            raise TransferError(f"{member.name!r} is larger than the {max_bytes} bytes left")
        content = tar.extractfile(member)
        data = b"" if content is None else content.read(member.size)
        return Entry("file", mode, data)
    return Entry("other", mode)
