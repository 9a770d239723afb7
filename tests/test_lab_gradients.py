"""The gradient table at a frozen policy as a regression test: 3 seeds of 64 batches a cell.

Bounds come from a study with an independent simulator of the same process: at six turns of six
tokens TB-GAE's direction is unbiased, and counting 100-token logs in the exponent turns it.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from trsi_jax.lab.arms import STANDARD
from trsi_jax.lab.simulator import World
from trsi_jax.lab.study import Laboratory, Recipe, gradient_quality

pytestmark = pytest.mark.lab

GAMMA, LAM, SEEDS = 0.99, 0.95, (0, 1, 2)
INVARIANT = ("TB", "token", "macro", "bi-level", "MC", "RLOO")
COUNTING = ("gap", "unmasked", "zeroed")
ARMS = tuple(arm for arm in STANDARD if arm.name in INVARIANT + COUNTING)


@functools.cache
def laboratory(log):
    return Laboratory(World(log=log), ARMS, Recipe())


@functools.cache
def table(arm, log):
    return laboratory(log).gradients(arm, SEEDS, gamma=GAMMA, lam=LAM)


@functools.cache
def quality(arm, log):
    found = table(arm, log)
    world = laboratory(log).world
    every = [gradient_quality(e, found.truth, world) for e in found.estimates]
    return {
        name: float(np.mean([getattr(q, name) for q in every]))
        for name in ("cos_expected", "snr", "early", "wrong")
    }


@pytest.mark.parametrize("arm", INVARIANT)
def test_logs_change_no_bit_of_the_gradient(arm):
    for log in (20, 100):
        np.testing.assert_array_equal(table(arm, log).estimates, table(arm, 0).estimates)


def test_logs_change_no_bit_of_any_sound_arm():
    """All arms of the study on one batch and one critic."""
    short, long = (
        Laboratory(World(log=log), STANDARD, Recipe()).advantages(0, gamma=GAMMA, lam=LAM)
        for log in (0, 20)
    )
    for arm in STANDARD:
        same = np.array_equal(short[arm.name], long[arm.name])
        assert same == (arm.name not in COUNTING), arm.name


@pytest.mark.parametrize("arm", COUNTING)
def test_without_logs_the_counting_recursions_are_token_gae(arm):
    """Fitted on its own targets for 120 steps, so rounding has grown: compared in direction."""
    for name, value in quality(arm, 0).items():
        assert value == pytest.approx(quality("token", 0)[name], abs=0.01), name


@pytest.mark.parametrize("arm", ["TB", "macro", "bi-level", "MC", "RLOO"])
def test_the_direction_is_unbiased_at_six_turns(arm):
    assert quality(arm, 0)["cos_expected"] > 0.98


def test_counting_the_log_turns_the_gradient():
    assert quality("gap", 100)["cos_expected"] < 0.75
    assert quality("zeroed", 100)["cos_expected"] < quality("gap", 100)["cos_expected"]
    for arm in COUNTING:
        lengths = [quality(arm, log)["cos_expected"] for log in (0, 20, 100)]
        assert lengths[0] > lengths[1] > lengths[2], arm
        assert quality(arm, 100)["early"] < 0.5 * quality(arm, 0)["early"], arm
