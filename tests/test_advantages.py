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
from trsi_jax.advantages import (
    check_tokens,
    decoupled,
    dr_grpo,
    gae,
    grpo,
    later_tokens,
    monte_carlo,
    pact_weight,
    rloo,
    spread,
    tb_gae,
    whiten,
)

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
    "gae_unmasked": [0.680214, 0.620111, 0.488822, 0.419800],
    "gae_zeroed": [0.548144, 0.479685, 0.470200, 0.400000],
    "gae": [0.696308, 0.637223, 0.470200, 0.400000],
    "turn_gae": [0.765250, 0.765250, 0.500000, 0.500000],
    "tb_gae": [0.765250, 0.665250, 0.500000, 0.400000],
}


@pytest.mark.parametrize("name", sorted(TABLE))
def test_table_of_recursions_on_input_a(name):
    advantage, _ = jitted(name)(*arrays(A), gamma=GAMMA, lam=LAM)
    np.testing.assert_allclose(advantage[jnp.array(ACTIONS)], TABLE[name], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gae", -0.135602), ("gae_zeroed", -0.143930), ("gae_unmasked", 0.639036)],
)
def test_reward_off_the_mask_on_input_b(name, expected):
    """What each recursion makes of a reward on the padding slot; the boundary refuses it."""
    reward, value, acted, turn = arrays(A)
    moved = jnp.zeros_like(reward).at[7].set(1.0)
    advantage, _ = jitted(name)(moved, value, acted, turn, gamma=GAMMA, lam=LAM)
    np.testing.assert_allclose(advantage[0], expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"x: reward 1.0 at token 7 stands on a token the policy"):
        check_tokens(moved, acted, turn, where="x")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gae", [0.696308, 0.696308, 0.696308, 0.696308]),
        ("gae_unmasked", [0.696308, 0.666511, 0.547184, 0.519039]),
        ("gae_zeroed", [0.696308, 0.548144, -0.045202, -0.185150]),
        ("tb_gae", [0.765250, 0.765250, 0.765250, 0.765250]),
    ],
)
def test_first_advantage_on_input_c(name, expected):
    """n = 0, 3, 30, 300 observation tokens of value .9 between the turns."""
    for n, first in zip([0, 3, 30, 300], expected, strict=True):
        advantage, _ = jitted(name)(*with_observations(n, 0.9), gamma=GAMMA, lam=LAM)
        np.testing.assert_allclose(advantage[0], first, atol=1e-6)


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


def turn_loop(reward, value, acted, turn, *, gamma, lam, bootstrap=0.0):
    """Turns as single steps: advantages and returns [T], float64."""
    advantage, returns = np.zeros(T), np.zeros(T)
    next_a, next_v = 0.0, bootstrap
    for u in reversed(np.unique(turn[acted])):
        index = np.flatnonzero(acted & (turn == u))
        v = value[index[0]]
        next_a = reward[index].sum() + gamma * next_v - v + gamma * lam * next_a
        advantage[index], returns[index] = next_a, next_a + v
        next_v = v
    return advantage, returns


def bilevel_loop(reward, value, acted, turn, *, gamma, lam, gamma_in, lam_in, bootstrap=0.0):
    """Two passes, each with its own loop: advantages [T], float64."""
    turns = [np.flatnonzero(acted & (turn == u)) for u in np.unique(turn[acted])]
    last = {}
    next_a, next_v, inner = 0.0, bootstrap, 0.0
    for k in reversed(range(len(turns))):
        e = turns[k][-1]
        next_a = reward[e] + gamma * (inner + next_v) - value[e] + gamma * lam * next_a
        last[k] = next_a
        next_v, inner = value[e], reward[turns[k][:-1]].sum()
    out = np.zeros(T)
    for k, index in enumerate(turns):
        out[index[-1]] = last[k]
        for t, after in zip(index[-2::-1], index[:0:-1], strict=True):
            delta = reward[t] + gamma_in * value[after] - value[t]
            out[t] = delta + gamma_in * lam_in * out[after]
    return out


