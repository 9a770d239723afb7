"""Runs the stages of a configuration in order, and goes on where a killed run stopped.

What a stage leaves: its checkpoint (the actor-critic pair), its trajectories, its record. The
record is written last, so a stage counts as finished only when all of it is there. Everything in
between is a function of configuration and seed, so what is repeated after a kill comes out alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax

from rollout.collect import EpisodeSpec
from rollout.engines.sglang import FleetOptions, SGLangFleet
from rollout.errors import UserError
from rollout.harness import shell_chat
from rollout.protocols import RolloutEngine, SandboxBackend, SandboxSpec
from rollout.records import Trajectory
from rollout.sandbox import make_backend
from rollout.store.reader import SegmentReader
from rollout.store.segments import SegmentWriter
from rollout.tasks.pool.families import FAMILIES
from rollout.tasks.pool.lexicon import vocabulary
from rollout.tasks.pool.source import PoolSource
from trsi_jax import advantages, checkpoint, model, optim, prng, rewards, state, steps
from trsi_jax.config import BaseStage, Config, RprStage, RsrStage, Stage, dump, load
from trsi_jax.engine import JaxEngine
from trsi_jax.evaluate import protocol
from trsi_jax.memory import trimmed_after_compilation
from trsi_jax.stages import base, record, rpr, rsr
from trsi_jax.stages.context import Clock, Context
from trsi_jax.stages.loop import LoopThread
from trsi_jax.stages.observer import Observer, StageRow

CONFIG = "config.toml"

VERSIONS_PER_STAGE = 1000
"""Weight versions reserved for a stage: its first is its index times this."""

Pair = dict[str, Any]
"""{"actor": params} or {"actor": params, "critic": params}."""


def run(config: Config, out: Path, observer: Observer) -> None:
    """Run every stage that is not finished yet.

    Args:
      config: the whole recursion.
      out: folder of the run; made, or resumed if it holds the same configuration.
      observer: is told of progress.

    Raises:
      UserError: the configuration names something that does not exist, `out` belongs to another
        configuration, or another process runs in it.
      SandboxUnavailable: no sandbox can be started here.
    """
    with _ready(config, out, observer) as context:
        _run_stages(context, config.stages)


def prepare(config: Config, out: Path, observer: Observer) -> None:
    """Run every stage but the last and warm up the critic of the last, which must be an RPR stage.

    Copies of `out` can then go on under configurations that differ in nothing before the joint
    iterations of the last stage; they start from the same actor, critic and optimizer states.

    Args:
      config: the whole recursion, its last stage of kind "rpr".
      out: folder of the run; made, or resumed if it holds the same configuration.
      observer: is told of progress.

    Raises:
      ValueError: for a last stage of another kind.
      UserError, SandboxUnavailable: as `run`.
    """
    last = config.stages[-1]
    if not isinstance(last, RprStage):
        raise ValueError(f"stage {last.name} has no critic to warm up")
    with _ready(config, out, observer) as context:
        before = len(config.stages) - 1
        _run_stages(context, config.stages[:before])
        pair = _restore(context, before - 1)
        version = before * VERSIONS_PER_STAGE
        rpr.warm_up(context, last, pair["actor"], pair.get("critic"), version)


@contextlib.contextmanager
def _ready(config: Config, out: Path, observer: Observer) -> Iterator[Context]:
    """Check, hold and claim the run's folder, and make the parts of the run."""
    _check_names(config)
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        _claim(config, out)
        _cache_compilations()
        with (
            trimmed_after_compilation(),
            _context(config, out, observer) as context,
            _compiling_ahead(context),
        ):
            yield context


def _check_names(config: Config) -> None:
    """Refuse names that only the parts themselves know, before any work."""
    asked = [("model.preset", config.model.preset, model.preset_names())]
    for stage in config.stages:
        if isinstance(stage, RprStage):
            key = f"stages.{stage.name}.estimator"
            asked.append((key, stage.estimator, advantages.names(kind="token")))
            if stage.estimator in advantages.names(kind="token"):
                key = f"stages.{stage.name}.estimator_options"
                taken = set(advantages.options(stage.estimator)) - {"gamma", "lam", "bootstrap"}
                asked += [(key, name, tuple(sorted(taken))) for name in stage.estimator_options]
        if isinstance(stage, BaseStage):
            key = f"stages.{stage.name}.never_shown"
            asked += [(key, family, tuple(FAMILIES)) for family in stage.never_shown]
    for key, name, known in asked:
        if name not in known:
            raise UserError(
                f"configuration {config.name}: {key} = {name!r}: must be one of "
                f"{', '.join(known) or 'none'}"
            )


