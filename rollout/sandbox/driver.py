"""The program inside every sandbox: process 1 guards, a shell below it runs the commands.

Descriptors inside:
  0  the null device;
  1, 2  the output pipe, read by the host;
  3  a socket to the host: orders in, reports out. It cannot be reopened through /proc, and the
     kernel stamps every report with its sender's process id, so a child cannot forge one;
  4  an anonymous file that the host fills with the text of the next command.

Both run a copy of bash that may be executed and not read. The kernel then lets no other program
look into them: not at memory, and not at descriptors, by which it could change the next command.
What a command runs in the shell itself has the shell's own rights: it can fool itself, and no
verifier, whose shell runs nothing of an agent's.

Reports are lines: `p PID` (the launcher: bubblewrap's process), `n PID` (process 1: a shell with
that inner id was started), `r` (shell: ready), `s CODE` (shell: a command ended) and `x CODE`
(process 1: the shell ended). An order is one empty line: run what is in the file.

Process 1 replaces a shell that ends, kills every other process on SIGUSR1, and exits when the host
is gone: then reading an order fails in the shell, and reporting that fails in process 1.
"""

from __future__ import annotations

PATH = "/etc/driver"
"""Where the driver lies inside."""
BASH = "/etc/bash"
"""Where the copy of bash lies inside."""

# Order matters in the shell: `eval` stands in both branches of a test of the last status, so that
# `$?` survives from one command to the next, and `set -e` still applies to what it runs.
_SHELL = (
    "trap - USR1; set +m; "
    '__status() { return "$1"; }; __last=0; builtin printf "r\\n" >&3; '
    "while builtin read -r -u 3 _; do "
    'IFS= builtin read -r -d "" __command </proc/self/fd/4; '
    "if __status $__last; "
    'then builtin eval "$__command" </dev/null 3>&- 4<&-; __last=$?; '
    'else builtin eval "$__command" </dev/null 3>&- 4<&-; __last=$?; fi; '
    'builtin printf "s %d\\n" "$__last" >&3; done'
)

# All on one line, and no function: an error in a command then reads "bash: line 1: ...". Job
# control is on while a shell is started: without it bash makes background jobs ignore SIGINT, and
# `kill 0` in the shell would reach process 1.
DRIVER = (
    "exec 2>/dev/null; ulimit -c 0; ulimit -n 256; ulimit -f $1; "
    "[ $2 = 0 ] || ulimit -u $2; [ $3 = 0 ] || { ulimit -d $3; ulimit -v $4; }; "
    "trap 'kill -KILL -1' USR1; "
    f"while :; do set -m; ( {_SHELL} ) 2>&1 & "
    '__pid=$!; set +m; printf "n %d\\n" $__pid >&3 || exit; '
    "until wait $__pid; __last=$?; ! kill -0 $__pid; do :; done; "
    'printf "x %d\\n" $__last >&3 || exit; done\n'
)


def driver_argv(*, file_mb: int, pids: int, memory_mb: int, mark: str) -> list[str]:
    """Argument vector of process 1.

    Args:
      file_mb: largest file a process may write.
      pids: processes of the sandbox's user, 0 for no limit of this kind.
      memory_mb: private memory of one process, 0 for no limit of this kind.
      mark: the owner's mark, readable in the process list of the host.

    Returns:
      The vector, program first.
    """
    # Address space is only reserved by many runtimes, so its bound is far above that of memory.
    kib = memory_mb * 1024
    limits = (file_mb * 1024, pids, kib, max(8 * kib, 8 << 20))
    start = f'IFS= read -r -d "" d <{PATH}; eval "$d"'
    return [BASH, "--norc", "--noprofile", "-c", start, "bash", *map(str, limits), mark]
