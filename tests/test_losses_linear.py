"""The chunked linear head against the one that makes all logits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trsi_jax.losses import linear_cross_entropy, linear_logprob

T, D, V = 13, 6, 29  # 13 is no multiple of the chunks


def inputs(shape=(T,), seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(*shape, D)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(D, V)), jnp.float32)
    target = jnp.asarray(rng.integers(0, V, shape), jnp.int32)
    weight = jnp.asarray(rng.normal(size=shape), jnp.float32)
    return hidden, kernel, target, weight


def naive(hidden, kernel, target, temperature):
    logp = jax.nn.log_softmax(hidden @ kernel / temperature)
    picked = jnp.take_along_axis(logp, target[..., None], -1)[..., 0]
    return picked, -jnp.sum(jnp.exp(logp) * logp, -1)


@pytest.mark.parametrize(
    ("shape", "chunk", "temperature"),
    [((T,), 1, 1.0), ((T,), 4, 0.6), ((T,), 512, 1.0), ((3, T), 4, 1.0), ((3, T), 13, 0.6)],
)
def test_logprob_and_entropy_equal_naive(shape, chunk, temperature):
    hidden, kernel, target, weight = inputs(shape)

    def scalar(fn, hidden, kernel):
        logprob, entropy = fn(hidden, kernel)
        return jnp.sum(weight * logprob) + jnp.sum(jnp.cos(weight) * entropy), (logprob, entropy)

    ours = functools.partial(
        scalar,
        lambda h, k: linear_logprob(h, k, target, temperature=temperature, chunk=chunk),
    )
    reference = functools.partial(scalar, lambda h, k: naive(h, k, target, temperature))
    got = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(hidden, kernel)
    want = jax.value_and_grad(reference, argnums=(0, 1), has_aux=True)(hidden, kernel)
    for x, y in zip(jax.tree.leaves(got[0][1]), jax.tree.leaves(want[0][1]), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    for x, y in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(x, y, atol=3e-5)


@pytest.mark.parametrize(
    ("shape", "chunk", "vocab", "columns"),
    [((T,), 512, 28, 15), ((3, T), 4, 28, 7), ((T,), 4, 28, 4), ((T,), 4, 29, 15)],
)
@pytest.mark.parametrize("parts", [(1, 1), (1, 0), (0, 1)])
def test_the_gradient_by_blocks_of_columns_is_the_whole_one(shape, chunk, vocab, columns, parts):
    # 28 columns in blocks of 14, 7 and 4; 29 have no divisor but 1, and are taken at once.
    hidden, kernel, target, weight = inputs(shape)
    kernel, target = kernel[:, :vocab], target % vocab

    def loss(columns, hidden, kernel):
        logprob, entropy = linear_logprob(
            hidden, kernel, target, temperature=0.7, chunk=chunk, columns=columns
        )
        # What the loss does not depend on has no cotangent, and must leave none behind.
        terms = (weight * logprob, jnp.cos(weight) * entropy)
        return sum(jnp.sum(term) for term, read in zip(terms, parts, strict=True) if read)

    for got, want in zip(
        jax.jit(jax.grad(functools.partial(loss, columns), (0, 1)))(hidden, kernel),
        jax.grad(functools.partial(loss, vocab), argnums=(0, 1))(hidden, kernel),
        strict=True,
    ):
        assert float(jnp.max(jnp.abs(want))) > 1e-2
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("shape", [(T,), (3, T)])
def test_cross_entropy_equals_naive(shape, chunk):
    hidden, kernel, target, weight = inputs(shape)

    def reference(hidden, kernel):
        return -jnp.sum(weight * naive(hidden, kernel, target, 0.8)[0])

    def ours(hidden, kernel):
        return linear_cross_entropy(hidden, kernel, target, weight, temperature=0.8, chunk=chunk)

    got = jax.value_and_grad(ours, argnums=(0, 1))(hidden, kernel)
    want = jax.value_and_grad(reference, argnums=(0, 1))(hidden, kernel)
    np.testing.assert_allclose(ours(hidden, kernel), want[0], rtol=1e-5)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for x, y in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(x, y, atol=3e-5)


def test_cross_entropy_scales_with_its_cotangent():
    hidden, kernel, target, weight = inputs()

    def loss(scale):
        return jax.grad(lambda k: scale * linear_cross_entropy(hidden, k, target, weight, chunk=4))(
            kernel
        )

    np.testing.assert_allclose(loss(3.0), 3 * loss(1.0), rtol=1e-5)


def test_two_passes_give_the_gradient_of_any_loss_of_the_logprobs():
    """Pass 1 log-probs, pass 2 cross-entropy with weight -dL/dlogprob."""
    hidden, kernel, target, weight = inputs()

    def of_logprob(logprob):
        return jnp.sum(jnp.minimum(jnp.exp(logprob + 2.0), 1.2) * weight)

    direct = jax.grad(lambda k: of_logprob(naive(hidden, k, target, 1.0)[0]))(kernel)
    logprob, _ = linear_logprob(hidden, kernel, target, chunk=4)
    second = -jax.grad(of_logprob)(logprob)
    fused = jax.grad(lambda k: linear_cross_entropy(hidden, k, target, second, chunk=4))(kernel)
    np.testing.assert_allclose(fused, direct, atol=3e-5)


def test_temperature_may_differ_by_token():
    hidden, kernel, target, _ = inputs()
    temperature = jnp.linspace(0.5, 2.0, T)
    got = linear_logprob(hidden, kernel, target, temperature=temperature, chunk=4)
    want = naive(hidden, kernel, target, temperature[:, None])
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_logits_of_any_size_stay_finite():
    hidden, kernel, target, weight = inputs()

    def loss(hidden, kernel):
        logprob, entropy = linear_logprob(hidden, kernel, target, chunk=4)
        return jnp.sum(weight * logprob + entropy), (logprob, entropy)

    for scale in (1e-30, 1e4, 1e15):
        out = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden * scale, kernel)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(out))
        assert np.all(out[0][1][1] >= 0)


@pytest.mark.parametrize("columns", [7, 4096])
@pytest.mark.parametrize("chunk", [4, 512])
def test_a_masked_token_reaches_neither_head_nor_loss(chunk, columns):
    hidden, kernel, target, weight = inputs()
    mask = jnp.arange(T) % 3 != 0
    broken = jnp.where(mask[:, None], hidden, jnp.nan)
    ids = jnp.where(mask, target, -1)

    def two(hidden, kernel):
        logprob, entropy = linear_logprob(hidden, kernel, ids, chunk=chunk, columns=columns)
        return jnp.sum(jnp.where(mask, weight * logprob + entropy, 0.0))

    def one(hidden, kernel):
        return linear_cross_entropy(hidden, kernel, ids, weight * mask, chunk=chunk)

    for loss in (one, two):
        dirty = jax.value_and_grad(loss, argnums=(0, 1))(broken, kernel)
        clean = jax.value_and_grad(loss, argnums=(0, 1))(
            jnp.where(mask[:, None], hidden, 0), kernel
        )
        for x, y in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize(("vocab", "columns"), [(1031, 4096), (1032, 129)])
def test_no_array_of_all_tokens_by_vocabulary_is_made(vocab, columns):
    """The compiled programs hold one chunk's logits, and no more temporaries for a longer row."""
    chunk = 32
    kernel = jax.ShapeDtypeStruct((D, vocab), jnp.float32)

    def programs(length):
        hidden = jax.ShapeDtypeStruct((length, D), jnp.float32)
        ids = jax.ShapeDtypeStruct((length,), jnp.int32)
        weight = jax.ShapeDtypeStruct((length,), jnp.float32)
        recompute = jax.grad(
            lambda h, k, y: sum(
                map(jnp.sum, linear_logprob(h, k, y, chunk=chunk, columns=columns))
            ),
            (0, 1),
        )
        fused = jax.value_and_grad(
            lambda h, k, y, w: linear_cross_entropy(h, k, y, w, chunk=chunk), (0, 1)
        )
        yield jax.jit(recompute).lower(hidden, kernel, ids).compile()
        yield jax.jit(fused).lower(hidden, kernel, ids, weight).compile()

    # The shorter one is long enough for a whole run of chunks by a block of columns.
    for short, long in zip(programs(256), programs(1024), strict=True):
        assert f"1024,{vocab}]" not in long.as_text()
        assert f"{chunk},{vocab}]" in long.as_text()
        bytes_short, bytes_long = (p.memory_analysis().temp_size_in_bytes for p in (short, long))
        # What grows is linear in T x D; all logits would add 768 x 1031 x 4 bytes.
        assert bytes_long - bytes_short < 768 * (4 * D + 16) * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": jnp.zeros((T, D + 1))}, "does not fit kernel"),
        ({"target": jnp.zeros((T + 1,), jnp.int32)}, "does not fit hidden"),
        ({"chunk": 0}, "chunk must be >= 1, got 0"),
        ({"columns": 0}, "columns must be >= 1, got 0"),
        ({"temperature": 0.0}, "temperature must be > 0, got 0.0"),
    ],
)
def test_mistakes_are_named(change, message):
    hidden, kernel, target, _ = inputs()
    with pytest.raises(ValueError, match=message):
        linear_logprob(**{"hidden": hidden, "kernel": kernel, "target": target, **change})