def slot_loop(reward, value, acted, *, gamma, lam, bootstrap=0.0):
    """Plain GAE over all slots, blanked at the end."""
    out, next_a, next_v = np.zeros(T), 0.0, bootstrap
    for t in reversed(range(T)):
        next_a = reward[t] + gamma * next_v - value[t] + gamma * lam * next_a
        out[t], next_v = next_a, value[t]
    return np.where(acted, out, 0.0)


def gap_loop(reward, value, acted, turn, *, gamma, lam, charged, bootstrap=0.0):
    """The exponent counts slots between action tokens, and `charged` more between turns."""
    index = np.flatnonzero(acted)
    out = np.zeros(T)
    for i in reversed(range(len(index))):
        t = index[i]
        if i + 1 < len(index):
            after = index[i + 1]
            steps = after - t + (charged if turn[after] != turn[t] else 0)
            next_v, next_a = value[after], out[after]
        else:
            steps, next_v, next_a = 1, bootstrap, 0.0
        out[t] = reward[t] + gamma**steps * next_v - value[t] + (gamma * lam) ** steps * next_a
    return out


UNIT = st.floats(0, 1)
SEED = st.integers(0, 2**32 - 1)
VALUE = st.floats(-2, 2)


@settings(max_examples=40, deadline=None)
@given(seed=SEED, gamma=UNIT, lam=UNIT, bootstrap=VALUE)
def test_turn_gae_is_its_definition(seed, gamma, lam, bootstrap):
    sequence = draw(seed)
    options = {"gamma": gamma, "lam": lam, "bootstrap": bootstrap}
    advantage, returns = turn_loop(*sequence, **options)
    check(jitted("turn_gae")(*to_jax(sequence), **options), advantage, sequence, returns=returns)


@settings(max_examples=40, deadline=None)
@given(seed=SEED, gamma=UNIT, lam=UNIT, gamma_in=UNIT, lam_in=UNIT, bootstrap=VALUE)
def test_bilevel_gae_is_its_definition(seed, gamma, lam, gamma_in, lam_in, bootstrap):
    sequence = draw(seed)
    options = {"gamma": gamma, "lam": lam, "gamma_in": gamma_in, "lam_in": lam_in}
    expected = bilevel_loop(*sequence, **options, bootstrap=bootstrap)
    got = jitted("bilevel_gae")(*to_jax(sequence), **options, bootstrap=bootstrap)
    check(got, expected, sequence)


@settings(max_examples=30, deadline=None)
@given(seed=SEED, alpha=st.floats(0.01, 2), gamma=UNIT, lam_critic=UNIT, bootstrap=VALUE)
def test_length_adaptive_gae_is_its_definition(seed, alpha, gamma, lam_critic, bootstrap):
    sequence = draw(seed)
    lam = min(max(1 - 1 / (alpha * sequence[2].sum()), 0.0), 1.0)
    pair, target = (gamma, lam), (gamma, lam_critic)
    advantage = pair_loop(*sequence, inside=pair, between=pair, bootstrap=bootstrap)
    critic = pair_loop(*sequence, inside=target, between=target, bootstrap=bootstrap)
    returns = np.where(sequence[2], critic + sequence[1], 0.0)
    options = {"gamma": gamma, "alpha": alpha, "lam_critic": lam_critic, "bootstrap": bootstrap}
    got = jitted("length_adaptive_gae")(*to_jax(sequence), **options)
    check(got, advantage, sequence, returns=returns)


@settings(max_examples=30, deadline=None)
@given(seed=SEED, gamma=UNIT, lam=UNIT, n_later=st.integers(0, 50), bootstrap=VALUE)
def test_cross_segment_gae_is_its_definition(seed, gamma, lam, n_later, bootstrap):
    sequence = draw(seed)
    pair = (gamma, lam)
    local = pair_loop(*sequence, inside=pair, between=pair, bootstrap=bootstrap)
    got = jitted("cross_segment_gae")(
        *to_jax(sequence), gamma=gamma, lam=lam, n_later=n_later, bootstrap=bootstrap
    )
    returns = np.where(sequence[2], local + sequence[1], 0.0)
    check(got, (gamma * lam) ** n_later * local, sequence, returns=returns)


