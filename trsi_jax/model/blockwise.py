"""Causal attention in blocks of the score matrix, for rows whose whole score would not fit."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sharding.mesh import vary_like

BLOCK = 1024

_Residuals = tuple[jax.Array, ...]


def attend_blockwise(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_segment: jax.Array,
    key_segment: jax.Array,
    start: jax.Array | int = 0,
    *,
    block: int = BLOCK,
) -> jax.Array:
    """Grouped-query attention of rows, each token on its own segment up to itself.

    o_t = sum_{s <= start + t, segment_s = segment_t} softmax_s(q_t . k_s / sqrt(d)) v_s, with a
    running maximum and sum over blocks of s; the backward pass makes each block's scores anew from
    the saved logsumexp. Only blocks on and below the diagonal are visited where `start` is the
    integer 0 and T = S.

    Args:
      query: [B, T, Hq, d] float; consecutive query heads share a key head.
      key: [B, S, Hkv, d] float.
      value: [B, S, Hkv, d] float.
      query_segment: [B, T] int; padding forms a segment of its own.
      key_segment: [B, S] int, of the whole row.
      start: [] int, place of the first query token in the row; queries may be a part of it.
      block: longest block of tokens, on both sides.

    Returns:
      [B, T, Hq, d] in the dtype of `value`; scores and sums are float32 at least.

    Raises:
      AssertionError: for shapes that do not fit.

    Source: online softmax (arXiv 1805.02867), blocks and recomputation as in FlashAttention
      (arXiv 2205.14135); here plain JAX.
    """
    chex.assert_rank([query, key, value, query_segment, key_segment], [4, 4, 4, 2, 2])
    chex.assert_equal_shape([key, value])
    heads, kv_heads = query.shape[2], key.shape[2]
    size_q, size_k = longest_divisor(query.shape[1], block), longest_divisor(key.shape[1], block)
    triangle = isinstance(start, int) and start == 0 and query.shape[1] == key.shape[1]
    batch, length, _, dim = query.shape
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    place = jnp.asarray(start, jnp.int32)
    out = _attend(
        (size_q, size_k, triangle), grouped, key, value, query_segment, key_segment, place
    )
    return out.reshape(batch, length, heads, dim)


def longest_divisor(length: int, most: int) -> int:
    """The largest block of at most `most` tokens that divides a row of `length`."""
    return next(size for size in range(min(length, most), 0, -1) if length % size == 0)


def _pairs(sizes: tuple[int, int, bool], length: int, span: int) -> jax.Array:
    """[n, 2] block indices (of queries, of keys) that may hold a visible pair."""
    size_q, size_k, triangle = sizes
    found = [
        (i, j)
        for i in range(length // size_q)
        for j in range(span // size_k)
        if not triangle or j * size_k < (i + 1) * size_q
    ]
    return jnp.array(found, jnp.int32)


def _cut(x: jax.Array, index: jax.Array, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, index * size, size, axis=1)


def _add(x: jax.Array, index: jax.Array, part: jax.Array) -> jax.Array:
    size = part.shape[1]
    return lax.dynamic_update_slice_in_dim(x, _cut(x, index, size) + part, index * size, axis=1)


def _set(x: jax.Array, index: jax.Array, part: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, part, index * part.shape[1], axis=1)


def _scores(
    query: jax.Array,
    key: jax.Array,
    segments: tuple[jax.Array, jax.Array],
    places: tuple[jax.Array, jax.Array],
    accum: jnp.dtype,
) -> jax.Array:
    """[B, Hkv, G, t, s] scores, -inf where not visible."""
    score = jnp.einsum("btkgd,bskd->bkgts", query, key, preferred_element_type=accum)
    score = score * query.shape[-1] ** -0.5
    of_query, of_key = segments
    at_query, at_key = places
    visible = (of_query[:, :, None] == of_key[:, None, :]) & (at_query[:, None] >= at_key)
    return jnp.where(visible[:, None, None], score, -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    sizes: tuple[int, int, bool],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_segment: jax.Array,
    key_segment: jax.Array,
    start: jax.Array,
) -> jax.Array:
    return _forward(sizes, query, key, value, query_segment, key_segment, start)[0]


def _forward(
    sizes: tuple[int, int, bool],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_segment: jax.Array,
    key_segment: jax.Array,
    start: jax.Array,
) -> tuple[jax.Array, _Residuals]:
    size_q, size_k, _ = sizes
    accum = jnp.promote_types(query.dtype, jnp.float32)
    batch, length, kv_heads, group, dim = query.shape
    inputs = (query, key, value, query_segment, key_segment, start)
    # The masks follow from data alone. Without this, differentiation takes them out of a remat and
    # a loop over layers and keeps all of them: as many bytes as there are visible pairs of tokens.
    query, query_segment, key_segment, start = lax.optimization_barrier(
        tuple(vary_like(x, *inputs) for x in (query, query_segment, key_segment, start))
    )
    total = vary_like(jnp.zeros((batch, length, kv_heads, group, dim), accum), *inputs)
    norm = vary_like(jnp.zeros((batch, length, kv_heads, group), accum), *inputs)
    top = vary_like(jnp.full((batch, length, kv_heads, group), -jnp.inf, accum), *inputs)
    at = jnp.arange(max(size_q, size_k), dtype=jnp.int32)

    def body(
        carry: tuple[jax.Array, jax.Array, jax.Array], pair: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
        total, norm, top = carry
        i, j = pair[0], pair[1]
        score = _scores(
            _cut(query, i, size_q),
            _cut(key, j, size_k),
            (_cut(query_segment, i, size_q), _cut(key_segment, j, size_k)),
            (start + i * size_q + at[:size_q], j * size_k + at[:size_k]),
            accum,
        )
        before = _cut(top, i, size_q)
        now = jnp.maximum(before, jnp.moveaxis(jnp.max(score, axis=-1), 3, 1))
        # Nothing visible yet: any finite maximum will do.
        safe = jnp.where(jnp.isneginf(now), 0, now)
        weight = jnp.exp(score - jnp.moveaxis(safe, 1, 3)[..., None])
        keep = jnp.exp(before - safe)
        mixed = jnp.einsum(
            "bkgts,bskd->btkgd",
            weight.astype(value.dtype),
            _cut(value, j, size_k),
            preferred_element_type=accum,
        )
        total = _set(total, i, _cut(total, i, size_q) * keep[..., None] + mixed)
        summed = jnp.moveaxis(jnp.sum(weight, axis=-1), 3, 1)
        norm = _set(norm, i, _cut(norm, i, size_q) * keep + summed)
        return (total, norm, _set(top, i, now)), None

    pairs = _pairs(sizes, length, key.shape[1])
    (total, norm, top), _ = lax.scan(body, (total, norm, top), pairs)
    output = (total / norm[..., None]).astype(value.dtype)
    return output, (*inputs, output, top + jnp.log(norm))


def _backward(
    sizes: tuple[int, int, bool], residuals: _Residuals, cotangent: jax.Array
) -> tuple[jax.Array | None, ...]:
    size_q, size_k, _ = sizes
    query, key, value, query_segment, key_segment, start, output, logsumexp = residuals
    accum = jnp.promote_types(query.dtype, jnp.float32)
    inner = jnp.sum(output.astype(accum) * cotangent.astype(accum), axis=-1)
    at = jnp.arange(max(size_q, size_k), dtype=jnp.int32)
    # With P = exp(score - logsumexp) and dP = do . v: dscore = P (dP - o . do).

    def body(
        carry: tuple[jax.Array, jax.Array, jax.Array], pair: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
        to_query, to_key, to_value = carry
        i, j = pair[0], pair[1]
        query_i, key_j = _cut(query, i, size_q), _cut(key, j, size_k)
        value_j, cotangent_i = _cut(value, j, size_k), _cut(cotangent, i, size_q)
        score = _scores(
            query_i,
            key_j,
            (_cut(query_segment, i, size_q), _cut(key_segment, j, size_k)),
            (start + i * size_q + at[:size_q], j * size_k + at[:size_k]),
            accum,
        )
        weight = jnp.exp(score - jnp.moveaxis(_cut(logsumexp, i, size_q), 1, 3)[..., None])
        low = weight.astype(value.dtype)
        dvalue = jnp.einsum("bkgts,btkgd->bskd", low, cotangent_i, preferred_element_type=accum)
        dweight = jnp.einsum(
            "btkgd,bskd->bkgts", cotangent_i, value_j, preferred_element_type=accum
        )
        dscore = weight * (dweight - jnp.moveaxis(_cut(inner, i, size_q), 1, 3)[..., None])
        dscore = (dscore * query.shape[-1] ** -0.5).astype(query.dtype)
        dquery = jnp.einsum("bkgts,bskd->btkgd", dscore, key_j, preferred_element_type=accum)
        dkey = jnp.einsum("bkgts,btkgd->bskd", dscore, query_i, preferred_element_type=accum)
        return (
            _add(to_query, i, dquery),
            _add(to_key, j, dkey),
            _add(to_value, j, dvalue),
        ), None

    everything = (*residuals, cotangent)

    def zeros(like: jax.Array) -> jax.Array:
        return vary_like(jnp.zeros(like.shape, accum), *everything)

    pairs = _pairs(sizes, query.shape[1], key.shape[1])
    found, _ = lax.scan(body, (zeros(query), zeros(key), zeros(value)), pairs)
    grads = tuple(g.astype(x.dtype) for g, x in zip(found, (query, key, value), strict=True))
    return (*grads, None, None, None)


_attend.defvjp(_forward, _backward)
