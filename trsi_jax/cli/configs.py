"""Finds the config that a person names, and the folder their run goes to."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import trsi_jax
from rollout.errors import UserError

if TYPE_CHECKING:
    from trsi_jax.config import Config

RUNS = Path("runs")


def find(path: Path) -> Path:
    """The file at `path`, or the config of that name that the package carries."""
    if path.exists():
        return path
    package = Path(trsi_jax.__file__).parent
    inside = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    if path.is_absolute() or ".." in path.parts:
        return path
    # The folder is beside the package in a checkout and inside it once installed.
    for folder in (package.parent / "configs", package / "_configs"):
        packaged = folder / inside
        if packaged.is_file():
            return packaged
    return path


def load(path: Path, overrides: Sequence[str], seed: int | str | None) -> Config:
    """The validated config. Raises UserError that names file, key, value and what is allowed."""
    from trsi_jax import config

    asked = [*overrides, *([] if seed is None else [f"seed={seed}"])]
    return config.load(find(path), asked)


def run_folder(config: Config, out: Path | None) -> Path:
    """`out`, or runs/<config>-<seed>."""
    folder = RUNS / f"{config.name}-{config.seed}" if out is None else out
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder}: is a file; give a folder")
    return folder


def clear(folder: Path) -> None:
    """Remove an earlier run. Raises UserError for a folder that is no run."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / "config.toml").is_file():
        raise UserError(f"--fresh: {folder} holds no run (no config.toml); remove it yourself")
    shutil.rmtree(folder)
