"""The verification protocol: how an attempt becomes a reward that nobody but its work earned.

1. Every process of the agent is gone before anything is read (`Sandbox.snapshot`).
2. A fresh sandbox gets the agent's working directory as data; on an image nothing else of what the
   agent changed is there, programs included. A symlink that leads out of the working directory
   is not among them: it could make the verifier compare its own files with themselves.
3. Only then the tests are copied in, to a directory that no process of the agent has seen. The
   result directory is new, too; what the agent left under its name is not carried over.
4. The tests run with a fixed environment, without a network unless the task lists hosts for them,
   in bounded time and memory.
5. Every process is gone again before the result is read, within bounds, by the strict parser. If
   programs outlived the tests they might have written it: then there is no result.
6. A fault of the verifier is a typed error that masks the attempt. It is never a reward of 0.

Tests that run the agent's programs do so as the same user, so a task written elsewhere can't keep
such a program from the result directory while the tests run; signs of it (a locked file, another
format, programs that live on) leave no result. Generated tasks are safe from that:
their checker reads the files first, ends every other process, and then writes the result; and
`verify_checks` judges them on the host, where there is nothing to write to.
"""

from __future__ import annotations

import base64
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from rollout.errors import (
    RewardInvalid,
    TaskError,
    TransferError,
    VerifierFailed,
    VerifierTimeout,
)
from rollout.protocols import ExecResult, Sandbox, SandboxBackend, SandboxSpec
from rollout.records import Check, Entry, FileTree, Task, Verdict
from rollout.tasks import predicates
from rollout.tasks.harbor.config import Artifact
from rollout.tasks.harbor.reward import (
    MAX_RESULTS_BYTES,
    REWARD_FILES,
    Manifest,
    parse_manifest,
    read_rewards,
    verdict_of,
)
from rollout.tasks.harbor.support import (
    LOGS,
    SOLUTION,
    TESTS,
    Plan,
    network_of,
    resolve_env,
)
from rollout.tasks.harbor.task import HarborTask, Step
from rollout.tasks.predicates import Ran, Run
from rollout.tasks.verifier import judge

DEFAULT_AGENT_S = 600.0
SPARE_S = 60.0
MAX_TREE_BYTES = 64 << 20
MAX_LOGS_BYTES = 4 * MAX_RESULTS_BYTES
LOG_BYTES = 20_000