@settings(max_examples=20, deadline=None)
@given(seed=SEED, gamma=UNIT)
def test_reinforce_pp_is_the_discounted_return(seed, gamma):
    """Observations neither reset nor discount: mask 1 0 1, gamma .5, reward last gives .5 first."""
    sequence = draw(seed)
    reward, value, acted, turn = sequence
    pair = (gamma, 1.0)
    expected = pair_loop(reward, value * 0, acted, turn, inside=pair, between=pair)
    got = jitted("reinforce_pp")(*to_jax(sequence), gamma=gamma)
    check(got, expected, sequence, returns=expected)


def test_reinforce_pp_keeps_the_credit_of_early_turns():
    acted = jnp.array([True, False, True])
    reward = jnp.array([0.0, 0.0, 1.0])
    got, _ = advantages.reinforce_pp(reward, reward, acted, jnp.array([0, 0, 1]), gamma=0.5)
    np.testing.assert_array_equal(got, [0.5, 0.0, 1.0])


@settings(max_examples=20, deadline=None)
@given(seed=SEED, gamma=UNIT, lam=UNIT, charged=st.floats(0, 20), bootstrap=VALUE)
def test_study_recursions_are_their_definitions(seed, gamma, lam, charged, bootstrap):
    sequence = draw(seed)
    reward, value, acted, _ = sequence
    options = {"gamma": gamma, "lam": lam, "bootstrap": bootstrap}
    arms = {
        "gae_unmasked": (slot_loop(reward, value, acted, **options), {}),
        "gae_zeroed": (slot_loop(reward, value * acted, acted, **options), {}),
        "gae_gap": (
            gap_loop(*sequence, charged=charged, **options),
            {"charged": charged},
        ),
    }
    for name, (expected, more) in arms.items():
        got = jitted(name)(*to_jax(sequence), **options, **more)
        check(got, expected, sequence)


@pytest.mark.parametrize("seed", range(3))
def test_decoupled_takes_each_output_at_its_own_lambda(seed):
    sequence = to_jax(draw(seed))
    both = decoupled("tb_gae", *sequence, gamma=GAMMA, lam=0.5, lam_critic=1.0)
    np.testing.assert_array_equal(both[0], tb_gae(*sequence, gamma=GAMMA, lam=0.5)[0])
    np.testing.assert_array_equal(both[1], tb_gae(*sequence, gamma=GAMMA, lam=1.0)[1])
    with pytest.raises(ValueError, match="'monte_carlo' has no lam to decouple"):
        decoupled("monte_carlo", *sequence, lam=0.5, lam_critic=1.0)


# --- relations --------------------------------------------------------------------------------

TOKEN = advantages.names(kind="token")


@settings(max_examples=30, deadline=None)
@given(seed=SEED, gamma=UNIT, bootstrap=VALUE)
def test_bilevel_equals_turn_boundary_at_lambda_one(seed, gamma, bootstrap):
    sequence = to_jax(draw(seed))
    options = {"gamma": gamma, "lam": 1.0, "bootstrap": bootstrap}
    two = jitted("bilevel_gae")(*sequence, **options)
    np.testing.assert_allclose(two, jitted("tb_gae")(*sequence, **options), atol=1e-5)


def test_without_observations_the_wrong_recursions_are_token_gae():
    reward, value, _, turn = to_jax(draw(2))
    everywhere = jnp.ones(T, bool)
    token = jitted("gae")(reward, value, everywhere, turn, gamma=GAMMA, lam=LAM)
    for name in advantages.names(study=True):
        got = jitted(name)(reward, value, everywhere, turn, gamma=GAMMA, lam=LAM)
        np.testing.assert_allclose(got, token, atol=1e-6)


def test_turn_gae_is_turn_boundary_gae_on_the_first_token_of_each_turn():
    """Of one-token turns both have the same steps."""
    reward, value, acted, _ = to_jax(draw(4))
    turn = jnp.arange(T)
    macro = jitted("turn_gae")(reward, value, acted, turn, gamma=GAMMA, lam=LAM)
    ours = jitted("tb_gae")(reward, value, acted, turn, gamma=GAMMA, lam=LAM)
    np.testing.assert_allclose(macro, ours, atol=1e-5)


