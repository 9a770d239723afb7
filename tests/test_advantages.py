"""Advantage estimators against float64 loops, published tables and their defining properties."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trsi_jax import advantages
from trsi_jax.advantages import gae, monte_carlo, tb_gae, whiten

GAMMA, LAM = 0.99, 0.95
T = 24  # one length, so that every estimator compiles once

# Input A of the oracle table: two actions, three observations, two actions, one padding slot.
A = {
    "reward": [0, 0, 0, 0, 0, 0, 1, 0],
    "value": [0.2, 0.3, 0.9, 0.9, 0.9, 0.5, 0.6, 0.4],
    "acted": [1, 1, 0, 0, 0, 1, 1, 0],
    "turn": [0, 0, 0, 0, 0, 1, 1, 1],
}
ACTIONS = [0, 1, 5, 6]


def arrays(case):
    return (
        jnp.asarray(case["reward"], jnp.float32),
        jnp.asarray(case["value"], jnp.float32),
        jnp.asarray(case["acted"], bool),
        jnp.asarray(case["turn"], jnp.int32),
    )


@functools.cache
def jitted(name):
    return jax.jit(advantages.get(name))


def draw(seed, *, turns=5):
    """A random sequence: prompt, then actions and observations; rewards on some action tokens."""
    rng = np.random.default_rng(seed)
    acted = rng.random(T) < 0.6
    acted[0] = False
    turn = np.sort(rng.integers(0, turns, T))
    reward = np.where(acted & (rng.random(T) < 0.3), rng.normal(size=T), 0.0)
    value = rng.normal(size=T)
    return reward, value, acted, turn


def pair_loop(reward, value, acted, turn, *, inside, between, bootstrap=0.0):
    """The two-pair recursion, literally, in float64: advantages [T]."""
    index = [t for t in range(len(acted)) if acted[t]]
    out = np.zeros(len(acted))
    value_next, advantage_next, turn_next = bootstrap, 0.0, None
    for t in reversed(index):
        g, lam = inside if turn[t] == turn_next else between
        delta = reward[t] + g * value_next - value[t]
        advantage_next = delta + g * lam * advantage_next
        out[t] = advantage_next
        value_next, turn_next = value[t], turn[t]
    return out


def to_jax(sequence):
    reward, value, acted, turn = sequence
    return (
        jnp.asarray(reward, jnp.float32),
        jnp.asarray(value, jnp.float32),
        jnp.asarray(acted),
        jnp.asarray(turn, jnp.int32),
    )


def check(result, advantage, sequence, *, returns=None):
    _, value, acted, _ = sequence
    expected = np.where(acted, advantage + value, 0) if returns is None else returns
    np.testing.assert_allclose(result[0], advantage, atol=1e-5)
    np.testing.assert_allclose(result[1], expected, atol=1e-5)


# --- published table --------------------------------------------------------------------------

# Numpy re-statements of each peer's recursion on input A, gamma .99, lambda .95 (survey of peers).
TABLE = {
    "gae": [0.696308, 0.637223, 0.470200, 0.400000],
    "tb_gae": [0.765250, 0.665250, 0.500000, 0.400000],
}


@pytest.mark.parametrize("name", sorted(TABLE))
def test_table_of_recursions_on_input_a(name):
    advantage, _ = jitted(name)(*arrays(A), gamma=GAMMA, lam=LAM)
    np.testing.assert_allclose(advantage[jnp.array(ACTIONS)], TABLE[name], atol=1e-6)


def test_reward_off_the_mask_is_not_read():
    """Input B: the peers' skip recursion loses such a reward (A0 = -0.135602); so would ours."""
    reward, value, acted, turn = arrays(A)
    moved = jnp.zeros_like(reward).at[7].set(1.0)
    advantage, _ = gae(moved, value, acted, turn, gamma=GAMMA, lam=LAM)
    np.testing.assert_allclose(advantage[0], -0.135602, atol=1e-6)


# --- oracles ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    lam_in=st.floats(0, 1),
    bootstrap=st.floats(-2, 2),
)
def test_tb_gae_is_its_definition(seed, gamma, lam, lam_in, bootstrap):
    sequence = draw(seed)
    expected = pair_loop(*sequence, inside=(1.0, lam_in), between=(gamma, lam), bootstrap=bootstrap)
    got = jitted("tb_gae")(
        *to_jax(sequence), gamma=gamma, lam=lam, lam_in=lam_in, bootstrap=bootstrap
    )
    check(got, expected, sequence)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    bootstrap=st.floats(-2, 2),
)
def test_gae_is_its_definition(seed, gamma, lam, bootstrap):
    sequence = draw(seed)
    pair = (gamma, lam)
    expected = pair_loop(*sequence, inside=pair, between=pair, bootstrap=bootstrap)
    got = jitted("gae")(*to_jax(sequence), gamma=gamma, lam=lam, bootstrap=bootstrap)
    check(got, expected, sequence)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), bootstrap=st.floats(-2, 2))
