"""What is shipped: the wheel, installed where the checkout cannot be seen."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_all_packages_and_configs_and_runs_without_the_checkout(
    tmp_path: Path,
) -> None:
    # The environment of the tests has the locked build backend and every dependency, so nothing
    # is downloaded: the wheel alone goes into an environment that sees those packages.
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", ".", str(ROOT), cwd=tmp_path)
    (wheel,) = tmp_path.glob("trsi_jax-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for package in ("trsi_jax", "sharding", "rollout"):
        assert f"{package}/__init__.py" in names
        assert f"{package}/py.typed" in names
    assert "trsi_jax/_configs/tiny.toml" in names
    assert "trsi_jax/report/templates/report.html.j2" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "runs/"))]

    run(sys.executable, "-m", "venv", "--without-pip", "fresh", cwd=tmp_path)
    fresh = tmp_path / "fresh" / "bin" / "python"
    target = run(str(fresh), "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path)
    run(*pip, "install", "--no-deps", "--target", target.strip(), str(wheel), cwd=tmp_path)
    outer = run(
        sys.executable,
        "-c",
        "import pydantic, pathlib; print(pathlib.Path(pydantic.__file__).parents[1])",
        cwd=tmp_path,
    )
    # A .pth file of this kind adds the folder's packages, but not its editable installs.
    (Path(target.strip()) / "outer.pth").write_text(outer)
    where = run(str(fresh), "-I", "-c", "import trsi_jax; print(trsi_jax.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path))
    shown = run(str(fresh), "-I", "-m", "trsi_jax.cli.main", "--help", cwd=tmp_path)
    assert "Terminal-RSI" in shown
    found = (
        "from pathlib import Path; from trsi_jax.cli import configs;"
        "print(configs.load(Path('configs/tiny.toml'), [], 3).seed)"
    )
    assert run(str(fresh), "-I", "-c", found, cwd=tmp_path).strip() == "3"


@pytest.mark.parametrize("tag", ["py311", "py312"])
def test_the_locks_pin_every_declared_dependency_exactly(tag: str) -> None:
    def pins(name: str) -> dict[str, str]:
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        kept = [line for line in lines if not line.startswith(("#", "-r"))]
        for line in kept:
            assert re.fullmatch(r"[a-z0-9.-]+==[^ ]+( ; [a-z0-9_' =]+)?", line), line
        return dict(line.split(" ; ")[0].split("==") for line in kept)

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core, test = pins(f"{tag}.txt"), pins(f"{tag}-test.txt")
    assert not core.keys() & test.keys()
    for requirement in project["dependencies"]:
        assert re.split(r"[<>=; \[]", requirement)[0] in core
    for requirement in project["optional-dependencies"]["test"]:
        assert re.split(r"[<>=; \[]", requirement)[0] in core | test
    # The pair that is known to work on each side of the split.
    assert core["jax"].startswith("0.10." if tag == "py311" else "0.12.")


def test_no_lock_or_script_names_a_package_index() -> None:
    files = [ROOT / "Makefile", ROOT / ".ci" / "run", *(ROOT / "requirements").iterdir()]
    for file in files:
        if file.is_file():
            assert "://" not in file.read_text(), file
            assert "index-url" not in file.read_text(), file
