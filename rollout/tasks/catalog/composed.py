"""Families of several steps: structured text, archives, and what only the sandbox tells."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from rollout.tasks.catalog.world import Arguments, Family, World


def _table(w: World) -> tuple[str, list[str], list[list[str]]]:
    """A new CSV file: its path, the column names and the rows."""
    columns = [w.name() for _ in range(w.rng.randint(3, 5))]
    rows = [
        [w.word(), *(str(w.data.randint(1, 99)) for _ in columns[1:])]
        for _ in range(w.data.randint(5, 10))
    ]
    path = w.add(w.path("csv"), [",".join(columns), *(",".join(row) for row in rows)])
    return path, columns, rows


def _column_extract(w: World) -> Arguments:
    (f, columns, rows), g = _table(w), w.path()
    i = w.rng.randrange(len(columns))
    w.do(f"head -n 1 {f}", f"tail -n +2 {f} | cut -d, -f{i + 1} > {g}")
    w.made(g, [row[i] for row in rows])
    w.goal("no-header", "lacks", g, columns[i])
    return {"f": f, "c": columns[i], "g": g}


def _column_sum(w: World) -> Arguments:
    (f, columns, rows), g = _table(w), w.path()
    i = w.rng.randrange(1, len(columns))
    total = sum(int(row[i]) for row in rows)
    w.do(f"head -n 1 {f}", f"awk -F, 'NR>1 {{s+=${i + 1}}} END {{print s}}' {f} > {g}")
    w.made(g, [str(total)])
    w.goal("has-total", "contains", g, str(total))
    return {"f": f, "c": columns[i], "g": g}


def _csv_filter_rows(w: World) -> Arguments:
    (f, columns, rows), g, x = _table(w), w.path(), w.keyword()
    for i in w.data.sample(range(len(rows)), w.data.randint(2, 3)):
        rows[i][0] = x
    text = [",".join(columns), *(",".join(row) for row in rows)]
    w.add(f, text)
    kept = [text[0], *(line for line in text[1:] if line.startswith(f"{x},"))]
    w.do(f"head -n 1 {f}", f"awk -F, 'NR==1 || $1==\"{x}\"' {f} > {g}")
    w.made(g, kept)
    w.goal("has-header", "contains", g, text[0])
    return {"f": f, "c": columns[0], "x": x, "g": g}


def _document(w: World) -> tuple[str, dict[str, str | int | dict[str, int]]]:
    """A new JSON file: its path and its value."""
    value: dict[str, str | int | dict[str, int]] = {
        w.name(): w.word(),
        w.name(): w.data.randint(100, 999),
        w.name(): {w.name(): w.data.randint(100, 999)},
        w.name(): w.word(),
    }
    path = w.path("json")
    w.files[path] = json.dumps(value, indent=2) + "\n"
    return path, value


def _json_set_field(w: World) -> Arguments:
    x = w.keyword()
    f, value = _document(w)
    k = w.rng.choice([key for key, v in value.items() if isinstance(v, str)])
    w.do(
        f"cat {f}",
        f"python3 -c \"import json; d = json.load(open('{f}')); d['{k}'] = '{x}'; "
        f"json.dump(d, open('{f}', 'w'))\"",
    )
    w.goal("value-there", "contains", f, x)
    w.goal("old-value-gone", "lacks", f, f'"{k}": "{value[k]}"')
    w.goal("set", "json", f, json.dumps(value | {k: x}))
    return {"f": f, "k": k, "x": x}


def _json_get_field(w: World) -> Arguments:
    (f, value), g = _document(w), w.path("txt")
    k = w.rng.choice([key for key, v in value.items() if not isinstance(v, dict)])
    w.do(f"cat {f}", f"echo {value[k]} > {g}")
    w.made(g, [str(value[k])])
    w.goal("has-value", "contains", g, str(value[k]))
    return {"f": f, "k": k, "g": g}


def _follow_note(w: World) -> Arguments:
    note = w.path("md", "txt")
    files = [w.source()[0] for _ in range(3)]
    folders = [w.folder() for _ in range(3)]
    f, d = w.data.choice(files), w.data.choice(folders)
    w.add(note, [*w.lines(2, 4), f"file: {f}", f"directory: {d}", *w.lines(1, 3)])
    w.do(f"cat {note}", f"mv {f} {d}")
    w.goal("gone", "absent", f)
    w.goal("arrived", "file", f"{d}/{f}")
    w.goal("moved", "moved", f, f"{d}/{f}", w.files[f])
    return {"note": note}


def _find_by_name_and_move(w: World) -> Arguments:
    f, d = w.path(), w.folder()
    places = [w.folder(w.folder()) for _ in range(3)]
    place = w.data.choice(places)
    w.add(f"{place}/{f}", w.lines())
    for other in places:
        w.add(f"{other}/{w.path()}", w.lines(1, 4))
    w.do(f"find . -name {f}", f"mv {place}/{f} {d}")
    w.goal("gone", "absent", f"{place}/{f}")
    w.goal("arrived", "file", f"{d}/{f}")
    w.goal("moved", "moved", f"{place}/{f}", f"{d}/{f}", w.files[f"{place}/{f}"])
    return {"f": f, "d": d}


def _pack(w: World) -> tuple[str, str, list[str]]:
    d = w.folder()
    files = [w.add(f"{d}/{w.path()}", w.lines(2, 6)) for _ in range(w.rng.randint(2, 4))]
    return d, f"{w.name()}.tar", files


def _tar_pack(w: World) -> Arguments:
    d, g, files = _pack(w)
    gzip = w.rng.random() < 0.5
    g += ".gz" if gzip else ""
    w.do(f"tar c{'z' if gzip else ''}f {g} {d}", f"tar tf {g}")
    w.goal("made", "file", g)
    w.goal("whole", "archive", g, *(part for f in files for part in (f, w.files[f])))
    return {"d": d, "g": g}


def _checksum_manifest(w: World) -> Arguments:
    d, g = w.folder(), w.path("txt")
    files = sorted(w.add(f"{d}/{w.path()}", w.lines(2, 6)) for _ in range(w.rng.randint(2, 4)))
    w.do(f"ls {d}", f"sha256sum {d}/* > {g}")
    sums = [f"{hashlib.sha256(w.files[f].encode()).hexdigest()}  {f}" for f in files]
    w.made(g, sums)
    for i, line in enumerate(sums):
        w.goal(f"sum-{i + 1}", "contains", g, line)
    return {"d": d, "g": g}


def _log(w: World, low: int, high: int) -> list[str]:
    """Lines such as programs print: a counter, a level, two words and a number."""
    return [
        f"{i:04d} {w.data.choice(('info', 'debug', 'notice'))} {w.word()} {w.word()}"
        f" {w.data.randint(10, 9999)}"
        for i in range(w.data.randint(low, high))
    ]


def _treasure_chain(w: World) -> Arguments:
    hops = w.rng.randint(3, 5)
    places = [f"{w.folder()}/{w.path('txt')}" for _ in range(hops)]
    start, g, trail, key = w.path("txt"), w.path("txt"), w.path("txt"), w.word()
    w.data.shuffle(places)
    for here, there in zip([start, *places], [*places, ""], strict=True):
        clue = f"next: {there}" if there else f"key: {key}"
        w.add(here, [*w.lines(0, 3), clue])
    visited = [start, *places]
    w.do(*(f"cat {place}" for place in visited), f"echo {key} > {g}")
    w.do("printf '%s\\n' " + " ".join(visited) + f" > {trail}")
    w.made(g, [key])
    w.made(trail, visited)
    for i, place in enumerate(places):
        w.goal(f"visited-{i + 1}", "contains", trail, place)
    return {"start": start, "g": g, "trail": trail}


def _stage_pipeline(w: World) -> Arguments:
    (f, lines), d, x = w.source(low=8, high=16), w.name(), w.keyword()
    for i in w.data.sample(range(len(lines)), 3):
        lines[i] = f"{x} {w.word()}"
    w.add(f, lines)
    hits = sorted({line for line in lines if x in line})
    raw, found, report = (f"{d}/{w.path('txt')}" for _ in range(3))
    w.do(f"mkdir {d}", f"cp {f} {raw}", f"grep {x} {raw} | sort -u > {found}")
    w.do(f"wc -l < {found} > {report}")
    w.goal("directory", "directory", d)
    w.goal("copied", "text", raw, w.files[f])
    w.made(found, hits)
    w.made(report, [str(len(hits))])
    return {"f": f, "d": d, "x": x, "raw": raw, "found": found, "report": report}


def _conditional_fix(w: World) -> Arguments:
    script, config, out = w.path("sh"), w.path("cfg"), w.path("txt")
    k, good, bad = w.name(), w.word(), w.data.randint(100, 999)
    others = {w.name(): w.word() for _ in range(3)}
    entries = [*others.items()]
    entries.insert(w.data.randrange(4), (k, str(bad)))
    w.add(config, [f"{key}={value}" for key, value in entries])
    steps = w.data.randint(40, 120)
    w.add(
        script,
        [
            "i=0",
            f'while [ "$i" -lt {steps} ]; do',
            '  echo "step $i: reading block $((i * 37 % 101))"',
            "  i=$((i + 1))",
            "done",
            f"if ! grep -qx {k}={good} {config}; then",
            f'  echo "error: {k} must be {good} in {config}"',
            "  exit 1",
            "fi",
            f"grep -c = {config} > {out}",
            f"echo {steps} >> {out}",
        ],
    )
    w.do(f"sh {script}", f"sed -i 's/^{k}=.*/{k}={good}/' {config}", f"sh {script}", f"cat {out}")
    fixed = [f"{key}={good if key == k else value}" for key, value in entries]
    w.goal("entry-fixed", "contains", config, f"{k}={good}\n")
    w.goal("config-right", "lines", config, "".join(f"{line}\n" for line in fixed))
    w.made(out, ["4", str(steps)])
    return {"script": script, "config": config, "out": out}


def _log_triage(w: World) -> Arguments:
    d, g, total, worst = w.folder(), w.path("json"), w.path("txt"), w.path("txt")
    k = w.rng.randint(2, 3)
    codes = [f"E{n}" for n in w.data.sample(range(100, 999), k + 2)]
    # Counts that differ, so that the most frequent are no matter of taste.
    counts = dict(zip(codes, w.data.sample(range(1, 9), len(codes)), strict=True))
    paths = [f"{d}/{w.path('log')}" for _ in range(3)]
    most = w.data.randrange(3)
    errors: list[list[str]] = [[] for _ in paths]
    occurrences = [code for code, n in counts.items() for _ in range(n)]
    w.data.shuffle(occurrences)
    lead = len(occurrences) // 2 + 1
    for i, code in enumerate(occurrences):
        errors[most if i < lead else w.data.randrange(3)].append(f"ERROR {code} {w.word()}")
    for path, found in zip(paths, errors, strict=True):
        lines = _log(w, 12, 30) + found
        w.data.shuffle(lines)
        w.add(path, lines)
    top = dict(sorted(counts.items(), key=lambda item: -item[1])[:k])
    value = json.dumps(top)
    w.do(
        f"cat {d}/*.log",
        f"grep -h ERROR {d}/*.log | cut -d' ' -f2 | sort | uniq -c | sort -rn | head -n {k}",
        f"echo '{value}' > {g}",
        f"cat {d}/*.log | grep -c ERROR > {total}",
        f"grep -c ERROR {d}/*.log",
        f"echo {paths[most]} > {worst}",
    )
    w.goal("made-json", "file", g)
    w.goal("top-codes", "json", g, value)
    w.made(total, [str(len(occurrences))])
    w.made(worst, [paths[most]])
    return {"d": d, "g": g, "k": str(k), "total": total, "worst": worst}


def _two_branch(w: World) -> Arguments:
    report, (a, first), (b, second) = w.path("log"), w.source(), w.source()
    x, g, d = w.keyword(), w.path("txt"), w.name()
    status = w.data.choice(("open", "closed"))
    w.add(report, [*_log(w, 30, 90), f"status: {status}", *_log(w, 2, 8)])
    f, lines = (a, first) if status == "open" else (b, second)
    w.do(f"cat {report}", f"echo {x} >> {f}", f"mkdir {d}", f"echo {status} > {d}/{g}")
    w.goal("appended", "lines", f, "".join(f"{line}\n" for line in [*lines, x]))
    w.goal("directory", "directory", d)
    w.made(f"{d}/{g}", [status])
    return {"report": report, "a": a, "b": b, "x": x, "d": d, "g": f"{d}/{g}"}


# --- one exit status --------------------------------------------------------------------------


def _digests(contents: Mapping[str, str]) -> str:
    """A shell command that succeeds where all of these files have just these contents."""
    sums = [f"{hashlib.sha256(t.encode()).hexdigest()}  {path}" for path, t in contents.items()]
    return "printf '%s\\n' " + " ".join(f"'{line}'" for line in sums) + " | sha256sum -c --quiet"


def _script_exit0(w: World) -> Arguments:
    x, s = w.keyword(), w.path("sh")
    f, _ = w.source()
    has = w.data.random() < 0.5
    if has:
        w.add(f, [*w.lines(), x])
    w.do(f"echo 'grep -q {x} \"$1\"' > {s}")
    w.goal(
        "exit",
        "exit",
        f"at=$(mktemp -d); echo {x} > $at/with; echo none > $at/without; "
        f"sh {s} $at/with && ! sh {s} $at/without && {'' if has else '! '}sh {s} {f}",
    )
    w.unmet.append(("file", s))
    return {"s": s, "x": x}


def _diff_empty(w: World) -> Arguments:
    (f, lines), g = w.source(low=6), w.path()
    changed = list(lines)
    changed[w.data.randrange(len(changed))] = w.keyword()
    w.add(g, changed)
    w.do(f"diff {f} {g}", f"cp {f} {g}")
    w.goal("exit", "exit", f"diff {f} {g} && {_digests({f: w.files[f]})}")
    w.unmet.append(("text", g, w.files[f]))
    return {"f": f, "g": g}


def _grep_q(w: World) -> Arguments:
    (f, _), x = w.source(), f"{w.keyword()}={w.keyword()}"
    w.do(f"echo {x} >> {f}")
    w.goal("exit", "exit", f"grep -qx {x} {f}")
    w.unmet.append(("contains", f, x))
    return {"f": f, "x": x}


def _env_file_source(w: World) -> Arguments:
    f = w.path("env")
    pairs = {w.name().upper(): w.keyword() for _ in range(w.rng.randint(2, 3))}
    w.do("printf '%s\\n' " + " ".join(f"{k}={v}" for k, v in pairs.items()) + f" > {f}")
    # Compared outside the shell that reads the file, which could end it with success.
    shown = " ".join(f'"${k}"' for k in pairs)
    found = f"$(. ./{f} >/dev/null && printf '%s/' {shown})"
    w.goal("exit", "exit", f'[ "{found}" = {"/".join(pairs.values())}/ ]')
    w.unmet.append(("file", f))
    return {"f": f, "pairs": " and ".join(f"{k} to {v}" for k, v in pairs.items())}


def _make_target(w: World) -> Arguments:
    t, (f, lines), g = w.name(), w.source(), w.path("txt")
    steps = w.data.randint(40, 110)
    recipe = f'for i in $$(seq {steps}); do echo "unit $$i: compiled, linked, checked"; done'
    w.add("Makefile", [f"{w.name()}:", f"\t@{recipe}"])
    w.do("make", f"printf '{t}:\\n\\tsort {f} > {g}\\n' >> Makefile", f"make {t}")
    result = "".join(f"{line}\n" for line in sorted(lines))
    w.goal("exit", "exit", f"rm -f {g}; make -s {t} && {_digests({g: result})}")
    w.unmet.append(("contains", "Makefile", t))
    return {"t": t, "f": f, "g": g}


def _round_trip(w: World) -> Arguments:
    d, g, files = _pack(w)
    w.do(f"tar cf {g} {d}")
    contents = {f: w.files[f] for f in files}
    w.goal(
        "exit", "exit", f"at=$(mktemp -d) && tar xf {g} -C $at && cd $at && {_digests(contents)}"
    )
    w.unmet.append(("file", g))
    return {"d": d, "g": g}


FAMILIES: tuple[Family, ...] = (
    Family(
        "column_extract",
        (
            "write the values of the column {c} of {f} to {g}, one a line, without the header",
            "take the column {c} out of {f}: its values, not its name, go to {g}, one a line",
            "{g} shall list what {f} has under the heading {c}, a value a line",
        ),
        _column_extract,
    ),
    Family(
        "column_sum",
        (
            "add up the column {c} of {f} and write the sum to {g}",
            "put the total of the column {c} in {f} into {g}",
            "{g} shall hold the sum of what {f} has under the heading {c}",
        ),
        _column_sum,
    ),
    Family(
        "csv_filter_rows",
        (
            "write the header of {f} and the rows whose {c} is {x} to {g}",
            "keep only the rows of {f} with {x} in the column {c}, header included, in {g}",
            "{g} shall be {f} without the rows whose {c} is something other than {x}",
        ),
        _csv_filter_rows,
    ),
    Family(
        "json_set_field",
        (
            "set the field {k} of {f} to the text {x}",
            "change the value of {k} in the JSON file {f} to {x}",
            "in {f}, the key {k} shall have the value {x}, the rest as it is",
        ),
        _json_set_field,
    ),
    Family(
        "json_get_field",
        (
            "write the value of the field {k} of {f} to {g}",
            "look up {k} in the JSON file {f} and put its value into {g}",
            "{g} shall hold just the value that {f} has for {k}",
        ),
        _json_get_field,
    ),
    Family(
        "follow_note",
        (
            "read {note} and move the file it names into the directory it names",
            "{note} says which file belongs in which directory; take it there",
            "do what {note} asks: put its file into its directory",
        ),
        _follow_note,
    ),
    Family(
        "find_by_name_and_move",
        (
            "find the file {f}, wherever it is, and move it into {d}",
            "{f} lies in some directory; put it in {d}",
            "look for {f} in all folders and take it to {d}",
        ),
        _find_by_name_and_move,
    ),
    Family(
        "tar_pack",
        (
            "pack the directory {d} into the archive {g}",
            "make a tar archive {g} of the folder {d}",
            "{g} shall be an archive that holds {d} with its files",
        ),
        _tar_pack,
    ),
    Family(
        "checksum_manifest",
        (
            "write the SHA-256 sums of the files in {d} to {g}, as sha256sum prints them with the"
            " path {d}/..., in alphabetical order",
            "make {g} a sha256sum listing of {d}/*, sorted by name",
            "{g} shall hold the output of sha256sum for every file in {d}, each named {d}/...",
        ),
        _checksum_manifest,
    ),
    Family(
        "treasure_chain",
        (
            "start at {start}: each file names the next one, the last has a key; write the key to"
            " {g} and the paths of all files on the way, in order and {start} first, to {trail}",
            "follow the files from {start} on to the one with the key; {g} shall hold the key and"
            " {trail} every path you came by, {start} included, a line each",
            "{start} begins a trail of files; save its key in {g}, and in {trail} list the trail's"
            " files from {start} to the last",
        ),
        _treasure_chain,
    ),
    Family(
        "stage_pipeline",
        (
            "make the directory {d}, copy {f} to {raw}, write the distinct lines of {raw} with {x}"
            " in them, sorted, to {found}, and their number to {report}",
            "first create {d}; then {raw} shall be a copy of {f}, {found} its different lines that"
            " contain {x} in alphabetical order, {report} how many these are",
            "in a new folder {d}, put {f} as {raw}, the sorted unique lines of it with {x} as"
            " {found}, and the count of those lines as {report}",
        ),
        _stage_pipeline,
    ),
    Family(
        "conditional_fix",
        (
            "run {script}; it says what is wrong in {config}; correct that and run it again, so"
            " that it writes {out}",
            "get {script} to succeed: read its error, mend {config}, not the script, and run it"
            " once more to make {out}",
            "{out} is written by {script} once {config} is right; find out what it wants and do it",
        ),
        _conditional_fix,
        logs=True,
    ),
    Family(
        "log_triage",
        (
            "in the logs of {d}, find the {k} most frequent codes after ERROR and write them with"
            " their counts as a JSON object to {g}; write the number of all ERROR lines to {total}"
            " and the path of the log with most of them to {worst}",
            "{g} shall map the {k} commonest ERROR codes of {d}/*.log to how often they occur, as"
            " JSON; {total} shall hold the number of ERROR lines, {worst} the path of the log"
            " that has most",
            "go through {d}/*.log: count of ERROR lines into {total}, the path of the file with"
            " the most into {worst}, and a JSON object from the top {k} codes to counts into {g}",
        ),
        _log_triage,
        logs=True,
    ),
    Family(
        "two_branch",
        (
            "look up the status in {report}: if it is open append the line {x} to {a}, else to"
            " {b}; then make the directory {d} and write the status to {g}",
            "{report} has a line with the status; append {x} to {a} when it is open and to {b}"
            " when it is not, create {d}, and save the status in {g}",
            "depending on the status in {report}, add the line {x} to {a} (open) or {b} (closed);"
            " after that make {d} and put the status into {g}",
        ),
        _two_branch,
        logs=True,
    ),
    Family(
        "script_exit0",
        (
            "write a shell script {s} that exits with 0 if the file given to it contains {x}, and"
            " with something else if not",
            "make {s}: called with a file name, `sh {s} FILE` succeeds exactly when FILE has {x}"
            " in it",
            "{s} shall be a script that tells by its exit status whether its argument, a file,"
            " mentions {x}",
        ),
        _script_exit0,
        "binary",
    ),
    Family(
        "diff_empty",
        (
            "change {g} so that it is the same as {f}",
            "`diff {f} {g}` shall print nothing; leave {f} as it is",
            "bring {g} into line with {f}, byte by byte",
        ),
        _diff_empty,
        "binary",
    ),
    Family(
        "grep_q",
        (
            "`grep -qx {x} {f}` shall succeed",
            "see to it that {f} has the line {x}",
            "the setting {x} is missing in {f}; add it on its own line",
        ),
        _grep_q,
        "binary",
    ),
    Family(
        "env_file_source",
        (
            "write {f} so that sourcing it in a shell sets {pairs}",
            "make an environment file {f} that sets {pairs}",
            "after `. ./{f}` a shell shall have set {pairs}",
        ),
        _env_file_source,
        "binary",
    ),
    Family(
        "make_target",
        (
            "add a target {t} to the Makefile that sorts {f} into {g}",
            "`make {t}` shall write the sorted lines of {f} to {g}",
            "the Makefile lacks {t}: it is to make {g} from {f} by sorting",
        ),
        _make_target,
        "binary",
        logs=True,
    ),
    Family(
        "round_trip",
        (
            "pack {d} into {g} so that unpacking it gives the same files again",
            "{g} shall be a tar archive from which {d} can be restored unchanged",
            "make {g}: extracted with tar elsewhere it yields {d} as it is now",
        ),
        _round_trip,
        "binary",
    ),
)
