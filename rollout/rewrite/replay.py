"""From verified successes to training data: plan, review, replay in fresh sandboxes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout.chat import Chat
from rollout.collect import Clock, EpisodeSpec, Progress, Verify, collect
from rollout.engines.scripted import ScriptedEngine
from rollout.harness import Limits
from rollout.protocols import Planner, Reviewer, Runbook, SandboxBackend, SandboxSpec
from rollout.records import Task, Trajectory
from rollout.rewrite.audit import ungrounded

EXECUTOR = "executor"
FUNNEL = (
    *("trajectories", "successes", "planned", "distinct", "accepted"),
    *("replayed", "verified", "grounded", "kept", "tasks"),
)
"""The counts of a rewrite, in the order in which they shrink."""


@dataclass(frozen=True)
class Rewrite:
    """What came of a rewrite.

    Attributes:
      kept: verified replays under the general harness. Their actions were not sampled, so their
        log-probs say nothing: data for supervised training only.
      runbooks: the runbook of each.
      funnel: the counts named in `FUNNEL`.
      rejections: reason of a review -> how often; a runbook may have several.
    """

    kept: tuple[Trajectory, ...]
    runbooks: tuple[Runbook, ...]
    funnel: Mapping[str, int]
    rejections: Mapping[str, int]


async def rewrite(
    trajectories: Sequence[Trajectory],
    tasks: Mapping[str, Task],
    *,
    planner: Planner,
    reviewer: Reviewer,
    backend: SandboxBackend,
    chat: Chat,
    verify: Verify,
    run_seed: int,
    stage: str,
    iteration: int = 0,
    per_task: int = 2,
    candidates: int = 4,
    limits: Limits | None = None,
    sandbox: SandboxSpec | None = None,
    wave: int = 128,
    max_live: int = 192,
    max_starts: int = 8,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> Rewrite:
    """Rewrite each success into a runbook, review it, and follow it in a fresh sandbox.

    Args:
      trajectories: of any harness; only strict successes are used.
      tasks: id -> task, for all of them.
      planner: makes the runbooks.
      reviewer: sees the instruction, the names of the files, and the runbook.
      backend: gives the sandboxes.
      chat: tokenizer and markup of the policy that will be trained.
      verify: judges the replays.
      run_seed: seed of the run.
      stage: of the replays' records.
      iteration: of the replays' records.
      per_task: replays kept of a task, the shortest runbooks first.
      candidates: runbooks tried of a task, the shortest first.
      limits: of a replay.
      sandbox: what each sandbox must be.
      wave: replays at a time.
      max_live: as in `collect`.
      max_starts: as in `collect`.
      progress: as in `collect`.
      clock: as in `collect`.
    """
    funnel: Counter[str] = Counter(dict.fromkeys(FUNNEL, 0))
    rejections: Counter[str] = Counter()
    accepted: dict[str, list[Runbook]] = {}
    seen: set[tuple[str, tuple[str, ...]]] = set()
    funnel["trajectories"] = len(trajectories)
    for trajectory in trajectories:
        if trajectory.verdict is None or not trajectory.verdict.strict_success:
            continue
        funnel["successes"] += 1
        runbook = planner.plan(trajectory)
        if runbook is None:
            continue
        funnel["planned"] += 1
        if (runbook.task_id, runbook.commands) in seen:
            continue
        funnel["distinct"] += 1
        seen.add((runbook.task_id, runbook.commands))
        task = tasks[runbook.task_id]
        files = sorted((*task.files, *task.directories))
        review = reviewer.review(task.instruction, files, runbook)
        rejections.update({reason.split(":", 1)[0] for reason in review.reasons})
        if review.accepted:
            funnel["accepted"] += 1
            accepted.setdefault(task.id, []).append(runbook)

    chosen = [
        (sample, runbook)
        for found in accepted.values()
        for sample, runbook in enumerate(sorted(found, key=_length)[:candidates])
    ]
    specs = [
        EpisodeSpec(
            task=tasks[runbook.task_id],
            harness="general",
            sample=sample,
            stage=stage,
            iteration=iteration,
            temperature=0.0,
            role=EXECUTOR,
            source=runbook.source_id,
        )
        for sample, runbook in chosen
    ]
    limits = limits or Limits()
    scripts = {
        spec.id: [chat.action(command) for command in (*runbook.commands, _FINISH)]
        for spec, (_, runbook) in zip(specs, chosen, strict=True)
    }
    replays = await collect(
        specs,
        engine=ScriptedEngine(
            scripts,
            vocab_size=chat.tokenizer.vocab_size,
            context_len=limits.context,
            max_sessions=wave,
        ),
        backend=backend,
        chat=chat,
        verify=verify,
        run_seed=run_seed,
        limits=limits,
        sandbox=sandbox,
        wave=wave,
        max_live=max_live,
        max_starts=max_starts,
        progress=progress,
        clock=clock,
    )
    funnel["replayed"] = len(replays)
    kept: list[tuple[Trajectory, Runbook]] = []
    per: Counter[str] = Counter()
    for replay, (_, runbook) in zip(replays, chosen, strict=True):
        if replay.verdict is None or not replay.verdict.strict_success:
            continue
        funnel["verified"] += 1
        # An episode that a limit cut short never says that it is finished; it teaches to go on.
        if replay.finish != "done" or ungrounded(replay, tasks[replay.task_id]):
            continue
        funnel["grounded"] += 1
        if per[replay.task_id] < per_task:
            per[replay.task_id] += 1
            kept.append((replay, runbook))
    funnel["kept"], funnel["tasks"] = len(kept), len(per)
    return Rewrite(
        kept=tuple(replay for replay, _ in kept),
        runbooks=tuple(runbook for _, runbook in kept),
        funnel={name: funnel[name] for name in FUNNEL},
        rejections=dict(sorted(rejections.items())),
    )


_FINISH = "done"


def _length(runbook: Runbook) -> tuple[int, int, tuple[str, ...]]:
    return len(runbook.commands), sum(map(len, runbook.commands)), runbook.commands
