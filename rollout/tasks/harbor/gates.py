"""The gates of a task: its reference solution passes, doing nothing doesn't, and always so."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rollout.errors import (
    LimitUnsupported,
    SandboxError,
    TaskError,
    UnsupportedTask,
    UserError,
    VerifierError,
)
from rollout.protocols import ImageBackend, Sandbox, SandboxBackend
from rollout.tasks.harbor.protocol import Act, Attempt, attempt, run_solution
from rollout.tasks.harbor.support import Plan, on_image, own_metadata, plan
from rollout.tasks.harbor.task import HarborTask, Step, read_task

State = Literal[
    "ok", "unsolvable", "free", "flaky", "faulty", "unsupported", "malformed", "unchecked"
]

MEANING: Mapping[State, str] = {
    "ok": "the reference solution passes, doing nothing doesn't",
    "unsolvable": "the reference solution doesn't pass, or there is none",
    "free": "the untouched sandbox passes",
    "flaky": "the same attempt doesn't end alike every time",
    "faulty": "the verifier fails by itself",
    "unsupported": "asks for what this sandbox can't give",
    "malformed": "can't be read",
    "unchecked": "the sandbox failed, twice",
}


@dataclass(frozen=True, slots=True)
class Checked:
    """One task's gates.

    Attributes:
      untouched: reward for doing nothing; None where it was not measured.
      reason: what was seen; empty for a task that is fine.
    """

    root: Path
    state: State
    reason: str = ""
    family: str = ""
    untouched: float | None = None
    unknown_keys: tuple[str, ...] = ()


@dataclass(slots=True)
class _Results:
    """What repeated attempts came to."""

    attempts: list[Attempt] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def endings(self) -> set[object]:
        found: set[object] = {(a.success, a.reward) for a in self.attempts}
        return found | ({"fault"} if self.faults else set())


async def _repeat(
    task: HarborTask,
    how: Plan,
    backend: SandboxBackend,
    act: Act,
    repeats: int,
    host_env: Mapping[str, str],
) -> _Results:
    results = _Results()
    for _ in range(repeats):
        try:
            results.attempts.append(await attempt(task, how, backend, act, host_env))
        except VerifierError as error:
            results.faults.append(f"{error.kind}: {error}")
    return results


async def check_task(
    root: Path,
    backend: SandboxBackend,
    *,
    repeats: int = 1,
    offline: bool = False,
    host_env: Mapping[str, str] | None = None,
    build_network: str = "none",
) -> Checked:
    """Run a task's gates in real sandboxes.

    Args:
      root: the task's directory.
      backend: gives the sandboxes.
      repeats: how often each attempt is made; a flaky task shows with 2 or more.
      offline: see `plan`.
      host_env: see `plan`.
      build_network: see `on_image`.

    Raises:
      SandboxError: a fault of the sandbox.
    """
    env = host_env or {}
    try:
        task = read_task(root)
        images = isinstance(backend, ImageBackend)
        how = plan(task, offline=offline, images=images, host_env=env)
        how = await on_image(how, task, backend, network=build_network)
    except UnsupportedTask as error:
        return Checked(root, "unsupported", str(error))
    except UserError as error:
        return Checked(root, "malformed", str(error))
    family = str(own_metadata(task).get("family", ""))
    said: list[str] = []

    async def solve(box: Sandbox, step: Step) -> None:
        ran = await run_solution(task, box, step)
        if ran.status != "ok":
            said.append(f"the solution ended with {ran.status}")

    async def nothing(box: Sandbox, step: Step) -> None:
        """Leave the sandbox as it is."""

    try:
        solved = await _repeat(task, how, backend, solve, repeats, env)
        idle = await _repeat(task, how, backend, nothing, repeats, env)
    except LimitUnsupported as error:
        # Known only once a sandbox is asked for: who may open a way out, and to which engine.
        return Checked(root, "unsupported", str(error), family, None, task.unknown_keys)
    except (TaskError, UserError) as error:
        return Checked(root, "unsolvable", str(error), family, None, task.unknown_keys)
    state, reason = _state(solved, idle)
    paid = max((a.reward for a in idle.attempts), default=None)
    reason = "; ".join(filter(None, (reason, *dict.fromkeys(said))))
    return Checked(root, state, reason, family, paid, task.unknown_keys)


def _state(solved: _Results, idle: _Results) -> tuple[State, str]:
    faults = solved.faults + idle.faults
    if len(solved.endings) > 1 or len(idle.endings) > 1:
        who = "the solution" if len(solved.endings) > 1 else "doing nothing"
        seen = sorted(str(e) for e in (solved if len(solved.endings) > 1 else idle).endings)
        return "flaky", f"{who} gave {', '.join(seen)}"
    if faults:
        return "faulty", faults[0]
    if idle.attempts[0].success:
        return "free", f"doing nothing gives reward {idle.attempts[0].reward:g}"
    if not solved.attempts[0].success:
        last = solved.attempts[0].outcomes[-1]
        missed = [r.id for r in last.verdict.results if not r.passed]
        tail = last.log.decode(errors="replace").strip().splitlines()[-1:]
        shown = f"; the tests end with {tail[0][:120]!r}" if tail else ""
        return "unsolvable", f"the solution fails {', '.join(missed[:5])}{shown}"
    return "ok", ""


async def check_all(
    roots: Sequence[Path],
    backend: SandboxBackend,
    *,
    jobs: int,
    repeats: int = 1,
    offline: bool = False,
    host_env: Mapping[str, str] | None = None,
    build_network: str = "none",
    progress: Callable[[Checked], None] = lambda checked: None,
) -> list[Checked]:
    """Run the gates of many tasks, `jobs` at a time; results in the order of `roots`.

    Raises:
      SandboxError: there are no sandboxes here.
    """
    gate = asyncio.Semaphore(jobs)
    faults: list[SandboxError] = []

    async def one(root: Path) -> Checked:
        checked = Checked(root, "unchecked")
        async with gate:
            for _ in range(2):
                try:
                    checked = await check_task(
                        root,
                        backend,
                        repeats=repeats,
                        offline=offline,
                        host_env=host_env,
                        build_network=build_network,
                    )
                    break
                except SandboxError as error:
                    # A machine that is busy may miss a start; one that has no sandboxes, all.
                    checked = replace(checked, reason=f"{error.kind}: {error}")
                    faults.append(error)
        progress(checked)
        return checked

    checked = await asyncio.gather(*(one(root) for root in roots))
    if faults and all(c.state == "unchecked" for c in checked):
        raise faults[0]
    return checked


def sample(roots: Sequence[Path], each: int, seed: int) -> list[Path]:
    """`each` directories of every family, the same for the same seed.

    A generated task's directory is named by its family; any other counts as one of its own.
    """
    families: defaultdict[str, list[Path]] = defaultdict(list)
    for root in roots:
        families[root.name.rpartition("-")[0] or root.name].append(root)

    def order(root: Path) -> bytes:
        return hashlib.sha256(f"{seed}/{root.name}".encode()).digest()

    return [root for members in families.values() for root in sorted(members, key=order)[:each]]
