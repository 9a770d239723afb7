"""Families of one step: files and directories by name, and digests of one text file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout.tasks.catalog.world import Arguments, Family, World

_MODES = ("600", "640", "700", "744", "755", "400", "444", "664")


def _write_line(w: World) -> Arguments:
    f, x = w.path(), f"{w.keyword()} {w.keyword()}"
    w.do(f"echo '{x}' > {f}")
    w.made(f, [x])
    return {"f": f, "x": x}


def _append_line(w: World) -> Arguments:
    (f, lines), x = w.source(), w.keyword()
    w.do(f"echo {x} >> {f}")
    w.goal("appended", "lines", f, "".join(f"{line}\n" for line in [*lines, x]))
    return {"f": f, "x": x}


def _make_dir(w: World) -> Arguments:
    d = w.name()
    w.do(f"mkdir {d}")
    w.goal("made", "directory", d)
    return {"d": d}


def _nested_dir(w: World) -> Arguments:
    names = [w.name() for _ in range(w.rng.randint(2, 4))]
    paths = ["/".join(names[: i + 1]) for i in range(len(names))]
    w.do(f"mkdir -p {paths[-1]}")
    for i, path in enumerate(paths):
        w.goal(f"level-{i + 1}", "directory", path)
    return {"d": paths[-1]}


def _touch_empty(w: World) -> Arguments:
    f = w.path()
    w.do(f"touch {f}")
    w.goal("empty", "text", f, "")
    return {"f": f}


def _rename(w: World) -> Arguments:
    (f, _), g = w.source(), w.path()
    w.do(f"mv {f} {g}")
    w.goal("gone", "absent", f)
    w.goal("renamed", "moved", f, g, w.files[f])
    return {"f": f, "g": g}


def _move_into_dir(w: World) -> Arguments:
    (f, _), d = w.source(), w.folder()
    w.do(f"mv {f} {d}")
    w.goal("gone", "absent", f)
    w.goal("moved", "moved", f, f"{d}/{f}", w.files[f])
    return {"f": f, "d": d}


def _copy_file(w: World) -> Arguments:
    (f, _), g = w.source(), w.path()
    w.do(f"cp {f} {g}")
    w.goal("made", "file", g)
    w.goal("copied", "text", g, w.files[f])
    return {"f": f, "g": g}


def _delete_file(w: World) -> Arguments:
    f, _ = w.source()
    w.do(f"rm {f}")
    w.goal("gone", "absent", f)
    return {"f": f}


def _symlink(w: World) -> Arguments:
    (f, _), g = w.source(), w.name()
    w.do(f"ln -s {f} {g}")
    w.goal("linked", "link", g, f, f"./{f}", f"/app/{f}")
    return {"f": f, "g": g}


def _chmod_mode(w: World) -> Arguments:
    (f, _), m = w.source(), w.rng.choice(_MODES)
    w.do(f"chmod {m} {f}")
    w.goal("mode", "mode", m, f)
    w.guard("same-text", "text", f, w.files[f])
    return {"f": f, "m": m}


def _truncate_file(w: World) -> Arguments:
    f, _ = w.source()
    w.do(f": > {f}")
    w.goal("empty", "text", f, "")
    return {"f": f}


def _delete_by_ext(w: World) -> Arguments:
    # Files that have nothing to do with the request never end so.
    e, other = w.rng.sample(("tmp", "bak"), 2)
    for _ in range(w.rng.randint(2, 4)):
        f, _ = w.source(e)
        w.goal(f"gone-{f}", "absent", f)
    w.source(other)
    w.do(f"rm *.{e}")
    return {"e": e}


def _join_two_files(w: World) -> Arguments:
    (a, first), (b, second), g = w.source(), w.source(), w.path()
    w.do(f"cat {a} {b} > {g}")
    w.made(g, first + second)
    return {"a": a, "b": b, "g": g}


def _replace_word(w: World) -> Arguments:
    f, x, y = w.path(), w.keyword(), w.keyword()
    lines = w.lines(5, 10, words=2)
    for i in w.data.sample(range(len(lines)), 2):
        lines[i] = f"{x} {w.word()}"
    w.add(f, lines)
    w.do(f"sed -i s/{x}/{y}/g {f}")
    w.goal(f"old-word-gone-{f}", "lacks", f, x)
    w.goal(f"new-word-there-{f}", "contains", f, y)
    w.goal(f"replaced-{f}", "lines", f, w.files[f].replace(x, y))
    return {"f": f, "x": x, "y": y}


@dataclass(frozen=True, slots=True)
class _Digest:
    """What one command makes of one text file.

    Attributes:
      command: `f` is the file, `g` the new one, `x` a word in some of its lines, `n` a count.
      result: (lines, x, n) -> the new file's lines.
    """

    name: str
    templates: tuple[str, ...]
    command: str
    result: Callable[[list[str], str, int], Sequence[str]]


_DIGESTS = (
    _Digest(
        "count_lines",
        (
            "count the lines of {f} and write the number to {g}",
            "put the number of lines in {f} into {g}",
            "{g} shall hold how many lines {f} has, as a bare number",
        ),
        "wc -l < {f} > {g}",
        lambda lines, x, n: [str(len(lines))],
    ),
    _Digest(
        "count_words",
        (
            "count the words of {f} and write the number to {g}",
            "put the number of words in {f} into {g}",
            "{g} shall hold how many words {f} has, as a bare number",
        ),
        "wc -w < {f} > {g}",
        lambda lines, x, n: [str(sum(len(line.split()) for line in lines))],
    ),
    _Digest(
        "grep_to_file",
        (
            "write the lines of {f} that contain {x} to {g}",
            "copy every line of {f} with {x} in it to {g}",
            "collect in {g} those lines of {f} where {x} occurs",
        ),
        "grep {x} {f} > {g}",
        lambda lines, x, n: [line for line in lines if x in line],
    ),
    _Digest(
        "grep_invert",
        (
            "write the lines of {f} that do not contain {x} to {g}",
            "copy {f} to {g} without the lines that have {x} in them",
            "collect in {g} those lines of {f} where {x} does not occur",
        ),
        "grep -v {x} {f} > {g}",
        lambda lines, x, n: [line for line in lines if x not in line],
    ),
    _Digest(
        "grep_count",
        (
            "count the lines of {f} that contain {x} and write the number to {g}",
            "put into {g} how many lines of {f} have {x} in them",
            "{g} shall hold the number of lines of {f} where {x} occurs",
        ),
        "grep -c {x} {f} > {g}",
        lambda lines, x, n: [str(sum(x in line for line in lines))],
    ),
    _Digest(
        "head_n",
        (
            "write the first {n} lines of {f} to {g}",
            "copy the top {n} lines of {f} to {g}",
            "{g} shall hold the {n} lines that {f} begins with",
        ),
        "head -n {n} {f} > {g}",
        lambda lines, x, n: lines[:n],
    ),
    _Digest(
        "tail_n",
        (
            "write the last {n} lines of {f} to {g}",
            "copy the bottom {n} lines of {f} to {g}",
            "{g} shall hold the {n} lines that {f} ends with",
        ),
        "tail -n {n} {f} > {g}",
        lambda lines, x, n: lines[-n:],
    ),
    _Digest(
        "sort_lines",
        (
            "sort the lines of {f} into {g}",
            "write the lines of {f} in alphabetical order to {g}",
            "{g} shall hold the lines of {f}, sorted",
        ),
        "sort {f} > {g}",
        lambda lines, x, n: sorted(lines),
    ),
    _Digest(
        "sort_unique",
        (
            "sort the lines of {f} without repeats into {g}",
            "write the distinct lines of {f} in alphabetical order to {g}",
            "{g} shall hold every different line of {f} once, sorted",
        ),
        "sort -u {f} > {g}",
        lambda lines, x, n: sorted(set(lines)),
    ),
    _Digest(
        "uniq_freq",
        (
            "write the most frequent line of {f} to {g}",
            "find out which line occurs most often in {f} and put it into {g}",
            "{g} shall hold the one line that {f} repeats most",
        ),
        "sort {f} | uniq -c | sort -rn | head -n 1 | sed 's/^ *[0-9]* //' > {g}",
        lambda lines, x, n: [Counter(lines).most_common(1)[0][0]],
    ),
    _Digest(
        "upper_case",
        (
            "write {f} in upper case to {g}",
            "copy {f} to {g} with every letter made a capital",
            "{g} shall hold the text of {f} in capital letters",
        ),
        "tr a-z A-Z < {f} > {g}",
        lambda lines, x, n: [line.upper() for line in lines],
    ),
)


def _digest(digest: _Digest) -> Callable[[World], Arguments]:
    def build(w: World) -> Arguments:
        f, g, x, n = w.path(), w.path(), w.keyword(), w.rng.randint(2, 5)
        lines = w.lines(7, 14)
        for i in w.data.sample(range(len(lines)), 3):
            lines[i] = f"{w.word()} {x}" if w.data.random() < 0.7 else x
        # One line outnumbers all others.
        most = w.data.choice(lines)
        lines += [most] * (1 + max(Counter(lines).values()) - lines.count(most))
        w.data.shuffle(lines)
        w.add(f, lines)
        arguments = {"f": f, "g": g, "x": x, "n": str(n)}
        w.do(digest.command.format_map(arguments))
        w.made(g, digest.result(lines, x, n))
        return arguments

    return build


FAMILIES: tuple[Family, ...] = (
    Family(
        "write_line",
        (
            "write the line '{x}' to {f}",
            "make a file {f} that says '{x}'",
            "save '{x}' in a new file {f}",
            "{f} shall hold the one line '{x}'",
        ),
        _write_line,
    ),
    Family(
        "append_line",
        (
            "append the line {x} to {f}",
            "add {x} as the last line of {f}",
            "put {x} on a line of its own at the end of {f}",
        ),
        _append_line,
    ),
    Family(
        "make_dir",
        ("make the directory {d}", "create a folder named {d}", "there shall be a directory {d}"),
        _make_dir,
    ),
    Family(
        "nested_dir",
        (
            "make the directory {d} with all its parents",
            "create the folders {d}, one in the other",
            "there shall be a directory {d}",
        ),
        _nested_dir,
    ),
    Family(
        "touch_empty",
        (
            "make an empty file {f}",
            "create {f} with nothing in it",
            "there shall be a file {f} of 0 bytes",
        ),
        _touch_empty,
    ),
    Family(
        "rename",
        ("rename {f} to {g}", "give {f} the name {g}", "{f} shall be called {g} from now on"),
        _rename,
    ),
    Family(
        "move_into_dir",
        ("move {f} into {d}", "put {f} in the directory {d}", "{f} belongs in {d}; take it there"),
        _move_into_dir,
    ),
    Family(
        "copy_file",
        ("copy {f} to {g}", "duplicate {f} as {g}", "make {g} a copy of {f} and keep {f}"),
        _copy_file,
    ),
    Family(
        "delete_file",
        ("delete {f}", "remove the file {f}", "{f} is not needed any more; get rid of it"),
        _delete_file,
    ),
    Family(
        "symlink",
        (
            "make a symbolic link {g} that points to {f}",
            "link {g} to {f} symbolically",
            "{g} shall be a symlink to {f}",
        ),
        _symlink,
    ),
    Family(
        "chmod_mode",
        ("set the mode of {f} to {m}", "give {f} the permissions {m}", "{f} shall have mode {m}"),
        _chmod_mode,
    ),
    Family(
        "truncate_file",
        ("empty {f} but keep the file", "cut {f} to 0 bytes", "{f} shall stay, with nothing in it"),
        _truncate_file,
    ),
    *(Family(d.name, d.templates, _digest(d), clauses=(1, 1, 2)) for d in _DIGESTS),
    Family(
        "replace_word",
        (
            "replace {x} by {y} everywhere in {f}",
            "change every {x} in {f} to {y}",
            "in {f}, {y} shall stand wherever {x} stands now",
        ),
        _replace_word,
        clauses=(1, 1, 2),
    ),
    Family(
        "delete_by_ext",
        (
            "delete all files that end in .{e}",
            "remove every .{e} file here",
            "no file with the extension .{e} shall be left",
        ),
        _delete_by_ext,
    ),
    Family(
        "join_two_files",
        (
            "join {a} and {b}, in this order, into {g}",
            "write {a} followed by {b} to {g}",
            "{g} shall hold the text of {a} and then that of {b}",
        ),
        _join_two_files,
        clauses=(1, 1, 2),
    ),
)
