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

from sharding.mesh import vary_like

CHUNK = 512

_How = tuple[int, str | None]


def linear_logprob(
    hidden: jax.Array,
    kernel: jax.Array,
    target: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    chunk: int = CHUNK,
    axis_name: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of the targets and entropy under softmax(hidden kernel / temperature).

      z_t = h_t W / temperature,
      log p_t = z_t[y_t] - logsumexp z_t,   H_t = logsumexp z_t - p_t . z_t.

    The backward pass makes the logits of each chunk anew: for cotangents g_t, e_t

      dz_t = g_t (onehot(y_t) - p_t) - e_t p_t (log p_t + H_t).

    Args:
      hidden: [..., T, D] float, states that predict the targets.
      kernel: [D, V] float, the head.
      target: [..., T] int; an id outside [0, V) gives -logsumexp and must be masked by the caller.
      temperature: scalar > 0, or [..., T]; a constant for differentiation.
      chunk: tokens of the T axis a chunk, >= 1.
      axis_name: inside `jax.shard_map`, the mesh axis that cuts the vocabulary: `kernel` is then
        this device's part, targets stay ids of the whole, and results are the whole's on every
        device; gradients by `hidden` are this device's part of the sum.

    Returns:
      (logprob, entropy), each [..., T] float32; float64 where `hidden` is.

    Raises:
      ValueError: for shapes that do not fit, or chunk < 1.
    """
    _check(hidden, kernel, target, chunk)
    inverse = _inverse_temperature(temperature, target, _accum(hidden))
    return _logprob((chunk, axis_name), hidden, kernel, target, inverse)


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


def _is_target(target: jax.Array, vocab: int, axis: str | None) -> jax.Array:
    if axis is not None:
        target = target - jax.lax.axis_index(axis) * vocab
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
) -> tuple[jax.Array, jax.Array]:
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
    return picked - log_total, entropy


def _head_gradients(
    hidden: jax.Array, kernel: jax.Array, dlogits: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients by the hidden states and (in float32 at least) by the head."""
    low = dlogits.astype(kernel.dtype)
    dhidden = jnp.matmul(low, kernel.T, preferred_element_type=_accum(hidden))
    leading = tuple(range(hidden.ndim - 1))
    dkernel = jax.lax.dot_general(
        hidden, low, ((leading, leading), ((), ())), preferred_element_type=_accum(hidden)
    )
    return dhidden.astype(hidden.dtype), dkernel


# --- log-prob and entropy, with recomputation -------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprob(
    how: _How, hidden: jax.Array, kernel: jax.Array, target: jax.Array, inverse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    chunk, name = how
    axis, length = target.ndim - 1, target.shape[-1]
    if length <= chunk:
        return _forward_chunk(hidden, kernel, target, inverse, name)
    n = math.ceil(length / chunk)
    parts = [_split(x, axis, chunk, n) for x in (hidden, target, inverse)]
    logprob, entropy = jax.lax.map(lambda p: _forward_chunk(p[0], kernel, p[1], p[2], name), parts)
    return _join(logprob, axis, length), _join(entropy, axis, length)


def _logprob_fwd(
    how: _How, hidden: jax.Array, kernel: jax.Array, target: jax.Array, inverse: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    return _logprob(how, hidden, kernel, target, inverse), (
        hidden,
        kernel,
        target,
        inverse,
    )


def _logprob_bwd(
    how: _How, residual: tuple[jax.Array, ...], cotangent: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None, None]:
    hidden, kernel, target, inverse = residual
    g, e = cotangent

    def back(
        hidden: jax.Array, target: jax.Array, inverse: jax.Array, g: jax.Array, e: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # A masked token has no cotangent; whatever its state holds must not reach the head.
        read = (g != 0) | (e != 0)
        hidden = jnp.where(read[..., None], hidden, 0)
        log_p = _log_softmax(_logits(hidden, kernel, inverse), name)
        p = jnp.exp(log_p)
        entropy = -_total(p * log_p, name)[..., None]
        hit = jnp.where(_is_target(target, log_p.shape[-1], name), g[..., None], 0.0)
        dlogits = hit - p * (g[..., None] + e[..., None] * (log_p + entropy))
        return _head_gradients(hidden, kernel, dlogits * inverse[..., None])

    chunk, name = how
    axis, length = target.ndim - 1, target.shape[-1]
    if length <= chunk:
        dhidden, dkernel = back(hidden, target, inverse, g, e)
        return dhidden, dkernel.astype(kernel.dtype), None, None
    n = math.ceil(length / chunk)
    parts = tuple(_split(x, axis, chunk, n) for x in (hidden, target, inverse, g, e))

    def step(total: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        dhidden, dkernel = back(*part)
        return total + dkernel, dhidden

    start = vary_like(jnp.zeros(kernel.shape, inverse.dtype), kernel, *parts)
    dkernel, dhidden = jax.lax.scan(step, start, parts)
    return _join(dhidden, axis, length), dkernel.astype(kernel.dtype), None, None


_logprob.defvjp(_logprob_fwd, _logprob_bwd)


# --- cross-entropy, loss and gradient in one pass ---------------------------------------------


def _loss_chunk(
    hidden: jax.Array,
    kernel: jax.Array,
    target: jax.Array,
    weight: jax.Array,
    inverse: jax.Array,
    axis: str | None,
) -> jax.Array:
    logprob, _ = _forward_chunk(hidden, kernel, target, inverse, axis)
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
        return loss, dhidden, dkernel

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
