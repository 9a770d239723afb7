"""Base: a policy trained from scratch on noisy demonstrations, weak on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from rollout.harness import HARNESSES, Limits, render
from rollout.tasks.pool.demonstrations import Teaching, demonstrations
from trsi_jax import checkpoint, model, optim, prng, state
from trsi_jax.batch import Example, PackedBatch, pack, text_example
from trsi_jax.config import BaseStage
from trsi_jax.stages.context import Context

BLOCK = 50
"""Updates between checkpoints of Base; also the grain of its curriculum and of its curve."""


def run(context: Context, stage: BaseStage) -> tuple[Any, dict[str, list[float]]]:
    """Train Base.

    Args:
      context: the run.
      stage: its settings.

    Returns:
      The actor's parameters, and the curve of its loss, a mean over `BLOCK` updates.
    """
    folder = context.checkpoints(f"{stage.name}.partial")
    params = model.init_params(context.model, prng.stream(context.config.seed, stage.name, "init"))
    start = checkpoint.latest(folder) or 0
    n_blocks = -(-stage.steps // BLOCK)
    saved: dict[str, Any] = {
        "actor": state.create(params, context.steps.optimizer),
        "loss": np.zeros(n_blocks, np.float32),
    }
    if start:
        saved = checkpoint.restore(folder, start, saved)
    actor, curve = saved["actor"], np.array(saved["loss"])
    with context.observer.part("train", stage.steps) as part:
        part.advance(start)
        for first in range(start, stage.steps, BLOCK):
            last = min(first + BLOCK, stage.steps)
            with context.clock.charge("data"):
                batches = _batches(context, stage, first, last - first)
            losses = []
            with context.clock.charge("training"):
                for step, batch in enumerate(batches, first):
                    rate = optim.warmup_cosine(
                        step,
                        peak=stage.learning_rate,
                        warmup_steps=stage.warmup_steps,
                        total_steps=stage.steps,
                        final_fraction=stage.final_fraction,
                    )
                    actor, metrics = context.steps.sft(actor, batch, rate)
                    losses.append(metrics["loss"])
                    part.advance(1)
                curve[first // BLOCK] = np.mean(jax.device_get(losses))
            part.advance(0, loss=float(curve[first // BLOCK]))
            with context.clock.charge("checkpoint"):
                checkpoint.save(folder, last, {"actor": actor, "loss": curve})
    return actor.params, {"sft/loss": [float(x) for x in curve]}


def _batches(
    context: Context, stage: BaseStage, first: int, n_updates: int
) -> tuple[PackedBatch, ...]:
    """Batches of the updates from `first` on: every block has a document stream of its own."""
    seed = prng.integer(context.config.seed, stage.name, "demonstrations", first)
    max_sub_goals = 1 if first < stage.curriculum_steps else 3
    documents = _documents(context, stage, seed, max_sub_goals=max_sub_goals)
    examples: list[Example] = []
    # As many tokens as all the rows hold: packing leaves gaps, so the batches are enough.
    packing = context.config.packing
    room = n_updates * packing.rows * packing.length
    while room > 0:
        examples.append(next(documents))
        room -= examples[-1].token_ids.size
    packed = pack(examples, rows=packing.rows, length=packing.length, seed=seed)
    return packed.batches[:n_updates]


def _documents(
    context: Context, stage: BaseStage, seed: int, *, max_sub_goals: int
) -> Iterator[Example]:
    teaching = Teaching(
        max_sub_goals=max_sub_goals,
        mistake=stage.mistake_rate,
        stepwise_mistake=0.6 * stage.mistake_rate,
        exclude_families=stage.never_shown,
    )
    length = context.config.packing.length
    limits = Limits(turns=2 * context.config.harness.max_turns, context=4 * length)
    for document in demonstrations(seed, teaching):
        rendered = render(HARNESSES[document.harness], context.chat, document, limits=limits)
        if rendered.token_ids.size > length:
            continue
        weight = np.where(rendered.acted_t, 1.0, stage.observation_weight)
        yield text_example(rendered.token_ids, weight, turn_t=rendered.turn_t)
