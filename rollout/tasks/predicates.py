"""What a check can say about a final working directory, as a module and as a program.

A predicate is data: a name and string arguments. Most are judged over a snapshot that was taken
after the agent's processes ended; only regular files count as files, so a symlink to the expected
content never passes for the thing itself. "exit" and "prints" are judged over the outcome of a
command that somebody ran beside the agent's files.

Generated tasks carry a copy of this file as `tests/checks.py`, so it needs the standard library of
Python 3.10 alone and imports nothing of ours. Run as a program it judges `/app` by the manifest
`checks.json` beside it and writes the results.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

MANIFEST_SCHEMA = "trsi.checks/1"
RESULTS_SCHEMA = "trsi.results/1"

RUN_SECONDS = 10.0
RUN_OUTPUT_BYTES = 64 * 1024
MAX_FILE_BYTES = 4 << 20
MAX_TREE_ENTRIES = 20_000
_NOBODY = 65_534


class Node(Protocol):
    """One entry of a snapshot; `rollout.records.Entry` is one."""

    @property
    def kind(self) -> str:
        """One of "file", "directory", "symlink", "other"."""
        ...

    @property
    def mode(self) -> int:
        """Permission bits."""
        ...

    @property
    def data(self) -> bytes:
        """Bytes of a file, or the target of a symlink."""
        ...


class Run(NamedTuple):
    """A command to run beside the agent's files, and what it reads."""

    command: str
    stdin: str = ""


class Ran(NamedTuple):
    """What a command gave: its exit code (None: it did not end by itself) and standard output."""

    exit_code: int | None
    stdout: bytes


Tree = Mapping[str, Node]
Runs = Mapping[Run, Ran]


def _file(tree: Tree, path: str) -> bytes | None:
    node = tree.get(path)
    return node.data if node is not None and node.kind == "file" else None


def _lines(data: bytes) -> list[str]:
    """Lines without what nobody sees: blanks at a line's end, empty lines at the text's end."""
    text = data.decode("utf-8", "surrogateescape").rstrip()
    return [line.rstrip() for line in text.split("\n")] if text else []


def _text(tree: Tree, a: Sequence[str], runs: Runs) -> bool:
    """Any of the (path, text) pairs is a regular file with exactly that text."""
    pairs = zip(a[::2], a[1::2], strict=True)
    return any(_file(tree, path) == text.encode() for path, text in pairs)


def _moved(tree: Tree, a: Sequence[str], runs: Runs) -> bool:
    """The first path is gone, and any of the (path, text) pairs after it holds."""
    return a[0] not in tree and _text(tree, a[1:], runs)


def _absent(tree: Tree, a: Sequence[str], runs: Runs) -> bool:
    """Nothing is at the path."""
    return a[0] not in tree


def _directory(tree: Tree, a: Sequence[str], runs: Runs) -> bool:
    """The path is a real directory."""
    node = tree.get(a[0])
    return node is not None and node.kind == "directory"


def _mode(tree: Tree, a: Sequence[str], runs: Runs) -> bool:
    """Any of the paths after the octal mode is a regular file with these permission bits."""
    nodes = [tree.get(path) for path in a[1:]]
    return any(n is not None and n.kind == "file" and n.mode == int(a[0], 8) for n in nodes)


def _only(tree: Tree, a: Sequence[str], runs: Runs) -> bool:
    """Nothing is in the tree but (some of) the paths."""
    return set(tree) <= set(a)


def _is_file(tree: Tree, a: Sequence[str], runs: Runs) -> bool:
    """The path is a regular file."""
    return _file(tree, a[0]) is not None


def _has_lines(tree: Tree, a: Sequence[str], runs: Runs) -> bool:
    """The path is a regular file with these lines, blanks at ends apart."""
    data = _file(tree, a[0])
    return data is not None and _lines(data) == _lines(a[1].encode())


def _contains(tree: Tree, a: Sequence[str], runs: Runs) -> bool:
    """The path is a regular file with the text somewhere in it."""
    data = _file(tree, a[0])
    return data is not None and a[1].encode() in data


def _lacks(tree: Tree, a: Sequence[str], runs: Runs) -> bool:
    """The path is a regular file with none of the texts in it."""
    data = _file(tree, a[0])
    return data is not None and not any(text.encode() in data for text in a[1:])


def _link(tree: Tree, a: Sequence[str], runs: Runs) -> bool:
    """The path is a symlink to any of the targets."""
    node = tree.get(a[0])
    return node is not None and node.kind == "symlink" and node.data in [t.encode() for t in a[1:]]


