"""Attention by blocks against attention at once: values, gradients, and a part of the queries."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trsi_jax.model.attention import attend
from trsi_jax.model.blockwise import attend_blockwise

LENGTH, HEADS, KV_HEADS, DIM = 24, 4, 2, 8


def rows():
    """Two rows of query, key and value; segments cross blocks' edges, padding is on the right."""
    rng = np.random.default_rng(0)
    shapes = [(2, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    # Scores of about +-20: a running maximum that is not carried from block to block overflows.
    query, key, value = (jnp.asarray(rng.normal(size=s) * 2, jnp.float32) for s in shapes)
    ids = np.zeros((2, LENGTH), np.int32)
    ids[0, :5], ids[0, 5:20] = 1, 2
    ids[1, :11], ids[1, 11:12], ids[1, 12:] = 1, 2, 3
    return (query, key, value), jnp.asarray(ids)


def at_once(query, key, value, ids):
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    visible = causal & (ids[:, :, None] == ids[:, None, :])
    return jax.vmap(partial(attend, accum_dtype="float32"))(query, key, value, visible)


@pytest.mark.parametrize("block", [6, 7, 24])
def test_values_and_gradients_are_those_of_attention_at_once(block):
    inputs, ids = rows()
    weight = jnp.cos(jnp.arange(HEADS * DIM, dtype=jnp.float32)).reshape(HEADS, DIM)

    def by_blocks(query, key, value):
        out = attend_blockwise(query, key, value, ids, ids, block=block)
        return jnp.sum(out * weight), out

    def plain(query, key, value):
        out = at_once(query, key, value, ids)
        return jnp.sum(out * weight), out

    got, expected = (
        jax.jit(jax.grad(f, argnums=(0, 1, 2), has_aux=True))(*inputs) for f in (by_blocks, plain)
    )
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5 * np.max(np.abs(theirs)))


@pytest.mark.parametrize("start", [0, 8, 16])
def test_a_part_of_the_queries_sees_the_row_up_to_its_own_place(start):
    (query, key, value), ids = rows()
    part = slice(start, start + 8)
    got = jax.jit(partial(attend_blockwise, block=6))(
        query[:, part], key, value, ids[:, part], ids, jnp.int32(start)
    )
    np.testing.assert_allclose(got, at_once(query, key, value, ids)[:, part], atol=1e-5)


def test_no_mask_of_all_blocks_is_kept_for_the_backward_pass():
    inputs, ids = rows()

    def layer(x, _):
        query, key, value = x
        out = attend_blockwise(query, key, value, ids, ids, block=6)
        return (out, key, value), None

    def loss(x):
        (out, _, _), _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, None, length=2)
        return jnp.sum(out)

    text = jax.jit(jax.grad(loss)).lower(inputs).as_text()
    # Ten pairs of blocks on and below the diagonal, each with a mask of 6 x 6.
    assert re.search(r"tensor<[0-9x]*x6x6xi1>", text)
    assert not re.search(r"tensor<10x[0-9x]*6x6xi1>", text)