def test_a_single_segment_is_not_damped():
    np.testing.assert_array_equal(later_tokens(jnp.array([3, 4, 5])), [9, 5, 0])
    sequence = to_jax(draw(5))
    np.testing.assert_array_equal(
        jitted("cross_segment_gae")(*sequence, gamma=GAMMA, lam=LAM),
        jitted("gae")(*sequence, gamma=GAMMA, lam=LAM),
    )


@pytest.mark.parametrize("name", TOKEN)
def test_every_estimator_is_zero_off_the_mask_and_cuts_gradients(name):
    reward, value, acted, turn = to_jax(draw(6))
    bound = advantages.bind(name, gamma=GAMMA, lam=LAM)
    for out in bound(reward, value, acted, turn):
        assert not np.any(np.asarray(out)[~np.asarray(acted)])

    def total(r, v):
        return sum(jnp.sum(x**2) for x in bound(r, v, acted, turn))

    for grad in jax.grad(total, argnums=(0, 1))(reward, value):
        assert not np.any(grad)


@pytest.mark.parametrize("name", advantages.names(kind="token", study=False))
def test_every_sound_estimator_ignores_observations(name):
    bound = advantages.bind(name, gamma=GAMMA, lam=LAM)
    plain = bound(*with_observations(0, 0.0))
    for value in (0.9, np.nan):
        longer = bound(*with_observations(7, value))
        keep = np.array([0, 1, 9, 10])
        for short, long in zip(plain, longer, strict=True):
            np.testing.assert_array_equal(np.asarray(long)[keep], np.asarray(short))


def test_float64_agrees_with_the_loop_to_nine_digits():
    sequence = draw(11)
    expected = pair_loop(*sequence, inside=(1.0, 0.9), between=(GAMMA, LAM))
    with jax.enable_x64(True):
        arguments = [jnp.asarray(x) for x in sequence]
        got, _ = tb_gae(*arguments, gamma=GAMMA, lam=LAM, lam_in=0.9)
        assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, expected, atol=1e-12)


# --- groups -----------------------------------------------------------------------------------


def test_group_baselines_by_hand():
    """Scores 1, 0, 0, one masked: mean 1/3; leave-one-out means 0, .5, .5; deviation 1/sqrt 3."""
    score = jnp.array([1.0, 0.0, jnp.nan, 0.0])
    valid = jnp.array([True, True, False, True])
    np.testing.assert_allclose(rloo(score, valid), [1.0, -0.5, 0.0, -0.5], atol=1e-6)
    np.testing.assert_allclose(dr_grpo(score, valid), [2 / 3, -1 / 3, 0, -1 / 3], atol=1e-6)
    unit = np.array([2 / 3, -1 / 3, 0, -1 / 3]) / (1 / np.sqrt(3) + 1e-4)
    np.testing.assert_allclose(grpo(score, valid), unit, atol=1e-5)


@pytest.mark.parametrize("fn", [rloo, grpo, dr_grpo])
@pytest.mark.parametrize("valid", [[False] * 3, [True, False, False]])
def test_groups_of_none_and_one_prefer_nothing(fn, valid):
    assert not np.any(fn(jnp.array([1.0, 0.0, 2.0]), jnp.array(valid)))


def test_group_advantage_is_laid_on_action_tokens():
    acted = jnp.array([False, True, False, True])
    np.testing.assert_array_equal(spread(jnp.float32(0.5), acted), [0, 0.5, 0, 0.5])


def test_integer_scores_are_refused():
    with pytest.raises(ValueError, match="score_g must be floating point, got int32"):
        rloo(jnp.array([1, 0]), jnp.array([True, True]))


# --- pact -------------------------------------------------------------------------------------


def test_pact_critic_weights():
    """Ratios 1, 2, e^2 (over 6, dropped) and a masked token."""
    new = jnp.array([-1.0, np.log(2.0) - 1, 1.0, jnp.nan])
    old = jnp.full(4, -1.0)
    acted = jnp.array([True, True, True, False])
    np.testing.assert_allclose(pact_weight(new, old, acted), [1, 2, 0, 0], rtol=1e-6)
    assert not np.any(jax.grad(lambda x: pact_weight(x, old, acted).sum())(new))
    with pytest.raises(ValueError, match="low < high"):
        pact_weight(new, old, acted, low=2.0, high=1.0)


