"""The gated delta rule and its short convolution, as pure functions of one sequence.

Token t of one value head, with state S in R^{dk x dv}:
  S' = a_t S_{t-1},  d_t = beta_t (v_t - S'^T k_t),  S_t = S' + k_t d_t^T,  o_t = S_t^T q_t,
where a_t = exp(g_t), and a_t = 0 where a new segment begins. Everything runs in the dtype of its
arguments at the highest matmul precision: on a TPU the default precision would round to bfloat16.
"""

from __future__ import annotations

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax import lax

_HIGHEST = lax.Precision.HIGHEST
_BLOCK = 16
UNROLL = 8
"""Chunks an iteration of the loop over a row holds: fast on a CPU, long to compile for a TPU."""


def segment_starts(segment_t: jax.Array) -> jax.Array:
    """Where the recurrent state must be dropped before a token is read.

    reset_t = segment_t != segment_{t-1} and segment_t != 0; padding resets nothing, so the state
    passes over it unchanged.

    Args:
      segment_t: [T] int, 0 on padding, positive and constant on each segment.

    Returns:
      [T] bool; false at t = 0, where an entering state may continue.

    Source: our reading.
    """
    chex.assert_rank(segment_t, 1)
    before_t = jnp.concatenate([segment_t[:1], segment_t[:-1]])
    return (segment_t != before_t) & (segment_t != 0)


def causal_conv(
    input_t: jax.Array, weight: jax.Array, reset_t: jax.Array, *, tail: jax.Array | None = None
) -> jax.Array:
    """Depthwise causal convolution of rows that does not look over a segment's start.

    y_t = sum_k weight[K-1-k] * x_{t-k} over taps k with no reset in (t-k, t].

    Args:
      input_t: [B, T, C] float, channels over time.
      weight: [K, C] float; the last tap meets the current token.
      reset_t: [B, T] bool, true where a segment begins.
      tail: [B, K-1, C] float, inputs before t = 0; zeros if None.

    Returns:
      [B, T, C] float.

    Source: the `qwen3_5` architecture; the reset is our reading.
    """
    chex.assert_rank([input_t, weight, reset_t], [3, 2, 2])
    rows, length, channels = input_t.shape
    taps = weight.shape[0]
    if tail is None:
        tail = jnp.zeros((rows, taps - 1, channels), input_t.dtype)
    chex.assert_shape(tail, (rows, taps - 1, channels))
    run_t = jnp.cumsum(reset_t.astype(jnp.int32), axis=1)
    padded_t = jnp.concatenate([tail, input_t], axis=1)
    padded_run_t = jnp.pad(run_t, ((0, 0), (taps - 1, 0)))
    # The rows as one list of tokens: the gradient of a tap is then a sum over the first of two
    # axes. For one over the first two of three XLA's CPU compiler takes 25 times as long
    # (jaxlib 0.10.2).
    output_t = input_t.reshape(-1, channels) * weight[-1]
    for back in range(1, taps):
        start = taps - 1 - back
        same_t = padded_run_t[:, start : start + length] == run_t
        earlier_t = jnp.where(same_t[..., None], padded_t[:, start : start + length], 0)
        output_t += earlier_t.reshape(-1, channels) * weight[-1 - back]
    return output_t.reshape(input_t.shape)


