"""A small model of the shell that the pool's commands run in, over a `FileTree`.

It knows the commands of the reference solutions and of the demonstrations, with the standard
output and the exit code that bash and GNU coreutils give in the C locale under umask 022.
Anything it doesn't know exactly (an order that the file system decides, a file read and written
at once) raises `UnsupportedCommand`; it never guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rollout.errors import TaskError
from rollout.records import Entry, FileTree

_UMASK = 0o022
_DIRECTORY_MODE = 0o755


class UnsupportedCommand(TaskError):
    """A command whose outcome this model doesn't know."""

    kind = "simulate-unsupported"


class Outcome(NamedTuple):
    """What one command left behind: the tree, its standard output and its exit code."""

    tree: dict[str, Entry]
    stdout: bytes
    exit_code: int


class _Failed(Exception):
    """The command ends with this exit code and standard output."""

    def __init__(self, exit_code: int, stdout: bytes = b"") -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code
        self.stdout = stdout


_Tree = dict[str, Entry]


def _kind(tree: _Tree, path: str) -> str:
    return tree[path].kind if path in tree else ""


def _has_parent(tree: _Tree, path: str) -> bool:
    parent = path.rpartition("/")[0]
    return not parent or _kind(tree, parent) == "directory"


def _read(tree: _Tree, path: str, missing: int, directory: int, text: bytes = b"") -> bytes:
    """Content of a file, or a failure: exit code `missing`, or `directory` and `text`."""
    kind = _kind(tree, path)
    if kind == "file":
        return tree[path].data
    raise _Failed(directory, text) if kind == "directory" else _Failed(missing)


