"""Arms trained from the same start: what an ablation of a whole stage shows.

An ablation is a TOML file that names a configuration and its arms. What all arms have in common
at the front, the same stages with the same settings, runs once a seed; each arm goes on from a
copy of it, on the same tasks, with the same streams of random numbers.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from rollout.errors import UserError
from rollout.records import Trajectory
from rollout.store.reader import SegmentReader
from trsi_jax import config as configuration
from trsi_jax import prng
from trsi_jax.config import Config, RprStage, Section
from trsi_jax.evaluate import protocol
from trsi_jax.evaluate.stats import Estimate
from trsi_jax.stages import machine, record, rpr
from trsi_jax.stages.observer import Observer

RESAMPLES = 10_000
WARM_UP_KEYS = (
    *("name", "kind", "tiers", "temperature", "critic", "warm_up_rounds", "warm_up_batches"),
    *("tasks_per_iteration", "samples", "critic_learning_rate", "value_clip", "value_loss"),
    *("frozen_attention", "reward", "iterations"),
)
"""What of an RPR stage must be equal for arms to share the start of its joint iterations."""


class ArmSection(Section):
    """One arm: the configuration with overrides, and which of its stages run."""

    overrides: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    """Names of the stages to run, in the configuration's order; empty for all."""


class Ablation(Section):
    """A file of `configs/ablations`."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    question: str
    config: str
    """The configuration, relative to this file."""
    overrides: tuple[str, ...] = ()
    """For every arm, before its own."""
    reference: str
    """The arm that the others are compared with."""
    shared_warm_up: bool = False
    """Whether arms that part in an RPR stage also share its critic's warm-up, which then runs
    under the reference's settings."""
    arms: Annotated[dict[str, ArmSection], Field(min_length=2)]


@dataclass(frozen=True)
class Plan:
    """A loaded ablation: its arms resolved, for any seed.

    Attributes:
      arms: name -> configuration, seed 0.
      shared: leading stages that all arms have in common.
    """

    ablation: Ablation
    arms: Mapping[str, Config]
    shared: int


