"""The gated delta rule: its chunked form against the token-by-token reference.

Tolerances are those of DESIGN 8.10 (1e-5 in fp32 for one function, 1e-9 in fp64), relative to
the largest entry of the reference.
"""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trsi_jax.model import gated_delta
from trsi_jax.model.gated_delta import (
    causal_conv,
    chunk_length,
    gated_delta_step,
    l2_normalize,
    segment_starts,
)

DK, DV = 8, 6
gated_delta_chunked = jax.jit(gated_delta.gated_delta_chunked, static_argnames=("chunk", "solver"))
gated_delta_recurrent = jax.jit(gated_delta.gated_delta_recurrent)
SOLVERS = ("solve", "ladder")


def _inputs(
    length: int, *, seed: int = 0, decay: float = 0.2, dtype: str = "float32"
) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    query = l2_normalize(jnp.asarray(rng.normal(size=(length, DK)), dtype))
    key = l2_normalize(jnp.asarray(rng.normal(size=(length, DK)), dtype))
    value = jnp.asarray(rng.normal(size=(length, DV)), dtype)
    log_decay = -jnp.asarray(rng.uniform(0, decay, length), dtype)
    beta = jnp.asarray(rng.uniform(0, 1, length), dtype)
    reset = jnp.zeros(length, bool)
    return query, key, value, log_decay, beta, reset


def _close(actual: object, expected: object, tolerance: float) -> None:
    def check(a: jax.Array, b: jax.Array) -> None:
        scale = max(float(jnp.max(jnp.abs(b))), 1e-3)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)

    jax.tree.map(check, actual, expected)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33])