def _run_stages(context: Context, stages: Sequence[Stage]) -> None:
    config, observer = context.config, context.observer
    pair: Pair = {}
    before: protocol.Evaluation | None = None
    for index, stage in enumerate(stages):
        observer.stage_started(stage.name, index, len(config.stages))
        path = context.out / record.FOLDER / f"{stage.name}.json"
        if path.exists():
            observer.note(f"{stage.name}: finished before, kept")
            observer.stage_finished(record.read(path).row)
            pair = _restore(context, index)
            before = protocol.evaluate(_evaluate(context, stage.name, version=index))
            continue
        start = time.perf_counter()
        context.clock.seconds.clear()
        version = index * VERSIONS_PER_STAGE
        pair, details = _train(context, stage, pair, version)
        with context.clock.charge("checkpoint"):
            checkpoint.save(context.checkpoints(stage.name), 0, pair)
        context.serve(version + VERSIONS_PER_STAGE - 1, pair["actor"])
        after = protocol.evaluate(_evaluate(context, stage.name, version=index))
        row = StageRow(
            name=stage.name,
            strict_success=after.strict_success.mean,
            ci95=(after.strict_success.lo, after.strict_success.hi),
            progress=after.progress,
            tiers={tier: e.mean for tier, e in after.tiers.items()},
            explained_variance=details.explained_variance,
            seconds=time.perf_counter() - start,
        )
        gain = protocol.gain(before, after) if before else None
        finished = record.StageRecord(
            index=index,
            row=row,
            seed=config.seed,
            config_digest=config.digest(),
            actor_digest=state.digest(pair["actor"]),
            critic_digest=state.digest(pair["critic"]) if "critic" in pair else None,
            funnel=details.funnel,
            curves=details.curves,
            seconds_by_part=dict(context.clock.seconds),
            families={family: e.mean for family, e in after.families.items()},
            paired_gain=record.PairedGain(gain.mean, gain.lo, gain.hi) if gain else None,
            masked=after.masked,
            tasks=len(after.results),
            samples=config.evaluation.repeats,
        )
        record.write(context.out, finished)
        shutil.rmtree(context.checkpoints(f"{stage.name}.partial"), ignore_errors=True)
        observer.stage_finished(row)
        before = after


@dataclass(frozen=True)
class _Details:
    """What a stage tells of its training."""

    curves: dict[str, list[float]]
    funnel: dict[str, int] = field(default_factory=dict)
    explained_variance: float | None = None


def _train(
    context: Context, stage: BaseStage | RsrStage | RprStage, pair: Pair, version: int
) -> tuple[Pair, _Details]:
    """Train one stage; what it does not train, it hands on untouched."""
    if isinstance(stage, BaseStage):
        actor, curves = base.run(context, stage)
        return {"actor": actor}, _Details(curves)
    if isinstance(stage, RsrStage):
        rewritten = rsr.run(context, stage, pair["actor"], version)
        return pair | {"actor": rewritten.actor}, _Details(rewritten.curves, rewritten.funnel)
    refined = rpr.run(context, stage, pair["actor"], pair.get("critic"), version)
    trained = {"actor": refined.actor, "critic": refined.critic}
    return trained, _Details(refined.curves, explained_variance=refined.explained_variance)


def _evaluate(context: Context, stage: str, *, version: int) -> list[Trajectory]:
    """The evaluation of a finished stage: `repeats` attempts at every held-out task."""
    settings = context.config.evaluation
    specs = [
        EpisodeSpec(
            task, "general", sample, stage, version, settings.temperature, role="evaluation"
        )
        for task in context.evaluation_tasks
        for sample in range(settings.repeats)
    ]
    return context.collect(f"evaluation/{stage}", specs, label="evaluate")


def _restore(context: Context, index: int) -> Pair:
    """The actor-critic pair that a finished stage left."""
    like: Pair = {"actor": model.abstract_params(context.model)}
    if any(isinstance(stage, RprStage) for stage in context.config.stages[: index + 1]):
        like["critic"] = jax.eval_shape(
            partial(model.init_value_params, context.model), like["actor"]
        )
    folder = context.checkpoints(context.config.stages[index].name)
    pair: Pair = checkpoint.restore(folder, 0, like)
    return pair


