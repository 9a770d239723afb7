"""The decoder: groups of gated-delta-net layers and one attention layer, over a plain pytree.

Module definitions are split once per configuration; what flows are nested dicts of arrays, with
one leading axis for the groups and a second for the gated-delta-net layers of a group:
  embed/embedding, groups/gdn/..., groups/attention/..., final_norm/scale, lm_head/kernel.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from trsi_jax.model.attention import Attention
from trsi_jax.model.config import ModelConfig
from trsi_jax.model.gated_delta import (
    UNROLL,
    causal_conv,
    gated_delta_chunked,
    l2_normalize,
    segment_starts,
)
from trsi_jax.model.layers import (
    Draws,
    Embedding,
    Projection,
    RMSNorm,
    SwiGLU,
    as_tokens,
    copying_output,
    rms_norm,
)

Params = dict[str, Any]


class GatedDeltaNet(nnx.Module):  # type: ignore[misc]
    """The gated-delta-net mixer, split into what precedes and what follows the recurrence."""

    def __init__(self, config: ModelConfig, *, draws: Draws) -> None:
        self.config = config
        hidden = (config.hidden_size,)
        key_dims = (config.gdn_key_heads, config.gdn_key_dim)
        value_dims = (config.gdn_value_heads, config.gdn_value_dim)
        heads = config.gdn_value_heads
        init, dtype = config.init, config.vector_dtype
        self.q_proj = Projection(config, hidden, key_dims, draws=draws)
        self.k_proj = Projection(config, hidden, key_dims, draws=draws)
        self.v_proj = Projection(config, hidden, value_dims, draws=draws)
        self.z_proj = Projection(config, hidden, value_dims, draws=draws)
        self.a_proj = Projection(config, hidden, (heads,), draws=draws)
        self.b_proj = Projection(config, hidden, (heads,), draws=draws)
        # The current token is the last tap and the previous one the tap before it.
        self.q_conv = nnx.Param(_init_conv(config, key_dims, config.conv_width - 1, draws))
        self.k_conv = nnx.Param(_init_conv(config, key_dims, config.conv_width - 2, draws))
        self.v_conv = nnx.Param(_init_conv(config, value_dims, config.conv_width - 1, draws))
        self.A_log = nnx.Param(
            jnp.log(draws.uniform((heads,), init.decay_min, init.decay_max, dtype))
        )
        low, high = math.log(init.step_min), math.log(init.step_max)
        step = jnp.exp(draws.uniform((heads,), low, high, dtype))
        self.dt_bias = nnx.Param(step + jnp.log(-jnp.expm1(-step)))
        self.norm = nnx.Param(jnp.ones((config.gdn_value_dim,), dtype))
        self.o_proj = Projection(config, value_dims, hidden, draws=draws, scale=init.output_scale)
        copying_output(config, self.v_proj, self.o_proj)

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """[..., D] -> conv input [..., C], output gate z, decay and write inputs a, b."""
        lead = x.shape[:-1]
        parts = [proj(x).reshape(*lead, -1) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        return jnp.concatenate(parts, axis=-1), self.z_proj(x), self.a_proj(x), self.b_proj(x)

    def conv_weight(self) -> jax.Array:
        """Taps of the short convolution, [K, C], in the compute dtype."""
        taps = self.config.conv_width
        parts = [w[...].reshape(taps, -1) for w in (self.q_conv, self.k_conv, self.v_conv)]
        return jnp.concatenate(parts, axis=-1).astype(self.config.compute_dtype)

    def heads(self, mixed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[..., C] conv output -> query and key [..., Hk, dk], value [..., Hv, dv]."""
        config = self.config
        mixed = jax.nn.silu(mixed).astype(config.accum_dtype)
        width = config.gdn_key_heads * config.gdn_key_dim
        keys = (*mixed.shape[:-1], config.gdn_key_heads, config.gdn_key_dim)
        query = l2_normalize(mixed[..., :width].reshape(keys)) * config.gdn_key_dim**-0.5
        key = l2_normalize(mixed[..., width : 2 * width].reshape(keys))
        values = (*mixed.shape[:-1], config.gdn_value_heads, config.gdn_value_dim)
        return query, key, mixed[..., 2 * width :].reshape(values)

    def gates(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[..., Hv] twice -> log decay g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)."""
        dtype = self.config.accum_dtype
        rate = jnp.exp(self.A_log[...].astype(dtype))
        tokens = as_tokens(a)
        step = jax.nn.softplus(tokens.astype(dtype) + self.dt_bias[...].astype(dtype))
        return (-rate * step).reshape(a.shape), jax.nn.sigmoid(b.astype(dtype))

    def finish(self, output: jax.Array, z: jax.Array) -> jax.Array:
        """[..., Hv, dv] outputs of the rule and their gates -> [..., D]."""
        config = self.config
        normed = rms_norm(
            as_tokens(output),
            self.norm[...],
            eps=config.norm_eps,
            accum_dtype=config.accum_dtype,
        ).reshape(output.shape)
        gated = normed * jax.nn.silu(z.astype(config.accum_dtype))
        return self.o_proj(gated.astype(config.compute_dtype))

    def __call__(self, x: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]; no segment sees another, padding leaves the state alone."""
        real = segment_ids != 0
        reset = jax.vmap(segment_starts)(segment_ids)
        inputs, z, a, b = self.project(x)
        inputs = jnp.where(real[..., None], inputs, 0)
        mixed = causal_conv(inputs, self.conv_weight(), reset)
        query, key, value = self.heads(mixed)
        log_decay, beta = self.gates(a, b)
        log_decay = jnp.where(real[..., None], log_decay, 0)
        beta = jnp.where(real[..., None], beta, 0)

        output, _ = self.recur(query, key, value, log_decay, beta, reset)
        return self.finish(output, z)

    def recur(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        log_decay: jax.Array,
        beta: jax.Array,
        reset: jax.Array,
        state: jax.Array | None = None,
        unroll: int = UNROLL,
    ) -> tuple[jax.Array, jax.Array]:
        """The rule by chunks for all heads: outputs [B, T, Hv, dv] and states [B, Hv, dk, dv].

        query and key [B, T, Hk, dk], value [B, T, Hv, dv], gates [B, T, Hv], reset [B, T].
        """
        config = self.config
        batch, length, heads, dim = value.shape
        repeat = heads // config.gdn_key_heads
        # Heads of all rows form one batch axis: nested ones compile far slower.
        inputs = [
            _by_head(jnp.repeat(query, repeat, axis=2)),
            _by_head(jnp.repeat(key, repeat, axis=2)),
            _by_head(value),
            _by_head(log_decay),
            _by_head(beta),
            jnp.repeat(reset, heads, axis=0),
        ]
        if state is not None:
            inputs.append(state.reshape(batch * heads, *state.shape[2:]))
        output, last = jax.vmap(
            lambda *xs: gated_delta_chunked(
                *xs[:6],
                chunk=config.gdn_chunk,
                solver=config.gdn_solver,
                state=xs[6] if state is not None else None,
                unroll=unroll,
            )
        )(*inputs)
        output = jnp.moveaxis(output.reshape(batch, heads, length, dim), 1, 2)
        return output, last.reshape(batch, heads, *last.shape[1:])


