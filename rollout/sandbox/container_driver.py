"""The program inside every container: process 1 guards, a shell below it runs the commands.

Standard input brings orders from the host, standard output takes what the commands print, standard
error the reports. Process 1 runs a copy of bash that its user may execute but not read. The kernel
then lets no process of that user look into it or its shell: not at memory, not at descriptors.

An order is a few texts, each ended by a NUL, the first a letter:

  r TAG TEXT  run TEXT in the shell;
  f MARK      print MARK on the output, behind everything that a command printed;
  k TAG       kill what was started since the last `r`, but for the shell;
  a TAG       kill every process, the shell too; a new one is started;
  e TAG       the same, and no new one is started: the end;
  o TAG       how many processes the kernel killed here for lack of memory.

A report is one line: `s TAG CODE` of the shell, a command ended; `k|a|e|o TAG NUMBER` of process 1;
`x SECRET CODE`, the shell ended. Tags are chosen anew by the host for every order, so nothing that
an earlier command left running can answer a later one. SECRET is the first text that the host
sends; the shell forgets it before it runs anything.

Process 1 ends when its input ends, which is when the host is gone, and when the lifetime is over.
"""

from __future__ import annotations

import hashlib

FOLDER = "/.trsi"
BASH = f"{FOLDER}/bash"
WORKDIR_TAR = f"{FOLDER}/workdir.tar"
"""What the image has in the working directory, on which a file system with a size is mounted."""

# What bash would end on, in process 1 too: there the kernel keeps away only what has no handler.
_SIGNALS = (
    "HUP INT QUIT ILL TRAP ABRT BUS FPE USR1 SEGV USR2 PIPE ALRM TERM XCPU XFSZ VTALRM PROF SYS"
)

# Order matters here as in `rollout.sandbox.driver`. Evaluated as a text and in no function, so that
# an error in a command reads "bash: line 1: ...". The parent of the shell says how it ended, and
# starts the next one when nothing is left of the orders of the last.
_SPAWN = (
    "exec 5<> <(:); exec 6>/dev/fd/5 7</dev/fd/5 5>&-; set -m; "
    f"( trap - {_SIGNALS}; "
    "exec 3<&- 6>&- 8<&-; set -m; while :; do ( set +m; builtin unset __secret __spawn __guard; "
    'builtin unset -f __sweep __kill; __status() { return "$1"; }; __last=0; '
    'while IFS= builtin read -r -d "" -u 7 __tag && IFS= builtin read -r -d "" -u 7 __command; do '
    "if __status $__last; "
    'then builtin eval "$__command" </dev/null 4>&- 7<&-; __last=$?; '
    'else builtin eval "$__command" </dev/null 4>&- 7<&-; __last=$?; fi; '
    'builtin printf "s %s %d\\n" "$__tag" "$__last" >&4; done ) 2>&1 & '
    "until wait $!; __last=$?; ! kill -0 $!; do :; done; "
    'while read -t 0 -u 7; do IFS= read -r -d "" -t 0.01 -u 7 _ || break; done; '
    'printf "x %s %d\\n" "$__secret" $__last >&4 || exit; done ) & __pid=$!; exec 7<&-'
)

_GUARD = (
    # Arguments: lifetime in seconds, largest file in KiB, whether to fill the working directory.
    'exec 3<&0 4>&2 </dev/null 2>/dev/null; ulimit -c 0; ulimit -f "$2"; umask 022; '
    'IFS= read -r -d "" __secret <&3 || exit; __since=0; '
    f"[ $3 = 0 ] || tar -x -p -o --strip-components=1 -f {WORKDIR_TAR} || "
    '{ printf "! the image has more in the working directory than disk_mb allows\\n" >&4; exit; }; '
    # An empty pipe to wait on: bash has no sleep of its own.
    f"exec 8<> <(:); trap '' {_SIGNALS}; "
    # What was started at $1 hundredths or later, but for this process, the shell and its parent.
    "__sweep() { local p s f; __found=(); for p in /proc/[0-9]*; do p=${p#/proc/}; "
    '[ $p = 1 ] || [ $p = "$__pid" ] && continue; read -r s </proc/$p/stat || continue; '
    'f=(${s##*) }); [[ ${f[0]} != [ZX] && ${f[1]} != "$__pid" ]] && [ ${f[19]} -ge $1 ] && '
    "__found+=($p); done; }; "
    "__kill() { local i; for i in {1..50}; do __sweep $1; [ ${#__found[@]} = 0 ] && break; "
    "kill -KILL ${__found[@]}; read -t 0.004 -u 8 _; done; }; "
    'eval "$__spawn"; '
    "while :; do __left=$(($1 - SECONDS)); [ $__left -gt 0 ] || exit; "
    'IFS= read -r -d "" -t $__left -u 3 __verb || exit; IFS= read -r -d "" -u 3 __tag || exit; '
    'case "$__verb" in '
    'r) IFS= read -r -d "" -u 3 __command || exit; '
    # Gone without a word: a command killed every process that it could.
    'kill -0 $__pid || { kill -KILL -1; __kill 0; eval "$__spawn"; }; '
    "read -r __since _ </proc/uptime; __since=$((10#${__since/./})); "
    'printf "%s\\0%s\\0" "$__tag" "$__command" >&6;; '
    'f) printf "%s" "$__tag";; '
    # Stopped first: a stopped process can't fork while the others are looked up.
    "k) for __i in 1 2 3 4 5 6 7 8; do __sweep $__since; [ ${#__found[@]} = 0 ] && break; "
    "kill -STOP ${__found[@]}; done; __kill $__since; "
    'printf "k %s %d\\n" "$__tag" ${#__found[@]} >&4;; '
    "a|e) kill -KILL -1; __pid=; __kill 0; "
    '[ $__verb = e ] || eval "$__spawn"; '
    'printf "%s %s %d\\n" $__verb "$__tag" ${#__found[@]} >&4;; '
    "o) __n=0; for __file in memory.events memory/memory.oom_control; "
    "do __file=/sys/fs/cgroup/$__file; [ -r $__file ] && while read -r __key __value; do "
    "[ $__key = oom_kill ] && __n=$__value; done <$__file; done; "
    'printf "o %s %d\\n" "$__tag" "$__n" >&4;; '
    "esac; done"
)