def _json(tree: Tree, a: Sequence[str], runs: Runs) -> bool:
    """The path is a regular file with this JSON value."""
    data = _file(tree, a[0])
    if data is None:
        return False
    try:
        # Compared as text, where 1, 1.0 and true differ.
        return _canonical(json.loads(data)) == _canonical(json.loads(a[1]))
    except (ValueError, RecursionError):
        return False


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _archive(tree: Tree, a: Sequence[str], runs: Runs) -> bool:
    """The path is a tar archive, plain or by gzip, of exactly the (name, text) pairs' files."""
    data = _file(tree, a[0])
    if data is None:
        return False
    try:
        if data[:2] == b"\x1f\x8b":
            unpack = zlib.decompressobj(wbits=31)
            data = unpack.decompress(data, MAX_FILE_BYTES)
        found: dict[str, bytes] = {}
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for member in archive:
                if member.isfile():
                    reader = archive.extractfile(member)
                    found[os.path.normpath(member.name)] = reader.read() if reader else b""
                elif not member.isdir():
                    return False
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError):
        return False
    return found == {name: text.encode() for name, text in zip(a[1::2], a[2::2], strict=True)}


def _exit(tree: Tree, a: Sequence[str], runs: Runs) -> bool:
    """The command ends by itself with exit code 0."""
    return runs[Run(a[0])].exit_code == 0


def _prints(tree: Tree, a: Sequence[str], runs: Runs) -> bool:
    """The command, given the second text, ends with exit code 0 and prints the third's lines."""
    ran = runs[Run(a[0], a[1])]
    return ran.exit_code == 0 and _lines(ran.stdout) == _lines(a[2].encode())


def _is_octal(text: str) -> bool:
    return 0 < len(text) <= 4 and all(c in "01234567" for c in text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class _Predicate(NamedTuple):
    holds: Callable[[Tree, Sequence[str], Runs], bool]
    takes: Callable[[Sequence[str]], bool]
    paths: Callable[[Sequence[str]], Sequence[str]]


_PREDICATES: dict[str, _Predicate] = {
    "text": _Predicate(_text, lambda a: len(a) >= 2 and len(a) % 2 == 0, lambda a: a[::2]),
    "moved": _Predicate(
        _moved, lambda a: len(a) >= 3 and len(a) % 2 == 1, lambda a: [a[0], *a[1::2]]
    ),
    "absent": _Predicate(_absent, lambda a: len(a) == 1, lambda a: a),
    "directory": _Predicate(_directory, lambda a: len(a) == 1, lambda a: a),
    "mode": _Predicate(_mode, lambda a: len(a) >= 2 and _is_octal(a[0]), lambda a: a[1:]),
    "only": _Predicate(_only, lambda a: True, lambda a: ()),
    "file": _Predicate(_is_file, lambda a: len(a) == 1, lambda a: a),
    "lines": _Predicate(_has_lines, lambda a: len(a) == 2, lambda a: a[:1]),
    "contains": _Predicate(_contains, lambda a: len(a) == 2, lambda a: a[:1]),
    "lacks": _Predicate(_lacks, lambda a: len(a) >= 2, lambda a: a[:1]),
    "link": _Predicate(_link, lambda a: len(a) >= 2, lambda a: a[:1]),
    "json": _Predicate(_json, lambda a: len(a) == 2 and _is_json(a[1]), lambda a: a[:1]),
    "archive": _Predicate(_archive, lambda a: len(a) >= 3 and len(a) % 2 == 1, lambda a: a[:1]),
    "exit": _Predicate(_exit, lambda a: len(a) == 1, lambda a: ()),
    "prints": _Predicate(_prints, lambda a: len(a) == 3, lambda a: ()),
}


def problem(predicate: Sequence[Any]) -> str:
    """What is wrong with a predicate; empty if it can be judged."""
    if not predicate or predicate[0] not in _PREDICATES:
        return f"unknown predicate {tuple(predicate[:1])!r}"
    arguments = predicate[1:]
    if not all(isinstance(a, str) for a in arguments) or not _PREDICATES[predicate[0]].takes(
        arguments
    ):
        return f"bad arguments of {predicate[0]!r}"
    return ""


def holds(predicate: Sequence[str], tree: Tree, runs: Runs) -> bool:
    """Whether a predicate without a `problem` holds."""
    return _PREDICATES[predicate[0]].holds(tree, predicate[1:], runs)


def paths_of(predicate: Sequence[str]) -> Sequence[str]:
    """The paths of the working directory that a predicate speaks of."""
    return _PREDICATES[predicate[0]].paths(predicate[1:])


def run_of(predicate: Sequence[str]) -> Run | None:
    """The command whose outcome a predicate judges, if there is one."""
    if predicate[0] == "exit":
        return Run(predicate[1])
    return Run(predicate[1], predicate[2]) if predicate[0] == "prints" else None


def runs_of(predicates: Iterable[Sequence[str]]) -> tuple[Run, ...]:
    """The different commands of several predicates, in their order."""
    runs = (run_of(predicate) for predicate in predicates)
    return tuple(dict.fromkeys(run for run in runs if run is not None))


# --- the program ------------------------------------------------------------------------------


class _Entry(NamedTuple):
    kind: str
    mode: int
    data: bytes


def _scan(root: str) -> dict[str, _Entry]:
    """Everything below `root`, which nobody else is changing; no link is followed."""
    tree: dict[str, _Entry] = {}
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(os.path.join(root, prefix)) as names:  # noqa: PTH118
            for entry in names:
                path = prefix + entry.name
                status = entry.stat(follow_symlinks=False)
                mode = stat.S_IMODE(status.st_mode)
                if len(tree) == MAX_TREE_ENTRIES:
                    raise OSError(f"{root} holds over {MAX_TREE_ENTRIES} entries")
                if stat.S_ISLNK(status.st_mode):
                    target = os.fsencode(os.readlink(entry.path))  # noqa: PTH115
                    tree[path] = _Entry("symlink", mode, target)
                elif stat.S_ISDIR(status.st_mode):
                    tree[path] = _Entry("directory", mode, b"")
                    pending.append(path + "/")
                elif stat.S_ISREG(status.st_mode):
                    with open(entry.path, "rb") as file:  # noqa: PTH123
                        tree[path] = _Entry("file", mode, file.read(MAX_FILE_BYTES + 1))
                else:
                    tree[path] = _Entry("other", mode, b"")
    return tree


def _execute(run: Run, root: str) -> Ran:
    """Run a command as an unprivileged user where this process may choose one."""
    user: dict[str, Any] = {"user": _NOBODY, "group": _NOBODY} if os.geteuid() == 0 else {}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            ["/bin/sh", "-c", run.command],
            cwd=root,
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": tempfile.gettempdir()},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **user,
        )
        try:
            process.communicate(run.stdin.encode(), RUN_SECONDS)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return Ran(code, output.read(RUN_OUTPUT_BYTES))


