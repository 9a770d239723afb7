"""Blocks that every layer is made of. Modules only hold parameters and define the forward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from trsi_jax.model.config import ModelConfig


def fan_in_normal(
    key: jax.Array, shape: tuple[int, ...], fan_in: int, dtype: str, scale: float = 1.0
) -> jax.Array:
    """Normal draw of standard deviation scale * fan_in^-1/2.

    Args:
      key: PRNG key.
      shape: of the result.
      fan_in: inputs that one output sums over.
      dtype: of the result.
      scale: factor on the standard deviation.

    Returns:
      An array of `shape`.

    Source: our reading.
    """
    std: float = scale * fan_in**-0.5
    return jax.random.normal(key, shape, dtype) * std


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
        self.scale = nnx.Param(jnp.full((dim,), 1.0 - offset, config.param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., dim] -> [..., dim] in the compute dtype."""
        weight = self.scale[...].astype(self.config.accum_dtype) + self.offset
        y = rms_norm(x, weight, eps=self.config.norm_eps, accum_dtype=self.config.accum_dtype)
        return y.astype(self.config.compute_dtype)


class Projection(nnx.Module):  # type: ignore[misc]
    """Bias-free linear map from the last `in_axes` axes to `out_shape`; kernel [*in, *out]."""

    def __init__(
        self,
        config: ModelConfig,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        *,
        rngs: nnx.Rngs,
        scale: float = 1.0,
    ) -> None:
        self.config = config
        self.in_axes = len(in_shape)
        fan_in = 1
        for dim in in_shape:
            fan_in *= dim
        self.kernel = nnx.Param(
            fan_in_normal(rngs.params(), (*in_shape, *out_shape), fan_in, config.param_dtype, scale)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *in] -> [..., *out] in the compute dtype."""
        kernel = self.kernel[...].astype(self.config.compute_dtype)
        return jnp.tensordot(x.astype(self.config.compute_dtype), kernel, axes=self.in_axes)


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

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        hidden, inner = (config.hidden_size,), (config.intermediate_size,)
        self.gate_proj = Projection(config, hidden, inner, rngs=rngs)
        self.up_proj = Projection(config, hidden, inner, rngs=rngs)
        self.down_proj = Projection(
            config, inner, hidden, rngs=rngs, scale=config.init.output_scale
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Embedding(nnx.Module):  # type: ignore[misc]
    """Token embedding, [V, D]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedding = nnx.Param(
            jax.random.normal(
                rngs.params(), (config.vocab_size, config.hidden_size), config.param_dtype
            )
            * config.init.embed_std
        )

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """[...] int -> [..., D] in the compute dtype."""
        rows: jax.Array = self.embedding[...][token_ids]
        return rows.astype(self.config.compute_dtype)