FILES = {f"{FOLDER}/guard": _GUARD, f"{FOLDER}/spawn": _SPAWN}
"""What a prepared image holds beside the copy of bash."""

VERSION = hashlib.sha256("\0".join(FILES.values()).encode()).hexdigest()[:16]
"""Part of the name of prepared images."""

# In a file and not an argument, so that a list of processes stays readable.
_START = (
    f'IFS= read -r -d "" __guard <{FOLDER}/guard; IFS= read -r -d "" __spawn <{FOLDER}/spawn; '
    'eval "$__guard"'
)


def driver_command(*, lifetime_s: float, file_mb: int, fill: bool) -> list[str]:
    """Argument vector of process 1.

    Args:
      lifetime_s: seconds until it ends, and with it the container.
      file_mb: largest file a process may write, 0 for no limit of this kind.
      fill: the prepared image has a `WORKDIR_TAR`, to be unpacked first.

    Returns:
      The vector, program first.
    """
    size = str(file_mb * 1024) if file_mb else "unlimited"
    arguments = [str(max(1, round(lifetime_s))), size, str(int(fill))]
    return [BASH, "--norc", "--noprofile", "-c", _START, "bash", *arguments]


# --- files ------------------------------------------------------------------------------------

# These run as a process of their own beside the shell, with a fixed search path. What they are
# given comes as arguments and standard input, never as text of the script.

_PRELUDE = (
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin; umask 022; LC_ALL=C; "
    'fail() { printf "%s" "$1" >&2; exit 1; }; cd -P -- "$1" || fail "no directory $1"; '
    # No part of a path but the last may be a link, and each that exists must be a directory.
    "above() { local here=. part rest=$1; while [[ $rest == */* ]]; do part=${rest%%/*}; "
    'rest=${rest#*/}; here=$here/$part; [ -L "$here" ] && fail "$1: a symlink on the way"; '
    '[ ! -e "$here" ] || [ -d "$here" ] || fail "$1: Not a directory"; done; }; '
)

PUT = _PRELUDE + (
    # Lists of paths, each ended by an empty one: directories, files, links; then a tar. One that
    # has a slash at its end is made only if it is not there.
    'new=(); while IFS= read -r -d \'\' p && [ -n "$p" ]; do above "$p/"; '
    '[ -d "$p" ] || new+=("./$p"); done; '
    'while IFS= read -r -d \'\' p && [ -n "$p" ]; do above "$p"; '
    '{ [ -L "$p" ] || [ -e "$p" ] && [ ! -f "$p" ]; } && fail "$p: is no regular file"; done; '
    'while IFS= read -r -d \'\' p && [ -n "$p" ]; do above "$p"; '
    '{ [ -L "$p" ] || [ -e "$p" ]; } && fail "$p: File exists"; done; '
    '[ ${#new[@]} = 0 ] || mkdir -p -- "${new[@]}" || exit; '
    "EXTRACT_UNSAFE_SYMLINKS=1 tar -x -p -o -f - || exit; printf done"
)

GET = _PRELUDE + (
    'above "$2"; [ -L "$2" ] && fail "is a symlink"; [ -e "$2" ] || fail "No such file"; '
    '[ -f "$2" ] || fail "is no regular file"; [ -r "$2" ] || fail "Permission denied"; '
    'exec head -c "$3" -- "$2"'
)

SNAPSHOT = _PRELUDE + (
    # First the modes of what its owner may not read, which is opened, and what a tar leaves out.
    "shopt -s globstar dotglob nullglob; [ -r . ] && [ -x . ] || chmod u+rwx .; "
    'while :; do again=0; for p in **; do [ -L "$p" ] && continue; '
    '{ [ -d "$p" ] && ! { [ -r "$p" ] && [ -x "$p" ]; }; } || '
    '{ [ -f "$p" ] && [ ! -r "$p" ]; } || continue; '
    'printf "%s %s\\0" "$(stat -c %a -- "$p")" "$p"; chmod u+rwx -- "$p" || exit; '
    '[ -d "$p" ] && again=1; done; '
    "[ $again = 0 ] && break; done; "
    'for p in **; do [ -S "$p" ] && [ ! -L "$p" ] && '
    'printf "s%s %s\\0" "$(stat -c %a -- "$p")" "$p"; '
    "done; printf '\\0'; exec tar -c -f - ."
)


def script(text: str, *arguments: str) -> list[str]:
    """Argument vector of one of the scripts above."""
    return [BASH, "--norc", "--noprofile", "-c", text, "bash", *arguments]