def test_monte_carlo_is_the_return_to_go(seed, bootstrap):
    sequence = draw(seed)
    reward, value, acted, _ = sequence
    returns = np.where(acted, np.cumsum((reward * acted)[::-1])[::-1] + bootstrap, 0.0)
    got = jitted("monte_carlo")(*to_jax(sequence), bootstrap=bootstrap)
    check(got, np.where(acted, returns - value, 0.0), sequence, returns=returns)


# --- properties of tb_gae ---------------------------------------------------------------------


def with_observations(n, value):
    """Input C: two actions, n observations, two actions, the reward on the last."""
    acted = [True] * 2 + [False] * n + [True] * 2
    return (
        jnp.zeros(n + 4).at[-1].set(1.0),
        jnp.concatenate([jnp.array([0.2, 0.3]), jnp.full(n, value), jnp.array([0.5, 0.6])]),
        jnp.array(acted),
        jnp.array([0] * (n + 2) + [1] * 2),
    )


@pytest.mark.parametrize("name", ["tb_gae", "gae"])
@pytest.mark.parametrize("n", [3, 30, 300, 30_000])
@pytest.mark.parametrize("value", [0.9, -3e38, np.inf, np.nan])
def test_observations_change_no_bit(name, n, value):
    plain = jitted(name)(*with_observations(0, 0.0), gamma=GAMMA, lam=LAM)
    longer = jitted(name)(*with_observations(n, value), gamma=GAMMA, lam=LAM)
    keep = np.array([0, 1, n + 2, n + 3])
    for short, long in zip(plain, longer, strict=True):
        np.testing.assert_array_equal(np.asarray(long)[keep], np.asarray(short))
        assert not np.any(np.delete(np.asarray(long), keep))


def test_rewards_and_turns_of_observations_are_not_read():
    sequence = to_jax(draw(3))
    reward, value, acted, turn = sequence
    plain = jitted("tb_gae")(*sequence, gamma=GAMMA, lam=LAM)
    noisy = jitted("tb_gae")(
        jnp.where(acted, reward, jnp.nan),
        value,
        acted,
        jnp.where(acted, turn, 99),
        gamma=GAMMA,
        lam=LAM,
    )
    np.testing.assert_array_equal(plain, noisy)