# --- the contract at the boundary -------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "acted", "turn", "message"),
    [
        ([0, 1], [True, True], [0, 0], "rewards must be floating point, got int64"),
        ([0.0, np.nan], [True, True], [0, 0], "reward nan at token 1 is not finite"),
        ([0.5, 0.0], [False, True], [0, 0], "reward 0.5 at token 0 stands on a token"),
        ([0.0, 1.0], [True, True], [1, 0], "turns go backwards at token 1: 0 after 1"),
        ([0.0, 1.0], [1, 1], [0, 0], "acted must be bool, got int64"),
        ([0.0, 1.0], [True, True], [0.0, 0.0], "turns must be integers, got float64"),
        ([0.0], [True, True], [0, 0], "need equal shapes"),
    ],
)
def test_contract_violations_are_named(reward, acted, turn, message):
    with pytest.raises(ValueError, match=f"traj-7: .*{message}"):
        check_tokens(np.array(reward), np.array(acted), np.array(turn), where="traj-7")


def test_a_sound_sequence_passes_the_contract():
    reward, _, acted, turn = draw(0)
    check_tokens(reward, acted, np.where(acted, turn, -5))


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


@pytest.mark.parametrize("n", [0, 3, 30, 300, 30_000])
@pytest.mark.parametrize("name", ["tb_gae", "gae"])
def test_observations_change_no_bit(name, n):
    plain = jitted(name)(*with_observations(0, 0.0), gamma=GAMMA, lam=LAM)
    keep = np.array([0, 1, n + 2, n + 3])
    for value in (0.9, -3e38, np.inf, np.nan):
        longer = jitted(name)(*with_observations(n, value), gamma=GAMMA, lam=LAM)
        for short, long in zip(plain, longer, strict=True):
            np.testing.assert_array_equal(np.asarray(long)[keep], np.asarray(short))
            assert not np.any(np.delete(np.asarray(long), keep))


@settings(max_examples=40, deadline=None)
@given(
    seed=SEED, gamma=UNIT, lam=UNIT, lam_in=UNIT, fill=st.sampled_from([np.nan, np.inf, -3e38, 0.7])
)
def test_where_observations_stand_and_what_they_hold_changes_no_bit(seed, gamma, lam, lam_in, fill):
    """The same actions dealt anew over the row, between other observations."""
    reward, value, acted, turn = draw(seed)
    index = np.flatnonzero(acted)
    settings = {"gamma": gamma, "lam": lam, "lam_in": lam_in}
    plain = jitted("tb_gae")(*to_jax((reward, value, acted, turn)), **settings)
    place = np.sort(np.random.default_rng(seed + 1).choice(T, index.size, replace=False))
    moved = [np.full(T, fill), np.full(T, fill), np.zeros(T, bool), np.full(T, -7)]
    for array, source in zip(moved, (reward, value, acted, turn), strict=True):
        array[place] = source[index]
    got = jitted("tb_gae")(*to_jax(moved), **settings)
    for here, there in zip(plain, got, strict=True):
        np.testing.assert_array_equal(np.asarray(here)[index], np.asarray(there)[place])
        assert not np.any(np.delete(np.asarray(there), place))


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


@settings(max_examples=30, deadline=None)
@given(seed=SEED, gamma=UNIT, lam=UNIT)
def test_one_turn_is_the_undiscounted_token_estimator(seed, gamma, lam):
    """Ended, so that nothing follows the turn: neither gamma nor lambda is read."""
    reward, value, acted, _ = draw(seed)
    one = np.zeros(T, int)
    expected = pair_loop(reward, value, acted, one, inside=(1.0, 1.0), between=(1.0, 1.0))
    got = jitted("tb_gae")(*to_jax((reward, value, acted, one)), gamma=gamma, lam=lam)
    check(got, expected, (reward, value, acted, one))