def l2_normalize(x: jax.Array, *, eps: float = 1e-6) -> jax.Array:
    """x / sqrt(sum(x^2) + eps) over the last axis.

    Args:
      x: [..., d] float.
      eps: added to the sum (not the mean) of squares.

    Returns:
      [..., d] float.

    Source: the `qwen3_5` architecture.
    """
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def gated_delta_step(
    state: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token of the rule for any number of heads.

    o = S'^T q + (k . q) d, which is the read of S after the write without reading it again.

    Args:
      state: [..., dk, dv] float, S before the token.
      query: [..., dk] float.
      key: [..., dk] float.
      value: [..., dv] float.
      log_decay: [...] float, g <= 0.
      beta: [...] float in [0, 1]; with beta = 0 and g = 0 the state stays bit for bit.

    Returns:
      State after the token, [..., dk, dv], and output, [..., dv].

    Source: Gated DeltaNet (arXiv 2412.06464), equation of the gated delta rule.
    """
    # Both reads in one product with S, and the decay after it: S is read once and written once.
    decay = jnp.exp(log_decay)[..., None]
    both = jnp.stack([key, query], axis=-2)
    read = jnp.einsum("...ik,...kv->...iv", both, state, precision=_HIGHEST)
    delta = beta[..., None] * (value - decay * read[..., 0, :])
    overlap = jnp.sum(key * query, axis=-1, keepdims=True)
    output = decay * read[..., 1, :] + overlap * delta
    return decay[..., None] * state + key[..., None] * delta[..., None, :], output


def gated_delta_recurrent(
    query_t: jax.Array,
    key_t: jax.Array,
    value_t: jax.Array,
    log_decay_t: jax.Array,
    beta_t: jax.Array,
    reset_t: jax.Array,
    *,
    state: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The rule of one head token by token: the reference of the chunked form.

    Args:
      query_t: [T, dk] float, normalised and scaled.
      key_t: [T, dk] float, normalised.
      value_t: [T, dv] float.
      log_decay_t: [T] float, g <= 0.
      beta_t: [T] float in [0, 1].
      reset_t: [T] bool, true where a segment begins and the state is dropped.
      state: [dk, dv] float, the entering state; zeros if None.

    Returns:
      Outputs [T, dv] and the final state [dk, dv].

    Source: Gated DeltaNet (arXiv 2412.06464).
    """
    if state is None:
        state = jnp.zeros((key_t.shape[-1], value_t.shape[-1]), value_t.dtype)

    def body(carry: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query, key, value, log_decay, beta, reset = token
        carry = jnp.where(reset, 0, carry)
        return gated_delta_step(carry, query, key, value, log_decay, beta)

    last, output_t = lax.scan(body, state, (query_t, key_t, value_t, log_decay_t, beta_t, reset_t))
    return output_t, last


def chunk_length(length: int, longest: int) -> int:
    """Equal chunk length that covers `length` with the fewest chunks of at most `longest`.

    n = ceil(length / longest), C = ceil(length / n): less than n tokens are padded, so a row a
    little longer than a chunk does not cost two whole ones.

    Args:
      length: tokens of a row, > 0.
      longest: upper bound of a chunk, > 0.

    Returns:
      The chunk length C.

    Raises:
      ValueError: for a length or bound that is not positive.

    Source: our reading.
    """
    if length <= 0 or longest <= 0:
        raise ValueError(f"chunk lengths are positive, got length {length}, longest {longest}")
    chunks = -(-length // longest)
    return -(-length // chunks)


def gated_delta_chunked(
    query_t: jax.Array,
    key_t: jax.Array,
    value_t: jax.Array,
    log_decay_t: jax.Array,
    beta_t: jax.Array,
    reset_t: jax.Array,
    *,
    chunk: int,
    solver: Literal["solve", "ladder"] = "solve",
    state: jax.Array | None = None,
    unroll: int = UNROLL,
) -> tuple[jax.Array, jax.Array]:
    """The rule of one head by chunks; equal to `gated_delta_recurrent` up to rounding.

    With c_i = sum_{j<=i} g_j inside a chunk, D_ij = e^{c_i - c_j} for i >= j in one segment,
    L = strictly lower part of beta_i (k_i . k_j) D_ij and entering state S:
      (I + L) [U0 | W] = [beta V | beta e^c K],  U = U0 - W S,
      O = e^c Q S + (Q K^T * D) U,  S_next = e^{c_C} S + (e^{c_C - c} K)^T U,
    where a read of S needs no reset before the token, a write none after it, and S survives only
    a chunk without reset. All but the chain of S is done for all chunks at once.

    Args:
      query_t: [T, dk] float, normalised and scaled.
      key_t: [T, dk] float, normalised.
      value_t: [T, dv] float.
      log_decay_t: [T] float, g <= 0.
      beta_t: [T] float in [0, 1].
      reset_t: [T] bool, true where a segment begins and the state is dropped.
      chunk: longest chunk; the row is cut into equal chunks of `chunk_length(T, chunk)`.
      solver: "solve" by substitution, a block of rows after the other; "ladder" by the inverse of
        the whole, made by doubling blocks.
        Both are stable for similar keys, where a product of powers of L is not.
      state: [dk, dv] float, the entering state; zeros if None.
      unroll: chunks an iteration of the loop holds, >= 1.

    Returns:
      Outputs [T, dv] and the final state [dk, dv].

    Source: Gated DeltaNet (arXiv 2412.06464), chunkwise form; re-derived.
    """
    chex.assert_rank([query_t, key_t, value_t], 2)
    chex.assert_equal_shape([log_decay_t, beta_t, reset_t])
    length = query_t.shape[0]
    size = chunk_length(length, chunk)
    count = -(-length // size)

    def cut(x: jax.Array) -> jax.Array:
        widths = [(0, count * size - length)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, widths).reshape(count, size, *x.shape[1:])

    query, key, value = cut(query_t), cut(key_t), cut(value_t)
    beta = cut(beta_t)
    decay = jnp.cumsum(cut(log_decay_t), axis=1)
    run = jnp.cumsum(cut(reset_t).astype(jnp.int32), axis=1)

    lower = jnp.tril(jnp.ones((size, size), bool))
    visible = lower & (run[:, :, None] == run[:, None, :])
    # The exponent is masked, not the exponential: above the diagonal it may overflow.
    ratio = jnp.exp(jnp.where(visible, decay[:, :, None] - decay[:, None, :], -jnp.inf))
    reads = jnp.where(run == 0, jnp.exp(decay), 0)
    writes = jnp.where(run == run[:, -1:], jnp.exp(decay[:, -1:] - decay), 0)
    keeps = reads[:, -1]

    similar = jnp.einsum("nik,njk->nij", key, key, precision=_HIGHEST)
    coupling = jnp.where(lower & ~jnp.eye(size, dtype=bool), beta[:, :, None] * similar * ratio, 0)
    target = jnp.concatenate([beta[..., None] * value, (beta * reads)[..., None] * key], axis=-1)
    solved = _solve_unit_lower(coupling, target, solver)
    fresh, stale = solved[..., : value.shape[-1]], solved[..., value.shape[-1] :]
    attend = jnp.einsum("nik,njk->nij", query, key, precision=_HIGHEST) * ratio
    query_read = reads[..., None] * query
    key_write = writes[..., None] * key

    def body(carry: jax.Array, piece: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        fresh_i, stale_i, attend_i, query_i, key_i, keep_i = piece
        update = fresh_i - jnp.dot(stale_i, carry, precision=_HIGHEST)
        output = jnp.dot(query_i, carry, precision=_HIGHEST)
        output += jnp.dot(attend_i, update, precision=_HIGHEST)
        return keep_i * carry + jnp.dot(key_i.T, update, precision=_HIGHEST), output

    if state is None:
        state = jnp.zeros((key.shape[-1], value.shape[-1]), value.dtype)
    last, output = lax.scan(
        # A long row would otherwise keep every chunk's state for the backward pass.
        jax.checkpoint(body) if count > unroll else body,
        state,
        (fresh, stale, attend, query_read, key_write, keeps),
        unroll=min(count, unroll),
    )
    return output.reshape(count * size, -1)[:length], last


def _solve_unit_lower(
    coupling: jax.Array, target: jax.Array, solver: Literal["solve", "ladder"]
) -> jax.Array:
    """Solve (I + L) X = B for strictly lower L, [n, C, C], and B, [n, C, m]."""
    return (_ladder_solve if solver == "ladder" else _substitution)(coupling, target)


# Not `lax.linalg.triangular_solve`: on a CPU that is LAPACK, which hands the matrices of a batch to
# XLA's thread pool and waits for them on a thread of the same pool. As many such calls side by side
# as the pool has threads (two layers' gradients on two cores) wait for ever, in jaxlib 0.10.2.
@jax.custom_vjp
def _substitution(coupling: jax.Array, target: jax.Array) -> jax.Array:
    """Forward substitution by blocks of rows."""
    solution, _ = _substitution_forward(coupling, target)
    return solution


def _substitution_forward(
    coupling: jax.Array, target: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    # X_k = (I + L_kk)^-1 (B_k - sum_{j<k} L_kj X_j)
    inverse = _diagonal_inverses(coupling)
    done: list[jax.Array] = []
    for k, (start, stop) in enumerate(_blocks(coupling.shape[-1])):
        rest = target[:, start:stop]
        if done:
            known = jnp.concatenate(done, axis=1)
            rest -= jnp.matmul(coupling[:, start:stop, :start], known, precision=_HIGHEST)
        own = inverse[:, k, : stop - start, : stop - start]
        done.append(jnp.matmul(own, rest, precision=_HIGHEST))
    solution = jnp.concatenate(done, axis=1)
    return solution, (coupling, inverse, solution)


def _substitution_backward(
    saved: tuple[jax.Array, jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # B' = (I + L)^-T X', L' = -B' X^T, the former by substitution from the last block up.
    coupling, inverse, solution = saved
    done: list[jax.Array] = []
    for k, (start, stop) in reversed(list(enumerate(_blocks(coupling.shape[-1])))):
        rest = cotangent[:, start:stop]
        if done:
            known = jnp.concatenate(done[::-1], axis=1)
            below = coupling[:, stop:, start:stop]
            rest -= jnp.einsum("nji,njm->nim", below, known, precision=_HIGHEST)
        own = inverse[:, k, : stop - start, : stop - start]
        done.append(jnp.einsum("nji,njm->nim", own, rest, precision=_HIGHEST))
    to_target = jnp.concatenate(done[::-1], axis=1)
    return -jnp.einsum("nim,njm->nij", to_target, solution, precision=_HIGHEST), to_target


_substitution.defvjp(_substitution_forward, _substitution_backward)


def _blocks(size: int) -> list[tuple[int, int]]:
    return [(at, min(at + _BLOCK, size)) for at in range(0, size, _BLOCK)]


def _diagonal_inverses(coupling: jax.Array) -> jax.Array:
    """[n, C, C] -> inverses of its diagonal blocks [n, k, b, b], the last one padded."""
    size = coupling.shape[-1]
    parts = []
    for start, stop in _blocks(size):
        missing = min(_BLOCK, size) - (stop - start)
        widths = ((0, 0), (0, missing), (0, missing))
        parts.append(jnp.pad(coupling[:, start:stop, start:stop], widths))
    blocks = jnp.stack(parts, axis=1)
    return _ladder_inverse(blocks.reshape(-1, *blocks.shape[2:])).reshape(blocks.shape)


def _ladder_inverse(coupling: jax.Array) -> jax.Array:
    """(I + L)^-1 by X := X - X L_b X for b = 1, 2, 4, ...

    L_b is L on the lower left b x b block of every diagonal block of 2b, and X, the inverse of
    the diagonal blocks of b, becomes that of the blocks of 2b.
    """
    size = coupling.shape[-1]
    index = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=coupling.dtype), coupling.shape)
    block = 1
    while block < size:
        row, column = index[:, None], index[None, :]
        corner = (row // (2 * block) == column // (2 * block)) & (row // block > column // block)
        step = jnp.where(corner, coupling, 0)
        if block > 1:  # With b = 1 the inverse is still the identity.
            step = jnp.matmul(step, inverse, precision=_HIGHEST)
            step = jnp.matmul(inverse, step, precision=_HIGHEST)
        inverse -= step
        block *= 2
    return inverse


@jax.custom_vjp
def _ladder_solve(coupling: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.matmul(_ladder_inverse(coupling), target, precision=_HIGHEST)


def _ladder_solve_forward(
    coupling: jax.Array, target: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    inverse = _ladder_inverse(coupling)
    solution = jnp.matmul(inverse, target, precision=_HIGHEST)
    return solution, (inverse, solution)


def _ladder_solve_backward(
    saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # B' = (I + L)^-T X', L' = -B' X^T: two products, not the derivative of every rung.
    inverse, solution = saved
    to_target = jnp.einsum("nji,njm->nim", inverse, cotangent, precision=_HIGHEST)
    to_coupling = -jnp.einsum("nim,njm->nij", to_target, solution, precision=_HIGHEST)
    return to_coupling, to_target


_ladder_solve.defvjp(_ladder_solve_forward, _ladder_solve_backward)
