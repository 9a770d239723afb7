"""Cached decoding against the training forward, and the independence of its rows.

Steps equal the training forward to 1e-9 in fp64; log-probs of the fp32 tiny preset agree to 2e-5
(measured: 5e-6 on sampled tokens); everything about rows is bitwise.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trsi_jax.model import ModelConfig, hidden_states, init_params, logits, preset
from trsi_jax.model.decode import (
    Cache,
    Rows,
    advance,
    clear_slots,
    decode_step,
    init_cache,
    prefill,
    rewind,
    sample,
    snapshot,
)
from trsi_jax.model.noise import gumbel

VOCAB, CONTEXT, WIDTH = 61, 40, 8


def tiny(**changes: Any) -> ModelConfig:
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "head_dim": 8,
        "rotary_dim": 4,
        "gdn_key_dim": 8,
        "gdn_value_dim": 8,
        "gdn_chunk": 8,
    }
    return dataclasses.replace(preset("tiny", vocab_size=VOCAB), **(small | changes))


DENSE = {
    "layer_pattern": ("full",),
    "num_layers": 2,
    "num_kv_heads": 2,
    "gated_attention": False,
    "norm_offset": 0.0,
    "tie_embeddings": True,
    "rotary_dim": 8,
}


def rows_for(
    prompts: list[list[int]], new: list[int], *, temperature: float = 1.0, stop: int = -1
) -> Rows:
    tokens = np.zeros((WIDTH, CONTEXT), np.int32)
    known, limit = np.ones(WIDTH, np.int32), np.ones(WIDTH, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        known[row], limit[row] = len(prompt), len(prompt) + new[row]
    keys = np.stack([np.zeros(WIDTH), 100 + np.arange(WIDTH)], axis=1).astype(np.uint32)
    return Rows(
        tokens=jnp.asarray(tokens),
        logprobs=jnp.zeros((WIDTH, CONTEXT), jnp.float32),
        known=jnp.asarray(known),
        limit=jnp.asarray(limit),
        done=jnp.asarray(known >= limit),
        key_data=jnp.asarray(keys),
        temperature=jnp.full(WIDTH, temperature, jnp.float32),
        top_p=jnp.ones(WIDTH, jnp.float32),
        top_k=jnp.full(WIDTH, -1, jnp.int32),
        stop=jnp.full((WIDTH, 8), -1, jnp.int32).at[:, 0].set(stop),
    )


def run(
    config: ModelConfig, params: Any, rows: Rows, cache: Cache | None = None, steps: int = CONTEXT
) -> tuple[Cache, Rows]:
    cache = init_cache(config, WIDTH, CONTEXT) if cache is None else cache
    while True:
        cache, rows = advance(config, params, cache, rows, jnp.zeros(WIDTH, bool), steps=steps)
        if np.all(rows.done):
            return cache, rows


@partial(jax.jit, static_argnums=0)
def training_logits(config: ModelConfig, params: Any, tokens: Any, known: Any) -> Any:
    segments = (jnp.arange(CONTEXT) < known[:, None]).astype(jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(CONTEXT), tokens.shape)
    return logits(config, params, hidden_states(config, params, tokens, segments, positions))


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_sampled_logprobs_equal_those_of_the_training_forward(temperature: float) -> None:
    config = preset("tiny", vocab_size=VOCAB)
    params = init_params(config, jax.random.key(0))
    prompts = prompts_of(1, 2, 5, 8, 9, 17, 30, 3)
    _, rows = run(config, params, rows_for(prompts, [10] * 8, temperature=temperature))
    scores = training_logits(config, params, rows.tokens, rows.known)
    logprob = jax.nn.log_softmax(scores / (temperature or 1.0))
    for row, prompt in enumerate(prompts):
        at = np.arange(len(prompt), len(prompt) + 10)
        expected = logprob[row, at - 1, rows.tokens[row, at]]
        np.testing.assert_allclose(rows.logprobs[row, at], expected, atol=2e-5)
        if temperature == 0:
            assert np.array_equal(rows.tokens[row, at], scores[row, at - 1].argmax(-1))
        assert np.all(rows.logprobs[row, : len(prompt)] == 0)


@pytest.mark.parametrize("changes", [{}, DENSE], ids=["hybrid", "dense"])
def test_steps_equal_the_training_forward_in_fp64(changes: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        config, params = wide_model(changes)
        tokens = np.random.default_rng(0).integers(0, VOCAB, (WIDTH, CONTEXT))
        lengths = jnp.asarray([40, 1, 7, 8, 9, 16, 33, 39])
        expected = training_logits(config, params, tokens, lengths)
        step = jax.jit(decode_step, static_argnums=0)
        cache = init_cache(config, WIDTH, CONTEXT)
        for t in range(CONTEXT):
            hidden, cache = step(config, params, cache, tokens[:, t], t < lengths)
            scores = logits(config, params, hidden)
            real = np.flatnonzero(t < lengths)
            np.testing.assert_allclose(scores[real], expected[real, t], atol=1e-9)
        assert np.array_equal(cache.length, lengths)


def wide_model(changes: dict[str, Any]) -> tuple[ModelConfig, Any]:
    """Two groups in fp64 with every parameter off its start."""
    wide = {"compute_dtype": "float64", "accum_dtype": "float64", "param_dtype": "float64"}
    config = tiny(**({"num_layers": 8} | changes), **wide)
    params = init_params(config, jax.random.key(0))
    return config, jax.tree.map(
        lambda x: x + 0.05 * jnp.sin(jnp.arange(x.size).reshape(x.shape)), params
    )


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, DENSE], ids=["hybrid", "dense"])
def test_prefill_with_lengths_of_rows_and_then_steps_equal_the_training_forward(
    changes: dict[str, Any],
) -> None:
    with jax.enable_x64(True):
        config, params = wide_model(changes)
        tokens = np.random.default_rng(0).integers(0, VOCAB, (WIDTH, CONTEXT))
        expected = training_logits(config, params, tokens, jnp.full(WIDTH, CONTEXT))
        # Around the chunk of 8, nothing at all, and the second call goes on in mid-chunk.
        first = np.asarray([17, 1, 7, 8, 9, 16, 0, 2])
        second = np.asarray([3, 17, 1, 0, 8, 9, 5, 2])
        cache, at = init_cache(config, WIDTH, CONTEXT), np.zeros(WIDTH, int)
        for lengths in (first, second):
            rows = np.full((WIDTH, 17), VOCAB - 1)  # Padding of no meaning.
            for row, length in enumerate(lengths):
                rows[row, :length] = tokens[row, at[row] : at[row] + length]
            before = jax.tree.map(np.array, cache)
            hidden, cache = prefill(config, params, cache, jnp.asarray(rows), jnp.asarray(lengths))
            at = at + lengths
            scores = logits(config, params, hidden)
            read = np.flatnonzero(lengths)
            np.testing.assert_allclose(scores[read], expected[read, at[read] - 1], atol=1e-9)
            for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(cache), strict=True):
                rows_of = (lambda leaf: leaf[None]) if old.ndim == 1 else (lambda leaf: leaf)
                idle = lengths == 0
                assert np.array_equal(rows_of(old)[:, idle], rows_of(np.asarray(new))[:, idle])
        assert np.array_equal(cache.length, first + second)
        step = jax.jit(decode_step, static_argnums=0)
        for _ in range(4):
            fed = tokens[np.arange(WIDTH), at]
            hidden, cache = step(config, params, cache, fed, jnp.ones(WIDTH, bool))
            scores = logits(config, params, hidden)
            np.testing.assert_allclose(scores, expected[np.arange(WIDTH), at], atol=1e-9)
            at = at + 1


def test_a_prefill_beyond_a_slot_or_its_tokens_names_the_row() -> None:
    config = tiny()
    params = init_params(config, jax.random.key(0))
    cache = init_cache(config, 2, 10)
    cache = dataclasses.replace(cache, length=jnp.asarray([0, 8]))
    tokens = jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(ValueError, match="row 1 has read 8 tokens and would read 3 more; its slot"):
        prefill(config, params, cache, tokens, jnp.asarray([4, 3]))
    for length in (5, -1):
        with pytest.raises(ValueError, match=f"row 0 is to read {length} tokens of the 4 given"):
            prefill(config, params, cache, tokens, jnp.asarray([length, 1]))


def test_a_turn_may_be_taken_back_to_the_snapshot_at_its_start() -> None:
    config = tiny()
    params = init_params(config, jax.random.key(0))
    prompts = prompts_of(6, 9, 3)
    cache, first = run(config, params, rows_for(prompts, [4, 4, 4]))
    ends = [int(n) for n in cache.length[:3]]
    saved = snapshot(cache)
    # A turn that is thrown away in rows 0 and 1; row 2 goes on from it.
    contexts = [first.tokens[row, : ends[row]].tolist() for row in range(3)]
    thrown = [[*context, 5, 6, 7] for context in contexts]
    cache, after = run(config, params, rows_for(thrown, [6, 6, 6]), cache)
    cache = rewind(cache, saved, jnp.arange(WIDTH) < 2)
    assert cache.length[:2].tolist() == ends[:2]
    assert int(cache.length[2]) == ends[2] + 8
    kept = after.tokens[2, : ends[2] + 9].tolist()
    taken = [[*contexts[0], 9], [*contexts[1], 9], [*kept, 4]]
    _, warm = run(config, params, rows_for(taken, [5, 5, 5]), cache)
    _, cold = run(config, params, rows_for(taken, [5, 5, 5]))
    assert np.array_equal(warm.tokens[:3], cold.tokens[:3])
    assert np.array_equal(warm.logprobs[:3], cold.logprobs[:3])


def test_a_row_is_bitwise_the_same_in_any_slot_and_company() -> None:
    config = tiny()
    params = init_params(config, jax.random.key(0))
    prompt = prompts_of(6)[0]
    outputs = set()
    for slot in range(WIDTH):
        company = prompts_of(*range(3, 3 + WIDTH), seed=slot)
        company[slot] = prompt
        rows = rows_for(company, [5 + (slot * row) % 7 for row in range(WIDTH)])
        rows = dataclasses.replace(
            rows,
            limit=rows.limit.at[slot].set(len(prompt) + 9),
            key_data=rows.key_data.at[slot].set(jnp.asarray([1, 2], jnp.uint32)),
        )
        _, rows = run(config, params, rows)
        outputs.add((rows.tokens[slot, :15].tobytes(), rows.logprobs[slot, :15].tobytes()))
    assert len(outputs) == 1


def test_splitting_over_calls_and_turns_changes_no_bit() -> None:
    config = tiny()
    params = init_params(config, jax.random.key(0))
    prompts = prompts_of(4, 9, 2)
    _, whole = run(config, params, rows_for(prompts, [12, 4, 7]))
    _, cut = run(config, params, rows_for(prompts, [12, 4, 7]), steps=3)
    assert np.array_equal(whole.tokens, cut.tokens)
    assert np.array_equal(whole.logprobs, cut.logprobs)
    # A second turn on the cache of the first, and the same context from nothing.
    cache, first = run(config, params, rows_for(prompts, [3, 3, 3]))
    longer = [[*first.tokens[row, : len(p) + 3].tolist(), 7, 8] for row, p in enumerate(prompts)]
    _, warm = run(config, params, rows_for(longer, [5, 5, 5]), cache)
    _, cold = run(config, params, rows_for(longer, [5, 5, 5]))
    assert np.array_equal(warm.tokens[:3], cold.tokens[:3])
    assert np.array_equal(warm.logprobs[:3], cold.logprobs[:3])


def test_a_stop_id_ends_only_its_row_and_is_kept() -> None:
    config = tiny()
    params = init_params(config, jax.random.key(0))
    prompts = prompts_of(3, 4, 5, 6)
    _, free = run(config, params, rows_for(prompts, [12] * 4))
    stop = int(free.tokens[1, 4 + 5])
    _, rows = run(config, params, rows_for(prompts, [12] * 4, stop=stop))
    for row, prompt in enumerate(prompts):
        start = len(prompt)
        sampled = free.tokens[row, start : start + 12].tolist()
        expected = sampled[: sampled.index(stop) + 1] if stop in sampled else sampled
        assert rows.tokens[row, start : int(rows.known[row])].tolist() == expected


def test_a_finished_row_is_frozen_and_a_cleared_slot_is_as_new() -> None:
    config = tiny()
    params = init_params(config, jax.random.key(0))
    cache, _ = run(config, params, rows_for(prompts_of(5, 6), [3, 3]))
    before = jax.tree.map(np.asarray, cache)
    cache, _ = run(config, params, rows_for([[1], prompts_of(5, 6)[1] * 2], [0, 9]), cache)
    after = jax.tree.map(np.asarray, cache)
    assert after.length[0] == before.length[0] == 7
    for old, new in zip((*before.conv, *before.state), (*after.conv, *after.state), strict=True):
        assert np.array_equal(old[:, 0], new[:, 0])
        assert not np.array_equal(old[:, 1], new[:, 1])
    length = int(before.length[0])
    assert np.array_equal(before.key[:, 0, ..., :length], after.key[:, 0, ..., :length])
    assert np.array_equal(before.value[:, 0, :, :length], after.value[:, 0, :, :length])

    prompts = prompts_of(4, 7, seed=3)
    cleared = clear_slots(cache, jnp.ones(WIDTH, bool))
    _, reused = run(config, params, rows_for(prompts, [6, 6]), cleared)
    _, new = run(config, params, rows_for(prompts, [6, 6]))
    assert np.array_equal(reused.tokens[:2], new.tokens[:2])
    assert np.array_equal(reused.logprobs[:2], new.logprobs[:2])


def test_a_row_may_fill_its_context_to_the_last_position() -> None:
    config = tiny()
    params = init_params(config, jax.random.key(0))
    prompts = prompts_of(CONTEXT - 2, CONTEXT - 1)
    cache, rows = run(config, params, rows_for(prompts, [2, 1]))
    assert rows.known[:2].tolist() == [CONTEXT, CONTEXT]
    assert int(cache.length[0]) == CONTEXT - 1
    scores = training_logits(config, params, rows.tokens, rows.known)
    expected = jax.nn.log_softmax(scores[0, CONTEXT - 2])[rows.tokens[0, -1]]
    np.testing.assert_allclose(rows.logprobs[0, -1], expected, atol=2e-5)


def test_a_context_beyond_the_positions_of_the_model_is_refused() -> None:
    config = tiny(max_position=16)
    with pytest.raises(ValueError, match=r"context 17 is outside 1\.\.16"):
        init_cache(config, WIDTH, 17)


def test_samples_follow_the_softmax_at_the_temperature() -> None:
    # 4,000 draws; a frequency has a standard error below 0.008, so 0.04 is five of them.
    scores = jnp.asarray([2.0, 1.0, 0.0, -1.0, -20.0])
    keys = jnp.stack([jnp.zeros(4000, jnp.uint32), jnp.arange(4000, dtype=jnp.uint32)], axis=1)
    for temperature in (1.0, 0.5):
        draw = jax.vmap(lambda k, t=temperature: sample(scores, k, jnp.int32(3), jnp.float32(t)))
        tokens, logprobs = draw(keys)
        expected = jax.nn.softmax(scores / temperature)
        seen = np.bincount(tokens, minlength=5) / 4000
        np.testing.assert_allclose(seen, expected, atol=0.04)
        np.testing.assert_allclose(logprobs, jnp.log(expected)[tokens], atol=1e-6)


def test_the_key_of_a_draw_depends_on_the_request_and_the_position() -> None:
    scores = jnp.zeros(1000)
    key, other = jnp.asarray([0, 1], jnp.uint32), jnp.asarray([0, 2], jnp.uint32)
    one = jnp.float32(1.0)
    draws = [sample(scores, k, jnp.int32(p), one)[0] for k, p in ((key, 3), (key, 4), (other, 3))]
    assert len({int(d) for d in draws}) == 3
    assert int(sample(scores, key, jnp.int32(3), one)[0]) == int(draws[0])


def test_the_noise_of_a_draw_is_that_of_jax_random_to_the_last_bit() -> None:
    rng = np.random.default_rng(0)
    words = jnp.asarray(rng.integers(0, 2**32, (6, 2), dtype=np.uint32))
    positions = jnp.asarray([0, 1, 2, 127, 4095, 262_143])
    ours = jax.jit(jax.vmap(lambda key, at: gumbel(key, at, 345)))(words, positions)

    def theirs(words: jax.Array, at: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), at)
        return jax.random.gumbel(key, (345,))

    assert np.array_equal(ours, jax.jit(jax.vmap(theirs))(words, positions))


def test_truncation_draws_from_the_kept_tokens_with_full_logprobs() -> None:
    scores = jnp.log(jnp.asarray([0.1, 0.4, 0.3, 0.15, 0.05]))
    keys = jnp.stack([jnp.zeros(500, jnp.uint32), jnp.arange(500, dtype=jnp.uint32)], axis=1)
    one = jnp.float32(1.0)
    for top_p, top_k, kept in ((0.6, -1, {1, 2}), (1.0, 3, {1, 2, 3}), (0.05, -1, {1})):
        draw = jax.vmap(
            lambda k, p=top_p, n=top_k: sample(
                scores, k, jnp.int32(0), one, top_p=jnp.float32(p), top_k=jnp.int32(n)
            )
        )
        tokens, logprobs = draw(keys)
        assert set(tokens.tolist()) == kept
        np.testing.assert_allclose(logprobs, scores[tokens], atol=1e-6)
