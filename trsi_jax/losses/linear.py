"""Log-probs, entropy and cross-entropy of a linear head, without an array of [T, vocab].

Tokens are taken in chunks; only one chunk's logits exist at a time. Leading axes (a batch, which
may be sharded) stay whole in every chunk, and the vocabulary axis may be sharded: the target's
logit is picked by comparison, which needs a reduction and no gather over that axis.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from sharding.mesh import vary_like

CHUNK = 512
COLUMNS = 4096
"""Columns of the head that the second of two passes takes at a time, at most: their logits and
their part of the gradient stay in a cache."""

_RUN = 8
"""Chunks of tokens whose logits of one block of columns are made together, at most."""

_How = tuple[int, str | None]
_TwoPasses = tuple[int, int, str | None]


def linear_logprob(
    hidden: jax.Array,
    kernel: jax.Array,
    target: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    chunk: int = CHUNK,
    columns: int = COLUMNS,
    axis_name: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of the targets and entropy under softmax(hidden kernel / temperature).

      z_t = h_t W / temperature,
      log p_t = z_t[y_t] - logsumexp z_t,   H_t = logsumexp z_t - p_t . z_t.

    The backward pass makes the logits anew, by chunks of tokens and blocks of columns: for
    cotangents g_t, e_t

      dz_t = g_t (onehot(y_t) - p_t) - e_t p_t (log p_t + H_t).

    Args:
      hidden: [..., T, D] float, states that predict the targets.
      kernel: [D, V] float, the head.
      target: [..., T] int; an id outside [0, V) gives -logsumexp and must be masked by the caller.
      temperature: scalar > 0, or [..., T]; a constant for differentiation.
      chunk: tokens of the T axis a chunk, >= 1.
      columns: of the head that the backward pass takes at a time, at most, >= 1. A block is the
        largest divisor of V up to this, or all of V where that is under an eighth of it.
      axis_name: inside `jax.shard_map`, the mesh axis that cuts the vocabulary: `kernel` is then
        this device's part, targets stay ids of the whole, and results are the whole's on every
        device; gradients by `hidden` are this device's part of the sum.

    Returns:
      (logprob, entropy), each [..., T] float32; float64 where `hidden` is.

    Raises:
      ValueError: for shapes that do not fit, chunk < 1 or columns < 1.
    """
    _check(hidden, kernel, target, chunk)
    if columns < 1:
        raise ValueError(f"columns must be >= 1, got {columns}")
    inverse = _inverse_temperature(temperature, target, _accum(hidden))
    return _logprob((chunk, columns, axis_name), hidden, kernel, target, inverse)


def linear_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    target: jax.Array,
    weight: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    chunk: int = CHUNK,
    axis_name: str | None = None,
) -> jax.Array:
    """Weighted cross-entropy of a linear head, loss and gradient in one pass over the tokens.

    loss = -sum_t w_t log p_t, with log p_t as in `linear_logprob`. Weights hold mask and
    denominator (acted_t / n_tokens), and for a policy gradient in a second pass the derivative of
    the loss by the log-prob, negated. A token of weight 0 is not read.

    Args:
      hidden: [..., T, D] float, states that predict the targets.
      kernel: [D, V] float, the head.
      target: [..., T] int, in [0, V) where the weight is not 0.
      weight: [..., T] float, a constant for differentiation.
      temperature: scalar > 0, or [..., T]; a constant for differentiation.
      chunk: tokens of the T axis a chunk, >= 1.
      axis_name: inside `jax.shard_map`, the mesh axis that cuts the vocabulary: `kernel` is then
        this device's part, targets stay ids of the whole, and results are the whole's on every
        device; gradients by `hidden` are this device's part of the sum.

    Returns:
      A float32 scalar; float64 where `hidden` is.

    Raises:
      ValueError: for shapes that do not fit, or chunk < 1.
    """
    _check(hidden, kernel, target, chunk)
    if weight.shape != target.shape:
        raise ValueError(f"weight {weight.shape} does not fit target {target.shape}")
    inverse = _inverse_temperature(temperature, target, _accum(hidden))
    weight = jax.lax.stop_gradient(weight.astype(inverse.dtype))
    return _cross_entropy((chunk, axis_name), hidden, kernel, target, weight, inverse)


def _check(hidden: jax.Array, kernel: jax.Array, target: jax.Array, chunk: int) -> None:
    if kernel.ndim != 2 or hidden.ndim < 2 or hidden.shape[-1] != kernel.shape[0]:
        raise ValueError(f"hidden {hidden.shape} does not fit kernel {kernel.shape}")
    if target.shape != hidden.shape[:-1]:
        raise ValueError(f"target {target.shape} does not fit hidden {hidden.shape}")
    if chunk < 1:
        raise ValueError(f"chunk must be >= 1, got {chunk}")