@contextlib.contextmanager
def _context(config: Config, out: Path, observer: Observer) -> Iterator[Context]:
    """Make the parts of a run, and close them at its end."""
    chat = shell_chat(vocabulary())
    chat.tokenizer.save(out / "tokenizer")
    vocab_size = chat.tokenizer.vocab_size
    architecture = model.preset(config.model.preset, vocab_size=vocab_size)
    train_tasks = PoolSource(config.seed, counts={"train": config.train_tasks}).tasks("train")
    split = config.evaluation.split
    held_out = PoolSource(
        config.seed,
        purpose="evaluate" if split == "test" else "select",
        counts={split: config.evaluation.tasks},
    )
    backend = make_backend(config.sandbox.backend)
    # A fleet is looked after while the trainer trains; the engine of this process needs that not.
    with LoopThread() if config.fleet else asyncio.Runner() as runner:
        engine = _engine(config, architecture)
        try:
            runner.run(_try_sandbox(backend))
            yield Context(
                config=config,
                out=out,
                model=architecture,
                chat=chat,
                train_tasks=train_tasks,
                evaluation_tasks=held_out.tasks(split),
                medians=rewards.family_medians(train_tasks),
                engine=engine,
                backend=backend,
                reader=SegmentReader(out / "store"),
                writer=SegmentWriter(out / "store", vocab_size=vocab_size),
                steps=steps.compile_steps(architecture, optim.adamw(**config.adam.model_dump())),
                observer=observer,
                runner=runner,
                clock=Clock(),
            )
        finally:
            runner.run(engine.aclose())
            runner.run(backend.aclose())


def _engine(config: Config, architecture: model.ModelConfig) -> RolloutEngine:
    """What samples: the servers of the configuration, or this process."""
    fleet = config.fleet
    if fleet is None:
        return JaxEngine(
            architecture,
            model.init_params(architecture, prng.stream(config.seed, "engine")),
            context_len=config.engine.context,
            max_sessions=config.engine.sessions,
            version=-1,
        )
    return SGLangFleet(
        fleet.urls,
        vocab_size=architecture.vocab_size,
        context_len=config.engine.context,
        hybrid=architecture.uses_gdn,
        options=FleetOptions(
            min_servers=fleet.min_servers,
            recovery_s=fleet.recovery,
            max_outstanding=fleet.max_outstanding,
        ),
    )


async def _try_sandbox(backend: SandboxBackend) -> None:
    """Learn that no sandbox can be had before minutes of training, not after them."""
    sandbox = await backend.start(SandboxSpec(lifetime_s=30.0))
    await sandbox.close()


@contextlib.contextmanager
def _compiling_ahead(context: Context) -> Iterator[None]:
    """Compile what later stages need in one thread beside the first stage's work."""
    with ThreadPoolExecutor(1, thread_name_prefix="compile") as executor:
        params = model.abstract_params(context.model)
        critic_params = jax.eval_shape(partial(model.init_value_params, context.model), params)
        create = partial(state.create, optimizer=context.steps.optimizer)
        actor, critic = (jax.eval_shape(create, p) for p in (params, critic_params))
        for stage in context.config.stages:
            if isinstance(stage, RprStage):
                rows = rpr.packed_like(context)
                plain = rpr.packed_like(context, columns=False)
                context.steps.critic.compile_ahead(
                    executor, critic, rows, 0.0, **rpr.critic_settings(stage)
                )
                context.steps.values.compile_ahead(executor, critic_params, plain)
                context.steps.actor.compile_ahead(
                    executor, actor, rows, 0.0, clip=stage.clip, temperature=stage.temperature
                )
        try:
            yield
        finally:
            executor.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold the run's folder for this process."""
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"{out}: another process runs in this folder; wait for it or give another --out"
            ) from None
        yield


def _claim(config: Config, out: Path) -> None:
    """Write the resolved configuration, or check that the folder holds the same one."""
    path = out / CONFIG
    if not path.exists():
        record.write_text(path, dump(config))
        return
    held = load(path)
    moved = held
    if held.fleet and config.fleet:
        moved = held.model_copy(update={"fleet": config.fleet})
    if moved != config or held.digest() != config.digest():
        raise UserError(
            f"{out}: holds a run of another configuration (digest {held.digest()}, seed"
            f" {held.seed}; this one has {config.digest()}, seed {config.seed}); give another"
            " --out, or --fresh to start over"
        )


def _cache_compilations() -> None:
    """Keep compiled programs between runs, unless the user chose a place already."""
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        settings.update("jax_compilation_cache_dir", str(cache / "trsi-jax" / "xla"))
