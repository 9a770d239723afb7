"""Races in the simulator: what must agree agrees, and the measure of a gradient is what it says."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from trsi_jax.lab.arms import STANDARD
from trsi_jax.lab.simulator import World
from trsi_jax.lab.study import Laboratory, Recipe, gradient_quality

WORLD = World(turns=3, tokens=2, log=0)
RECIPE = Recipe(iterations=4, batch=16, warmup_batches=2, warmup_batch=16)


@functools.cache
def laboratory(log):
    return Laboratory(WORLD.with_log(log), STANDARD, RECIPE)


def test_without_logs_the_wrong_recursions_learn_as_token_gae_does():
    lab = laboratory(0)
    token = lab.race("token", [0, 1], gamma=0.99, lam=0.95)
    for name in ("gap", "unmasked", "zeroed"):
        race = lab.race(name, [0, 1], gamma=0.99, lam=0.95)
        np.testing.assert_allclose(race.success, token.success, atol=1e-5)
    assert np.all(token.success[:, 0] == pytest.approx(0.765**3, rel=1e-5))


def test_arms_that_differ_in_a_constant_or_in_the_order_alone():
    """Dr. GRPO is 7/8 of RLOO in groups of 8; PACT is MC until the critic hears of the order."""
    lab = laboratory(0)
    found = lab.advantages(0, gamma=0.99, lam=0.95)
    np.testing.assert_allclose(found["Dr. GRPO"], 7 / 8 * found["RLOO"], atol=1e-6)
    np.testing.assert_array_equal(found["PACT"], found["MC"])
    mc, pact = (lab.race(name, [0, 1], gamma=0.99, lam=0.95).success for name in ("MC", "PACT"))
    np.testing.assert_array_equal(pact[:, :2], mc[:, :2])
    assert np.all(pact[:, -1] != mc[:, -1])


def test_a_gradient_worked_by_hand():
    """Batches t + e and t - e with e across: direction exact, variance 2 |e|^2 for two of them."""
    world = World(turns=1, tokens=1, log=0)
    truth = np.array([1.0, 0, 0, 0, 1.0, 0, 0, 0], np.float32)
    across = np.array([0, 0.5, 0, 0, 0, 0.5, 0, 0], np.float32)
    got = gradient_quality(np.stack([truth + across, truth - across]), truth, world)
    # Mean t, |t|^2 = 2; variance .5 + .5 = 1, of which half is taken off: 2 - .5.
    assert got.cos_expected == pytest.approx(np.sqrt(2) / np.sqrt(1.5))
    assert got.cos_batch == pytest.approx(np.sqrt(2) / np.sqrt(2.5))
    assert got.snr == pytest.approx(2.0)
    assert got.early == pytest.approx(1.0)
    assert got.wrong == 0.0
    with pytest.raises(ValueError, match="at least two batches, got 1"):
        gradient_quality(truth[None], truth, world)


def test_unknown_arm_is_named():
    with pytest.raises(ValueError, match=r"no arm 'tb'.*known: TB, "):
        laboratory(0).race("tb", [0], gamma=1.0, lam=1.0)