def load(path: Path, overrides: Sequence[str] = ()) -> Plan:
    """Read an ablation and resolve its arms.

    Args:
      path: a TOML file.
      overrides: for every arm, after the file's own and before the arm's.

    Raises:
      UserError: the file, or a configuration that it makes, is not valid.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        ablation = Ablation.model_validate_json(configuration.as_json(content))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"{path}: cannot read the ablation ({reason})") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise UserError(f"{path}: {key}: {problem['msg'].lower()}") from None
    if ablation.reference not in ablation.arms:
        raise UserError(
            f"{path}: reference = {ablation.reference!r}: must be one of {', '.join(ablation.arms)}"
        )
    base = path.parent / ablation.config
    arms = {}
    for name, arm in ablation.arms.items():
        resolved = configuration.load(base, [*ablation.overrides, *overrides, *arm.overrides])
        arms[name] = _chosen(resolved, arm.stages, f"{path}: arms.{name}.stages")
    shared = _shared(list(arms.values()))
    if ablation.shared_warm_up:
        nexts = [c.stages[shared] for c in arms.values() if len(c.stages) == shared + 1]
        settings = [
            {key: getattr(s, key) for key in WARM_UP_KEYS} for s in nexts if isinstance(s, RprStage)
        ]
        if len(settings) < len(arms) or any(s != settings[0] for s in settings):
            raise UserError(
                f"{path}: shared_warm_up needs arms that differ in one last stage of kind 'rpr',"
                f" and there not in {', '.join(WARM_UP_KEYS)}"
            )
    return Plan(ablation, arms, shared)


def _chosen(config: Config, names: Sequence[str], where: str) -> Config:
    if not names:
        return config
    known = [stage.name for stage in config.stages]
    for name in names:
        if name not in known:
            raise UserError(f"{where} = {name!r}: must be one of {', '.join(known)}")
    stages = tuple(stage for stage in config.stages if stage.name in names)
    if stages[0].kind != "base":
        raise UserError(f"{where}: the first stage must be {known[0]}")
    return config.model_copy(update={"stages": stages})


def _shared(arms: Sequence[Config]) -> int:
    """Number of leading stages that all arms have in common; 0 if they differ outside stages."""
    first = arms[0]
    if any(a.model_copy(update={"stages": first.stages}) != first for a in arms):
        return 0
    count = 0
    for stages in zip(*(arm.stages for arm in arms), strict=False):
        if any(stage != stages[0] for stage in stages):
            break
        count += 1
    return count


# --- running ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArmResult:
    """One arm of one seed, after its last stage.

    Attributes:
      by_task: held-out task -> mean strict success over its attempts.
      success: mean of it.
      commands: mean number of commands of a held-out episode.
      training_success: share of successes in each PPO iteration, over the arm's own stages.
      explained_variance: of the undiscounted return by the critic, the same iterations.
      episodes: training episodes sampled in the arm's own stages.
      tokens: tokens that the policy sampled in them.
      iterations: PPO iterations in them.
      updates: updates of the actor in these.
    """

    by_task: Mapping[str, float]
    success: float
    commands: float
    training_success: tuple[float, ...]
    explained_variance: tuple[float, ...]
    episodes: int
    tokens: int
    iterations: int
    updates: int


@dataclass(frozen=True)
class Result:
    """All arms and seeds.

    Attributes:
      start: seed -> success of the stage before the arms part; empty if nothing is shared.
      results: arm -> seed -> result.
      differences: arm -> its success minus the reference's, paired by seed and task.
    """

    plan: Plan
    seeds: tuple[int, ...]
    start: Mapping[int, float]
    results: Mapping[str, Mapping[int, ArmResult]]
    differences: Mapping[str, Estimate]


def run(plan: Plan, seeds: Sequence[int], out: Path, observer: Observer) -> Result:
    """Run what is shared, then every arm, for every seed; goes on where it was stopped.

    Args:
      plan: as loaded.
      seeds: of the whole recursion, tasks included.
      out: folder for the runs, `<out>/seed-N/<arm>`.
      observer: is told of progress.
    """
    results: dict[str, dict[int, ArmResult]] = {name: {} for name in plan.arms}
    start: dict[int, float] = {}
    for seed in seeds:
        folder = out / f"seed-{seed}"
        observer.note(f"seed {seed}: what the arms share")
        origin = _run_shared(plan, seed, folder / "start", observer)
        start[seed] = record.read_all(origin)[plan.shared - 1].row.strict_success if origin else 0.0
        for name, config in plan.arms.items():
            observer.note(f"seed {seed}: {name}")
            seeded = config.model_copy(update={"seed": seed})
            mine = folder / name
            if origin is not None:
                _branch(origin, mine)
            machine.run(seeded, mine, observer)
            results[name][seed] = measure(seeded, mine, plan.shared)
    reference = results[plan.ablation.reference]
    differences = {
        name: paired_bootstrap(
            [_differences(of_seed[s], reference[s]) for s in seeds],
            prng.generator(0, "ablate", name),
        )
        for name, of_seed in results.items()
        if name != plan.ablation.reference
    }
    return Result(plan, tuple(seeds), start, results, differences)


def _run_shared(plan: Plan, seed: int, folder: Path, observer: Observer) -> Path | None:
    if plan.shared == 0:
        return None
    config = plan.arms[plan.ablation.reference].model_copy(update={"seed": seed})
    if plan.ablation.shared_warm_up:
        machine.prepare(config, folder, observer)
    else:
        stages = config.stages[: plan.shared]
        machine.run(config.model_copy(update={"stages": stages}), folder, observer)
    return folder


def _branch(origin: Path, folder: Path) -> None:
    """A copy of a run that another configuration can claim; whole, or not there."""
    if folder.exists():
        return
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(origin, part, ignore=shutil.ignore_patterns(machine.CONFIG, ".lock"))
    part.rename(folder)


def measure(config: Config, folder: Path, shared: int) -> ArmResult:
    """Read a finished arm.

    Args:
      config: of the arm.
      folder: of its run.
      shared: leading stages that are not its own.
    """
    reader = SegmentReader(folder / "store").pinned()
    last = config.stages[-1].name
    own = {stage.name for stage in config.stages[shared:]}
    held_out: list[Trajectory] = []
    of_collection: dict[str, list[str]] = {}
    episodes = tokens = 0
    for segment in reader.segments():
        name = segment.rpartition(".")[0]
        of_collection.setdefault(name, []).append(segment)
        if name == f"evaluation/{last}":
            held_out += reader.read(segment)
        elif name.partition("/")[0] in own:
            acted = reader.read_tokens(segment, "acted_t")
            episodes += len(acted)
            tokens += int(sum(a.sum() for a in acted))
    evaluation = protocol.evaluate(held_out)
    commands = [
        sum(turn.status != "control" for turn in t.turns) for t in held_out if t.fault is None
    ]
    curves = [r.curves for r in record.read_all(folder) if r.row.name in own]
    success, explained = (
        tuple(x for c in curves for x in c.get(name, ()))
        for name in ("train/success", "critic/explained_variance")
    )
    updates = 0
    for stage in (s for s in config.stages[shared:] if isinstance(s, RprStage)):
        for i in range(stage.iterations):
            sampled = of_collection[f"{stage.name}/{rpr.collection(i)}"]
            trajectories = [t for segment in sampled for t in reader.read(segment)]
            updates += rpr.updates_of(config, stage, i, trajectories)
    return ArmResult(
        by_task={task: r.strict_success for task, r in evaluation.results.items()},
        success=evaluation.strict_success.mean,
        commands=float(np.mean(commands)),
        training_success=success,
        explained_variance=explained,
        episodes=episodes,
        tokens=tokens,
        iterations=len(success),
        updates=updates,
    )


def _differences(arm: ArmResult, reference: ArmResult) -> npt.NDArray[np.float64]:
    tasks = sorted(arm.by_task.keys() & reference.by_task.keys())
    return np.array([arm.by_task[t] - reference.by_task[t] for t in tasks])


def paired_bootstrap(
    of_seed: Sequence[npt.NDArray[np.float64]],
    rng: np.random.Generator,
    *,
    resamples: int = RESAMPLES,
) -> Estimate:
    """Mean paired difference with a 95 % bootstrap interval over seeds and tasks within them.

    Seeds are drawn with replacement, then tasks within each seed drawn; the interval is that of
    the 2.5 % and 97.5 % quantiles of the mean over seeds of the mean over tasks.

    Args:
      of_seed: for each seed, [tasks] differences.
      rng: of the resampling.
      resamples: number of them.

    Returns:
      The mean over seeds, its interval, and the number of seeds.

    Raises:
      ValueError: without a seed, or for one without a task.
    """
    if not of_seed or any(d.size == 0 for d in of_seed):
        raise ValueError("a paired difference needs seeds that share a task")
    count = len(of_seed)
    drawn = rng.integers(count, size=(resamples, count))
    means = np.zeros((resamples, count))
    for s, d in enumerate(of_seed):
        here = drawn == s
        weights = rng.multinomial(d.size, np.full(d.size, 1 / d.size), size=int(here.sum()))
        means[here] = weights @ d / d.size
    lo, hi = np.quantile(means.mean(axis=1), (0.025, 0.975))
    return Estimate(float(np.mean([d.mean() for d in of_seed])), float(lo), float(hi), count)
