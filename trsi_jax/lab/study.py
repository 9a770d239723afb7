"""Races and gradient tables in the simulator: one compiled program a world, all arms in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from trsi_jax import prng
from trsi_jax.advantages import pact_weight, whiten
from trsi_jax.lab import simulator as sim
from trsi_jax.lab.arms import Arm, Estimate, Rows, Run
from trsi_jax.lab.critic import Critic, features, initial_critic, value_of
from trsi_jax.lab.simulator import Episodes, World
from trsi_jax.losses import explained_variance, masked_sum, value_mse


@dataclass(frozen=True)
class Recipe:
    """How a race is run; the same for every arm.

    Attributes:
      iterations: policy updates, one a batch.
      batch: episodes a batch, a multiple of the world's group.
      lr: Adam's step for the policy, with the gradient's norm cut to 1.
      critic_lr: Adam's step for the critic, set by how much of the undiscounted return a critic
        fitted to Monte-Carlo returns explains at the initial policy of `early` (6 turns of 6
        tokens): .25 after the warm-up, .48 after 30 batches more and .61 after 300 in the study
        that the rules come from; here .29, .45 and .62 (seeds 100 to 102).
      critic_steps: critic updates a batch.
      warmup_batches: batches of `warmup_batch` episodes on Monte-Carlo returns before the start.
      warmup_batch: episodes of one of these.
      warmup_steps: critic updates on each of them.
    """

    iterations: int = 120
    batch: int = 64
    lr: float = 0.03
    critic_lr: float = 6e-3
    critic_steps: int = 4
    warmup_batches: int = 8
    warmup_batch: int = 128
    warmup_steps: int = 4


class Race(NamedTuple):
    """What a race gives, for S seeds.

    Attributes:
      success: [S, iterations + 1] exact success before and after each update.
      explained_variance: [S, iterations] of the undiscounted return by the critic; NaN without.
    """

    success: npt.NDArray[np.float32]
    explained_variance: npt.NDArray[np.float32]


class Gradients(NamedTuple):
    """Estimates at a frozen policy, for S seeds, over its P logits, flattened.

    Attributes:
      estimates: [S, batches, P].
      truth: [P].
      explained_variance: [S, batches] of the undiscounted return by the critic; NaN without.
    """

    estimates: npt.NDArray[np.float32]
    truth: npt.NDArray[np.float32]
    explained_variance: npt.NDArray[np.float32]


class Learner(NamedTuple):
    """Parameters and optimizer states of a race."""

    policy: jax.Array
    policy_opt: optax.OptState
    critic: Critic
    critic_opt: optax.OptState


class Laboratory:
    """One world, its arms, and the compiled programs that run them."""

    def __init__(self, world: World, arms: Sequence[Arm], recipe: Recipe) -> None:
        self.world = world
        self.arms = tuple(arms)
        self.recipe = recipe
        self._runs: tuple[Run, ...] = tuple(arm.build(world.group) for arm in arms)
        self._actor_first = jnp.array([arm.actor_first for arm in arms])
        self._critic = jnp.array([arm.critic for arm in arms])
        self._policy_tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(recipe.lr))
        self._critic_tx = optax.adam(recipe.critic_lr)
        self._start = jax.jit(jax.vmap(self._one_start))
        self._race = jax.jit(jax.vmap(self._one_race, in_axes=(None, 0, 0, None, None)))
        self._gradients = jax.jit(
            jax.vmap(self._one_table, in_axes=(None, 0, 0, None, None, None, None)),
            static_argnums=(5, 6),
        )
        self._started: dict[tuple[object, ...], tuple[Learner, jax.Array]] = {}

    def race(self, arm: str, seeds: Sequence[int], *, gamma: float, lam: float) -> Race:
        """Train from the initial policy with one arm; all arms see the same keys.

        Raises:
          ValueError: for an arm that this laboratory does not have.
        """
        start, keys = self._starts(seeds)
        index = self._index(arm)
        success, ev = self._race(index, start, keys, jnp.float32(gamma), jnp.float32(lam))
        return Race(np.asarray(success), np.asarray(ev))

    def gradients(
        self,
        arm: str,
        seeds: Sequence[int],
        *,
        gamma: float,
        lam: float,
        batches: int = 64,
        fit: int = 30,
    ) -> Gradients:
        """Gradient estimates at the initial policy, after `fit` batches of critic training."""
        start, keys = self._starts(seeds, "gradients")
        estimates, ev = self._gradients(
            self._index(arm), start, keys, jnp.float32(gamma), jnp.float32(lam), batches, fit
        )
        truth = jax.grad(functools.partial(sim.exact_success, self.world))(
            sim.initial_policy(self.world)
        )
        return Gradients(np.asarray(estimates), np.asarray(truth).ravel(), np.asarray(ev))

    def advantages(self, seed: int, *, gamma: float, lam: float) -> dict[str, jax.Array]:
        """Advantages [B, K, m] of one batch by every arm, all with the same warmed-up critic."""

        @jax.jit
        def every(
            learner: Learner, key: jax.Array, gamma: jax.Array, lam: jax.Array
        ) -> list[jax.Array]:
            episodes = sim.sample(self.world, learner.policy, key, self.recipe.batch)
            rows, layout, _ = self._rows(learner, episodes)
            found = [run(rows, gamma, lam).advantage for run in self._runs]
            return [sim.gather(advantage, layout.position) for advantage in found]

        start, keys = self._starts([seed], "advantages")
        learner = jax.tree.map(lambda x: x[0], start)
        arrays = every(learner, keys[0], jnp.float32(gamma), jnp.float32(lam))
        return {arm.name: array for arm, array in zip(self.arms, arrays, strict=True)}

    def _starts(self, seeds: Sequence[int], *purpose: str) -> tuple[Learner, jax.Array]:
        """Learners and keys of all seeds, made once: every arm starts from the same."""
        which = (*purpose, *seeds)
        if which not in self._started:
            keys = jnp.stack([prng.stream(seed, "simulator", *purpose) for seed in seeds])
            self._started[which] = self._start(keys)
        return self._started[which]

    def _index(self, arm: str) -> jax.Array:
        names = [a.name for a in self.arms]
        if arm not in names:
            raise ValueError(f"no arm {arm!r} here; known: {', '.join(names)}")
        return jnp.asarray(names.index(arm), jnp.int32)

    # --- one seed -----------------------------------------------------------------------------

    def _one_start(self, key: jax.Array) -> tuple[Learner, jax.Array]:
        """Initial policy, a critic warmed up on Monte-Carlo returns, and a key for what follows."""
        k_start, k_run = jax.random.split(key)
        k_init, k_warm = jax.random.split(k_start)
        policy = sim.initial_policy(self.world)
        critic = initial_critic(self.world, k_init)
        learner = Learner(
            policy, self._policy_tx.init(policy), critic, self._critic_tx.init(critic)
        )

        def warm(learner: Learner, key: jax.Array) -> tuple[Learner, None]:
            episodes = sim.sample(self.world, policy, key, self.recipe.warmup_batch)
            target = jnp.broadcast_to(
                episodes.success.astype(jnp.float32)[:, None, None], episodes.token.shape
            )
            steps = self.recipe.warmup_steps
            return self._fit(learner, episodes, target, episodes.emitted, steps=steps), None

        learner, _ = jax.lax.scan(
            warm, learner, jax.random.split(k_warm, self.recipe.warmup_batches)
        )
        return learner, k_run

    def _fit(
        self,
        learner: Learner,
        episodes: Episodes,
        target: jax.Array,
        fitted: jax.Array,
        *,
        steps: int,
        weight: jax.Array | None = None,
    ) -> Learner:
        """A few steps of the critic towards fixed targets [B, K, m], weighted if asked."""
        x = features(self.world, episodes).action
        count = jnp.sum(fitted)

        def loss(critic: Critic) -> jax.Array:
            value = value_of(critic, x)
            return value_mse(value, target, fitted, n_tokens=count, weight_t=weight)

        def step(state: tuple[Critic, Any], _: None) -> tuple[tuple[Critic, Any], None]:
            critic, opt = state
            updates, opt = self._critic_tx.update(jax.grad(loss)(critic), opt, critic)
            return (optax.apply_updates(critic, updates), opt), None

        (critic, opt), _ = jax.lax.scan(
            step, (learner.critic, learner.critic_opt), None, length=steps
        )
        return learner._replace(critic=critic, critic_opt=opt)

    def _learn(
        self,
        arm: jax.Array,
        learner: Learner,
        episodes: Episodes,
        estimate: Estimate,
        weight: jax.Array,
    ) -> Learner:
        """Fit the critic to the arm's own targets, if the arm has any use for one."""
        fit = functools.partial(self._fit, steps=self.recipe.critic_steps, weight=weight)
        learned: Learner = jax.lax.cond(
            self._critic[arm],
            lambda: fit(learner, episodes, estimate.target, estimate.fitted),
            lambda: learner,
        )
        return learned

    def _rows(self, learner: Learner, episodes: Episodes) -> tuple[Rows, sim.Layout, jax.Array]:
        """Episodes as the arms see them, where their tokens lie, and the values [B, K, m]."""
        world = self.world
        layout = sim.lay(world, episodes)
        seen = features(world, episodes)
        at_action = value_of(learner.critic, seen.action)
        at_log = value_of(learner.critic, seen.log)
        on_log = jnp.take_along_axis(at_log, jnp.maximum(layout.turn, 0), axis=1)
        value = sim.scatter(at_action, layout.position, world.length)
        rows = Rows(
            sim.terminal_reward(world, episodes, layout),
            jnp.where(layout.logged, on_log, value),
            layout.acted,
            layout.turn,
            episodes.success.astype(jnp.float32),
        )
        return rows, layout, at_action

    def _estimate(
        self, arm: jax.Array, learner: Learner, episodes: Episodes, gamma: jax.Array, lam: jax.Array
    ) -> tuple[Estimate, jax.Array]:
        """The arm's estimate at the action tokens, [B, K, m] each, and the values there."""
        rows, layout, at_action = self._rows(learner, episodes)
        branches: list[Callable[..., Estimate]] = [
            functools.partial(run, rows) for run in self._runs
        ]
        estimate: Estimate = jax.lax.switch(arm, branches, gamma, lam)
        return Estimate(*(sim.gather(x, layout.position) for x in estimate)), at_action

    def _explained(self, arm: jax.Array, value: jax.Array, episodes: Episodes) -> jax.Array:
        """EV of the undiscounted return by values [B, K, m], over the action tokens."""
        score = episodes.success.astype(jnp.float32)[:, None, None]
        target = jnp.broadcast_to(score, value.shape)
        found = explained_variance(value, target, episodes.emitted)
        return jnp.where(self._critic[arm], found, jnp.nan)

    def _surrogate(self, policy: jax.Array, episodes: Episodes, weight: jax.Array) -> jax.Array:
        """Mean over episodes of sum_t A_t log pi_t."""
        logprob = sim.logprob_of(policy, episodes)
        return masked_sum(logprob * weight, episodes.emitted, n_tokens=weight.shape[0])

    def _one_race(
        self, arm: jax.Array, start: Learner, key: jax.Array, gamma: jax.Array, lam: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def iterate(learner: Learner, key: jax.Array) -> tuple[Learner, tuple[jax.Array, ...]]:
            before = sim.exact_success(self.world, learner.policy)
            episodes = sim.sample(self.world, learner.policy, key, self.recipe.batch)
            estimate, value = self._estimate(arm, learner, episodes, gamma, lam)
            advantage = whiten(estimate.advantage, episodes.emitted)
            gradient = jax.grad(self._surrogate)(learner.policy, episodes, -advantage)
            updates, opt = self._policy_tx.update(gradient, learner.policy_opt, learner.policy)
            ev = self._explained(arm, value, episodes)
            policy = optax.apply_updates(learner.policy, updates)
            ratio = pact_weight(
                sim.logprob_of(policy, episodes),
                sim.logprob_of(learner.policy, episodes),
                episodes.emitted,
            )
            weight = jnp.where(self._actor_first[arm], ratio, 1.0)
            learner = self._learn(arm, learner, episodes, estimate, weight)
            return learner._replace(policy=policy, policy_opt=opt), (before, ev)

        learner, (success, ev) = jax.lax.scan(
            iterate, start, jax.random.split(key, self.recipe.iterations)
        )
        final = sim.exact_success(self.world, learner.policy)
        return jnp.append(success, final), ev

    def _one_table(
        self,
        arm: jax.Array,
        start: Learner,
        key: jax.Array,
        gamma: jax.Array,
        lam: jax.Array,
        batches: int,
        fit: int,
    ) -> tuple[jax.Array, jax.Array]:
        k_fit, k_run = jax.random.split(key)

        def settle(learner: Learner, key: jax.Array) -> tuple[Learner, None]:
            episodes = sim.sample(self.world, learner.policy, key, self.recipe.batch)
            estimate, _ = self._estimate(arm, learner, episodes, gamma, lam)
            weight = jnp.ones_like(estimate.target)
            return self._learn(arm, learner, episodes, estimate, weight), None

        learner, _ = jax.lax.scan(settle, start, jax.random.split(k_fit, fit))

        def measure(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            episodes = sim.sample(self.world, learner.policy, key, self.recipe.batch)
            estimate, value = self._estimate(arm, learner, episodes, gamma, lam)
            gradient = jax.grad(self._surrogate)(learner.policy, episodes, estimate.advantage)
            return jnp.ravel(gradient), self._explained(arm, value, episodes)

        measured: tuple[jax.Array, jax.Array] = jax.lax.map(
            measure, jax.random.split(k_run, batches)
        )
        return measured


# --- how good a gradient is -------------------------------------------------------------------


@dataclass(frozen=True)
class GradientQuality:
    """One estimator's gradient against the true one.

    Attributes:
      cos_expected: cosine of the expected estimate with the truth, the noise of the mean taken
        off; 1 is an unbiased direction (noise can carry it past 1). NaN where the mean is no
        larger than its noise.
      cos_batch: mean cosine of a single batch.
      snr: squared projection of the mean on the truth, over the total variance of a batch.
      early: size of the mean estimate at the first turn's decision, relative to the truth.
      wrong: share of batches that point against the truth.
    """

    cos_expected: float
    cos_batch: float
    snr: float
    early: float
    wrong: float


def gradient_quality(
    estimates: npt.NDArray[np.float32], truth: npt.NDArray[np.float32], world: World
) -> GradientQuality:
    """Measure [N, P] estimates of independent batches against the truth [P].

    Raises:
      ValueError: with fewer than two batches.
    """
    x, t = np.asarray(estimates, np.float64), np.asarray(truth, np.float64)
    n = x.shape[0]
    if n < 2:
        raise ValueError(f"need at least two batches, got {n}")
    unit = t / np.linalg.norm(t)
    mean = x.mean(axis=0)
    variance = float(x.var(axis=0, ddof=1).sum())
    size = float(mean @ mean) - variance / n
    along = x @ unit
    first = np.zeros((world.turns, world.tokens, 2, sim.TOKENS), bool)
    first[0, world.decision] = True
    mask = first.ravel()
    return GradientQuality(
        cos_expected=float(mean @ unit) / np.sqrt(size) if size > 0 else float("nan"),
        cos_batch=float(np.mean(along / np.maximum(np.linalg.norm(x, axis=1), 1e-30))),
        snr=float(mean @ unit) ** 2 / variance if variance else float("inf"),
        early=float(mean[mask] @ t[mask]) / float(t[mask] @ t[mask]),
        wrong=float(np.mean(along < 0)),
    )
