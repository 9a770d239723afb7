"""Why no sandbox starts here, and the one command that mends it."""

from __future__ import annotations

from pathlib import Path

PROC_SYS = Path("/proc/sys")

_SWITCHES = (
    ("kernel/unprivileged_userns_clone", "0", "1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ("user/max_user_namespaces", "0", "15000"),
)


def explain_start_failure(said: str, proc_sys: Path = PROC_SYS) -> tuple[str, str]:
    """Reason and hint for a start that failed.

    Args:
      said: what bubblewrap wrote.
      proc_sys: the kernel's settings.

    Returns:
      One line that says why, one that says what to do.
    """
    last = said.splitlines()[-1] if said else "bubblewrap ended without a word"
    if "proc" in last and "mount" in last.lower():
        return (
            f"/proc cannot be mounted in a sandbox ({last})",
            "start this container with: --security-opt systempaths=unconfined",
        )
    if any(word in last for word in ("namespace", "uid map", "gid map", "Permission", "permitted")):
        for switch, forbidden, allowed in _SWITCHES:
            path = proc_sys / switch
            if path.exists() and path.read_text().strip() == forbidden:
                name = switch.replace("/", ".")
                return (
                    f"user namespaces are forbidden here ({name}={forbidden})",
                    f"run: sudo sysctl -w {name}={allowed}",
                )
        return (
            f"user namespaces are forbidden here ({last})",
            "in a container, start it with: --security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined",
        )
    return f"bubblewrap failed: {last}", "run `trsi doctor` for details"
