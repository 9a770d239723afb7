"""Losses: values worked by hand, masks, denominators, and finiteness at the extremes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trsi_jax.losses import (
    double_sided,
    explained_variance,
    gspo,
    kl_estimate,
    masked_sum,
    ppo_clip,
    sft_nll,
    token_weight,
    truncated_weight,
    value_bce,
    value_mse,
    value_of_logit,
)

MASK = jnp.array([True, True, False, True])
MAX = float(np.finfo(np.float32).max)
EXTREMES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-38, 1e4, -1e4, 1e20, -1e20, MAX, -MAX])


# --- PPO --------------------------------------------------------------------------------------


def surrogate(ratio, advantage, **options):
    """Loss of one token with the given ratio."""
    loss, metrics = ppo_clip(
        jnp.log(jnp.array([ratio])),
        jnp.zeros(1),
        jnp.array([advantage]),
        jnp.ones(1, bool),
        n_tokens=1,
        **options,
    )
    return float(loss), {k: float(v) for k, v in metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "objective", "clipped"),
    [
        (1.1, 2.0, {}, 2.2, 0),  # inside the clip: rho A
        (1.5, 2.0, {}, 2.4, 1),  # above: 1.2 A
        (0.5, 2.0, {}, 1.0, 0),  # below with A > 0: the pessimistic bound is rho A
        (0.5, -2.0, {}, -1.6, 1),  # below with A < 0: 0.8 A
        (1.5, -2.0, {}, -3.0, 0),  # above with A < 0: rho A
        (1.5, 2.0, {"clip_high": 0.28}, 2.56, 1),  # asymmetric: 1.28 A
        (5.0, -2.0, {"dual_clip": 3.0}, -6.0, 0),  # dual clip: at most c A
        (5.0, 2.0, {"dual_clip": 3.0}, 2.4, 1),  # and nothing else for A > 0
    ],
)
def test_ppo_clip_of_one_token(ratio, advantage, options, objective, clipped):
    loss, metrics = surrogate(ratio, advantage, **options)
    assert loss == pytest.approx(-objective, rel=1e-5)
    assert metrics["clip_fraction"] == clipped
    assert metrics["ratio"] == pytest.approx(ratio, rel=1e-5)
    assert metrics["approx_kl"] == pytest.approx(ratio - 1 - np.log(ratio), abs=1e-5)


def test_ppo_gradient_at_ratio_one_is_the_policy_gradient():
    """d loss / d log pi_t = -A_t / n where acted: the score function estimator."""
    logprob = jnp.array([-1.0, -2.0, -3.0, -0.5])
    advantage = jnp.array([1.0, -2.0, 5.0, 0.25])
    grad = jax.grad(lambda x: ppo_clip(x, logprob, advantage, MASK, n_tokens=3)[0])(logprob)
    np.testing.assert_allclose(grad, np.where(MASK, -advantage, 0) / 3, atol=1e-6)


def test_clipped_tokens_have_no_gradient():
    old = jnp.zeros(2)
    new = jnp.log(jnp.array([1.5, 0.5]))
    advantage = jnp.array([1.0, -1.0])
    ones = jnp.ones(2, bool)
    grad = jax.grad(lambda x: ppo_clip(x, old, advantage, ones, n_tokens=2)[0])(new)
    np.testing.assert_array_equal(grad, [0.0, 0.0])


def test_advantages_weights_and_old_logprobs_are_data():
    x = jnp.array([-1.0, -1.1, -0.7, -2.0])

    def loss(old, advantage, weight):
        return ppo_clip(x, old, advantage, MASK, n_tokens=3, weight_t=weight)[0]

    for grad in jax.grad(loss, argnums=(0, 1, 2))(x - 0.1, x, x):
        assert not np.any(grad)


@pytest.mark.parametrize(
    "options", [{"clip_low": 1.5}, {"clip_high": -0.1}, {"dual_clip": 0.9}, {"clip_low": -0.1}]
)
def test_impossible_clips_are_refused(options):
    with pytest.raises(ValueError, match="got"):
        surrogate(1.0, 1.0, **options)


# --- double-sided mask, sequence ratio, truncated weights ----------------------------------------


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_double_sided_mask_drops_on_both_sides_whatever_the_sign(advantage):
    """Window (.7, 6): ratio .5 and 7 dropped, 2 kept with gradient -rho A / n."""
    old = jnp.zeros(3)
    new = jnp.log(jnp.array([0.5, 2.0, 7.0]))
    ones = jnp.ones(3, bool)
    a = jnp.full(3, advantage)

    def loss(x):
        return double_sided(x, old, a, ones, n_tokens=3, low=0.3, high=5.0)

    (_, metrics), grad = jax.value_and_grad(loss, has_aux=True)(new)
    np.testing.assert_allclose(grad, [0.0, -2.0 * advantage / 3, 0.0], rtol=1e-5)
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)


def test_double_sided_refuses_an_empty_window():
    with pytest.raises(ValueError, match="need 0 < low <= 1 and high > 0"):
        double_sided(*[jnp.zeros(1)] * 3, jnp.ones(1, bool), n_tokens=1, low=0.0)


def test_gspo_ratio_is_the_geometric_mean_over_action_tokens():
    """Log-ratios .3 and -.1 (and a masked 9): s = e^.1; objective s A on both tokens."""
    new = jnp.array([0.3, 9.0, -0.1])
    acted = jnp.array([True, False, True])
    loss, metrics = gspo(
        new, jnp.zeros(3), jnp.full(3, 2.0), acted, n_tokens=2, clip_low=0.5, clip_high=0.5
    )
    assert loss == pytest.approx(-2.0 * np.exp(0.1), rel=1e-5)
    assert metrics["ratio"] == pytest.approx(np.exp(0.1), rel=1e-5)


def test_gspo_clips_a_sequence_whole():
    """s = e^.1 > 1.05 with A > 0: no token has a gradient, though one has a ratio below 1."""
    new = jnp.array([0.3, -0.1])
    grad = jax.grad(
        lambda x: gspo(x, jnp.zeros(2), jnp.ones(2), jnp.ones(2, bool), n_tokens=2, clip_high=0.05)[
            0
        ]
    )(new)
    assert not np.any(grad)


def test_gspo_keeps_rows_apart():
    rng = np.random.default_rng(0)
    new, advantage = (jnp.asarray(rng.normal(size=(3, 4)), jnp.float32) for _ in range(2))
    mask = jnp.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
    args = {"n_tokens": 7, "clip_low": 0.2, "clip_high": 0.2}
    whole, _ = gspo(new, new * 0, advantage, mask, **args)
    rows = [gspo(new[i], new[i] * 0, advantage[i], mask[i], **args)[0] for i in range(3)]
    np.testing.assert_allclose(whole, sum(rows), rtol=1e-6)


def test_truncated_weights():
    """Ratios .5, 2 and 8 with cap 2: .5, 2, 2; masked 0; data, not a path for gradients."""
    trainer = jnp.log(jnp.array([0.5, 2.0, 8.0, 1.0]))
    acted = jnp.array([True, True, True, False])

    def weights(x):
        return truncated_weight(x, jnp.zeros(4), acted, cap=2.0)

    np.testing.assert_allclose(weights(trainer), [0.5, 2, 2, 0], rtol=1e-5)
    assert not np.any(jax.grad(lambda x: weights(x).sum())(trainer))
    with pytest.raises(ValueError, match=r"cap must be >= 1, got 0\.5"):
        truncated_weight(trainer, trainer, acted, cap=0.5)


# --- masks and denominators -------------------------------------------------------------------

LOSSES = {
    "ppo_clip": lambda x, mask, n: ppo_clip(x, x * 0.9 - 0.1, x + 1, mask, n_tokens=n)[0],
    "ppo_clip dual": lambda x, mask, n: ppo_clip(
        x, x * 0.5, x + 1, mask, n_tokens=n, dual_clip=3.0
    )[0],
    "double_sided": lambda x, mask, n: double_sided(x, x * 0.9, x + 1, mask, n_tokens=n)[0],
    "gspo": lambda x, mask, n: gspo(x, x * 0.9 - 0.1, x + 1, mask, n_tokens=n)[0],
    "value_bce": lambda x, mask, n: value_bce(x, x * 0.5 + 1, mask, n_tokens=n),
    "value_mse": lambda x, mask, n: value_mse(x, x * 0.5 + 1, mask, n_tokens=n),
    "value_mse clip": lambda x, mask, n: value_mse(
        x, x * 0.5 + 1, mask, n_tokens=n, old_value_t=x * 0.9, clip=0.2
    ),
    "sft_nll": lambda x, mask, n: sft_nll(x, mask, n_tokens=n),
    "k1": lambda x, mask, n: masked_sum(kl_estimate(x, x / 2, mask, kind="k1"), mask, n_tokens=n),
    "k2": lambda x, mask, n: masked_sum(kl_estimate(x, x / 2, mask, kind="k2"), mask, n_tokens=n),
    "k3": lambda x, mask, n: masked_sum(kl_estimate(x, x / 2, mask, kind="k3"), mask, n_tokens=n),
}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_masked_tokens_reach_neither_value_nor_gradient(name):
    x = jnp.array([-1.0, -0.5, -2.0, -0.1])
    plain = jax.value_and_grad(LOSSES[name])(x, MASK, 3)
    for junk in (jnp.nan, jnp.inf, -3e38):
        value, grad = jax.value_and_grad(LOSSES[name])(x.at[2].set(junk), MASK, 3)
        np.testing.assert_array_equal(value, plain[0])
        np.testing.assert_array_equal(grad, plain[1])
    assert plain[1][2] == 0


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_micro_batches_add_up_to_the_batch(name):
    """With one global denominator; a fully masked row adds nothing to it (4 tokens stay 4)."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(-rng.random((3, 4)), jnp.float32)
    mask = jnp.array([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]], bool)
    whole = LOSSES[name](x, mask, 4)
    parts = sum(LOSSES[name](x[i], mask[i], 4) for i in range(3))
    np.testing.assert_allclose(whole, parts, rtol=1e-6)
    without = LOSSES[name](x[jnp.array([0, 2])], mask[jnp.array([0, 2])], 4)
    np.testing.assert_allclose(whole, without, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_an_empty_batch_has_loss_zero(name):
    value, grad = jax.value_and_grad(LOSSES[name])(jnp.full(4, jnp.nan), jnp.zeros(4, bool), 0)
    assert value == 0
    assert not np.any(grad)


def test_ways_to_average():
    """Rows of 3, 0 and 1 action tokens with terms 1: token 4/4, sequence 2/2, constant 4/(2x8)."""
    acted = jnp.array([[1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]], bool)
    terms = jnp.array([[1.0] * 4, [1.0] * 4, [5.0] * 4])

    def average(kind, constant=None):
        weight, n = token_weight(acted, kind=kind, constant=constant)
        return masked_sum(weight * terms, acted, n_tokens=n)

    assert average("token") == pytest.approx((3 + 5) / 4)
    assert average("sequence") == pytest.approx((1 + 5) / 2)
    assert average("constant", 8.0) == pytest.approx((3 + 5) / 16)


@pytest.mark.parametrize(
    ("kind", "constant"), [("constant", None), ("token", 8.0), ("mean", None), ("constant", 0.0)]
)
def test_impossible_averages_are_refused(kind, constant):
    with pytest.raises(ValueError, match="got"):
        token_weight(jnp.ones((1, 1), bool), kind=kind, constant=constant)


# --- finiteness -------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(x=st.tuples(*[EXTREMES] * 5), dual=st.sampled_from([None, 3.0]))
def test_policy_and_value_losses_are_finite_for_finite_input(x, dual):
    rows = np.array([[v, -v, v / 3, 1.0] for v in x], np.float32)
    for leaf in jax.tree.leaves(all_losses(dual)(*rows)):
        assert np.all(np.isfinite(leaf))


@functools.cache
def all_losses(dual):
    """Every loss, with gradients by the trained log-probs and the values."""

    def loss(new, value, old, advantage, target):
        policy, metrics = ppo_clip(new, old, advantage, MASK, n_tokens=3, dual_clip=dual)
        critic = value_mse(value, target, MASK, n_tokens=3)
        clipped = value_mse(value, target, MASK, n_tokens=3, old_value_t=old, clip=0.2)
        bce = value_bce(value, target, MASK, n_tokens=3)
        hard, _ = double_sided(new, old, advantage, MASK, n_tokens=3)
        sequence, _ = gspo(new, old, advantage, MASK, n_tokens=3)
        kls = [
            masked_sum(kl_estimate(new, old, MASK, kind=k), MASK, n_tokens=3)
            for k in ("k1", "k2", "k3")
        ]
        sft = sft_nll(new, MASK, n_tokens=3)
        parts = [policy, critic, clipped, bce, hard, sequence, sft, *kls]
        return sum(parts), (parts, metrics)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def test_not_a_number_on_an_action_token_is_not_hidden():
    x = jnp.array([jnp.nan, -1.0, -1.0, -1.0])
    for loss in LOSSES.values():
        assert np.isnan(loss(x, MASK, 3))


# --- value ------------------------------------------------------------------------------------


def test_value_mse_by_hand():
    """Errors 1, 2, 4 on the acted tokens: (1 + 4 + 16) / (2 * 3) = 3.5."""
    value = jnp.array([1.0, 2.0, 100.0, 4.0])
    assert value_mse(value, jnp.zeros(4), MASK, n_tokens=3) == pytest.approx(3.5)


def test_clipped_value_error_is_never_smaller():
    """V = 1, old V = 0, R = 1, clip .2: the clipped value .2 errs by .8, and that counts."""
    one = jnp.ones(1)
    loss = value_mse(one, one, one > 0, n_tokens=1, old_value_t=one * 0, clip=0.2)
    assert loss == pytest.approx(0.5 * 0.8**2)


def test_value_clip_needs_old_values():
    with pytest.raises(ValueError, match="needs old_value_t"):
        value_mse(jnp.ones(1), jnp.ones(1), jnp.ones(1, bool), n_tokens=1, clip=0.2)


def test_value_bce_has_the_mean_return_as_optimum():
    """Targets 0, .5, 1 at one shared logit: the gradient vanishes at sigmoid(z) = .5."""
    ones = jnp.ones(3, bool)
    target = jnp.array([0.0, 0.5, 1.0])

    def loss(z):
        return value_bce(jnp.full(3, z), target, ones, n_tokens=3)

    assert jax.grad(loss)(0.0) == pytest.approx(0.0, abs=1e-6)
    assert jax.grad(loss)(2.0) == pytest.approx(1 / (1 + np.exp(-2)) - 0.5, rel=1e-5)
    assert loss(0.0) == pytest.approx(np.log(2.0), rel=1e-5)


def test_value_bce_range():
    """Returns of [-1, 3]: 1 is half-way, and what lies outside is cut to the edge."""
    one = jnp.ones(1, bool)
    grad = jax.grad(lambda z: value_bce(z, jnp.ones(1), one, n_tokens=1, low=-1.0, high=3.0))
    assert grad(jnp.zeros(1))[0] == pytest.approx(0.0, abs=1e-6)
    assert value_of_logit(jnp.zeros(1), low=-1.0, high=3.0)[0] == 1.0
    edge = value_bce(jnp.zeros(1), jnp.full(1, 9.0), one, n_tokens=1, low=-1.0, high=3.0)
    assert edge == pytest.approx(np.log(2.0))
    with pytest.raises(ValueError, match=r"need low < high, got 1\.0, 1\.0"):
        value_of_logit(jnp.zeros(1), low=1.0, high=1.0)


def test_explained_variance():
    """Perfect 1, constant 0, worse than constant negative; nothing to explain 0."""
    target = jnp.array([0.0, 1.0, 9.0, 2.0])
    assert explained_variance(target, target, MASK) == pytest.approx(1.0)
    assert explained_variance(jnp.full(4, 7.0), target, MASK) == pytest.approx(0.0)
    assert explained_variance(-target, target, MASK) == pytest.approx(-3.0)
    assert explained_variance(target, jnp.ones(4), MASK) == 0
    assert explained_variance(target, target, jnp.zeros(4, bool)) == 0
    half = explained_variance(target / 2, target, MASK)  # residual R / 2: a quarter is left
    assert half == pytest.approx(0.75)


# --- KL ---------------------------------------------------------------------------------------


def test_kl_estimates_have_the_divergence_as_mean():
    """Exact expectation over a categorical of 5; k2's gradient is the divergence's."""
    logits = jnp.array([0.3, -1.0, 0.5, 0.0, 2.0])
    ref = jax.nn.log_softmax(jnp.array([0.0, -0.5, 0.4, 0.3, 1.0]))
    everywhere = jnp.ones(5, bool)

    def divergence(z):
        logp = jax.nn.log_softmax(z)
        return jnp.sum(jnp.exp(logp) * (logp - ref))

    logp = jax.nn.log_softmax(logits)
    p = jnp.exp(logp)
    for kind in ("k1", "k3"):
        mean = jnp.sum(p * kl_estimate(logp, ref, everywhere, kind=kind))
        np.testing.assert_allclose(mean, divergence(logits), atol=1e-6)

    def k2(z):
        return jnp.sum(p * kl_estimate(jax.nn.log_softmax(z), ref, everywhere, kind="k2"))

    np.testing.assert_allclose(jax.grad(k2)(logits), jax.grad(divergence)(logits), atol=1e-6)


def test_unknown_kl_kind_is_refused():
    with pytest.raises(ValueError, match="k1, k2, k3, got 'k4'"):
        kl_estimate(jnp.zeros(1), jnp.zeros(1), jnp.ones(1, bool), kind="k4")