def _accum(hidden: jax.Array) -> jnp.dtype:
    """Logits and sums are in float32 at least."""
    return jnp.promote_types(hidden.dtype, jnp.float32)


def _inverse_temperature(
    temperature: float | jax.Array, target: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    if isinstance(temperature, (int, float)) and not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    inverse = 1.0 / jnp.asarray(temperature, dtype)
    return jax.lax.stop_gradient(jnp.broadcast_to(inverse, target.shape))


# --- chunks -----------------------------------------------------------------------------------


def _split(x: jax.Array, axis: int, chunk: int, n: int) -> jax.Array:
    """Cut `axis` into [n, chunk] (padded with zeros) and move the chunk index to the front."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, n * chunk - x.shape[axis])
    x = jnp.pad(x, pad).reshape(*x.shape[:axis], n, chunk, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _join(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Undo `_split`."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def _logits(hidden: jax.Array, kernel: jax.Array, inverse: jax.Array) -> jax.Array:
    logits = jnp.matmul(hidden, kernel, preferred_element_type=inverse.dtype)
    return logits.astype(inverse.dtype) * inverse[..., None]


def _own_ids(target: jax.Array, vocab: int, axis: str | None) -> jax.Array:
    """Ids counted from the first column of this device's part of the vocabulary."""
    return target if axis is None else target - jax.lax.axis_index(axis) * vocab


def _is_target(target: jax.Array, vocab: int, axis: str | None = None) -> jax.Array:
    target = _own_ids(target, vocab, axis)
    ids = jax.lax.broadcasted_iota(target.dtype, (*target.shape, vocab), target.ndim)
    return ids == target[..., None]


def _total(x: jax.Array, axis: str | None) -> jax.Array:
    """Sum over the vocabulary, with the parts of other devices."""
    part = jnp.sum(x, axis=-1)
    return part if axis is None else jax.lax.psum(part, axis)


def _top(logits: jax.Array, axis: str | None) -> jax.Array:
    part = jnp.max(logits, axis=-1, keepdims=True)
    return part if axis is None else jax.lax.pmax(part, axis)


def _log_softmax(logits: jax.Array, axis: str | None) -> jax.Array:
    if axis is None:
        return jax.nn.log_softmax(logits, axis=-1)
    shifted = logits - _top(logits, axis)
    return shifted - jnp.log(_total(jnp.exp(shifted), axis))[..., None]


def _forward_chunk(
    hidden: jax.Array,
    kernel: jax.Array,
    target: jax.Array,
    inverse: jax.Array,
    axis: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log-prob, entropy, and the two parts of the logsumexp: the largest logit and the rest."""
    logits = _logits(hidden, kernel, inverse)
    vocab = logits.shape[-1]
    top = _top(logits, axis)
    shifted = logits - top
    exp = jnp.exp(shifted)
    total = _total(exp, axis)
    log_total = jnp.log(total)
    picked = _total(jnp.where(_is_target(target, vocab, axis), shifted, 0.0), axis)
    outside = (target < 0) | (target >= vocab * (1 if axis is None else jax.lax.axis_size(axis)))
    picked = jnp.where(outside, -top[..., 0], picked)
    entropy = log_total - _total(exp * shifted, axis) / total
    return picked - log_total, entropy, top[..., 0], log_total


def _head_gradients(
    hidden: jax.Array, kernel: jax.Array, dlogits: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients by the hidden states and by the head, in float32 at least."""
    low = dlogits.astype(kernel.dtype)
    dhidden = jnp.matmul(low, kernel.T, preferred_element_type=_accum(hidden))
    leading = tuple(range(hidden.ndim - 1))
    dkernel = jax.lax.dot_general(
        hidden, low, ((leading, leading), ((), ())), preferred_element_type=_accum(hidden)
    )
    return dhidden, dkernel


# --- log-prob and entropy, with recomputation -------------------------------------------------


def _forward(
    how: _TwoPasses, hidden: jax.Array, kernel: jax.Array, target: jax.Array, inverse: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`_forward_chunk` of every chunk."""
    chunk, _, name = how
    axis, length = target.ndim - 1, target.shape[-1]
    if length <= chunk:
        return _forward_chunk(hidden, kernel, target, inverse, name)
    n = math.ceil(length / chunk)
    parts = [_split(x, axis, chunk, n) for x in (hidden, target, inverse)]
    found = jax.lax.map(lambda p: _forward_chunk(p[0], kernel, p[1], p[2], name), parts)
    logprob, entropy, top, log_total = (_join(x, axis, length) for x in found)
    return logprob, entropy, top, log_total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprob(
    how: _TwoPasses, hidden: jax.Array, kernel: jax.Array, target: jax.Array, inverse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logprob, entropy, _, _ = _forward(how, hidden, kernel, target, inverse)
    return logprob, entropy


def _logprob_fwd(
    how: _TwoPasses, *primals: CustomVJPPrimal
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    hidden, kernel, target, inverse = (x.value for x in primals)
    logprob, entropy, top, log_total = _forward(how, hidden, kernel, target, inverse)
    # With these a chunk's probabilities follow from its logits without a sum over the vocabulary.
    return (logprob, entropy), (hidden, kernel, target, inverse, top, log_total, entropy)


def _dlogits(
    log_p: jax.Array,
    ids: jax.Array,
    g: jax.Array,
    entropy: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """dz of `linear_logprob` for cotangents g and, with the entropy itself, e."""
    weight = g[..., None]
    if entropy is not None:
        e, of_token = entropy
        weight = weight + e[..., None] * (log_p + of_token[..., None])
    hit = jnp.where(_is_target(ids, log_p.shape[-1]), g[..., None], 0.0)
    return hit - jnp.exp(log_p) * weight


def _block(vocab: int, most: int) -> int:
    """Columns of a block: the largest divisor up to `most`; all where that would be small."""
    size = next(n for n in range(min(vocab, most), 0, -1) if vocab % n == 0)
    return size if 8 * size >= most else vocab


def _logprob_bwd(
    how: _TwoPasses,
    residual: tuple[jax.Array, ...],
    cotangent: tuple[jax.Array | SymbolicZero, jax.Array | SymbolicZero],
) -> tuple[jax.Array, jax.Array, None, None]:
    hidden, kernel, target, inverse, *sums = residual
    g, e = (
        jnp.zeros(x.shape, inverse.dtype) if isinstance(x, SymbolicZero) else x for x in cotangent
    )
    longest, columns, name = how
    axis, length, vocab = target.ndim - 1, target.shape[-1], kernel.shape[-1]
    block = _block(vocab, columns)

    def masked(part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """Which tokens are read, and the hidden states of those."""
        # A masked token has no cotangent; whatever its state holds must not reach the head.
        hidden, _, _, g, e, *_ = part
        read = (g != 0) | (e != 0)
        return read, jnp.where(read[..., None], hidden, 0)

    def whole(part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        _, ids, inverse, g, e, *_ = part
        _, hidden = masked(part)
        # A small vocabulary makes its sums anew, in the order that replays are bit-equal to.
        log_p = _log_softmax(_logits(hidden, kernel, inverse), name)
        entropy = -_total(jnp.exp(log_p) * log_p, name)
        dlogits = _dlogits(log_p, ids, g, (e, entropy))
        dhidden, dkernel = _head_gradients(hidden, kernel, dlogits * inverse[..., None])
        return dhidden.astype(hidden.dtype), dkernel

    def by_blocks(total: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        _, ids, inverse, g, e, *sums = part
        read, hidden = masked(part)
        top, log_total, entropy = (jnp.where(read, x, 0) for x in sums)
        # A loss that does not depend on the entropy leaves its sums out of the program.
        of_entropy = None if isinstance(cotangent[1], SymbolicZero) else (e, entropy)

        def add_block(
            carry: tuple[jax.Array, jax.Array], at: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            total, dhidden = carry
            own = jax.lax.dynamic_slice_in_dim(kernel, at, block, axis=1)
            log_p = _logits(hidden, own, inverse) - top[..., None] - log_total[..., None]
            dlogits = _dlogits(log_p, ids.astype(at.dtype) - at, g, of_entropy)
            more, dkernel = _head_gradients(hidden, own, dlogits * inverse[..., None])
            dkernel += jax.lax.dynamic_slice_in_dim(total, at, block, axis=1)
            total = jax.lax.dynamic_update_slice_in_dim(total, dkernel, at, axis=1)
            return (total, dhidden + more), None

        zeros = vary_like(jnp.zeros(hidden.shape, inverse.dtype), kernel, *part)
        starts = jnp.arange(0, vocab, block, dtype=jnp.int32)
        (total, dhidden), _ = jax.lax.scan(add_block, (total, zeros), starts)
        return total, dhidden.astype(hidden.dtype)

    def step(total: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        if block < vocab:
            return by_blocks(total, part)
        dhidden, dkernel = whole(part)
        return total + dkernel, dhidden

    per_token = (hidden, _own_ids(target, vocab, name), inverse, g, e, *sums)
    if length <= longest and block == vocab:
        dhidden, dkernel = whole(per_token)
        return dhidden, dkernel.astype(kernel.dtype), None, None
    chunk = longest
    if block < vocab:
        # In the room of a chunk's logits there is space for those of so many chunks by a block, and
        # each run of them is added to the head's whole gradient once. Runs are even: padding costs.
        most = longest * min(_RUN, vocab // block)
        chunk = math.ceil(length / math.ceil(length / most))
    n = math.ceil(length / chunk)
    parts = tuple(_split(x, axis, chunk, n) for x in per_token)
    start = vary_like(jnp.zeros(kernel.shape, inverse.dtype), kernel, *parts)
    dkernel, dhidden = jax.lax.scan(step, start, parts)
    return _join(dhidden, axis, length), dkernel.astype(kernel.dtype), None, None


_logprob.defvjp(_logprob_fwd, _logprob_bwd, symbolic_zeros=True)


# --- cross-entropy, loss and gradient in one pass ---------------------------------------------


def _loss_chunk(
    hidden: jax.Array,
    kernel: jax.Array,
    target: jax.Array,
    weight: jax.Array,
    inverse: jax.Array,
    axis: str | None,
) -> jax.Array:
    logprob, *_ = _forward_chunk(hidden, kernel, target, inverse, axis)
    return -jnp.sum(jnp.where(weight != 0, weight * logprob, 0.0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    how: _How,
    hidden: jax.Array,
    kernel: jax.Array,
    target: jax.Array,
    weight: jax.Array,
    inverse: jax.Array,
) -> jax.Array:
    chunk, name = how
    axis, length = target.ndim - 1, target.shape[-1]
    if length <= chunk:
        return _loss_chunk(hidden, kernel, target, weight, inverse, name)
    n = math.ceil(length / chunk)
    parts = [_split(x, axis, chunk, n) for x in (hidden, target, weight, inverse)]

    def one(part: list[jax.Array]) -> jax.Array:
        hidden, target, weight, inverse = part
        return _loss_chunk(hidden, kernel, target, weight, inverse, name)

    return jnp.sum(jax.lax.map(one, parts))


def _cross_entropy_fwd(
    how: _How,
    hidden: jax.Array,
    kernel: jax.Array,
    target: jax.Array,
    weight: jax.Array,
    inverse: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    def both(
        hidden: jax.Array, target: jax.Array, weight: jax.Array, inverse: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        read = weight != 0
        hidden = jnp.where(read[..., None], hidden, 0)
        log_p = _log_softmax(_logits(hidden, kernel, inverse), name)
        hit = _is_target(target, log_p.shape[-1], name)
        logprob = _total(jnp.where(hit, log_p, 0.0), name)
        loss = -jnp.sum(jnp.where(read, weight * logprob, 0.0))
        dlogits = (weight * inverse)[..., None] * (jnp.exp(log_p) - hit)
        dhidden, dkernel = _head_gradients(hidden, kernel, dlogits)
        return loss, dhidden.astype(hidden.dtype), dkernel

    chunk, name = how
    axis, length = target.ndim - 1, target.shape[-1]
    if length <= chunk:
        loss, dhidden, dkernel = both(hidden, target, weight, inverse)
        return loss, (dhidden, dkernel.astype(kernel.dtype))
    n = math.ceil(length / chunk)
    parts = tuple(_split(x, axis, chunk, n) for x in (hidden, target, weight, inverse))

    def step(
        carry: tuple[jax.Array, jax.Array], part: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        loss, dhidden, dkernel = both(*part)
        return (carry[0] + loss, carry[1] + dkernel), dhidden

    # The loss is summed over the vocabulary's axis in each chunk, so it does not vary over it.
    start = (
        vary_like(jnp.zeros((), inverse.dtype), target, weight),
        vary_like(jnp.zeros(kernel.shape, inverse.dtype), kernel, *parts),
    )
    (loss, dkernel), dhidden = jax.lax.scan(step, start, parts)
    return loss, (_join(dhidden, axis, length), dkernel.astype(kernel.dtype))


def _cross_entropy_bwd(
    how: _How, residual: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None, None, None]:
    del how
    dhidden, dkernel = residual
    return (
        (cotangent * dhidden).astype(dhidden.dtype),
        (cotangent * dkernel).astype(dkernel.dtype),
        None,
        None,
        None,
    )


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)
