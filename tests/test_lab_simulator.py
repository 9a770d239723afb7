"""The simulated process: exact success, exact gradient, and its layout as sequences."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trsi_jax.lab import simulator as sim
from trsi_jax.lab.simulator import World

OUTCOMES = ["early", "chain", "soft"]


def random_policy(world, seed=0):
    key = jax.random.key(seed)
    return jax.random.normal(key, (world.turns, world.tokens, 2, sim.TOKENS))


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_exact_success_is_the_sum_over_all_decisions(outcome):
    """Enumerate the 2^K patterns of right and wrong and the probability of each."""
    world = World(turns=3, tokens=2, log=0, outcome=outcome)
    policy = random_policy(world)
    p = np.asarray(jax.nn.softmax(policy[:, 0], axis=-1))
    right = 0.5 * (p[:, 0, 0] + p[:, 1, 1])
    total = 0.0
    for pattern in itertools.product([0, 1], repeat=3):
        chance = np.prod([r if hit else 1 - r for r, hit in zip(right, pattern, strict=True)])
        total += chance * float(sim.success_of(world, jnp.array(pattern)))
    assert sim.exact_success(world, policy) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(
    ("outcome", "start", "success"),
    [("chain", 0.765, 0.765**6), ("early", 0.5, 0.5), ("soft", 0.5, 0.5)],
)
def test_initial_policy_starts_where_it_says(outcome, start, success):
    world = World(outcome=outcome, start=start)
    assert sim.exact_success(world, sim.initial_policy(world)) == pytest.approx(success, rel=1e-5)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_the_score_function_with_the_raw_return_estimates_the_exact_gradient(outcome):
    """Mean of R grad log pi over 65,536 episodes: within 5 standard errors of the derivative."""
    world = World(turns=2, tokens=2, log=0, outcome=outcome, start=0.6)
    policy = sim.initial_policy(world)
    episodes = sim.sample(world, policy, jax.random.key(1), 1 << 16)
    baseline = episodes.success - sim.exact_success(world, policy)

    def surrogate(policy, weight):
        return jnp.sum(sim.logprob_of(policy, episodes) * weight[:, None, None])

    estimate = jax.grad(surrogate)(policy, baseline) / len(baseline)
    exact = jax.grad(functools.partial(sim.exact_success, world))(policy)
    # |R - b| <= 1 and |d log pi / d logit| <= 1 at one of two cues: variance below 1/2.
    np.testing.assert_allclose(estimate, exact, atol=5 * np.sqrt(0.5 / len(baseline)))
    assert not np.any(exact[:, 1])


@pytest.mark.parametrize(
    "world",
    [
        World(turns=3, tokens=2, log=5),
        World(turns=3, tokens=4, log=7, trap="long-command", outcome="soft", start=0.5),
        World(turns=3, tokens=2, log=20, trap="quiet", outcome="soft", start=0.5),
        World(turns=3, tokens=2, log=0),
    ],
)
def test_layout_is_what_a_transcript_would_be(world):
    """Write every episode down token by token and compare."""
    episodes = sim.sample(world, sim.initial_policy(world), jax.random.key(0), 16)
    layout = sim.lay(world, episodes)
    reward = sim.terminal_reward(world, episodes, layout)
    for b in range(16):
        kinds, turns = [], []
        for k in range(world.turns):
            n = int(episodes.emitted[b, k].sum())
            kinds += ["act"] * n + ["log"] * int(episodes.log[b, k])
            turns += [k] * (n + int(episodes.log[b, k]))
        size = len(kinds)
        assert size <= world.length
        np.testing.assert_array_equal(layout.acted[b, :size], [x == "act" for x in kinds])
        np.testing.assert_array_equal(layout.logged[b, :size], [x == "log" for x in kinds])
        np.testing.assert_array_equal(layout.turn[b, :size], turns)
        assert not np.any(layout.acted[b, size:] | layout.logged[b, size:])
        expected = np.zeros(world.length)
        expected[size - 1] = episodes.success[b]
        np.testing.assert_array_equal(reward[b], expected)


def test_scatter_and_gather_are_inverse():
    world = World(turns=3, tokens=4, log=7, trap="long-command", outcome="soft", start=0.5)
    episodes = sim.sample(world, sim.initial_policy(world), jax.random.key(0), 8)
    layout = sim.lay(world, episodes)
    x = jnp.where(episodes.emitted, jax.random.normal(jax.random.key(1), (8, 3, 4)), 0.0)
    rows = sim.scatter(x, layout.position, world.length)
    np.testing.assert_array_equal(sim.gather(rows, layout.position), x)
    assert np.count_nonzero(rows) == np.count_nonzero(x)


def test_traps_do_what_they_say():
    quiet = World(log=100, trap="quiet", outcome="soft", start=0.5)
    episodes = sim.sample(quiet, sim.initial_policy(quiet), jax.random.key(0), 64)
    log, right = np.asarray(episodes.log)[:, :-1], np.asarray(episodes.right)[:, :-1]
    assert log[right].min() >= 50
    assert log[~right].max() <= 15
    long = World(trap="long-command", tokens=32, log=0, outcome="soft", start=0.5)
    episodes = sim.sample(long, sim.initial_policy(long), jax.random.key(0), 64)
    count = np.asarray(episodes.emitted.sum(axis=2))
    np.testing.assert_array_equal(count, np.where(episodes.right, 32, 1))


def test_a_group_shares_its_cues():
    world = World()
    episodes = sim.sample(world, sim.initial_policy(world), jax.random.key(0), 24)
    cue = np.asarray(episodes.cue).reshape(3, 8, -1)
    assert np.all(cue == cue[:, :1])
    with pytest.raises(ValueError, match="20 episodes do not make groups of 8"):
        sim.sample(world, sim.initial_policy(world), jax.random.key(0), 20)


@pytest.mark.parametrize(
    "options",
    [{"turns": 0}, {"log": -1}, {"decision": 6}, {"start": 1.0}],
)
def test_impossible_worlds_are_refused(options):
    with pytest.raises(ValueError, match="got"):
        World(**options)