@pytest.mark.parametrize("seed", range(5))
def test_one_turn_is_the_undiscounted_token_estimator(seed):
    reward, value, acted, turn = to_jax(draw(seed))
    one = jnp.zeros_like(turn)
    ours = jitted("tb_gae")(reward, value, acted, one, gamma=0.3, lam=0.2)
    token = jitted("gae")(reward, value, acted, one, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(ours, token, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_unit_decay_is_monte_carlo(seed):
    sequence = to_jax(draw(seed))
    ours = jitted("tb_gae")(*sequence, gamma=1.0, lam=1.0, bootstrap=0.5)
    np.testing.assert_allclose(ours, jitted("monte_carlo")(*sequence, bootstrap=0.5), atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_equal_pairs_are_skip_observation_gae(seed):
    sequence = to_jax(draw(seed))
    ours = jitted("tb_gae")(*sequence, gamma=1.0, lam=0.7, lam_in=0.7)
    np.testing.assert_array_equal(ours, jitted("gae")(*sequence, gamma=1.0, lam=0.7))


@pytest.mark.parametrize("seed", range(5))
def test_a_turn_telescopes(seed):
    """A_t + V_t - (rewards from t to the turn's end) is one constant a turn."""
    sequence = draw(seed)
    reward, value, acted, turn = sequence
    advantage, _ = jitted("tb_gae")(*to_jax(sequence), gamma=0.9, lam=0.8)
    for u in np.unique(turn[acted]):
        index = np.flatnonzero(acted & (turn == u))
        to_go = np.cumsum(reward[index][::-1])[::-1]
        constant = np.asarray(advantage)[index] + value[index] - to_go
        np.testing.assert_allclose(constant, constant[0], atol=1e-5)


def test_fully_masked_sequence_is_zero():
    reward, value, acted, turn = to_jax(draw(0))
    off = jnp.zeros_like(acted)
    assert not np.any(jitted("tb_gae")(reward, value * jnp.nan, off, turn, gamma=0.9, lam=0.9))


def test_no_gradient_reaches_the_values():
    reward, value, acted, turn = to_jax(draw(1))

    def loss(v):
        advantage, returns = tb_gae(reward, v, acted, turn, gamma=GAMMA, lam=LAM, bootstrap=v[0])
        return jnp.sum(advantage**2) + jnp.sum(returns**2) + jnp.sum(whiten(v, acted) ** 3)

    assert not np.any(jax.grad(loss)(value))


def test_time_major_batch_equals_rows():
    """vmap over the last axis, the layout that needs no transposition, gives the same bits."""
    rows = [to_jax(draw(seed)) for seed in range(3)]
    batch = [jnp.stack(x, axis=1) for x in zip(*rows, strict=True)]
    run = functools.partial(tb_gae, gamma=GAMMA, lam=LAM)
    together = jax.jit(jax.vmap(run, in_axes=1, out_axes=1))(*batch)
    for i, row in enumerate(rows):
        alone = jitted("tb_gae")(*row, gamma=GAMMA, lam=LAM)
        for x, y in zip(together, alone, strict=True):
            np.testing.assert_allclose(x[:, i], y, atol=1e-6)


def test_bfloat16_values_are_computed_in_float32():
    reward, value, acted, turn = arrays(A)
    advantage, _ = tb_gae(reward, value.astype(jnp.bfloat16), acted, turn, gamma=GAMMA, lam=LAM)
    assert advantage.dtype == jnp.float32


# --- mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "dtype", "message"),
    [
        (0, jnp.int32, "reward_t must be floating point, got int32"),
        (1, jnp.int32, "value_t must be floating point, got int32"),
        (2, jnp.float32, "acted_t must be bool, got float32"),
        (3, jnp.float32, "turn_t must be an integer array, got float32"),
    ],
)
def test_wrong_types_are_refused(position, dtype, message):
    sequence = list(arrays(A))
    sequence[position] = sequence[position].astype(dtype)
    with pytest.raises(ValueError, match=message):
        tb_gae(*sequence, gamma=GAMMA, lam=LAM)


def test_wrong_shapes_are_refused():
    reward, value, acted, turn = arrays(A)
    with pytest.raises(AssertionError):
        tb_gae(reward[:-1], value, acted, turn, gamma=GAMMA, lam=LAM)
    with pytest.raises(AssertionError):
        tb_gae(*(x[None] for x in (reward, value, acted, turn)), gamma=GAMMA, lam=LAM)


@pytest.mark.parametrize("setting", ["gamma", "lam", "lam_in"])
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(ValueError, match=rf"{setting} must lie in \[0, 1\], got 1.5"):
        tb_gae(*arrays(A), **{"gamma": GAMMA, "lam": LAM, setting: 1.5})


# --- registry ---------------------------------------------------------------------------------


def test_registry_refuses_a_taken_name():
    with pytest.raises(ValueError, match="'tb_gae' is already registered by trsi_jax"):
        advantages.register("tb_gae")(gae)
    assert advantages.get("tb_gae") is tb_gae


def test_registry_lists_the_known_names():
    with pytest.raises(ValueError, match=r"'gea'.*known:.*gae.*monte_carlo.*tb_gae"):
        advantages.get("gea")


def test_bind_passes_what_an_estimator_takes():
    sequence = arrays(A)
    bound = advantages.bind("monte_carlo", gamma=GAMMA, lam=LAM)
    np.testing.assert_array_equal(bound(*sequence), monte_carlo(*sequence))
    with pytest.raises(ValueError, match="no advantage estimator takes lambada"):
        advantages.bind("tb_gae", lambada=1.0)


# --- whitening --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("acted", "expected"),
    [
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([0, 1, 0, 0], [0, 0, 0, 0]),
        ([0, 1, 0, 1], [0, -1, 0, 1]),  # 2 and 8: mean 5, population spread 3
    ],
)
def test_whitening_of_zero_one_and_two_tokens(acted, expected):
    advantage = jnp.array([jnp.nan, 2.0, jnp.inf, 8.0])
    mask = jnp.array(acted, bool)
    np.testing.assert_allclose(whiten(advantage, mask), expected, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), power=st.integers(-6, 37))
def test_whitened_tokens_have_mean_zero_and_unit_spread(seed, power):
    rng = np.random.default_rng(seed)
    acted = rng.random((4, 6)) < 0.5
    acted[0, :2] = True
    advantage = (rng.normal(size=(4, 6)) + 1.0) * 10.0**power
    out = np.asarray(whiten(jnp.asarray(advantage, jnp.float32), jnp.asarray(acted)))
    assert np.all(out[~acted] == 0)
    inside = advantage[acted]
    expected = (inside - inside.mean()) / (inside.std() + 1e-8)
    np.testing.assert_allclose(out[acted], expected, atol=1e-4)


def test_equal_advantages_whiten_to_zero():
    out = whiten(jnp.full(1000, 5.3), jnp.ones(1000, bool))
    np.testing.assert_array_equal(out, np.zeros(1000))
