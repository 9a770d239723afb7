"""RPR, recursive policy-refine: critic handover, critic-only rounds, then PPO of both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from rollout.collect import EpisodeSpec
from rollout.records import Trajectory
from trsi_jax import advantages, batch, checkpoint, losses, model, optim, prng, rewards, state
from trsi_jax.config import Config, RewardSection, RprStage
from trsi_jax.stages.ahead import Ahead
from trsi_jax.stages.context import Context, graded, success_rate

Array = npt.NDArray[np.float32]

CURVES = (
    *("train/success", "train/reward", "critic/explained_variance", "critic/loss"),
    *("actor/entropy", "actor/approx_kl", "actor/clip_fraction"),
)


COLUMNS = ("value_t", "advantage_t", "return_t")
"""What a batch of an RPR update carries beside the tokens."""


@dataclass(frozen=True)
class RprResult:
    """The new actor-critic pair and its curves by iteration.

    Attributes:
      explained_variance: of the critic on the fresh batches of the joint iterations, before it
        was trained on them.
    """

    actor: Any
    critic: Any
    explained_variance: float
    curves: dict[str, list[float]]


@dataclass(frozen=True)
class Batch:
    """Graded episodes with the numbers that training needs, all token-aligned [T] lists."""

    trajectories: Sequence[Trajectory]
    reward: list[float]
    reward_t: list[Array]
    value_t: list[Array]
    advantage_t: list[Array]
    return_t: list[Array]

    def examples(self) -> list[batch.Example]:
        """Sequences with their columns, for packing."""
        columns = zip(*(getattr(self, name) for name in COLUMNS), strict=True)
        return [
            batch.trajectory_example(trajectory, dict(zip(COLUMNS, arrays, strict=True)))
            for trajectory, arrays in zip(self.trajectories, columns, strict=True)
        ]


def run(
    context: Context, stage: RprStage, actor: Any, critic: Any | None, version: int
) -> RprResult:
    """One RPR stage.

    Args:
      context: the run.
      stage: its settings.
      actor: parameters of the stage before.
      critic: parameters of the previous RPR's critic; None if there is none.
      version: weight version of `actor`; each joint iteration makes the next one.

    Returns:
      The pair after the last iteration.
    """
    folder = context.checkpoints(f"{stage.name}.partial")
    done = checkpoint.latest(folder)
    if done is None:
        saved = _start(context, stage, actor, critic, version)
    else:
        saved = checkpoint.restore(folder, done, _fresh(context, stage, actor, critic))
    actor_state, critic_state = saved["actor"], saved["critic"]
    curves = np.array(saved["curves"])
    with contextlib.ExitStack() as stack:
        take = _sampler(context, stage, version, done or 0, stack)
        for iteration in range(done or 0, stage.iterations):
            context.serve(version + iteration, actor_state.params)
            trajectories = take(iteration)
            actor_state, critic_state, curves[:, iteration] = _iterate(
                context, stage, iteration, actor_state, critic_state, trajectories
            )
            n = iteration + 1
            if n % context.config.checkpoint_every == 0 and n < stage.iterations:
                saved |= {"actor": actor_state, "critic": critic_state, "curves": curves}
                with context.clock.charge("checkpoint"):
                    checkpoint.save(folder, n, saved)
    named = {name: [float(x) for x in row] for name, row in zip(CURVES, curves, strict=True)}
    explained = float(np.mean(named["critic/explained_variance"]))
    named["warm-up/explained_variance"] = [float(x) for x in saved["warm_up"]]
    return RprResult(actor_state.params, critic_state.params, explained, named)


def warm_up(
    context: Context, stage: RprStage, actor: Any, critic: Any | None, version: int
) -> None:
    """Do what comes before the first joint iteration, and keep it where `run` goes on from.

    Arguments as of `run`.
    """
    folder = context.checkpoints(f"{stage.name}.partial")
    if checkpoint.latest(folder) is None:
        checkpoint.save(folder, 0, _start(context, stage, actor, critic, version))


def _start(
    context: Context, stage: RprStage, actor: Any, critic: Any | None, version: int
) -> dict[str, Any]:
    """The states before the first joint iteration, the critic warmed up."""
    saved = _fresh(context, stage, actor, critic)
    context.serve(version, actor)
    saved["critic"], saved["warm_up"] = _warm_up(context, stage, saved["critic"])
    return saved


def _fresh(context: Context, stage: RprStage, actor: Any, critic: Any | None) -> dict[str, Any]:
    """What a checkpoint inside the stage holds, before any update."""
    if critic is None or stage.critic == "fresh":
        critic = model.init_value_params(context.model, actor)
    optimizer = context.steps.optimizer
    return {
        "actor": state.create(jax.tree.map(jnp.copy, actor), optimizer),
        "critic": state.create(jax.tree.map(jnp.copy, critic), optimizer),
        "curves": np.zeros((len(CURVES), stage.iterations), np.float32),
        "warm_up": np.zeros(stage.warm_up_rounds, np.float32),
    }


def collection(iteration: int) -> str:
    """Name of a joint iteration's episodes in the store, below the stage's."""
    return f"iteration-{iteration:03d}"


def _task_count(context: Context, stage: RprStage, iteration: int) -> int:
    """Tasks of a joint iteration: a fixed number, or what the stage's token budget still buys.

    A function of the store's earlier iterations alone, so a run that goes on after a kill counts
    as an undisturbed one does.
    """
    if stage.tokens_per_iteration is None:
        return stage.tasks_per_iteration
    sampled: dict[str, list[int]] = {}
    for segment in context.reader.segments():
        folder, _, name = segment.rpartition(".")[0].partition("/")
        if folder == stage.name:
            acted = context.reader.read_tokens(segment, "acted_t")
            sampled.setdefault(name, []).extend(int(a.sum()) for a in acted)
    joint = [sampled[collection(i)] for i in range(iteration)]
    warm = [n for i in range(stage.warm_up_batches) for n in sampled.get(f"warm-up-{i}", [])]
    return _affordable(stage, [sum(tokens) for tokens in joint], joint[-1] if joint else warm)


def _affordable(stage: RprStage, spent: Sequence[int], latest: Sequence[int]) -> int:
    """Tasks that should bring the sampled tokens to the budget after one more iteration.

    Args:
      stage: with `tokens_per_iteration`.
      spent: sampled tokens of each joint iteration so far.
      latest: sampled tokens of the latest episodes; empty if there are none.
    """
    if not latest:
        return stage.tasks_per_iteration
    left = (stage.tokens_per_iteration or 0) * (len(spent) + 1) - sum(spent)
    of_task = max(sum(latest) / len(latest), 1.0) * stage.samples
    return min(max(round(left / of_task), 1), 4 * stage.tasks_per_iteration)


def _sampler(
    context: Context, stage: RprStage, version: int, first: int, stack: contextlib.ExitStack
) -> Callable[[int], list[Trajectory]]:
    """Gives the episodes of a joint iteration: sampled when asked for, or ahead by a fleet."""
    fleet = context.config.fleet
    if fleet is None:
        return lambda i: _rollouts(context, stage, i, collection(i), _task_count(context, stage, i))
    ahead = Ahead(
        context,
        fleet,
        version=version,
        first=first,
        iterations=stage.iterations,
        specs=lambda i: _specs(context, stage, i, collection(i), stage.tasks_per_iteration),
        segment=lambda i: f"{stage.name}/{collection(i)}",
    )
    return stack.enter_context(ahead).take


def _rollouts(
    context: Context, stage: RprStage, iteration: int, name: str, count: int
) -> list[Trajectory]:
    """`samples` attempts at each of `count` tasks under the general harness."""
    specs = _specs(context, stage, iteration, name, count)
    return graded(context.collect(f"{stage.name}/{name}", specs, label=name))


def _specs(
    context: Context, stage: RprStage, iteration: int, name: str, count: int
) -> list[EpisodeSpec]:
    tasks = context.draw_tasks(count, stage.name, name, tiers=stage.tiers)
    return [
        EpisodeSpec(task, "general", sample, f"{stage.name}.{name}", iteration, stage.temperature)
        for task in tasks
        for sample in range(stage.samples)
    ]


def _annotate(context: Context, segment: str, data: Batch) -> None:
    """Write what training saw beside the stored trajectories, for people and later studies."""
    ids = [t.id for t in data.trajectories]
    with context.clock.charge("store"):
        for name in ("reward_t", *COLUMNS):
            context.annotate(segment, name, dict(zip(ids, getattr(data, name), strict=True)))


def reward_of(
    trajectory: Trajectory, medians: Mapping[str, float], section: RewardSection
) -> float:
    """Terminal reward of a graded trajectory under the configured scheme."""
    verdict = trajectory.verdict
    if verdict is None:
        raise ValueError(f"trajectory {trajectory.id} is masked and has no reward")
    if section.kind == "strict":
        return float(verdict.strict_success)
    if section.kind == "fdr":
        return rewards.verdict_fdr(verdict, trajectory.family, medians)
    return rewards.verdict_spr(
        verdict,
        trajectory.family,
        medians,
        success_reward=section.success,
        beta=section.beta,
        cap=section.cap,
    )


def _warm_up(
    context: Context, stage: RprStage, critic: state.TrainState
) -> tuple[state.TrainState, Array]:
    """Critic-only rounds on rollouts of the frozen actor, towards returns with lam = 1.

    Returns:
      The critic, and its explained variance on the rollouts before each round.
    """
    explained = np.zeros(stage.warm_up_rounds, np.float32)
    if stage.warm_up_rounds == 0:
        return critic, explained
    trajectories: list[Trajectory] = []
    for i in range(stage.warm_up_batches):
        trajectories += _rollouts(context, stage, i, f"warm-up-{i}", stage.tasks_per_iteration)
    with (
        context.observer.part("critic warm-up", stage.warm_up_rounds) as part,
        context.clock.charge("training"),
    ):
        for k in range(stage.warm_up_rounds):
            data = _score(context, stage, trajectories, critic.params, lam=1.0)
            explained[k] = _explained_variance(data)
            seed = prng.integer(context.config.seed, stage.name, "warm-up", k)
            for rows in _pack(context.config, data.examples(), seed, minibatches=1):
                critic, metrics = context.steps.critic(
                    critic, rows, stage.critic_learning_rate, **critic_settings(stage)
                )
            part.advance(1, loss=float(metrics["loss"]), explained_variance=float(explained[k]))
    return critic, explained


def _iterate(
    context: Context,
    stage: RprStage,
    iteration: int,
    actor: state.TrainState,
    critic: state.TrainState,
    trajectories: Sequence[Trajectory],
) -> tuple[state.TrainState, state.TrainState, Array]:
    """PPO on one batch of rollouts; returns both states and the iteration's point of `CURVES`."""
    data = _score(
        context, stage, trajectories, critic.params, lam=stage.lam, lam_critic=stage.lam_critic
    )
    _annotate(context, f"{stage.name}/{collection(iteration)}", data)
    explained = _explained_variance(data)
    sums: dict[str, list[jax.Array]] = {}
    updates = int(actor.step)
    with context.clock.charge("training"):
        examples = data.examples()
        for epoch in range(stage.epochs):
            seed = _order(context.config, stage, iteration, epoch)
            for rows in _pack(context.config, examples, seed, minibatches=stage.minibatches):
                rate = optim.linear_warmup(
                    updates, peak=stage.actor_learning_rate, warmup_steps=stage.actor_warmup_steps
                )
                updates += 1
                actor, of_actor = context.steps.actor(
                    actor,
                    rows,
                    rate,
                    clip=stage.clip,
                    temperature=stage.temperature,
                )
                for name, value in of_actor.items():
                    sums.setdefault(f"actor/{name}", []).append(value)
                for _ in range(stage.critic_updates):
                    critic, of_critic = context.steps.critic(
                        critic, rows, stage.critic_learning_rate, **critic_settings(stage)
                    )
                    for name, value in of_critic.items():
                        sums.setdefault(f"critic/{name}", []).append(value)
        means = {name: float(np.mean(jax.device_get(values))) for name, values in sums.items()}
    means |= {
        "train/success": success_rate(trajectories),
        "train/reward": float(np.mean(data.reward)),
        "critic/explained_variance": explained,
    }
    return actor, critic, np.array([means[name] for name in CURVES], np.float32)