def test_chunked_equals_recurrent_around_the_chunk_size(length: int, solver: str) -> None:
    state = jnp.asarray(np.random.default_rng(1).normal(size=(DK, DV)), jnp.float32)
    inputs = _inputs(length, seed=length)
    chunked = gated_delta_chunked(*inputs, chunk=16, solver=solver, state=state)
    _close(chunked, gated_delta_recurrent(*inputs, state=state), 1e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_chunked_equals_recurrent_in_fp64_for_any_chunk(solver: str) -> None:
    with jax.enable_x64(True):
        inputs = _inputs(50, decay=1.0, dtype="float64")
        expected = gated_delta_recurrent(*inputs)
        for chunk in (1, 3, 16, 24, 50, 64):
            _close(gated_delta_chunked(*inputs, chunk=chunk, solver=solver), expected, 1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("case", ["mild", "extreme decay", "identical keys", "resets"])
def test_all_gradients_equal_those_of_the_recurrence(case: str, solver: str) -> None:
    with jax.enable_x64(True):
        inputs = list(_inputs(21, decay=60.0 if case == "extreme decay" else 0.3, dtype="float64"))
        if case == "identical keys":
            inputs[1] = jnp.broadcast_to(inputs[1][:1], inputs[1].shape)
            inputs[4] = jnp.full(21, 0.99)
        if case == "resets":
            inputs[5] = jnp.zeros(21, bool).at[jnp.asarray([4, 5, 14])].set(True)
        rng = np.random.default_rng(3)
        state = jnp.asarray(rng.normal(size=(DK, DV)))
        to_output = jnp.asarray(rng.normal(size=(21, DV)))
        to_state = jnp.asarray(rng.normal(size=(DK, DV)))

        def loss(rule, state, *floats):  # type: ignore[no-untyped-def]
            output, last = rule(*floats, inputs[5], state=state)
            return jnp.sum(output * to_output) + jnp.sum(last * to_state)

        grads = [
            jax.jit(jax.grad(partial(loss, rule), argnums=tuple(range(6))))(state, *inputs[:5])
            for rule in (
                partial(gated_delta_chunked, chunk=8, solver=solver),
                gated_delta_recurrent,
            )
        ]
        assert all(bool(jnp.any(g != 0)) for g in grads[1])
        _close(grads[0], grads[1], 1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_extreme_decay_neither_overflows_nor_drifts(solver: str) -> None:
    inputs = _inputs(64, decay=60.0)
    chunked = gated_delta_chunked(*inputs, chunk=32, solver=solver)
    _close(chunked, gated_delta_recurrent(*inputs), 1e-4)
    grad = jax.grad(
        lambda g: jnp.sum(
            gated_delta_chunked(*inputs[:3], g, *inputs[4:], chunk=32, solver=solver)[0]
        )
    )(inputs[3])
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("solver", SOLVERS)
def test_identical_keys_stay_exact_in_fp32(solver: str) -> None:
    # Where a product of powers of L errs by 1e11 (facts: 64 identical keys, beta 0.99).
    query, key, value, log_decay, beta, reset = _inputs(64, decay=1e-3)
    key = jnp.broadcast_to(key[:1], key.shape)
    inputs = (query, key, value, log_decay, jnp.full_like(beta, 0.99), reset)
    chunked = gated_delta_chunked(*inputs, chunk=64, solver=solver)
    _close(chunked, gated_delta_recurrent(*inputs), 1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 7, 30])
def test_a_reset_makes_segments_independent(chunk: int) -> None:
    cuts = [0, 1, 2, 9, 17, 30]
    whole = list(_inputs(30, seed=5))
    whole[5] = jnp.zeros(30, bool).at[jnp.asarray(cuts[1:-1])].set(True)
    rule = partial(gated_delta_chunked, chunk=chunk, solver="ladder")
    output, last = rule(*whole)
    for start, stop in itertools.pairwise(cuts):
        alone = gated_delta_recurrent(
            *(x[start:stop] for x in whole[:5]), jnp.zeros(stop - start, bool)
        )
        _close(output[start:stop], alone[0], 1e-5)
    _close(last, alone[1], 1e-5)


def test_no_gradient_flows_between_segments() -> None:
    query, key, value, log_decay, beta, _ = _inputs(20, seed=6)
    reset = jnp.zeros(20, bool).at[11].set(True)

    def loss(value, part):  # type: ignore[no-untyped-def]
        output, _ = gated_delta_chunked(query, key, value, log_decay, beta, reset, chunk=8)
        return jnp.sum(output[part] ** 2)

    first = jax.grad(loss)(value, slice(0, 11))
    second = jax.grad(loss)(value, slice(11, 20))
    assert np.all(first[11:] == 0)
    assert np.all(second[:11] == 0)
    assert np.any(second[11:] != 0)


def test_padding_passes_the_state_on_bit_for_bit() -> None:
    query, key, value, *_ = _inputs(1)
    state = jnp.asarray(np.random.default_rng(2).normal(size=(DK, DV)), jnp.float32)
    zero = jnp.zeros(())
    after, _ = gated_delta_step(state, query[0], key[0], value[0], zero, zero)
    assert np.array_equal(after, state)


def test_state_handed_over_equals_one_long_run() -> None:
    inputs = _inputs(40, seed=7)
    output, last = gated_delta_chunked(*inputs, chunk=16)
    first, state = gated_delta_chunked(*(x[:23] for x in inputs), chunk=16)
    second, end = gated_delta_chunked(*(x[23:] for x in inputs), chunk=16, state=state)
    _close((jnp.concatenate([first, second]), end), (output, last), 1e-5)


def test_chunks_are_equal_and_pad_less_than_one_token_a_chunk() -> None:
    for length in range(1, 200):
        for longest in (1, 16, 24, 64):
            size = chunk_length(length, longest)
            count = -(-length // size)
            assert size <= longest
            assert 0 <= count * size - length < count
    assert chunk_length(72, 64) == 36
    with pytest.raises(ValueError, match="positive"):
        chunk_length(0, 16)


def test_causal_conv_is_the_sum_of_its_taps_inside_a_segment() -> None:
    rng = np.random.default_rng(8)
    x, weight = rng.normal(size=(2, 12, 3)), rng.normal(size=(4, 3))
    segment = np.asarray(
        [[1, 1, 1, 1, 1, 2, 3, 3, 3, 3, 0, 0], [1, 2, 2, 2, 2, 2, 2, 3, 3, 4, 4, 4]]
    )
    expected = np.zeros(x.shape)
    for row, t in np.ndindex(segment.shape):
        for back in range(min(t, 3) + 1):
            if segment[row, t - back] == segment[row, t] or segment[row, t] == 0:
                expected[row, t] += weight[3 - back] * x[row, t - back]
    reset = jax.vmap(segment_starts)(jnp.asarray(segment))
    assert [np.flatnonzero(row).tolist() for row in reset] == [[5, 6], [1, 7, 9]]
    real = segment != 0
    got = causal_conv(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), reset)
    np.testing.assert_allclose(got[real], expected[real], atol=1e-6)


def test_causal_conv_continues_from_its_tail() -> None:
    rng = np.random.default_rng(9)
    x = jnp.asarray(rng.normal(size=(2, 10, 3)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)
    reset = jnp.zeros((2, 10), bool)
    whole = causal_conv(x, weight, reset)
    rest = causal_conv(x[:, 6:], weight, reset[:, 6:], tail=x[:, 3:6])
    np.testing.assert_array_equal(rest, whole[:, 6:])