def _by_head(x: jax.Array) -> jax.Array:
    """[B, T, H, ...] -> [B * H, T, ...]."""
    batch, length, heads = x.shape[:3]
    return jnp.moveaxis(x, 2, 1).reshape(batch * heads, length, *x.shape[3:])


def _init_conv(
    config: ModelConfig, dims: tuple[int, ...], role_tap: int, draws: Draws
) -> jax.Array:
    shape = (config.conv_width, *dims)
    weight = draws.normal(shape, config.init.conv_std, config.param_dtype)
    return weight.at[role_tap].add(1.0) if config.init.role_conv else weight


class GatedDeltaLayer(nnx.Module):  # type: ignore[misc]
    """x += mixer(norm(x)); x += mlp(norm(x)), with a gated delta net."""

    def __init__(self, config: ModelConfig, *, draws: Draws) -> None:
        self.input_norm = RMSNorm(config, config.hidden_size, offset=config.norm_offset)
        self.mixer = GatedDeltaNet(config, draws=draws)
        self.post_norm = RMSNorm(config, config.hidden_size, offset=config.norm_offset)
        self.mlp = SwiGLU(config, draws=draws)

    def __call__(self, x: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        x = x + self.mixer(self.input_norm(x), segment_ids)
        return x + self.mlp(self.post_norm(x))


class AttentionLayer(nnx.Module):  # type: ignore[misc]
    """x += mixer(norm(x)); x += mlp(norm(x)), with full attention."""

    def __init__(self, config: ModelConfig, *, draws: Draws) -> None:
        self.input_norm = RMSNorm(config, config.hidden_size, offset=config.norm_offset)
        self.mixer = Attention(config, draws=draws)
        self.post_norm = RMSNorm(config, config.hidden_size, offset=config.norm_offset)
        self.mlp = SwiGLU(config, draws=draws)

    def __call__(self, x: jax.Array, segment_ids: jax.Array, position_ids: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        x = x + self.mixer(self.input_norm(x), segment_ids, position_ids)
        return x + self.mlp(self.post_norm(x))


@lru_cache(maxsize=64)
def definition(kind: type, config: ModelConfig) -> Any:
    """The static half of a module of `kind`; `nnx.merge` joins it with parameters."""
    return nnx.split(nnx.eval_shape(lambda: _make(kind, config, Draws())), nnx.Param)[0]


def bind(kind: type, config: ModelConfig, params: Params) -> Any:
    """A module of `kind` over `params`, for use inside one traced function."""
    return nnx.merge(definition(kind, config), params)


def _make(kind: type, config: ModelConfig, draws: Draws) -> Any:
    if kind is RMSNorm:
        return RMSNorm(config, config.hidden_size, offset=config.norm_offset)
    return kind(config, draws=draws)


def _init(kind: type, config: ModelConfig, key: jax.Array, *stack: int) -> Params:
    counter = Draws()
    jax.eval_shape(lambda: nnx.state(_make(kind, config, counter), nnx.Param))
    make: Any = lambda numbers: nnx.to_pure_dict(  # noqa: E731
        nnx.state(_make(kind, config, Draws(numbers)), nnx.Param)
    )
    for _ in stack:
        make = jax.vmap(make)
    params: Params = make(jax.random.normal(key, (*stack, counter.used)))
    return params


@partial(jax.jit, static_argnames="config")
def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Parameters drawn as `config.init` says; jitted, and usable under `jit` or `eval_shape`.

    Args:
      config: the model.
      key: PRNG key.

    Returns:
      A nested dict of arrays of `config.param_dtype`.

    Source: the tiny preset's three initialisations are ours (measured to be needed to learn).
    """
    embed_key, gdn_key, attention_key, head_key = jax.random.split(key, 4)
    groups = config.num_groups
    embed = _init(Embedding, config, embed_key)
    stacked: Params = {}
    if config.uses_gdn:
        shape = (groups, config.linear_per_group)
        stacked["gdn"] = _init(GatedDeltaLayer, config, gdn_key, *shape)
    stacked["attention"] = _init(AttentionLayer, config, attention_key, groups)
    params: Params = {
        "embed": embed,
        "groups": stacked,
        "final_norm": _init(RMSNorm, config, head_key),
    }
    if config.tie_embeddings:
        return params
    shape = (config.hidden_size, config.vocab_size)
    std = config.hidden_size**-0.5
    if config.init.head_from_embedding:
        kernel = embed["embedding"].T * (std / config.init.embed_std)
    else:
        kernel = jax.random.normal(head_key, shape, config.param_dtype) * std
    return params | {"lm_head": {"kernel": kernel}}


def abstract_params(config: ModelConfig) -> Params:
    """Shapes and dtypes of `init_params(config, key)` without computing anything."""
    abstract: Params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return abstract


def hidden_states(
    config: ModelConfig,
    params: Params,
    token_ids: jax.Array,
    segment_ids: jax.Array,
    position_ids: jax.Array,
) -> jax.Array:
    """Hidden states after the final norm, for packed or right-padded rows.

    Args:
      config: the model.
      params: tree of `init_params`; a head is not read, so a critic's trunk will do.
      token_ids: [B, T] int.
      segment_ids: [B, T] int, 0 on padding, else the segment: 1, 2, ... without gaps.
      position_ids: [B, T] int, position inside the segment.

    Returns:
      [B, T, D] in the compute dtype; padding holds finite values of no meaning.

    Source: the `qwen3_5` architecture.
    """
    chex.assert_rank(token_ids, 2)
    chex.assert_equal_shape([token_ids, segment_ids, position_ids])
    x = bind(Embedding, config, params["embed"])(token_ids)

    def linear(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        return bind(GatedDeltaLayer, config, layer)(x, segment_ids), None

    def group(x: jax.Array, layers: Params) -> tuple[jax.Array, None]:
        if config.uses_gdn and not config.remat:
            # A loop copies what the backward pass needs into stacks; here it stays where it is.
            for layer in _unstacked(layers["gdn"], config.linear_per_group):
                x, _ = linear(x, layer)
        elif config.uses_gdn:
            x, _ = jax.lax.scan(linear, x, layers["gdn"])
        layer = bind(AttentionLayer, config, layers["attention"])
        return layer(x, segment_ids, position_ids), None

    body = jax.checkpoint(group) if config.remat else group
    if config.num_groups == 1:
        x, _ = body(x, jax.tree.map(lambda leaf: leaf[0], params["groups"]))
    else:
        x, _ = jax.lax.scan(body, x, params["groups"])
    hidden: jax.Array = bind(RMSNorm, config, params["final_norm"])(x)
    return hidden


def _unstacked(stack: Params, count: int) -> list[Params]:
    """The layers of a stack; their gradients are joined again by one concatenation."""
    leaves, tree = jax.tree.flatten(stack)
    parts = [jax.lax.split(leaf, [1] * count) for leaf in leaves]
    return [
        jax.tree.unflatten(tree, [part[i].reshape(part[i].shape[1:]) for part in parts])
        for i in range(count)
    ]


def head_kernel(config: ModelConfig, params: Params) -> jax.Array:
    """The language-model head, [D, V]; the transposed embedding where the two are tied."""
    kernel: jax.Array
    if config.tie_embeddings:
        kernel = params["embed"]["embedding"].T
    else:
        kernel = params["lm_head"]["kernel"]
    return kernel


def logits(config: ModelConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Next-token logits, hidden @ head.

    Args:
      config: the model.
      params: tree of `init_params`.
      hidden: [..., D], of `hidden_states`.

    Returns:
      [..., V] in the accumulation dtype.

    Source: the `qwen3_5` architecture.
    """
    kernel = head_kernel(config, params).astype(config.compute_dtype)
    found = jnp.dot(
        as_tokens(hidden).astype(config.compute_dtype),
        kernel,
        preferred_element_type=jnp.dtype(config.accum_dtype),
    )
    return found.reshape(*hidden.shape[:-1], kernel.shape[-1])


def check_rows(segment_ids: npt.NDArray[np.int32]) -> None:
    """Refuse rows that the model would misread: left padding, holes, segments that return.

    Args:
      segment_ids: [B, T] int, on the host.

    Raises:
      ValueError: names the first bad row and what is wrong with it.
    """
    if segment_ids.ndim != 2:
        raise ValueError(f"segment_ids must be [rows, tokens], got shape {segment_ids.shape}")
    for index, row in enumerate(segment_ids):
        real = row[row != 0]
        if real.size and row[0] == 0:
            raise ValueError(
                f"row {index} is padded on the left; pad on the right (segment id 0 only after "
                "the last segment)"
            )
        if np.any(row[: real.size] == 0):
            raise ValueError(f"row {index} has padding between its segments")
        if np.any(np.diff(real) < 0) or np.any(real < 0):
            raise ValueError(f"row {index} has segment ids that are negative or do not ascend")