CLEAN_ENV = {
    # Nothing that the agent left in the working directory is imported by a test's Python.
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
_KILLED_FROM = 128
_NOT_RUN = (126, 127)

# Prints how many processes live beside process 1, the shell that runs this and that shell's parent,
# which in a container is the driver's, too. What is just being ended gets a moment.
_COUNT_OTHERS = (
    "builtin read -r s </proc/$BASHPID/stat; s=${s##*) }; s=${s#* }; above=${s%% *}; "
    "for i in 1 2 3 4 5; do n=0; for p in /proc/[0-9]*/stat; do "
    "{ builtin read -r s <$p; } 2>/dev/null || continue; "
    'case "${p#/proc/}" in 1/stat|$BASHPID/stat|$above/stat) continue;; esac; '
    'case "${s##*) }" in [ZX]*) ;; *) n=$((n+1));; esac; done; '
    '[ "$n" = 0 ] && break; sleep 0.02; done; builtin echo "$n"'
)


@dataclass(frozen=True, slots=True)
class Left:
    """What an attempt left behind.

    Attributes:
      tree: the working directory, with nothing in it that leads out.
      artifacts: what a verifier finds in /logs/artifacts.
      flags: what was left out, for people to read: signs of tampering, mostly.
    """

    tree: FileTree
    artifacts: FileTree = field(default_factory=dict)
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """One verification.

    Attributes:
      log: the end of what the tests printed. It may hold expected values: not for the agent.
    """

    step: str
    rewards: Mapping[str, float]
    verdict: Verdict
    flags: tuple[str, ...]
    log: bytes
    seconds: float

    @property
    def reward(self) -> float:
        """The reward."""
        return self.rewards["reward"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """All steps of one attempt at a task.

    Attributes:
      reward: mean over all steps, those not reached counting 0, or the last step's.
      success: every step passed.
    """

    reward: float
    success: bool
    outcomes: tuple[Outcome, ...]


Act = Callable[[Sandbox, Step], Awaitable[None]]
"""What the agent does in one step; time-outs and failures of its commands are data."""


# --- the agent's side -------------------------------------------------------------------------


def carry_over(tree: FileTree, workdir: str) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """A working directory without what leads out of it, and a note on each thing left out.

    A link stays if it names a place in the working directory or the system's, without going up
    again: then no chain of links that stay leads to the tests.
    """
    kept: dict[str, Entry] = {}
    flags: list[str] = []
    for path, entry in tree.items():
        if entry.kind == "symlink" and not _leads_inside(path, entry.data, workdir):
            flags.append(f"symlink {path!r} leads to {entry.data.decode(errors='replace')!r}")
        elif entry.kind == "other":
            flags.append(f"{path!r} is no file, directory or symlink")
        else:
            kept[path] = entry
    return kept, tuple(flags)


def _leads_inside(path: str, target: bytes, workdir: str) -> bool:
    parts = target.decode(errors="surrogateescape").split("/")
    names = [p for p in parts if p not in ("", ".")]
    if target.startswith(b"/"):
        home = workdir.strip("/").split("/")
        known = names[: len(home)] == home or (bool(names) and names[0] in _SYSTEM)
        return known and ".." not in names
    up = 0
    while up < len(names) and names[up] == "..":
        up += 1
    return ".." not in names[up:] and up <= path.count("/")


async def restore(box: Sandbox, tree: FileTree, below: str | None = None) -> None:
    """Write a snapshot into a fresh sandbox: files, directories, modes and symlinks."""
    folders = [path for path, e in tree.items() if e.kind == "directory"]
    await box.put_files(
        {path: e.data for path, e in tree.items() if e.kind == "file"},
        directories=folders,
        modes={path: e.mode for path, e in tree.items() if e.kind == "file"},
        links={
            path: e.data.decode(errors="surrogateescape")
            for path, e in tree.items()
            if e.kind == "symlink"
        },
        below=below,
    )
    # Deepest first: what is inside a directory is done before the directory may be closed.
    modes = {path: tree[path].mode for path in folders if tree[path].mode != 0o755}
    if modes:
        await box.put_files({}, directories=sorted(modes, reverse=True), modes=modes, below=below)


async def place(box: Sandbox, plan: Plan, tree: FileTree) -> None:
    """Give a fresh sandbox an attempt's working directory, in place of what the image has there.

    Raises:
      TransferError: it can't be written, or the image's files can't be removed.
    """
    if plan.image is not None:
        gone = await box.exec(
            f"( builtin cd {shlex.quote(plan.workdir)} && shopt -s dotglob nullglob && "
            "command rm -rf -- ./* )"
        )
        if gone.exit_code != 0:
            raise TransferError(
                f"the image's files stay: {gone.output[-200:].decode(errors='replace')}"
            )
    await restore(box, tree)


async def start_attempt(
    plan: Plan, backend: SandboxBackend, task: HarborTask, step: Step, tree: FileTree | None = None
) -> Sandbox:
    """The agent's sandbox at the start of a step.

    Args:
      plan: how to set the task up.
      backend: gives the sandbox.
      task: the task.
      step: the step.
      tree: the working directory that the step before left; None at the first.

    Raises:
      TaskError: the step's setup.sh failed.
      SandboxError: no sandbox.
    """
    timeout = step.config.agent.timeout_sec or DEFAULT_AGENT_S
    network = network_of(task, step.config.agent)
    box = await backend.start(plan.spec({}, timeout + SPARE_S, network))
    try:
        if tree is None:
            await restore(box, plan.files)
        else:
            await place(box, plan, tree)
        await box.put_files({}, directories=["agent", "artifacts", "verifier"], below=LOGS)
        added = task.workdir(step)
        await restore(box, {path: e for path, e in added.items() if path != "setup.sh"})
        if "setup.sh" in added:
            await box.put_files({"setup.sh": added["setup.sh"].data}, below=SOLUTION)
            setup = await box.exec(f"bash {SOLUTION}/setup.sh", timeout_s=timeout)
            await box.exec(f"rm {SOLUTION}/setup.sh")
            if setup.status != "ok" or setup.exit_code:
                raise TaskError(f"{task.root}: setup.sh of step {step.name!r} failed")
    except BaseException:
        await box.close()
        raise
    return box


async def take(box: Sandbox, plan: Plan, task: HarborTask, step: Step) -> Left:
    """End the agent's processes and take what it left. The sandbox is closed.

    Raises:
      SandboxError: the sandbox is gone, or the files are beyond the bounds.
    """
    try:
        tree, flags = carry_over(await box.snapshot(max_bytes=MAX_TREE_BYTES), plan.workdir)
        logs = await box.snapshot(max_bytes=MAX_TREE_BYTES, below=LOGS)
    finally:
        await box.close()
    planted = [path for path in logs if path.startswith("verifier/")]
    flags += tuple(f"{LOGS}/{path} was there before the tests ran" for path in planted)
    artifacts = {
        path.removeprefix("artifacts/"): e
        for path, e in logs.items()
        if path.startswith("artifacts/") and e.kind in ("file", "directory")
    }
    for artifact in (*task.config.artifacts, *step.config.artifacts):
        artifacts |= _artifact(artifact, tree, plan.workdir)
    return Left(tree, artifacts, flags)


def _artifact(artifact: str | Artifact, tree: FileTree, workdir: str) -> dict[str, Entry]:
    """A declared artifact of the working directory, by its place in /logs/artifacts."""
    source = artifact if isinstance(artifact, str) else artifact.source
    wanted = PurePosixPath(workdir, source)
    if not wanted.is_relative_to(workdir):
        return {}
    name = str(wanted.relative_to(workdir))
    to = (artifact.destination if not isinstance(artifact, str) else None) or wanted.name
    base = PurePosixPath(to.removeprefix(f"{LOGS}/artifacts").strip("/"))
    placed = {
        str(base / PurePosixPath(p).relative_to(name)): e
        for p, e in tree.items()
        if PurePosixPath(p).is_relative_to(name) and e.kind in ("file", "directory")
    }
    return {path: e for path, e in placed.items() if path != "."}


async def run_solution(task: HarborTask, box: Sandbox, step: Step) -> ExecResult:
    """Run a step's reference solution as an agent's work.

    Raises:
      TaskError: the task has none.
    """
    files = task.solution(step)
    if "solve.sh" not in files:
        raise TaskError(f"{task.root}: has no solution/solve.sh")
    await restore(box, files, SOLUTION)
    env = resolve_env(task, task.config.solution.env, {})
    exports = "".join(f"export {k}={shlex.quote(v)}; " for k, v in env.items())
    return await box.exec(
        f"{exports}bash {SOLUTION}/solve.sh",
        timeout_s=step.config.agent.timeout_sec or DEFAULT_AGENT_S,
        max_output=LOG_BYTES,
    )


# --- the verifier's side ----------------------------------------------------------------------


def manifest_of(task: HarborTask, step: Step) -> Manifest | None:
    """The fixed manifest of a step's checks; None where the task has none."""
    tests = task.tests(step)
    if "checks.json" not in tests:
        return None
    return parse_manifest(f"{step.folders[-1]}/checks.json", tests["checks.json"].data)


async def verify_step(
    task: HarborTask,
    step: Step,
    left: Left,
    plan: Plan,
    backend: SandboxBackend,
    host_env: Mapping[str, str] | None = None,
) -> Outcome:
    """Judge what a step left, in a fresh sandbox, by the task's own tests.

    Raises:
      VerifierError: of the kind that says what went wrong; the attempt is masked.
      SandboxError: a fault of the sandbox; the attempt is masked.
    """
    begun = time.perf_counter()
    manifest = manifest_of(task, step)
    tests = task.tests(step)
    verifier = step.config.verifier
    env = CLEAN_ENV | resolve_env(task, verifier.env, host_env or {})
    network = network_of(task, verifier)
    box = await backend.start(plan.spec(env, verifier.timeout_sec + SPARE_S, network))
    try:
        await place(box, plan, left.tree)
        await box.put_files({}, directories=["verifier", "artifacts"], below=LOGS)
        await restore(box, {f"artifacts/{p}": e for p, e in left.artifacts.items()}, LOGS)
        await restore(box, tests, TESTS)
        ran = await box.exec(
            f"bash {TESTS}/test.sh", timeout_s=verifier.timeout_sec, max_output=LOG_BYTES
        )
        if ran.status == "timeout":
            raise VerifierTimeout(f"the tests did not end in {verifier.timeout_sec:g} s")
        if ran.status != "ok" or ran.exit_code is None or ran.exit_code > _KILLED_FROM:
            raise VerifierFailed(f"the tests were ended ({ran.status}, exit {ran.exit_code})")
        others = await box.exec(_COUNT_OTHERS)
        if others.output.strip() != b"0":
            raise VerifierFailed("programs outlived the tests and could write their result")
        results = await _results(box)
    finally:
        await box.close()
    rewards = read_rewards(results, plan.reward_range)
    if ran.exit_code in _NOT_RUN and rewards["reward"] != plan.reward_range[1]:
        raise VerifierFailed(f"the tests ended with exit {ran.exit_code}: a command is missing")
    _check_promises(tests, results)
    verdict = verdict_of(manifest, rewards, results, plan.reward_range)
    seconds = time.perf_counter() - begun
    return Outcome(step.name, rewards, verdict, left.flags, ran.output, seconds)


async def _results(box: Sandbox) -> dict[str, Entry]:
    """The result directory, when no process of the sandbox lives any more."""
    try:
        logs = await box.snapshot(max_bytes=MAX_LOGS_BYTES, below=LOGS)
    except TransferError as error:
        raise RewardInvalid(f"the result directory can't be read: {error}") from error
    folder = logs.get("verifier", Entry("other"))
    if folder.kind != "directory" or folder.mode & 0o700 != 0o700:
        raise RewardInvalid("the result directory was replaced or closed")
    for name in REWARD_FILES:
        # A program of the agent may write a result first and lock it against the tests.
        if (entry := logs.get(f"verifier/{name}")) is not None and not entry.mode & 0o200:
            raise RewardInvalid(f"{name} is locked: the tests can't have written it")
    return {p.removeprefix("verifier/"): e for p, e in logs.items() if p.startswith("verifier/")}


def _check_promises(tests: FileTree, results: FileTree) -> None:
    """Hold the results against what the tests say that they write.

    Raises:
      VerifierFailed: a report that test.sh asks for is not there: its runner never ran.
      RewardInvalid: a result whose name no file of the tests has, while they name another.
    """
    script = tests["test.sh"].data
    for option, ending in ((b"--ctrf", "ctrf.json"), (b"--junit", ".xml")):
        if option in script and not any(path.endswith(ending) for path in results):
            raise VerifierFailed(f"test.sh asks for a report by {option.decode()}: there is none")
    named = [n for n in REWARD_FILES if any(n.encode() in e.data for e in tests.values())]
    for name in REWARD_FILES:
        if named and name in results and name not in named:
            raise RewardInvalid(f"{name} is there, and the tests write {' or '.join(named)} only")


async def attempt(
    task: HarborTask,
    plan: Plan,
    backend: SandboxBackend,
    act: Act,
    host_env: Mapping[str, str] | None = None,
) -> Attempt:
    """Act and verify, step by step; a step below its min_reward ends the attempt.

    Each step begins in a fresh sandbox with the files that the one before left: no process and no
    effect of a verification reaches the next step.

    Raises:
      VerifierError, SandboxError, TaskError: the attempt has no reward and is masked.
    """
    outcomes: list[Outcome] = []
    tree: FileTree | None = None
    for step in task.steps:
        box = await start_attempt(plan, backend, task, step, tree)
        try:
            await act(box, step)
        except BaseException:
            await box.close()
            raise
        left = await take(box, plan, task, step)
        tree = left.tree
        outcomes.append(await verify_step(task, step, left, plan, backend, host_env))
        if not _reached(step.config.min_reward, outcomes[-1].rewards):
            break
    rewards = [o.reward for o in outcomes] + [0.0] * (len(task.steps) - len(outcomes))
    final = task.config.multi_step_reward_strategy == "final"
    return Attempt(
        reward=rewards[-1] if final else sum(rewards) / len(rewards),
        success=len(outcomes) == len(task.steps)
        and all(o.verdict.strict_success for o in outcomes),
        outcomes=tuple(outcomes),
    )


def _reached(least: float | Mapping[str, float] | None, rewards: Mapping[str, float]) -> bool:
    """Whether every reward named is there and large enough."""
    if least is None:
        return True
    wanted = {"reward": least} if isinstance(least, int | float) else least
    return all(rewards.get(key, float("-inf")) >= value for key, value in wanted.items())


# --- checks judged on the host ----------------------------------------------------------------


async def run_commands(
    runs: Sequence[Run], tree: FileTree, backend: SandboxBackend, spec: SandboxSpec
) -> dict[Run, Ran]:
    """Run the commands that checks judge in a fresh sandbox of the agent's files.

    Neither tests nor a result directory are in it: a program of the agent can spoil its own
    output, and nothing else.

    Raises:
      SandboxError: a fault of the sandbox.
    """
    found: dict[Run, Ran] = {}
    if not runs:
        return found
    box = await backend.start(spec)
    try:
        await restore(box, tree)
        for run in runs:
            fed = base64.b64encode(run.stdin.encode()).decode()
            ran = await box.exec(
                f"builtin cd {spec.workdir}; builtin echo {fed} | base64 -d | "
                f"/bin/sh -c {shlex.quote(run.command)} 2>/dev/null",
                timeout_s=predicates.RUN_SECONDS,
                max_output=predicates.RUN_OUTPUT_BYTES,
            )
            ended = ran.status == "ok" and not ran.truncated
            found[run] = Ran(ran.exit_code if ended else None, ran.output)
    finally:
        await box.close()
    return found


async def verify_checks(
    checks: Sequence[Check],
    tree: FileTree,
    backend: SandboxBackend,
    spec: SandboxSpec | None = None,
) -> Verdict:
    """Judge a final working directory on the host by a generated task's checks.

    Raises:
      VerifierError: a malformed manifest or snapshot.
      SandboxError: a fault of the sandbox that a check's command runs in.
    """
    spec = spec or SandboxSpec()
    kept, _ = carry_over(tree, spec.workdir)
    runs = predicates.runs_of(c.predicate for c in checks if c.predicate)
    return judge(checks, tree, await run_commands(runs, kept, backend, spec))


async def verify_task(task: Task, tree: FileTree, backend: SandboxBackend) -> Verdict:
    """The verdict on the working directory that an attempt at a generated task left behind.

    Raises:
      VerifierError: a malformed manifest or snapshot; the attempt is masked, never scored 0.
      SandboxError: a fault of the sandbox that a check's command runs in.
    """
    return await verify_checks(task.checks, tree, backend)
