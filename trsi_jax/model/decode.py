"""Cached decoding of a block of slots: one jitted loop that feeds known tokens and samples.

Every row is independent of the others: it has its own length, limit, stop ids, temperature and
key, and a row that is finished is frozen (beta = 0, decay 1). Known tokens are fed one by one
through the same step that samples, so a row's numbers do not depend on how its context was split
over calls, nor on what runs in the other rows. `prefill` reads a long context by chunks instead,
equal up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trsi_jax.model.attention import attend_cached
from trsi_jax.model.config import ModelConfig
from trsi_jax.model.decoder import AttentionLayer, GatedDeltaLayer, Params, bind, logits
from trsi_jax.model.gated_delta import causal_conv, gated_delta_step
from trsi_jax.model.layers import Embedding, RMSNorm
from trsi_jax.model.noise import gumbel


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "value", "conv", "state", "length"],
    meta_fields=[],
)
@dataclass(frozen=True, slots=True)
class Cache:
    """What a block of slots remembers of the tokens that it read.

    Attributes:
      key: [G, B, Hkv, d, S] rotated keys of the attention layers, as scores are made of them.
      value: [G, B, Hkv, S, d].
      conv: a [G, B, K-1, C] for each linear layer of a group, its last convolution inputs.
      state: likewise [G, B, Hv, dk, dv], the recurrent states in the accumulation dtype.
      length: [B] int32, tokens read so far.
    """

    key: jax.Array
    value: jax.Array
    conv: tuple[jax.Array, ...]
    state: tuple[jax.Array, ...]
    length: jax.Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "tokens",
        "logprobs",
        "known",
        "limit",
        "done",
        "key_data",
        "temperature",
        "top_p",
        "top_k",
        "stop",
    ],
    meta_fields=[],
)
@dataclass(frozen=True, slots=True)
class Rows:
    """What a block of slots is asked to do, and has done.

    Attributes:
      tokens: [B, S] int32, the context and behind it the sampled tokens.
      logprobs: [B, S] float32, of each sampled token; 0 elsewhere.
      known: [B] int32, filled positions of `tokens`.
      limit: [B] int32, the row is done when `known` reaches it; at most S.
      done: [B] bool, frozen.
      key_data: [B, 2] uint32, the request's key.
      temperature: [B] float32; 0 is greedy with log-probs of the raw logits.
      top_p: [B] float32 and top_k: [B] int32, read only by a truncating loop; 1 and -1 are off.
      stop: [B, N] int32, ids that end the row; -1 fills.
    """

    tokens: jax.Array
    logprobs: jax.Array
    known: jax.Array
    limit: jax.Array
    done: jax.Array
    key_data: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    stop: jax.Array


def init_cache(config: ModelConfig, rows: int, context: int) -> Cache:
    """An empty cache of `rows` slots that hold up to `context` tokens each.

    Args:
      config: the model.
      rows: slots, > 0.
      context: longest context, > 0 and within the model's positions.

    Returns:
      Zeros.

    Raises:
      ValueError: for a context that the model has no positions for.
    """
    if not 0 < context <= config.max_position:
        raise ValueError(
            f"context {context} is outside 1..{config.max_position}, the positions of {config.name}"
        )
    groups, linear = config.num_groups, range(config.linear_per_group)
    heads, dim = config.num_kv_heads, config.head_dim
    conv = (groups, rows, config.conv_width - 1, config.gdn_channels)
    state = (groups, rows, config.gdn_value_heads, config.gdn_key_dim, config.gdn_value_dim)
    return Cache(
        key=jnp.zeros((groups, rows, heads, dim, context), config.compute_dtype),
        value=jnp.zeros((groups, rows, heads, context, dim), config.compute_dtype),
        conv=tuple(jnp.zeros(conv, config.compute_dtype) for _ in linear),
        state=tuple(jnp.zeros(state, config.accum_dtype) for _ in linear),
        length=jnp.zeros((rows,), jnp.int32),
    )


def clear_slots(cache: Cache, slots: jax.Array) -> Cache:
    """Zero everything that the slots marked true remember, before another context uses them.

    Args:
      cache: of a block.
      slots: [B] bool.

    Returns:
      The cache; other slots are untouched.
    """

    def zero(leaf: jax.Array, axis: int) -> jax.Array:
        shape = [1] * leaf.ndim
        shape[axis] = -1
        return jnp.where(slots.reshape(shape), 0, leaf).astype(leaf.dtype)

    # Stale keys and values lie behind the length and are never visible.
    return replace(
        cache,
        conv=tuple(zero(leaf, 1) for leaf in cache.conv),
        state=tuple(zero(leaf, 1) for leaf in cache.state),
        length=zero(cache.length, 0),
    )


@partial(jax.tree_util.register_dataclass, data_fields=["conv", "state", "length"], meta_fields=[])
@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a block of slots needs to go back to a turn's end: `Cache` without keys and values.

    A recurrent state cannot be rolled back, but keys and values of attention can: those behind
    the length are never visible.
    """

    conv: tuple[jax.Array, ...]
    state: tuple[jax.Array, ...]
    length: jax.Array


