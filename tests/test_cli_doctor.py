"""`trsi doctor` on this machine, and on what can be taken from it without breaking it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trsi_jax.cli import doctor

ROOT = Path(__file__).resolve().parent.parent


def run_doctor(**variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trsi_jax.cli.main", "doctor"],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_doctor_passes_where_a_sandbox_starts() -> None:
    done = run_doctor()
    subjects = [line.split()[1] for line in done.stdout.splitlines() if line[:2] in ("ok", "--")]
    assert done.returncode == 0, done.stdout
    for subject in ("Python", "packages", "jax", "devices", "disk", "bubblewrap"):
        assert subject in subjects
    assert "a command ran in a sandbox" in done.stdout


def test_a_missing_platform_blocks_and_is_mended_by_one_command() -> None:
    # No machine that runs the tests has a device of this name.
    done = run_doctor(JAX_PLATFORMS="abacus")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("no  devices"))
    assert "abacus" in lines[at]
    assert lines[at + 1].strip() == "mend: unset JAX_PLATFORMS"
    assert "Traceback" not in done.stdout + done.stderr


def test_every_finding_that_blocks_says_how_to_mend_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # The thresholds move rather than the machine.
    monkeypatch.setattr(doctor, "DISK_NEEDED", 2**62)
    monkeypatch.setattr(doctor, "MEMORY_NEEDED", 2**62)
    found = {finding.subject: finding for finding in doctor.examine(ROOT)}
    assert found["disk"].level == "blocks"
    assert found["memory"].level == "note"
    for finding in found.values():
        assert finding.mend or finding.level != "blocks"