def _lines(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def _one(arguments: Sequence[str]) -> str:
    if len(arguments) != 1:
        raise UnsupportedCommand(f"one operand expected, got {list(arguments)}")
    return arguments[0]


def _two(arguments: Sequence[str]) -> tuple[str, str]:
    if len(arguments) != 2:
        raise UnsupportedCommand(f"two operands expected, got {list(arguments)}")
    return arguments[0], arguments[1]


def _echo(tree: _Tree, arguments: Sequence[str], stdin: bytes | None) -> bytes:
    return " ".join(arguments).encode() + b"\n"


def _ls(tree: _Tree, arguments: Sequence[str], stdin: bytes | None) -> bytes:
    if arguments:
        raise UnsupportedCommand("ls with operands")
    return "".join(f"{p}\n" for p in sorted(tree) if "/" not in p).encode()


def _cat(tree: _Tree, arguments: Sequence[str], stdin: bytes | None) -> bytes:
    return _read(tree, _one(arguments), 1, 1)


def _mkdir(tree: _Tree, arguments: Sequence[str], stdin: bytes | None) -> bytes:
    path = _one(arguments)
    if path in tree or not _has_parent(tree, path):
        raise _Failed(1)
    tree[path] = Entry("directory", _DIRECTORY_MODE)
    return b""


def _rmdir(tree: _Tree, arguments: Sequence[str], stdin: bytes | None) -> bytes:
    path = _one(arguments)
    if _kind(tree, path) != "directory" or any(p.startswith(f"{path}/") for p in tree):
        raise _Failed(1)
    del tree[path]
    return b""


def _touch(tree: _Tree, arguments: Sequence[str], stdin: bytes | None) -> bytes:
    path = _one(arguments)
    if path not in tree:
        if not _has_parent(tree, path):
            raise _Failed(1)
        tree[path] = Entry("file", 0o666 & ~_UMASK)
    return b""


def _rm(tree: _Tree, arguments: Sequence[str], stdin: bytes | None) -> bytes:
    path = _one(arguments)
    if _kind(tree, path) != "file":
        raise _Failed(1)
    del tree[path]
    return b""


def _target(tree: _Tree, source: str, target: str) -> str:
    """Where `mv` or `cp` puts `source`; fails where both refuse."""
    if source not in tree:
        raise _Failed(1)
    if _kind(tree, target) == "directory":
        target = f"{target}/{source.rpartition('/')[2]}"
    if target == source or not _has_parent(tree, target):
        raise _Failed(1)
    return target


def _mv(tree: _Tree, arguments: Sequence[str], stdin: bytes | None) -> bytes:
    source, target = _two(arguments)
    target = _target(tree, source, target)
    if tree[source].kind == "directory":
        if target.startswith(f"{source}/") or _kind(tree, target) == "file":
            raise _Failed(1)
        if target in tree:
            raise UnsupportedCommand("mv of a directory over a directory")
        for path in [p for p in tree if p == source or p.startswith(f"{source}/")]:
            tree[target + path[len(source) :]] = tree.pop(path)
        return b""
    if _kind(tree, target) == "directory":
        raise _Failed(1)
    tree[target] = tree.pop(source)
    return b""


def _cp(tree: _Tree, arguments: Sequence[str], stdin: bytes | None) -> bytes:
    source, target = _two(arguments)
    if _kind(tree, source) == "directory":
        raise _Failed(1)
    target = _target(tree, source, target)
    if _kind(tree, target) == "directory":
        raise _Failed(1)
    mode = tree[target].mode if target in tree else tree[source].mode & ~_UMASK
    tree[target] = Entry("file", mode, tree[source].data)
    return b""


def _wc(tree: _Tree, arguments: Sequence[str], stdin: bytes | None) -> bytes:
    if not arguments or arguments[0] != "-l":
        raise UnsupportedCommand("wc without -l")
    if len(arguments) == 1:
        if stdin is None:
            raise UnsupportedCommand("wc without input")
        return b"%d\n" % stdin.count(b"\n")
    path = _one(arguments[1:])
    data = _read(tree, path, 1, 1, f"0 {path}\n".encode())
    return f"{data.count(10)} {path}\n".encode()


def _sort(tree: _Tree, arguments: Sequence[str], stdin: bytes | None) -> bytes:
    unique = bool(arguments) and arguments[0] == "-u"
    lines = _lines(_read(tree, _one(arguments[1:] if unique else arguments), 2, 2))
    return b"".join(sorted(set(lines) if unique else lines))


def _grep(tree: _Tree, arguments: Sequence[str], stdin: bytes | None) -> bytes:
    if arguments and arguments[0] == "-rl":
        word = _one(arguments[1:]).encode()
        hits = [p for p, e in tree.items() if e.kind == "file" and word in e.data]
        if len(hits) > 1:
            raise UnsupportedCommand("grep -rl with several hits: the directory decides the order")
        if not hits:
            raise _Failed(1)
        return f"{hits[0]}\n".encode()
    pattern, path = _two(arguments)
    word = pattern.encode()
    hit_lines = [line for line in _lines(_read(tree, path, 2, 2)) if word in line]
    if not hit_lines:
        raise _Failed(1)
    return b"".join(hit_lines)


def _sed(tree: _Tree, arguments: Sequence[str], stdin: bytes | None) -> bytes:
    in_place = bool(arguments) and arguments[0] == "-i"
    script, path = _two(arguments[1:] if in_place else arguments)
    parts = script.split("/")
    if len(parts) != 4 or parts[0] != "s" or parts[3] or not (parts[1] + parts[2]).isalpha():
        raise UnsupportedCommand(f"sed script {script!r}")
    lines = _lines(_read(tree, path, 2, 4))
    old, new = parts[1].encode(), parts[2].encode()
    data = b"".join(line.replace(old, new, 1) for line in lines)
    if not in_place:
        return data
    tree[path] = Entry("file", tree[path].mode, data)
    return b""


def _chmod(tree: _Tree, arguments: Sequence[str], stdin: bytes | None) -> bytes:
    mode, path = _two(arguments)
    if path not in tree or not 1 <= len(mode) <= 4 or not all(c in "01234567" for c in mode):
        raise _Failed(1)
    if tree[path].kind == "directory":
        raise UnsupportedCommand("chmod of a directory: later commands may lose access")
    tree[path] = Entry("file", int(mode, 8), tree[path].data)
    return b""


def _head(tree: _Tree, arguments: Sequence[str], stdin: bytes | None) -> bytes:
    count = 10
    if arguments and arguments[0].startswith("-"):
        if not arguments[0][1:].isdecimal():
            raise UnsupportedCommand(f"head {arguments[0]}")
        count = int(arguments[0][1:])
        arguments = arguments[1:]
    return b"".join(_lines(_read(tree, _one(arguments), 1, 1))[:count])


_COMMANDS: dict[str, Callable[[_Tree, Sequence[str], bytes | None], bytes]] = {
    "cat": _cat,
    "chmod": _chmod,
    "cp": _cp,
    "echo": _echo,
    "grep": _grep,
    "head": _head,
    "ls": _ls,
    "mkdir": _mkdir,
    "mv": _mv,
    "rm": _rm,
    "rmdir": _rmdir,
    "sed": _sed,
    "sort": _sort,
    "touch": _touch,
    "wc": _wc,
}


def _open_output(tree: _Tree, path: str, append: bool) -> None:
    """Make or truncate the target of a redirection, as bash does before the command runs."""
    if not _has_parent(tree, path) or _kind(tree, path) == "directory":
        raise _Failed(1)
    if path not in tree:
        tree[path] = Entry("file", 0o666 & ~_UMASK)
    elif not append:
        tree[path] = Entry("file", tree[path].mode)


def run(tree: FileTree, command: str) -> Outcome:
    """Run one simple command, with redirections set off by spaces, in a copy of `tree`.

    Raises:
      UnsupportedCommand: a command outside the model.
    """
    new = dict(tree)
    words = command.split()
    arguments: list[str] = []
    redirections: list[tuple[str, str]] = []
    position = 0
    while position < len(words):
        if words[position] in ("<", ">", ">>"):
            if position + 1 == len(words):
                raise UnsupportedCommand(f"redirection without a file: {command!r}")
            redirections.append((words[position], words[position + 1]))
            position += 2
        else:
            arguments.append(words[position])
            position += 1
    if not arguments or arguments[0] not in _COMMANDS:
        raise UnsupportedCommand(f"not in the model: {command!r}")
    outputs = [path for operator, path in redirections if operator != "<"]
    inputs = [path for operator, path in redirections if operator == "<"]
    if len(outputs) > 1 or len(inputs) > 1:
        raise UnsupportedCommand(f"several redirections of a kind: {command!r}")
    reads = arguments[1:] if arguments[0] != "echo" else []
    if outputs and (outputs[0] in (*reads, *inputs) or arguments[:2] == ["grep", "-rl"]):
        raise UnsupportedCommand(f"reads what it writes: {command!r}")

    stdin: bytes | None = None
    try:
        for operator, path in redirections:
            if operator != "<":
                _open_output(new, path, append=operator == ">>")
            elif _kind(new, path) == "directory":
                raise UnsupportedCommand(f"reads a directory: {command!r}")
            else:
                stdin = _read(new, path, 1, 1)
        stdout, exit_code = _COMMANDS[arguments[0]](new, arguments[1:], stdin), 0
    except _Failed as failure:
        stdout, exit_code = failure.stdout, failure.exit_code
    if outputs and stdout:
        # A failed open leaves no output, so the target is a file here.
        written = new[outputs[0]]
        new[outputs[0]] = Entry("file", written.mode, written.data + stdout)
        stdout = b""
    return Outcome(new, stdout, exit_code)


def initial_tree(files: Mapping[str, bytes], directories: Sequence[str]) -> _Tree:
    """The tree of a fresh sandbox that holds a task's files and directories."""
    tree = {d: Entry("directory", _DIRECTORY_MODE) for d in directories}
    tree.update({path: Entry("file", 0o666 & ~_UMASK, data) for path, data in files.items()})
    return tree