def _score(
    context: Context,
    stage: RprStage,
    trajectories: Sequence[Trajectory],
    critic: Any,
    *,
    lam: float,
    lam_critic: float | None = None,
) -> Batch:
    """Rewards, values, advantages (whitened over the batch) and returns of graded episodes."""
    # An episode whose prompt filled the context sampled nothing: nothing of it can be trained.
    trajectories = [t for t in trajectories if t.acted_t.any()]
    reward = [reward_of(t, context.medians, stage.reward) for t in trajectories]
    reward_t = [batch.token_rewards(t, r) for t, r in zip(trajectories, reward, strict=True)]
    for t, of_t in zip(trajectories, reward_t, strict=True):
        advantages.check_tokens(of_t, t.acted_t, t.turn_t, where=f"trajectory {t.id}")
    packing = context.config.packing
    packed = batch.pack(
        [batch.trajectory_example(t) for t in trajectories],
        rows=packing.rows,
        length=packing.length,
        seed=0,
    )
    with context.clock.charge("training"):
        said = [context.steps.values(critic, rows) for rows in packed.batches]
        if stage.value_loss == "bce":
            high = stage.reward.success
            said = [losses.value_of_logit(logit, high=high) for logit in said]
        value_t = packed.gather(said)
    # A whole number of waves wide, so that a masked episode does not change the shape.
    wave = context.config.engine.sessions
    tokens, index = batch.action_tokens(
        [t.acted_t for t in trajectories],
        [t.turn_t for t in trajectories],
        {"reward": reward_t, "value": value_t},
        length=context.config.engine.context,
        width=-(-len(trajectories) // wave) * wave,
    )
    advantage, target = _estimate(
        tokens,
        estimator=stage.estimator,
        gamma=stage.gamma,
        lam=lam,
        lam_critic=lam_critic,
        options=tuple(sorted(stage.estimator_options.items())),
    )
    return Batch(
        trajectories=trajectories,
        reward=reward,
        reward_t=reward_t,
        value_t=value_t,
        advantage_t=index.scatter(advantage),
        return_t=index.scatter(target),
    )


@partial(jax.jit, static_argnames=("estimator", "gamma", "lam", "lam_critic", "options"))
def _estimate(
    tokens: batch.ActionTokens,
    *,
    estimator: str,
    gamma: float,
    lam: float,
    lam_critic: float | None,
    options: tuple[tuple[str, float], ...],
) -> tuple[jax.Array, jax.Array]:
    """Whitened advantages and returns of action tokens [Ta, N]."""

    def both(at: float) -> tuple[jax.Array, jax.Array]:
        one = advantages.bind(estimator, **{"gamma": gamma, "lam": at} | dict(options))
        result: tuple[jax.Array, jax.Array] = jax.vmap(one, in_axes=1, out_axes=1)(
            tokens.columns["reward"], tokens.columns["value"], tokens.acted_t, tokens.turn_t
        )
        return result

    advantage, target = both(lam)
    if lam_critic is not None:
        _, target = both(lam_critic)
    return advantages.whiten(advantage, tokens.acted_t), target


def _explained_variance(data: Batch) -> float:
    """EV of the values against the undiscounted return, over the batch's action tokens."""
    acted = np.concatenate([t.acted_t for t in data.trajectories])
    # The reward is terminal, so the undiscounted return of every token is the reward.
    outcome = np.concatenate(
        [np.full(t.shape, r, np.float32) for t, r in zip(data.reward_t, data.reward, strict=True)]
    )
    value = np.concatenate(data.value_t)
    return float(losses.explained_variance(*(jnp.asarray(x) for x in (value, outcome, acted))))


def critic_settings(stage: RprStage) -> dict[str, Any]:
    """What is compiled into the stage's critic step: the settings that are not the default."""
    settings: dict[str, Any] = {"value_clip": stage.value_clip}
    if stage.value_loss == "bce":
        settings["value_high"] = stage.reward.success
    if stage.frozen_attention:
        settings["frozen_attention"] = True
    return settings


def packed_like(context: Context, *, columns: bool = True) -> batch.PackedBatch:
    """An empty batch of the shape of every RPR update (or of the values, without columns)."""
    packing = context.config.packing
    names = COLUMNS if columns else ()
    example = batch.text_example(np.zeros(1, np.int32), np.zeros(1, np.float32))
    example = replace(example, columns={name: np.zeros(1, np.float32) for name in names})
    return batch.pack([example], rows=packing.rows, length=packing.length, seed=0).batches[0]


def updates_of(
    config: Config, stage: RprStage, iteration: int, trajectories: Sequence[Trajectory]
) -> int:
    """Updates of the actor that a joint iteration makes of its stored episodes.

    Every epoch has as many as its episodes need packed batches, and at least `minibatches`.
    """
    kept = [t for t in graded(trajectories) if t.acted_t.any()]
    examples = [batch.trajectory_example(t) for t in kept]
    return sum(
        len(
            _pack(
                config,
                examples,
                _order(config, stage, iteration, epoch),
                minibatches=stage.minibatches,
            )
        )
        for epoch in range(stage.epochs)
    )


def _order(config: Config, stage: RprStage, iteration: int, epoch: int) -> int:
    """Seed of the order in which an epoch packs its episodes."""
    return prng.integer(config.seed, stage.name, "minibatch", iteration, epoch)


def _pack(
    config: Config, examples: Sequence[batch.Example], seed: int, *, minibatches: int
) -> tuple[batch.PackedBatch, ...]:
    """Packed rows of examples, in at least `minibatches` equal shapes."""
    packing = config.packing
    pack = partial(batch.pack, examples, rows=packing.rows, length=packing.length, seed=seed)
    packed = pack()
    return (
        packed.batches if len(packed.batches) >= minibatches else pack(batches=minibatches).batches
    )
