"""Blocks that every layer is made of. Modules only hold parameters and define the forward pass."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from trsi_jax.model.config import ModelConfig


class Draws:
    """Random numbers for the parameters of one module, handed out from one flat normal draw.

    One draw for all tensors keeps the compiled initialiser small: a generator a tensor takes many
    times as long to compile. Without numbers it hands out zeros, to learn shapes and counts.
    """

    def __init__(self, numbers: jax.Array | None = None) -> None:
        self.numbers = numbers
        self.used = 0

    def normal(self, shape: tuple[int, ...], std: float, dtype: str) -> jax.Array:
        """N(0, std^2)."""
        start, self.used = self.used, self.used + math.prod(shape)
        if self.numbers is None:
            return jnp.zeros(shape, dtype)
        return (self.numbers[start : self.used].reshape(shape) * std).astype(dtype)

    def uniform(self, shape: tuple[int, ...], low: float, high: float, dtype: str) -> jax.Array:
        """U(low, high), as the quantile of a normal number."""
        quantile = jax.scipy.stats.norm.cdf(self.normal(shape, 1.0, dtype))
        return (low + (high - low) * quantile).astype(dtype)


def as_tokens(x: jax.Array) -> jax.Array:
    """[..., n] as a list of tokens [N, n].

    The gradient of what all tokens share sums over them. XLA's CPU compiler is fast where they
    are one axis, the first, and slow where they are two or more (jaxlib 0.10.2).
    """
    return x.reshape(-1, x.shape[-1])


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, accum_dtype: str) -> jax.Array:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis.

    Args:
      x: [..., d] float.
      weight: [d] float, the whole factor (an offset is already added).
      eps: added to the mean of squares.
      accum_dtype: dtype of the computation and of the result.

    Returns:
      [..., d] of `accum_dtype`.

    Source: the `qwen3_5` architecture.
    """
    x = x.astype(accum_dtype)
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * weight.astype(accum_dtype)


class RMSNorm(nnx.Module):  # type: ignore[misc]
    """x / rms(x) * (offset + scale), computed in the accumulation dtype and cast last."""

    def __init__(self, config: ModelConfig, dim: int, *, offset: float) -> None:
        self.config = config
        self.offset = offset
        self.scale = nnx.Param(jnp.full((dim,), 1.0 - offset, config.vector_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., dim] -> [..., dim] in the compute dtype."""
        weight = self.scale[...].astype(self.config.accum_dtype) + self.offset
        tokens = as_tokens(x)
        y = rms_norm(tokens, weight, eps=self.config.norm_eps, accum_dtype=self.config.accum_dtype)
        return y.astype(self.config.compute_dtype).reshape(x.shape)


class Projection(nnx.Module):  # type: ignore[misc]
    """Bias-free linear map from the last `in_axes` axes to `out_shape`; kernel [*in, *out]."""

    def __init__(
        self,
        config: ModelConfig,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        *,
        draws: Draws,
        scale: float = 1.0,
    ) -> None:
        self.config = config
        self.in_axes = len(in_shape)
        std = scale * math.prod(in_shape) ** -0.5
        self.kernel = nnx.Param(draws.normal((*in_shape, *out_shape), std, config.param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *in] -> [..., *out] in the compute dtype."""
        kernel = self.kernel[...].astype(self.config.compute_dtype)
        x = x.astype(self.config.compute_dtype)
        # Matrices and nothing else: of operands with more axes XLA's CPU compiler makes transposed
        # copies for the gradient by the kernel, which take as long as the product.
        lead, out = x.shape[: x.ndim - self.in_axes], kernel.shape[self.in_axes :]
        matrix = kernel.reshape(-1, math.prod(out))
        return jnp.dot(x.reshape(-1, matrix.shape[0]), matrix).reshape(*lead, *out)


def copying_output(config: ModelConfig, value: Projection, output: Projection) -> None:
    """Start `output` as `config.init.copy_scale` times the transpose of `value`, if that is set.

    A mixer then adds about the input of what it reads, and copying need not wait until two random
    maps have found each other. A value head that several output heads share is repeated.
    """
    if config.init.copy_scale is None:
        return
    transposed = jnp.moveaxis(value.kernel[...], 0, -1)
    repeats = output.kernel.shape[0] // transposed.shape[0]
    output.kernel[...] = config.init.copy_scale * jnp.repeat(transposed, repeats, axis=0)


class SwiGLU(nnx.Module):  # type: ignore[misc]
    """W_down (silu(W_gate x) * (W_up x))."""

    def __init__(self, config: ModelConfig, *, draws: Draws) -> None:
        hidden, inner = (config.hidden_size,), (config.intermediate_size,)
        self.gate_proj = Projection(config, hidden, inner, draws=draws)
        self.up_proj = Projection(config, hidden, inner, draws=draws)
        self.down_proj = Projection(
            config, inner, hidden, draws=draws, scale=config.init.output_scale
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Embedding(nnx.Module):  # type: ignore[misc]
    """Token embedding, [V, D]."""

    def __init__(self, config: ModelConfig, *, draws: Draws) -> None:
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        std = config.init.embed_std
        self.embedding = nnx.Param(draws.normal(shape, std, config.param_dtype))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """[...] int -> [..., D] in the compute dtype."""
        rows: jax.Array = self.embedding[...][token_ids]
        return rows.astype(self.config.compute_dtype)