def snapshot(cache: Cache) -> Snapshot:
    """A copy of the recurrent part of a cache, which a later call may donate."""
    saved: Snapshot = jax.tree.map(jnp.copy, Snapshot(cache.conv, cache.state, cache.length))
    return saved


def rewind(cache: Cache, saved: Snapshot, slots: jax.Array) -> Cache:
    """Take the slots marked true back to where they were; the next turn reads only what is new.

    Args:
      cache: of the block; the marked slots have only read on since the snapshot was taken.
      saved: of the same block.
      slots: [B] bool.

    Returns:
      The cache; other slots are untouched.
    """

    def back(now: jax.Array, then: jax.Array, axis: int) -> jax.Array:
        shape = [1] * now.ndim
        shape[axis] = -1
        return jnp.where(slots.reshape(shape), then, now)

    return replace(
        cache,
        conv=tuple(back(*leaves, 1) for leaves in zip(cache.conv, saved.conv, strict=True)),
        state=tuple(back(*leaves, 1) for leaves in zip(cache.state, saved.state, strict=True)),
        length=back(cache.length, saved.length, 0),
    )


def save_slots(cache: Cache, saved: Snapshot, slots: jax.Array) -> Snapshot:
    """Let the slots marked true remember where they are now.

    Args:
      cache: of a block.
      saved: of the same block.
      slots: [B] bool.

    Returns:
      The snapshot; other slots keep theirs.
    """

    def taken(now: jax.Array, then: jax.Array) -> jax.Array:
        # Slots are the only axis of the lengths and the second one of everything else.
        at = slots if now.ndim == 1 else slots.reshape(1, -1, *[1] * (now.ndim - 2))
        return jnp.where(at, now, then)

    here = Snapshot(cache.conv, cache.state, cache.length)
    updated: Snapshot = jax.tree.map(taken, here, saved)
    return updated


def copy_slot(
    cache: Cache, saved: Snapshot, source: jax.Array, target: jax.Array
) -> tuple[Cache, Snapshot]:
    """Give one slot the keys, values and snapshot of another, to share the start of a context.

    Args:
      cache: of a block.
      saved: of the same block.
      source: [] int, slot that is read.
      target: [] int, slot that is overwritten; `rewind` it before it is used.

    Returns:
      Cache and snapshot; the source is untouched.
    """

    def copied(leaf: jax.Array, axis: int) -> jax.Array:
        row = lax.dynamic_slice_in_dim(leaf, source, 1, axis)
        return lax.dynamic_update_slice_in_dim(leaf, row, target, axis)

    cache = replace(cache, key=copied(cache.key, 1), value=copied(cache.value, 1))
    return cache, Snapshot(
        conv=tuple(copied(leaf, 1) for leaf in saved.conv),
        state=tuple(copied(leaf, 1) for leaf in saved.state),
        length=copied(saved.length, 0),
    )


def load_rows(rows: Rows, new: Rows, slots: jax.Array) -> Rows:
    """Take the slots marked true, [B] bool, from `new` and the others from `rows`."""
    loaded: Rows = jax.tree.map(
        lambda old, fresh: jnp.where(slots.reshape(-1, *[1] * (old.ndim - 1)), fresh, old),
        rows,
        new,
    )
    return loaded