@settings(max_examples=30, deadline=None)
@given(seed=SEED, bootstrap=VALUE)
def test_unit_decay_is_the_undiscounted_token_estimator(seed, bootstrap):
    sequence = draw(seed)
    one = (1.0, 1.0)
    expected = pair_loop(*sequence, inside=one, between=one, bootstrap=bootstrap)
    got = jitted("tb_gae")(*to_jax(sequence), gamma=1.0, lam=1.0, bootstrap=bootstrap)
    check(got, expected, sequence)
    # Which is the Monte-Carlo return less the value: the values of later tokens cancel.
    monte = jitted("monte_carlo")(*to_jax(sequence), bootstrap=bootstrap)
    np.testing.assert_allclose(got, monte, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(seed=SEED, lam=UNIT, bootstrap=VALUE)
def test_equal_pairs_are_skip_observation_gae(seed, lam, bootstrap):
    """The pair inside a turn is (1, lam_in), so equal pairs have gamma 1."""
    sequence = draw(seed)
    expected = pair_loop(*sequence, inside=(1.0, lam), between=(1.0, lam), bootstrap=bootstrap)
    options = {"gamma": 1.0, "lam": lam, "bootstrap": bootstrap}
    got = jitted("tb_gae")(*to_jax(sequence), **options, lam_in=lam)
    check(got, expected, sequence)
    np.testing.assert_array_equal(got, jitted("gae")(*to_jax(sequence), **options))


@settings(max_examples=30, deadline=None)
@given(seed=SEED, gamma=UNIT, lam=UNIT, bootstrap=VALUE)
def test_a_turn_telescopes(seed, gamma, lam, bootstrap):
    """A_t = (rewards from t to the turn's end) + C - V_t, C from the first token of the next turn.

    C_k = gamma V_F + gamma lambda A_F with F the next turn's first action token, so a float64 loop
    over turns gives what the loop over tokens does: the depth is the number of turns.
    """
    sequence = draw(seed)
    reward, value, acted, turn = sequence
    expected = np.zeros(T)
    constant = gamma * bootstrap
    for u in reversed(np.unique(turn[acted])):
        index = np.flatnonzero(acted & (turn == u))
        to_go = np.cumsum(reward[index][::-1])[::-1]
        expected[index] = to_go + constant - value[index]
        first = index[0]
        constant = gamma * value[first] + gamma * lam * expected[first]
    options = {"gamma": gamma, "lam": lam, "bootstrap": bootstrap}
    tokens = pair_loop(*sequence, inside=(1.0, 1.0), between=(gamma, lam), bootstrap=bootstrap)
    np.testing.assert_allclose(expected, tokens, atol=1e-12)
    check(jitted("tb_gae")(*to_jax(sequence), **options), expected, sequence)


@settings(max_examples=30, deadline=None)
@given(seed=SEED, gamma=UNIT, lam=UNIT, more=st.integers(1, 8))
def test_decay_counts_turns_and_not_tokens(seed, gamma, lam, more):
    """Tokens of no reward and any value, put behind one of a turn, change no other advantage."""
    rng = np.random.default_rng(seed)
    reward, value, acted, turn = draw(seed)
    at = int(rng.choice(np.flatnonzero(acted))) + 1
    inserted = (
        *(np.zeros(more), rng.normal(size=more)),
        *(np.ones(more, bool), np.full(more, turn[at - 1])),
    )
    off = (np.zeros(8 - more), np.zeros(8 - more), np.zeros(8 - more, bool), np.zeros(8 - more))
    longer = [
        np.concatenate([x[:at], new, x[at:], end])
        for x, new, end in zip((reward, value, acted, turn), inserted, off, strict=True)
    ]
    expected = pair_loop(
        reward, value, acted, turn, inside=(1.0, 1.0), between=(gamma, lam), bootstrap=0.5
    )
    advantage, _ = jitted("tb_gae")(*to_jax(longer), gamma=gamma, lam=lam, bootstrap=0.5)
    rest = np.delete(np.asarray(advantage), np.arange(at, at + more))
    np.testing.assert_allclose(rest[:T], expected, atol=1e-5)


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
