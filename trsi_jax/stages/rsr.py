"""RSR, recursive self-rewrite: discover, plan, review, replay, fine-tune the actor.

Only the actor is updated. Training data are verified replays under the general harness; the
runbook itself is never trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollout.collect import EpisodeSpec
from rollout.records import Task, Trajectory
from rollout.rewrite.audit import RuleReviewer
from rollout.rewrite.planner import RulePlanner
from rollout.rewrite.replay import rewrite
from rollout.tasks.harbor.protocol import verify_task
from trsi_jax import batch, optim, prng, state
from trsi_jax.config import RsrStage
from trsi_jax.stages.context import Context, success_rate


@dataclass(frozen=True)
class RsrResult:
    """The new actor and what led to it.

    Attributes:
      funnel: counts from attempts to training data, in order.
      curves: name -> values; "discover/<harness>" is one success rate.
    """

    actor: Any
    funnel: dict[str, int]
    curves: dict[str, list[float]] = field(default_factory=dict)


def run(context: Context, stage: RsrStage, actor: Any, version: int) -> RsrResult:
    """One RSR stage.

    Args:
      context: the run.
      stage: its settings.
      actor: parameters of the stage before; served while the stage discovers.
      version: weight version of `actor`.

    Returns:
      The fine-tuned actor, the funnel, and the curves.
    """
    context.serve(version, actor)
    tasks = context.draw_tasks(stage.tasks, stage.name)
    specs = [
        EpisodeSpec(task, harness, sample, stage.name, 0, stage.temperature)
        for harness in stage.harnesses
        for task in tasks
        for sample in range(stage.attempts)
    ]
    attempts = context.collect(f"{stage.name}/discover", specs, label="discover")
    curves = {
        f"discover/{harness}": [success_rate([t for t in attempts if t.harness == harness])]
        for harness in stage.harnesses
    }
    replays, funnel = _rewrite(context, stage, tasks, attempts)
    if not replays:
        context.observer.note(f"{stage.name}: no replay was verified, the actor stays as it is")
        return RsrResult(actor, funnel, curves)
    actor, curves["sft/loss"] = _fine_tune(context, stage, actor, replays)
    return RsrResult(actor, funnel, curves)


def _rewrite(
    context: Context, stage: RsrStage, tasks: Sequence[Task], attempts: Sequence[Trajectory]
) -> tuple[Sequence[Trajectory], dict[str, int]]:
    """Runbooks of the successes, replayed in fresh sandboxes; the verified ones are stored."""
    segment = f"{stage.name}/replay"
    n_successes = sum(t.verdict is not None and t.verdict.strict_success for t in attempts)
    with context.observer.part("replay", n_successes) as part, context.charge_collection() as clock:
        result = context.runner.run(
            rewrite(
                attempts,
                {task.id: task for task in tasks},
                planner=RulePlanner({task.id: task.instruction for task in tasks}),
                reviewer=RuleReviewer(),
                backend=context.backend,
                chat=context.chat,
                verify=verify_task,
                run_seed=context.config.seed,
                stage=stage.name,
                per_task=stage.runbooks_per_task,
                limits=context.limits(),
                wave=context.config.engine.sessions,
                max_starts=context.config.sandbox.starts,
                progress=lambda done, total, trajectory: part.advance(1),
                clock=clock,
            )
        )
    with context.clock.charge("store"):
        context.writer.write(segment, result.kept)
    return result.kept, dict(result.funnel)


def _fine_tune(
    context: Context, stage: RsrStage, params: Any, replays: Sequence[Trajectory]
) -> tuple[Any, list[float]]:
    """Supervised epochs over the replays; returns parameters and the loss by epoch."""
    packing = context.config.packing
    examples = [batch.trajectory_example(replay) for replay in replays]

    def shuffled(epoch: int) -> batch.Packing:
        seed = prng.integer(context.config.seed, stage.name, "sft", epoch)
        return batch.pack(examples, rows=packing.rows, length=packing.length, seed=seed)

    epochs = [shuffled(epoch) for epoch in range(stage.epochs)]
    total = sum(len(epoch.batches) for epoch in epochs)
    # The caller keeps its parameters: the step donates what it is given.
    actor = state.create(jax.tree.map(jnp.copy, params), context.steps.optimizer)
    curve = []
    step = 0
    with context.observer.part("fine-tune", total) as part, context.clock.charge("training"):
        for epoch in epochs:
            losses = []
            for rows in epoch.batches:
                rate = optim.warmup_cosine(
                    step,
                    peak=stage.learning_rate,
                    warmup_steps=min(stage.warmup_steps, total),
                    total_steps=total,
                    final_fraction=stage.final_fraction,
                )
                actor, metrics = context.steps.sft(actor, rows, rate)
                losses.append(metrics["loss"])
                step += 1
                part.advance(1)
            curve.append(float(np.mean(jax.device_get(losses))))
            part.advance(0, loss=curve[-1])
    return actor.params, curve