def decode_step(
    config: ModelConfig, params: Params, cache: Cache, token_ids: jax.Array, active: jax.Array
) -> tuple[jax.Array, Cache]:
    """Read one token in each active row.

    Args:
      config: the model.
      params: tree of `init_params`.
      cache: of the block; each active row's length is below the context.
      token_ids: [B] int.
      active: [B] bool; an inactive row's cache stays bit for bit.

    Returns:
      Hidden states after the final norm, [B, D], and the cache.

    Source: the `qwen3_5` architecture.
    """
    rows = jnp.arange(token_ids.shape[0])
    position = cache.length
    visible = jnp.arange(cache.key.shape[-1])[None, :] <= position[:, None]

    def linear_layer(
        x: jax.Array, tail: jax.Array, state: jax.Array, block: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        mixer = block.mixer
        inputs, z, a, b = mixer.project(block.input_norm(x))
        window = jnp.concatenate([tail, inputs[:, None]], axis=1)
        query, key, value = mixer.heads(_convolved(window, mixer.conv_weight(), position))
        log_decay, beta = mixer.gates(a, b)
        repeat = config.gdn_value_heads // config.gdn_key_heads
        state, output = gated_delta_step(
            state,
            jnp.repeat(query, repeat, axis=-2),
            jnp.repeat(key, repeat, axis=-2),
            value,
            jnp.where(active[:, None], log_decay, 0),
            jnp.where(active[:, None], beta, 0),
        )
        tail = jnp.where(active[:, None, None], window[:, 1:], tail)
        return mixer.finish(output, z), tail, state

    def attention_layer(
        x: jax.Array, cache: Cache, block: Any, group: tuple[Any, ...]
    ) -> tuple[jax.Array, Cache]:
        query, gate, key, value = block.mixer.project(block.input_norm(x), position)
        # An inactive row writes behind its length, where nothing is visible, or drops the write.
        cache = _write(cache, group, rows, position, key, value)
        mixed = jax.vmap(partial(attend_cached, accum_dtype=config.accum_dtype))(
            query[:, None], cache.key[group], cache.value[group], visible[:, None]
        )
        return block.mixer.finish(mixed[:, 0], gate), cache

    hidden, cache = _walk(config, params, cache, token_ids, linear_layer, attention_layer)
    return hidden, replace(cache, length=cache.length + active)


def _convolved(window: jax.Array, weight: jax.Array, position: jax.Array) -> jax.Array:
    """sum_k window_k weight_k by neighbours: [B, K, C], [K, C], [B] >= 0 -> [B, C].

    The sum of `jnp.sum` to the last bit for four taps, without its call of a library, which takes
    ten times as long on a CPU. There the compiler would fuse a product with an addition, and round
    once; an integer zero that it can't see through, added to the bits, keeps them apart. And it
    would compute the sum anew wherever it is read, but for a concatenation.
    """
    integer, wide = f"int{8 * window.dtype.itemsize}", jnp.promote_types(window.dtype, jnp.float32)
    zero = jnp.minimum(position, 0).astype(integer)[:, None, None]
    half = window.shape[-1] // 2
    halves = []
    for channels in (slice(half), slice(half, None)):
        bits = lax.bitcast_convert_type(
            window[..., channels] * weight[:, channels], jnp.dtype(integer)
        )
        product = lax.bitcast_convert_type(bits + zero, window.dtype).astype(wide)
        terms = [product[:, tap] for tap in range(weight.shape[0])]
        while len(terms) > 1:
            pairs = zip(terms[::2], terms[1::2], strict=False)
            terms = [a + b for a, b in pairs] + terms[len(terms) // 2 * 2 :]
        halves.append(terms[0])
    return jnp.concatenate(halves, axis=-1).astype(window.dtype)


def _write(
    cache: Cache,
    group: tuple[Any, ...],
    rows: jax.Array,
    position: jax.Array,
    key: jax.Array,
    value: jax.Array,
) -> Cache:
    """Put keys and values [..., Hkv, d] of `rows` at `position`; behind the context: nowhere."""
    return replace(
        cache,
        key=cache.key.at[*group, rows, :, :, position].set(key, mode="drop"),
        value=cache.value.at[*group, rows, :, position].set(value, mode="drop"),
    )


def _walk(
    config: ModelConfig,
    params: Params,
    cache: Cache,
    token_ids: jax.Array,
    linear_mixer: Any,
    attention_mixer: Any,
) -> tuple[jax.Array, Cache]:
    """Embedding, every layer with its part of the cache, final norm; the length stays.

    With one group, the cache may be that of `_ungrouped`.

    `linear_mixer(x, tail, state, block)` gives what is added, the tail and the state;
    `attention_mixer(x, cache, block, group)` gives what is added and the cache, of which `group` is
    the index of the first axis, if that is there.
    """

    def group(
        x: jax.Array, cache: Cache, index: tuple[Any, ...], layers: Layers
    ) -> tuple[jax.Array, Cache]:
        gdn, attention = layers
        conv, state = list(cache.conv), list(cache.state)
        for inner, layer in enumerate(gdn):
            block = bind(GatedDeltaLayer, config, layer)
            added, tail, after = linear_mixer(x, conv[inner][index], state[inner][index], block)
            x = x + added
            x = x + block.mlp(block.post_norm(x))
            conv[inner] = conv[inner].at[index].set(tail)
            state[inner] = state[inner].at[index].set(after)
        cache = replace(cache, conv=tuple(conv), state=tuple(state))
        block = bind(AttentionLayer, config, attention)
        added, cache = attention_mixer(x, cache, block, index)
        x = x + added
        return x + block.mlp(block.post_norm(x)), cache

    x = bind(Embedding, config, params["embed"])(token_ids)
    if config.num_groups == 1:
        kept = cache
        x, cache = group(x, _ungrouped(config, cache), (), _apart(config, params)["groups"])
        cache = _like(kept, cache)
    else:

        def scanned(carry: tuple[jax.Array, Cache], each: Any) -> tuple[Any, None]:
            return group(*carry, (each[0],), _layers(config, each[1])), None

        indices = jnp.arange(config.num_groups)
        (x, cache), _ = lax.scan(scanned, (x, cache), (indices, params["groups"]))
    hidden: jax.Array = bind(RMSNorm, config, params["final_norm"])(x)
    return hidden, cache


Layers = tuple[tuple[Params, ...], Params]
"""The linear layers of a group, and its attention layer."""


def _layers(config: ModelConfig, group: Params) -> Layers:
    gdn = [
        jax.tree.map(lambda leaf, i=inner: leaf[i], group["gdn"])
        for inner in range(config.linear_per_group)
    ]
    return tuple(gdn), group["attention"]


def _apart(config: ModelConfig, params: Params) -> Params:
    """With one group, its `Layers` instead of stacks: cut out before a loop, not at every step."""
    groups = params["groups"]
    if config.num_groups > 1 or isinstance(groups, tuple):
        return params
    return params | {"groups": _layers(config, jax.tree.map(lambda leaf: leaf[0], groups))}


def _ungrouped(config: ModelConfig, cache: Cache) -> Cache:
    """With one group, without the axis of groups: in a loop XLA updates such arrays in place."""
    if config.num_groups > 1 or cache.key.ndim == 4:
        return cache
    arrays = replace(cache, length=cache.length[None])
    ungrouped: Cache = jax.tree.map(lambda leaf: leaf[0], arrays)
    return ungrouped


def _like(kept: Cache, cache: Cache) -> Cache:
    """A cache with the axis of groups where `kept` has one."""
    shaped: Cache = jax.tree.map(lambda one, leaf: leaf.reshape(one.shape), kept, cache)
    return shaped


def prefill(
    config: ModelConfig, params: Params, cache: Cache, token_ids: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, Cache]:
    """Read many tokens in each row at once, after what the row has read already.

    The gated delta rule runs by chunks from the row's state, attention over the row's keys. It
    equals feeding the tokens one by one up to rounding, and costs a training forward.

    Args:
      config: the model.
      params: tree of `init_params`.
      cache: of the block. Donated.
      token_ids: [B, T] int, padded on the right.
      lengths: [B] int, tokens to read of each row; a row of 0 keeps its cache bit for bit.

    Returns:
      Hidden states after the final norm of each row's last token, [B, D] (a row that reads
      nothing holds finite values of no meaning), and the cache.

    Raises:
      ValueError: names the first row that reads more than it is given or than its slot holds.

    Source: the `qwen3_5` architecture; Gated DeltaNet (arXiv 2412.06464), chunkwise form.
    """
    taken, read = np.asarray(lengths), np.asarray(cache.length)
    width, context = token_ids.shape[1], cache.key.shape[-1]
    for row, (more, before) in enumerate(zip(taken.tolist(), read.tolist(), strict=True)):
        if not 0 <= more <= width:
            raise ValueError(f"row {row} is to read {more} tokens of the {width} given")
        if before + more > context:
            raise ValueError(
                f"row {row} has read {before} tokens and would read {more} more; its slot holds "
                f"{context}"
            )
    hidden: tuple[jax.Array, Cache] = _prefill(config, params, cache, token_ids, lengths)
    return hidden


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _prefill(
    config: ModelConfig, params: Params, cache: Cache, token_ids: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, Cache]:
    batch, width = token_ids.shape
    context = cache.key.shape[-1]
    offset = jnp.arange(width)
    real = offset < lengths[:, None]
    position = cache.length[:, None] + offset
    visible = jnp.arange(context) <= position[:, :, None]
    # Padding writes out of bounds, and that write is dropped.
    target = jnp.where(real, position, context)
    rows = jnp.arange(batch)
    going_on = jnp.zeros((batch, width), bool)

    def linear_layer(
        x: jax.Array, tail: jax.Array, state: jax.Array, block: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        mixer = block.mixer
        inputs, z, a, b = mixer.project(block.input_norm(x))
        inputs = jnp.where(real[..., None], inputs, 0)
        weight = mixer.conv_weight()
        mixed = causal_conv(inputs, weight, going_on, tail=tail)
        query, key, value = mixer.heads(mixed)
        log_decay, beta = mixer.gates(a, b)
        output, state = mixer.recur(
            query,
            key,
            value,
            jnp.where(real[..., None], log_decay, 0),
            jnp.where(real[..., None], beta, 0),
            going_on,
            state,
        )
        window = jnp.concatenate([tail, inputs], axis=1)
        last = lengths[:, None] + jnp.arange(config.conv_width - 1)
        return mixer.finish(output, z), window[rows[:, None], last], state

    def attention_layer(
        x: jax.Array, cache: Cache, block: Any, group: tuple[Any, ...]
    ) -> tuple[jax.Array, Cache]:
        query, gate, key, value = block.mixer.project(block.input_norm(x), position)
        cache = _write(cache, group, rows[:, None], target, key, value)
        mixed = jax.vmap(partial(attend_cached, accum_dtype=config.accum_dtype))(
            query, cache.key[group], cache.value[group], visible
        )
        return block.mixer.finish(mixed, gate), cache

    hidden, cache = _walk(config, params, cache, token_ids, linear_layer, attention_layer)
    return hidden[rows, jnp.maximum(lengths - 1, 0)], replace(cache, length=cache.length + lengths)


def prefill_slots(
    config: ModelConfig,
    params: Params,
    cache: Cache,
    slots: jax.Array,
    token_ids: jax.Array,
    lengths: jax.Array,
) -> Cache:
    """`prefill` of a few slots of a block, at the cost of those only.

    Args:
      config: the model.
      params: tree of `init_params`.
      cache: of the block.
      slots: [P] int, which ones, each once; B stands for none.
      token_ids: [P, T] int, padded on the right.
      lengths: [P] int, tokens to read; a slot's length and these are at most the context.

    Returns:
      The cache; other slots are untouched. What a slot holds then is a function of what it held,
      its tokens and the shapes alone, bit for bit.
    """

    def taken(leaf: jax.Array, axis: int) -> jax.Array:
        return jnp.take(leaf, slots, axis=axis, mode="clip")

    def put(leaf: jax.Array, part: jax.Array) -> jax.Array:
        return leaf.at[:, slots].set(part, mode="drop")

    part = Cache(
        key=taken(cache.key, 1),
        value=taken(cache.value, 1),
        conv=tuple(taken(leaf, 1) for leaf in cache.conv),
        state=tuple(taken(leaf, 1) for leaf in cache.state),
        length=taken(cache.length, 0),
    )
    _, part = _prefill(config, params, part, token_ids, lengths)
    return Cache(
        key=put(cache.key, part.key),
        value=put(cache.value, part.value),
        conv=tuple(put(*leaves) for leaves in zip(cache.conv, part.conv, strict=True)),
        state=tuple(put(*leaves) for leaves in zip(cache.state, part.state, strict=True)),
        length=cache.length.at[slots].set(part.length, mode="drop"),
    )


def sample(
    scores: jax.Array,
    key_data: jax.Array,
    position: jax.Array,
    temperature: jax.Array,
    *,
    top_p: jax.Array | None = None,
    top_k: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draw one token of one row and its log-prob.

    y ~ softmax(l / temperature) with key fold_in(request key, position); at temperature 0,
    y = argmax l. The log-prob is of softmax(l / temperature) (temperature 0: softmax(l)) over
    the full vocabulary, whether or not the draw was truncated.

    Args:
      scores: [V] float32 logits.
      key_data: [2] uint32, the request's key.
      position: [] int, index of the token in its context.
      temperature: [] float32, >= 0.
      top_p: [] float32 in (0, 1], share of the probability that is kept, or None.
      top_k: [] int32, number of tokens that are kept (-1: all), or None.

    Returns:
      Token, [] int32, and log-prob, [] float32.

    Source: our reading.
    """
    greedy = temperature == 0
    logprob = jax.nn.log_softmax(scores / jnp.where(greedy, 1, temperature))
    allowed = logprob
    if top_p is not None and top_k is not None:
        # By rank, not by value: a log-prob that is computed twice may be rounded in two ways.
        order = jnp.argsort(logprob, descending=True)
        probability = jnp.exp(logprob[order])
        count = jnp.sum(jnp.cumsum(probability) - probability < top_p)
        count = jnp.where(top_k > 0, jnp.minimum(count, top_k), count)
        kept = jnp.zeros(scores.shape, bool).at[order].set(jnp.arange(scores.size) < count)
        off = (top_p >= 1) & (top_k <= 0)
        allowed = jnp.where(kept | off, logprob, -jnp.inf)
    noise = gumbel(key_data, position, scores.size)
    # argmax as two plain reductions: XLA's own of value and index is scalar code on a CPU and took
    # a sixth of a step. Behind the barrier both see the same numbers.
    score = lax.optimization_barrier(allowed + jnp.where(greedy, 0, noise))
    index = jnp.arange(scores.size, dtype=jnp.int32)
    first = jnp.min(jnp.where(score == jnp.max(score), index, scores.size - 1))
    return first, logprob[first]


@partial(
    jax.jit, static_argnames=("config", "steps", "truncate"), donate_argnames=("cache", "rows")
)
def advance(
    config: ModelConfig,
    params: Params,
    cache: Cache,
    rows: Rows,
    halt: jax.Array,
    *,
    steps: int,
    truncate: bool = False,
) -> tuple[Cache, Rows]:
    """Feed and sample in every row that is not done, for at most `steps` tokens a row.

    Args:
      config: the model.
      params: tree of `init_params`.
      cache: of the block; `rows.tokens[:, :length]` are the tokens it has read. Donated.
      rows: what to do; each undone row has length < known < limit. Donated.
      halt: [B] bool, rows to end first as they are.
      steps: most tokens that a row reads in this call.
      truncate: whether `top_p` and `top_k` are applied (this costs a sort a token).

    Returns:
      Cache and rows; call again until all rows are done.

    Source: our reading.
    """
    index = jnp.arange(rows.tokens.shape[0])
    rows = replace(rows, done=rows.done | halt)
    params = _apart(config, params)
    kept, cache = cache, _ungrouped(config, cache)

    def going(carry: tuple[jax.Array, Cache, Rows]) -> jax.Array:
        step, _, rows = carry
        return (step < steps) & ~jnp.all(rows.done)

    def body(carry: tuple[jax.Array, Cache, Rows]) -> tuple[jax.Array, Cache, Rows]:
        step, cache, rows = carry
        active = ~rows.done
        fed = rows.tokens.at[index, cache.length].get(mode="fill", fill_value=0)
        hidden, cache = decode_step(config, params, cache, fed, active)
        scores = logits(config, params, hidden).astype(jnp.float32)
        drawing = active & (cache.length == rows.known)
        draw: Any = jax.vmap(
            lambda s, k, n, t, p, q: sample(
                s, k, n, t, top_p=p if truncate else None, top_k=q if truncate else None
            )
        )
        token, logprob = draw(
            scores, rows.key_data, rows.known, rows.temperature, rows.top_p, rows.top_k
        )
        # A row that does not draw writes out of bounds, and that write is dropped.
        target = jnp.where(drawing, rows.known, rows.tokens.shape[1])
        known = rows.known + drawing
        stopped = drawing & jnp.any(token[:, None] == rows.stop, axis=1)
        rows = replace(
            rows,
            tokens=rows.tokens.at[index, target].set(token, mode="drop"),
            logprobs=rows.logprobs.at[index, target].set(logprob, mode="drop"),
            known=known,
            done=rows.done | stopped | (known >= rows.limit),
        )
        return step + 1, cache, rows

    _, cache, rows = lax.while_loop(going, body, (jnp.zeros((), jnp.int32), cache, rows))
    return _like(kept, cache), rows
