"""The decoder on a mesh: one program for every device, with its communication written out.

Inside `jax.shard_map` a device holds its part of each parameter and of the rows. Between layers the
residual stream is cut over tokens by `sequence` and `tensor`; a mixer or an MLP gathers the tokens
over `tensor`, works on its heads or channels, and sums and cuts the result in one reduce-scatter.
Parameters cut by FSDP are gathered in the compute dtype when a layer needs them, again in the
backward pass, and their gradients are reduce-scattered in float32. Over `sequence` attention
gathers keys and values, and the gated delta rule passes its state on. The maths of a layer is that
of `model.decoder`'s modules, with the head counts of one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from sharding.layouts import FSDP, ROWS, decoder_rules
from sharding.mesh import AXES, vary_like, vary_over
from sharding.rules import axes_of, specs
from trsi_jax import model
from trsi_jax.losses.linear import CHUNK, COLUMNS, linear_cross_entropy, linear_logprob
from trsi_jax.model.blockwise import BLOCK as ATTEND_BLOCK
from trsi_jax.model.blockwise import attend_blockwise, longest_divisor
from trsi_jax.model.decoder import AttentionLayer, GatedDeltaLayer, bind
from trsi_jax.model.gated_delta import causal_conv
from trsi_jax.model.layers import RMSNorm

_BATCH = ("data", "fsdp")

BLOCK = 2048
"""Tokens of the delta rule that are worked on, and kept for its backward pass, at a time."""


@dataclass(frozen=True)
class ShardedModel:
    """A model on a mesh.

    Attributes:
      config: of the whole model.
      mesh: of `sharding.mesh.make_mesh`; without devices it does for shapes and specs.
      chunk: tokens of one row a chunk of the linear head.
      block: longest run of a row's tokens that a mixer works on at a time.
      columns: of the linear head that its backward pass of PPO takes at a time, at most.
    """

    config: model.ModelConfig
    mesh: Mesh | AbstractMesh
    chunk: int = CHUNK
    block: int = BLOCK
    columns: int = COLUMNS

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis."""
        return dict(self.mesh.shape)

    def check(self, rows: int, length: int) -> None:
        """Refuse what the mesh does not divide.

        Args:
          rows: of one micro-batch.
          length: tokens of a row.

        Raises:
          ValueError: names the dimension and the axes.
        """
        c, size = self.config, self.sizes
        tensor = size["tensor"]
        named = {
            "attention heads": c.num_heads,
            "MLP channels": c.intermediate_size,
            "vocabulary": c.vocab_size,
        }
        if c.uses_gdn:
            named |= {"GDN key heads": c.gdn_key_heads, "GDN value heads": c.gdn_value_heads}
        for what, number in named.items():
            if number % tensor:
                raise ValueError(f"mesh axis 'tensor' of {tensor} does not divide {number} {what}")
        batch = size["data"] * size["fsdp"]
        if rows % batch:
            raise ValueError(
                f"mesh axes 'data' x 'fsdp' of {batch} do not divide {rows} rows of a micro-batch"
            )
        cut = size["sequence"] * tensor
        if length % cut:
            raise ValueError(
                f"mesh axes 'sequence' x 'tensor' of {cut} do not divide rows of {length} tokens"
            )

    def specs(self, tree: Any) -> Any:
        """PartitionSpecs of a tree of parameters or of a whole train state."""
        rules = decoder_rules(
            tensor=self.sizes["tensor"],
            kv_heads=self.config.num_kv_heads,
            gated_attention=self.config.gated_attention,
        )
        return specs(rules, tree, self.sizes)

    @property
    def local(self) -> model.ModelConfig:
        """The model as one device sees it inside a layer."""
        c, tensor = self.config, self.sizes["tensor"]
        return replace(
            c,
            num_heads=c.num_heads // tensor,
            num_kv_heads=max(c.num_kv_heads // tensor, 1),
            gdn_key_heads=c.gdn_key_heads // tensor,
            gdn_value_heads=c.gdn_value_heads // tensor,
            # Products only: a triangular solve is slow on a TPU, and slower to compile for it.
            gdn_solver="ladder",
        )


def logprobs(
    sharded: ShardedModel,
    params: Any,
    token_ids: jax.Array,
    segment_ids: jax.Array,
    position_ids: jax.Array,
    target: jax.Array,
    *,
    temperature: float,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of the targets and entropy, as `losses.linear_logprob` of the hidden states.

    Args:
      sharded: the model on its mesh.
      params: tree of `model.init_params`, placed by `sharded.specs`.
      token_ids: [R, T] int.
      segment_ids: [R, T] int, 0 on padding.
      position_ids: [R, T] int.
      target: [R, T] int, predictor-aligned.
      temperature: of the softmax, > 0.

    Returns:
      (logprob, entropy), each [R, T] float32, predictor-aligned.
    """

    def head(hidden: jax.Array, params: Any, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        kernel = _head(sharded, params, spec)
        return linear_logprob(
            hidden,
            kernel,
            target,
            temperature=temperature,
            chunk=sharded.chunk,
            columns=sharded.columns,
            axis_name="tensor",
        )

    spec = sharded.specs(params)
    logprob, entropy = _on_mesh(sharded, spec, head, (ROWS, ROWS), params, token_ids, segment_ids,
                                position_ids, target)  # fmt: skip
    return logprob, entropy


def cross_entropy(
    sharded: ShardedModel,
    params: Any,
    token_ids: jax.Array,
    segment_ids: jax.Array,
    position_ids: jax.Array,
    target: jax.Array,
    weight: jax.Array,
) -> jax.Array:
    """-sum_t w_t log p_t over all rows, loss and gradient in one pass over the tokens.

    Args:
      sharded: the model on its mesh.
      params: tree of `model.init_params`, placed by `sharded.specs`.
      token_ids: [R, T] int.
      segment_ids: [R, T] int, 0 on padding.
      position_ids: [R, T] int.
      target: [R, T] int, predictor-aligned.
      weight: [R, T] float, predictor-aligned; holds mask and denominator.

    Returns:
      [] float32.
    """

    def head(
        hidden: jax.Array, params: Any, target: jax.Array, weight: jax.Array
    ) -> tuple[jax.Array]:
        kernel = _head(sharded, params, spec)
        loss = linear_cross_entropy(
            hidden, kernel, target, weight, chunk=sharded.chunk, axis_name="tensor"
        )
        return (lax.psum(loss, (*_BATCH, "sequence")),)

    spec = sharded.specs(params)
    loss: jax.Array
    (loss,) = _on_mesh(sharded, spec, head, (P(),), params, token_ids, segment_ids, position_ids,
                       target, weight)  # fmt: skip
    return loss


def values(
    sharded: ShardedModel,
    params: Any,
    token_ids: jax.Array,
    segment_ids: jax.Array,
    position_ids: jax.Array,
) -> jax.Array:
    """V_t = w . h_t + b, as `model.values`.

    Args:
      sharded: the model on its mesh.
      params: tree of `model.init_value_params`, placed by `sharded.specs`.
      token_ids: [R, T] int.
      segment_ids: [R, T] int, 0 on padding.
      position_ids: [R, T] int.

    Returns:
      [R, T] float32, predictor-aligned.
    """

    def head(hidden: jax.Array, params: Any) -> tuple[jax.Array]:
        dtype = jnp.promote_types(hidden.dtype, jnp.float32)
        kernel = params["value_head"]["kernel"].astype(dtype)
        product = jnp.sum(hidden.astype(dtype) * kernel, axis=-1)
        return (product + params["value_head"]["bias"].astype(dtype),)

    spec = sharded.specs(params)
    cut = P(_BATCH, ("sequence", "tensor"))
    value: jax.Array
    (value,) = _on_mesh(sharded, spec, head, (cut,), params, token_ids, segment_ids, position_ids,
                        gather=False)  # fmt: skip
    return value


def _on_mesh(
    sharded: ShardedModel,
    spec: Any,
    head: Callable[..., Any],
    out_specs: tuple[P, ...],
    params: Any,
    token_ids: jax.Array,
    segment_ids: jax.Array,
    position_ids: jax.Array,
    *per_token: jax.Array,
    gather: bool = True,
) -> Any:
    """`head` of the hidden states, on every device; with `gather` it sees all of a row's part."""

    def local(params: Any, *arrays: jax.Array) -> Any:
        tokens, segments, positions, *rest = arrays
        hidden = _trunk(sharded, params, spec, tokens, segments, positions)
        if gather:
            hidden = lax.all_gather(hidden, "tensor", axis=1, tiled=True)
        return head(hidden, params, *rest)

    arrays = (token_ids, segment_ids, position_ids, *per_token)
    mapped = jax.shard_map(
        local,
        mesh=sharded.mesh,
        in_specs=(spec, *([ROWS] * len(arrays))),
        out_specs=out_specs,
    )
    return mapped(params, *arrays)


# --- parameters -------------------------------------------------------------------------------


def _gathered(sharded: ShardedModel, params: Any, spec: Any, stacked: int) -> Any:
    """A layer's parameters, whole but for `tensor`, varying over the whole mesh.

    `stacked` leading dimensions of the specs have been sliced away by scans.
    """
    dtype = sharded.config.compute_dtype

    def one(param: jax.Array, spec: P) -> jax.Array:
        # Its transpose sums the gradient over these axes, in the parameter's own dtype.
        param = vary_over(param, AXES)
        for dimension, entry in enumerate(tuple(spec)[stacked:]):
            if axes_of(entry) == FSDP:
                return _gather(FSDP, dimension, dtype, param)
        return param

    return jax.tree.map(one, params, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(axes: tuple[str, ...], dimension: int, dtype: str, param: jax.Array) -> jax.Array:
    """All-gather in `dtype`; the gradient is summed and cut in the parameter's own dtype."""
    whole: jax.Array = lax.all_gather(param.astype(dtype), axes, axis=dimension, tiled=True)
    return whole


def _gather_fwd(
    axes: tuple[str, ...], dimension: int, dtype: str, param: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _gather(axes, dimension, dtype, param), jnp.zeros((), param.dtype)


def _gather_bwd(
    axes: tuple[str, ...], dimension: int, dtype: str, like: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array]:
    del dtype
    whole = cotangent.astype(like.dtype)
    return (lax.psum_scatter(whole, axes, scatter_dimension=dimension, tiled=True),)


_gather.defvjp(_gather_fwd, _gather_bwd)


def _head(sharded: ShardedModel, params: Any, spec: Any) -> jax.Array:
    """[D, V / tensor], the head's columns of this device."""
    if sharded.config.tie_embeddings:
        embed = _gathered(sharded, params["embed"], spec["embed"], 0)
        return jnp.transpose(embed["embedding"])
    kernel: jax.Array = _gathered(sharded, params["lm_head"], spec["lm_head"], 0)["kernel"]
    return kernel


# --- layers -----------------------------------------------------------------------------------


def _trunk(
    sharded: ShardedModel,
    params: Any,
    spec: Any,
    token_ids: jax.Array,
    segment_ids: jax.Array,
    position_ids: jax.Array,
) -> jax.Array:
    """[r, t] of this device -> [r, t / tensor, D] after the final norm."""
    config = sharded.config
    before = _previous(sharded, segment_ids, 1)
    row = lax.all_gather(segment_ids, "sequence", axis=1, tiled=True)

    def linear(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        def block(x: jax.Array, layer: Any) -> jax.Array:
            whole = _gathered(sharded, layer, spec["groups"]["gdn"], 2)
            return _gated_delta_layer(sharded, x, whole, segment_ids, before)

        # Forward and backward are loops of their own, so nothing can be merged across them.
        return jax.checkpoint(block, prevent_cse=False)(x, layer), None

    def full(x: jax.Array, layer: Any) -> jax.Array:
        whole = _gathered(sharded, layer, spec["groups"]["attention"], 1)
        return _attention_layer(sharded, x, whole, segment_ids, row, position_ids)

    def group(x: jax.Array, layers: Any) -> tuple[jax.Array, None]:
        if config.uses_gdn:
            x, _ = lax.scan(linear, x, layers["gdn"])
        return jax.checkpoint(full, prevent_cse=False)(x, layers["attention"]), None

    x = _embed(sharded, params["embed"], token_ids)
    x, _ = lax.scan(group, x, params["groups"])
    norm = _gathered(sharded, params["final_norm"], spec["final_norm"], 0)
    hidden: jax.Array = bind(RMSNorm, config, norm)(x)
    return hidden


def _embed(sharded: ShardedModel, params: Any, token_ids: jax.Array) -> jax.Array:
    """[r, t] -> [r, t / tensor, D]: each device looks up its part of the vocabulary."""
    table = vary_over(params["embedding"], AXES)
    local = token_ids - lax.axis_index("tensor") * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    found = _look_up(sharded.config.compute_dtype, table, jnp.where(mine, local, 0))
    return _sum_and_cut(jnp.where(mine[..., None], found, 0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _look_up(dtype: str, table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a table whose columns are cut by FSDP, in `dtype`.

    The gradient of a row that many tokens share is summed in the table's own dtype.
    """
    whole: jax.Array = lax.all_gather(table.astype(dtype), FSDP, axis=1, tiled=True)
    return whole[ids]


def _look_up_fwd(
    dtype: str, table: jax.Array, ids: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _look_up(dtype, table, ids), (table, ids)


def _look_up_bwd(
    dtype: str, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, None]:
    del dtype
    table, ids = saved
    whole = vary_like(jnp.zeros((table.shape[0], cotangent.shape[-1]), table.dtype), table, ids)
    whole = whole.at[ids].add(cotangent.astype(table.dtype))
    return lax.psum_scatter(whole, FSDP, scatter_dimension=1, tiled=True), None


_look_up.defvjp(_look_up_fwd, _look_up_bwd)


def _sum_and_cut(partial: jax.Array) -> jax.Array:
    """[r, t, D] parts of a sum over `tensor` -> [r, t / tensor, D]."""
    part: jax.Array = lax.psum_scatter(partial, "tensor", scatter_dimension=1, tiled=True)
    return part


def _mlp(sharded: ShardedModel, layer: Any, x: jax.Array) -> jax.Array:
    whole = lax.all_gather(layer.post_norm(x), "tensor", axis=1, tiled=True)
    return x + _sum_and_cut(layer.mlp(whole))


def _previous(sharded: ShardedModel, x: jax.Array, count: int) -> jax.Array:
    """[r, count, ...] last tokens of the sequence shard before this one; zeros for the first."""
    size = sharded.sizes["sequence"]
    last = x[:, x.shape[1] - count :]
    if size == 1:
        return jnp.zeros_like(last)
    pairs = [(i, i + 1) for i in range(size - 1)]
    before: jax.Array = lax.ppermute(last, "sequence", pairs)
    return before


def _attention_layer(
    sharded: ShardedModel,
    x: jax.Array,
    params: Any,
    segment_ids: jax.Array,
    row_segments: jax.Array,
    position_ids: jax.Array,
) -> jax.Array:
    local = sharded.local
    params = _own_kv_heads(sharded, params)
    layer = bind(AttentionLayer, local, params)
    whole = lax.all_gather(layer.input_norm(x), "tensor", axis=1, tiled=True)
    query, gate, key, value = layer.mixer.project(whole, position_ids)
    start: jax.Array | int = 0
    if sharded.sizes["sequence"] > 1:
        key = lax.all_gather(key, "sequence", axis=1, tiled=True)
        value = lax.all_gather(value, "sequence", axis=1, tiled=True)
        start = lax.axis_index("sequence") * query.shape[1]
    mixed = attend_blockwise(
        query, key, value, segment_ids, row_segments, start, block=min(sharded.block, ATTEND_BLOCK)
    )
    x = x + _sum_and_cut(layer.mixer.finish(mixed, gate))
    return _mlp(sharded, layer, x)


def _own_kv_heads(sharded: ShardedModel, params: Any) -> Any:
    """Where keys and values are whole over a wider `tensor`, the one head of this device."""
    tensor, heads = sharded.sizes["tensor"], sharded.config.num_kv_heads
    if heads % tensor == 0:
        return params
    mine = lax.axis_index("tensor") * heads // tensor
    mixer = dict(params["mixer"])
    for name in ("k_proj", "v_proj"):
        kernel = lax.dynamic_slice_in_dim(mixer[name]["kernel"], mine, 1, axis=1)
        mixer[name] = {"kernel": kernel}
    return {**params, "mixer": mixer}


def _gated_delta_layer(
    sharded: ShardedModel,
    x: jax.Array,
    params: Any,
    segment_ids: jax.Array,
    segment_before: jax.Array,
) -> jax.Array:
    layer = bind(GatedDeltaLayer, sharded.local, params)
    mixer = layer.mixer
    whole = lax.all_gather(layer.input_norm(x), "tensor", axis=1, tiled=True)
    real = segment_ids != 0
    first = lax.axis_index("sequence") == 0
    # As `segment_starts`, but the token before this shard's first may be the neighbour's.
    at_start = jnp.where(first, segment_ids[:, :1], segment_before)
    shifted = jnp.concatenate([at_start, segment_ids[:, :-1]], axis=1)
    reset = (segment_ids != shifted) & real
    inputs, z, a, b = mixer.project(whole)
    inputs = jnp.where(real[..., None], inputs, 0)
    taps = sharded.config.conv_width - 1
    tail = _previous(sharded, inputs, taps)
    # Of the neighbour's tokens only those of its last segment go on here.
    same = _previous(sharded, segment_ids, taps) == segment_before
    tail = jnp.where(same[..., None], tail, 0)
    mixed = causal_conv(inputs, mixer.conv_weight(), reset, tail=tail)
    query, key, value = mixer.heads(mixed)
    log_decay, beta = mixer.gates(a, b)
    log_decay = jnp.where(real[..., None], log_decay, 0)
    beta = jnp.where(real[..., None], beta, 0)
    output = _recur(sharded, mixer, query, key, value, log_decay, beta, reset)
    x = x + _sum_and_cut(mixer.finish(output, z))
    return _mlp(sharded, layer, x)


def _recur(
    sharded: ShardedModel,
    mixer: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    reset: jax.Array,
) -> jax.Array:
    """The delta rule of a shard, with the state that enters it from the shards before.

    The rule is affine in the entering state: S_out = M S_in + B and o_t = o0_t + P_t S_in. With
    values [v | 0] and entering state [0 | I] one call yields [o0 | P] and [B | M]; the shards then
    exchange B and M, [dk, dv + dk] a head, and each folds those before it.
    """
    batch, _, heads, dv = value.shape
    dk = key.shape[-1]
    like = (query, value, log_decay, reset)
    size = sharded.sizes["sequence"]
    output: jax.Array
    zeros = vary_like(jnp.zeros((batch, heads, dk, dv), value.dtype), *like)
    if size == 1:
        tokens = (query, key, value, log_decay, beta, reset)
        output, _ = _recur_by_blocks(sharded, mixer, tokens, zeros)
        return output
    unit = jnp.broadcast_to(jnp.eye(dk, dtype=value.dtype), (batch, heads, dk, dk))
    start = jnp.concatenate([zeros, vary_like(unit, *like)], axis=-1)
    wide = jnp.concatenate([value, jnp.zeros((*value.shape[:-1], dk), value.dtype)], axis=-1)
    tokens = (query, key, wide, log_decay, beta, reset)
    output, last = _recur_by_blocks(sharded, mixer, tokens, start)
    shards = lax.all_gather(last, "sequence")  # [shards, B, H, dk, dv + dk]
    mine = lax.axis_index("sequence")

    def fold(state: jax.Array, shard: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        index, affine = shard
        then = affine[..., :dv] + jnp.matmul(
            affine[..., dv:], state, precision=lax.Precision.HIGHEST
        )
        return jnp.where(index < mine, then, state), None

    state, _ = lax.scan(fold, zeros, (jnp.arange(size), shards))
    read = jnp.einsum("bthk,bhkv->bthv", output[..., dv:], state, precision=lax.Precision.HIGHEST)
    return output[..., :dv] + read


def _recur_by_blocks(
    sharded: ShardedModel, mixer: Any, tokens: tuple[jax.Array, ...], state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`mixer.recur`, block after block; a block's intermediates are made anew for its gradient.

    Per token they take some fifty times the memory of the residual stream.
    """
    batch, length = tokens[0].shape[:2]
    size = longest_divisor(length, sharded.block)

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(batch, length // size, size, *x.shape[2:]), 1, 0)

    def body(state: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        output, last = mixer.recur(*block, state, unroll=1)
        return last, output

    last, blocks = lax.scan(
        jax.checkpoint(body, prevent_cse=False), state, tuple(split(x) for x in tokens)
    )
    output = jnp.moveaxis(blocks, 0, 1)
    return output.reshape(batch, length, *output.shape[3:]), last
