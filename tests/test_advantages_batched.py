"""Every form of TB-GAE over a batch is TB-GAE of its columns."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trsi_jax.advantages import (
    action_index,
    compact,
    expand,
    tb_gae,
    tb_gae_batch,
    tb_gae_compacted,
    turn_starts,
)

T, B, TURNS = 40, 3, 7


def draw(seed):
    """Random columns, one of them without any action token; NaN stands off the mask."""
    rng = np.random.default_rng(seed)
    acted = rng.random((T, B)) < 0.5
    acted[:, 2] &= rng.random() < 0.8
    turn = np.sort(rng.integers(0, TURNS, (T, B)), axis=0)
    reward = np.where(rng.random((T, B)) < 0.4, rng.normal(size=(T, B)), 0.0)
    value = np.where(acted, rng.normal(size=(T, B)), np.nan)
    return (
        jnp.asarray(np.where(acted, reward, np.nan), jnp.float32),
        jnp.asarray(value, jnp.float32),
        jnp.asarray(acted),
        jnp.asarray(np.where(acted, turn, -9), jnp.int32),
        jnp.asarray(rng.normal(size=B), jnp.float32),
    )


@functools.partial(jax.jit, static_argnames=("form", "lam_in"))
def run(reward, value, acted, turn, bootstrap, gamma, lam, *, form, lam_in=1.0):
    return tb_gae_batch(
        reward,
        value,
        acted,
        turn,
        gamma=gamma,
        lam=lam,
        lam_in=lam_in,
        bootstrap_b=bootstrap,
        max_turns=TURNS,
        form=form,
    )


@jax.jit
def columns(reward, value, acted, turn, bootstrap, gamma, lam, lam_in):
    one = functools.partial(tb_gae, gamma=gamma, lam=lam, lam_in=lam_in)
    outs = [
        one(reward[:, b], value[:, b], acted[:, b], turn[:, b], bootstrap=bootstrap[b])
        for b in range(B)
    ]
    return tuple(jnp.stack(x, axis=1) for x in zip(*outs, strict=True))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_every_form_is_tb_gae(seed, gamma, lam):
    batch = draw(seed)
    want = columns(*batch, gamma, lam, 1.0)
    for form in ("scan", "turns", "associative"):
        got = run(*batch, gamma, lam, form=form)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)
            assert not np.any(np.asarray(x)[~np.asarray(batch[2])])


@pytest.mark.parametrize("form", ["scan", "associative"])
def test_forms_take_an_inner_lambda(form):
    batch = draw(1)
    want = columns(*batch, 0.9, 0.8, 0.5)
    got = run(*batch, 0.9, 0.8, form=form, lam_in=0.5)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_compaction_is_exact():
    """Gather the action tokens, run the same recursion, scatter back: not a bit differs."""
    batch = draw(2)
    *arrays, bootstrap = batch
    index = jnp.asarray(action_index(np.asarray(batch[2]), multiple=8))
    assert index.shape[0] % 8 == 0
    short = run(*(compact(x, index) for x in arrays), bootstrap, 0.9, 0.8, form="scan")
    long = run(*batch, 0.9, 0.8, form="scan")
    for x, y in zip(short, long, strict=True):
        np.testing.assert_array_equal(expand(x, index, length=T), y)


@pytest.mark.parametrize("lam_in", [1.0, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_the_one_carry_recursion_is_tb_gae(seed, lam_in):
    batch = draw(seed)
    *arrays, bootstrap = batch
    index = jnp.asarray(action_index(np.asarray(batch[2]), multiple=8))
    reward, value, acted, turn = (compact(x, index) for x in arrays)
    got = tb_gae_compacted(
        reward,
        value,
        acted,
        turn_starts(acted, turn),
        gamma=0.9,
        lam=0.8,
        lam_in=lam_in,
        bootstrap_b=bootstrap,
    )
    for x, y in zip(got, columns(*batch, 0.9, 0.8, lam_in), strict=True):
        np.testing.assert_allclose(expand(x, index, length=T), y, atol=1e-5)


def test_padding_changes_no_bit_of_the_one_carry_recursion():
    """Columns padded to multiples of 1, 40 and 64 rows, as a longer neighbour would have it."""
    *arrays, bootstrap = draw(5)
    outs = []
    for multiple in (1, 40, 64):
        index = jnp.asarray(action_index(np.asarray(arrays[2]), multiple=multiple))
        reward, value, acted, turn = (compact(x, index) for x in arrays)
        starts = turn_starts(acted, turn)
        got = tb_gae_compacted(
            reward, value, acted, starts, gamma=0.9, lam=0.8, bootstrap_b=bootstrap
        )
        outs.append([expand(x, index, length=T) for x in got])
    for other in outs[1:]:
        np.testing.assert_array_equal(other, outs[0])


def test_turn_starts():
    """A column of turns 0 0 2 2 2 behind two slots of padding, and an empty one."""
    acted = jnp.array([[0, 0, 1, 1, 1, 1, 1], [0] * 7], bool).T
    turn = jnp.array([[0, 0, 0, 0, 2, 2, 2], [0] * 7]).T
    expected = [0, 0, 1, 0, 1, 0, 0]
    np.testing.assert_array_equal(turn_starts(acted, turn).T, [expected, [0] * 7])


def test_index_of_a_batch_without_actions():
    index = action_index(np.zeros((5, 2), bool), multiple=4)
    np.testing.assert_array_equal(index, np.full((4, 2), 5))
    assert not np.any(compact(jnp.ones((5, 2)), jnp.asarray(index)))


def test_gradients_are_cut_in_every_form():
    reward, value, acted, turn, bootstrap = draw(3)
    for form in ("scan", "turns", "associative"):

        def total(v, form=form):
            return run(reward, v, acted, turn, bootstrap, 0.9, 0.8, form=form)[0].sum()

        assert not np.any(jax.grad(total)(jnp.where(acted, value, 0.0)))


def test_impossible_forms_are_refused():
    batch = draw(4)
    with pytest.raises(ValueError, match=r"needs max_turns and lam_in = 1, got 7 and 0\.5"):
        run(*batch, 0.9, 0.8, form="turns", lam_in=0.5)
    with pytest.raises(ValueError, match="auto, scan, turns, associative, got 'loop'"):
        run(*batch, 0.9, 0.8, form="loop")