def _end_others() -> None:
    """Kill every process but this one and those it came from, until there is none.

    A program of the agent that left its group could otherwise wait for the result and replace it.
    """
    spared = {1}
    pid = os.getpid()
    while pid > 1:
        spared.add(pid)
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        pid = int(status.rpartition(") ")[2].split()[1])
    found = True
    while found:
        found = False
        for name in os.listdir("/proc"):  # noqa: PTH208
            if not name.isdigit() or int(name) in spared:
                continue
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{name}/stat").read_text(errors="replace")
                if state.rpartition(") ")[2][:1] not in ("Z", "X"):
                    os.kill(int(name), signal.SIGKILL)
                    found = True


def _write(path: Path, value: object) -> None:
    """Write JSON whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value))
    partial.replace(path)


def main(arguments: Sequence[str]) -> None:
    """Judge WORKDIR by the manifest beside this file and write RESULTS/reward.json.

    A manifest of form "checks" also gives RESULTS/checks.json with the outcome of each check; one
    of form "binary" gives one number and no detail.
    """
    root, results = arguments
    manifest = json.loads(Path(__file__).with_name("checks.json").read_text())
    checks = manifest["checks"]
    # Read before anything of the agent's runs here.
    tree = _scan(root)
    runs = {run: _execute(run, root) for run in runs_of(c["predicate"] for c in checks)}
    if runs:
        _end_others()
    passed = [holds(c["predicate"], tree, runs) for c in checks]
    effective = [(c["weight"], p) for c, p in zip(checks, passed, strict=True) if _counts(c)]
    guards = [p for c, p in zip(checks, passed, strict=True) if not _counts(c)]
    q = sum(w for w, p in effective if p) / sum(w for w, _ in effective)
    h = sum(guards) / len(guards) if guards else 1.0
    folder = Path(results)
    folder.mkdir(parents=True, exist_ok=True)
    if manifest["form"] == "checks":
        status = ["passed" if p else "failed" for p in passed]
        outcomes = [{"id": c["id"], "status": s} for c, s in zip(checks, status, strict=True)]
        _write(folder / "checks.json", {"schema": RESULTS_SCHEMA, "results": outcomes})
    _write(folder / "reward.json", {"reward": q * h})


def _counts(check: Mapping[str, Any]) -> bool:
    return bool(check["kind"] == "effective")


if __name__ == "__main__":
    main(sys.argv[1:])
