"""Full attention with grouped queries, query/key norms, partial rotation and an output gate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trsi_jax.model.blockwise import attend_blockwise
from trsi_jax.model.config import ModelConfig
from trsi_jax.model.layers import Draws, Projection, RMSNorm, copying_output

# Longer rows take the blocks below the diagonal only: half the work, and no [T, T] array.
_WHOLE, _BLOCK = 512, 256


def rotate(
    x: jax.Array, position: jax.Array, *, rotary_dim: int, theta: float, accum_dtype: str
) -> jax.Array:
    """Rotary embedding of the leading dimensions, in the rotate-half form.

    With h = rotary_dim / 2 and angle p * theta^(-j / h): the pair (x_j, x_{j+h}) is rotated.
    For text the three positions of the interleaved multimodal form are equal, so this is it.

    Args:
      x: [..., heads, d] float.
      position: [...] int, position in the segment.
      rotary_dim: how many leading dimensions are rotated, even.
      theta: base of the frequencies.
      accum_dtype: dtype of angles and rotation.

    Returns:
      [..., heads, d] in the dtype of `x`.

    Source: RoFormer (arXiv 2104.09864) in the form of the `qwen3_5` architecture.
    """
    half = rotary_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=accum_dtype) / half)
    angle = position.astype(accum_dtype)[..., None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first = x[..., :half].astype(accum_dtype)
    second = x[..., half:rotary_dim].astype(accum_dtype)
    rotated = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
    if rotary_dim == x.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x[..., rotary_dim:]], axis=-1)


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array, *, accum_dtype: str
) -> jax.Array:
    """Grouped-query attention of one sequence, softmax in the accumulation dtype.

    o_t = sum_s softmax_s(q_t . k_s / sqrt(d)) v_s over visible s; consecutive query heads share
    a key head.

    Args:
      query: [T, Hq, d] float.
      key: [S, Hkv, d] float.
      value: [S, Hkv, d] float.
      visible: [T, S] bool, with at least one true in each row.
      accum_dtype: dtype of scores and softmax.

    Returns:
      [T, Hq, d] in the dtype of `value`.

    Source: Attention Is All You Need (arXiv 1706.03762), GQA (arXiv 2305.13245).
    """
    return _attend(
        query, jnp.moveaxis(key, 1, 0), jnp.moveaxis(value, 1, 0), visible, "gsd", accum_dtype
    )


def attend_cached(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array, *, accum_dtype: str
) -> jax.Array:
    """`attend` to keys and values that lie as both products read them.

    Args:
      query: [T, Hq, d] float.
      key: [Hkv, d, S] float.
      value: [Hkv, S, d] float.
      visible: [T, S] bool, with at least one true in each row.
      accum_dtype: dtype of scores and softmax.

    Returns:
      [T, Hq, d] in the dtype of `value`.

    Source: as `attend`.
    """
    return _attend(query, key, value, visible, "gds", accum_dtype)


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    axes: str,
    accum_dtype: str,
) -> jax.Array:
    length, heads, dim = query.shape
    groups = len(key)
    # Heads first and a group's queries in one matrix: both products are then plain batched ones.
    query = jnp.moveaxis(query, 1, 0).reshape(groups, -1, dim)
    dtype = jnp.dtype(accum_dtype)
    score = jnp.einsum(f"gmd,{axes}->gms", query, key, preferred_element_type=dtype)
    score = score.reshape(heads, length, -1) * dim**-0.5
    weight = jax.nn.softmax(jnp.where(visible, score, -jnp.inf), axis=-1).astype(value.dtype)
    mixed = jnp.einsum("gms,gsd->gmd", weight.reshape(groups, heads // groups * length, -1), value)
    return jnp.moveaxis(mixed.reshape(heads, length, dim), 0, 1)


class Attention(nnx.Module):  # type: ignore[misc]
    """The full-attention mixer, split into what precedes and what follows the attention."""

    def __init__(self, config: ModelConfig, *, draws: Draws) -> None:
        self.config = config
        hidden = (config.hidden_size,)
        heads, kv = config.num_heads, (config.num_kv_heads, config.head_dim)
        # Per head the query comes first and its output gate second.
        query = (heads, 2, config.head_dim) if config.gated_attention else (heads, config.head_dim)
        self.q_proj = Projection(config, hidden, query, draws=draws)
        self.k_proj = Projection(config, hidden, kv, draws=draws)
        self.v_proj = Projection(config, hidden, kv, draws=draws)
        self.o_proj = Projection(
            config,
            (heads, config.head_dim),
            hidden,
            draws=draws,
            scale=config.init.output_scale,
        )
        copying_output(config, self.v_proj, self.o_proj)
        self.q_norm = RMSNorm(config, config.head_dim, offset=config.norm_offset)
        self.k_norm = RMSNorm(config, config.head_dim, offset=config.norm_offset)

    def project(
        self, x: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
        """[..., D] -> rotated query, gate or None, rotated key, value, each [..., heads, d]."""
        query, gate = self.q_proj(x), None
        if self.config.gated_attention:
            query, gate = query[..., 0, :], query[..., 1, :]

        def turn(y: jax.Array) -> jax.Array:
            return rotate(
                y,
                position,
                rotary_dim=self.config.rotary_dim,
                theta=self.config.rope_theta,
                accum_dtype=self.config.accum_dtype,
            )

        return turn(self.q_norm(query)), gate, turn(self.k_norm(self.k_proj(x))), self.v_proj(x)

    def finish(self, mixed: jax.Array, gate: jax.Array | None) -> jax.Array:
        """[..., Hq, d] attention output and its gate -> [..., D]."""
        if gate is not None:
            mixed = mixed * jax.nn.sigmoid(gate)
        return self.o_proj(mixed)

    def __call__(self, x: jax.Array, segment_ids: jax.Array, position_ids: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]; a token sees its own segment up to itself."""
        query, gate, key, value = self.project(x, position_ids)
        length = x.shape[1]
        if length > _WHOLE and length % _BLOCK == 0:
            mixed = attend_blockwise(query, key, value, segment_ids, segment_ids, block=_BLOCK)
            return self.finish(mixed, gate)
        causal = jnp.tril(jnp.ones((length, length), bool))
        # Padding forms a segment of its own, so no row of the softmax is empty.
        visible = causal & (segment_ids[:, :, None] == segment_ids[:, None, :])
        mixed = jax.vmap(
            lambda q, k, v, m: attend(q, k, v, m, accum_dtype=self.config.accum_dtype)
        )(query, key, value, visible)
        return self.finish(mixed, gate)
