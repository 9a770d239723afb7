"""The whole decoder: presets, initialisation, packing, padding, scanning, the critic."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trsi_jax.model import (
    ModelConfig,
    abstract_params,
    check_rows,
    hidden_states,
    init_params,
    init_value_params,
    logits,
    preset,
    preset_names,
    values,
)

VOCAB = 61


def tiny(**changes: Any) -> ModelConfig:
    """A smaller cousin of the tiny preset."""
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rotary_dim": 4,
        "gdn_key_heads": 2,
        "gdn_value_heads": 4,
        "gdn_key_dim": 8,
        "gdn_value_dim": 8,
        "gdn_chunk": 8,
    }
    return dataclasses.replace(preset("tiny", vocab_size=VOCAB), **(small | changes))


def noisy(config: ModelConfig, seed: int = 0) -> Any:
    """Parameters with every norm weight perturbed, so that w and 1 + w differ."""
    params = init_params(config, jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    shaken = [
        x + 0.1 * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, shaken)


@partial(jax.jit, static_argnums=0)
def forward(config: ModelConfig, params: Any, ids: Any, segments: Any, positions: Any) -> Any:
    hidden = hidden_states(config, params, ids, segments, positions)
    return logits(config, params, hidden)


evaluate = jax.jit(values, static_argnums=0)


def rows_of(*lengths: int, total: int) -> tuple[np.ndarray, np.ndarray]:
    """[1, total] segment ids and positions of one packed row."""
    segments, positions = np.zeros((1, total), np.int32), np.zeros((1, total), np.int32)
    at = 0
    for index, length in enumerate(lengths, start=1):
        segments[0, at : at + length] = index
        positions[0, at : at + length] = np.arange(length)
        at += length
    return segments, positions


def count(params: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def test_the_27b_preset_has_the_published_number_of_parameters_and_tensors() -> None:
    # 26,895,998,464 text parameters in 851 tensors, from the checkpoint inventory (facts/model 0).
    config = preset("qwen3.8-27b")
    params = abstract_params(config)
    assert count(params) == 26_895_998_464
    gdn = jax.tree.leaves(params["groups"]["gdn"])
    attention = jax.tree.leaves(params["groups"]["attention"])
    assert {leaf.shape[:2] for leaf in gdn} == {(16, 3)}
    assert {leaf.shape[0] for leaf in attention} == {16}
    # A checkpoint fuses q, k, v (projection and convolution): 4 tensors less in each GDN layer.
    tensors = 48 * (len(gdn) - 4) + 16 * len(attention) + 3
    assert tensors == 851


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # transformers' Qwen3ForCausalLM counts (embedding once when tied).
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
    ],
)
def test_dense_presets_have_their_published_size(name: str, expected: int) -> None:
    assert count(abstract_params(preset(name))) == expected


def test_the_tiny_preset_is_the_measured_one() -> None:
    # 700,216 parameters at 178 tokens (facts/learnability_hybrid 2).
    assert count(abstract_params(preset("tiny", vocab_size=178))) == 700_216


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'huge'.*qwen3\.8-27b.*tiny"):
        preset("huge")
    with pytest.raises(ValueError, match="vocab_size"):
        preset("tiny")
    assert "qwen3-0.6b" in preset_names()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 6}, "num_layers 6"),
        ({"num_kv_heads": 3}, "num_kv_heads 3"),
        ({"rotary_dim": 40}, "rotary_dim 40"),
        ({"gdn_value_heads": 3}, "gdn_value_heads 3"),
        ({"gdn_solver": "powers"}, "powers"),
        ({"layer_pattern": ("full", "linear")}, "layer_pattern"),
    ],
)
def test_an_impossible_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(preset("tiny", vocab_size=VOCAB), **change)


def test_the_tiny_initialiser_has_its_three_properties() -> None:
    config = preset("tiny", vocab_size=178)
    params = init_params(config, jax.random.key(0))
    embedding, head = params["embed"]["embedding"], params["lm_head"]["kernel"]
    np.testing.assert_allclose(head, embedding.T * (128**-0.5 / 0.1), rtol=1e-6)
    assert abs(float(embedding.std()) - 0.1) < 0.005
    mixer = params["groups"]["gdn"]["mixer"]
    for name, tap in (("q_conv", 3), ("k_conv", 2), ("v_conv", 3)):
        strongest = np.argmax(np.asarray(mixer[name]), axis=2)
        assert np.all(strongest == tap), name
    step = jax.nn.softplus(mixer["dt_bias"])
    assert step.min() * 1.001 >= 0.001
    assert step.max() <= 0.03 * 1.001
    rate = jnp.exp(mixer["A_log"])
    assert rate.min() >= 0.5
    assert rate.max() <= 8.0
    out = params["groups"]["attention"]["mlp"]["down_proj"]["kernel"]
    assert abs(float(out.std()) / (0.3 * 256**-0.5) - 1) < 0.05


def test_initialisation_is_a_function_of_the_key() -> None:
    config = tiny()
    first, again = init_params(config, jax.random.key(3)), init_params(config, jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    other = init_params(config, jax.random.key(4))
    assert not np.array_equal(first["embed"]["embedding"], other["embed"]["embedding"])
    layers = first["groups"]["gdn"]["mixer"]["q_proj"]["kernel"]
    assert not np.array_equal(layers[0, 0], layers[0, 1])


@pytest.mark.parametrize("pattern", ["hybrid", "dense"])
def test_packed_rows_equal_separate_rows(pattern: str) -> None:
    config = tiny(num_layers=8)  # Two groups, so that they are scanned.
    if pattern == "dense":
        config = tiny(
            layer_pattern=("full",),
            num_layers=2,
            gated_attention=False,
            norm_offset=0.0,
            tie_embeddings=True,
            rotary_dim=8,
        )
    params = noisy(config)
    lengths = (5, 1, 9, 3)
    segments, positions = rows_of(*lengths, total=24)
    ids = np.random.default_rng(0).integers(0, VOCAB, (1, 24)).astype(np.int32)
    packed = forward(config, params, ids, segments, positions)
    at = 0
    for length in lengths:
        alone_segments, alone_positions = rows_of(length, total=24)
        alone_ids = np.zeros((1, 24), np.int32)
        alone_ids[0, :length] = ids[0, at : at + length]
        alone = forward(config, params, alone_ids, alone_segments, alone_positions)
        np.testing.assert_allclose(packed[0, at : at + length], alone[0, :length], atol=2e-4)
        at += length


def test_long_rows_attend_by_blocks_to_the_same_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny(num_layers=1, layer_pattern=("full",))
    params, length = noisy(config), 768
    ids = jax.random.randint(jax.random.key(2), (2, length), 0, VOCAB)
    # Segments that end inside blocks, and a row that is mostly padding.
    ends = jnp.array([[300, 301, 700], [100, 130, 130]])
    index = jnp.arange(length)
    segment = 1 + jnp.sum(index[None, :, None] >= ends[:, None], axis=-1)
    segment = jnp.where(index < ends[:, 2:], segment, 0)
    position = jnp.where(segment > 0, index, 0)

    def loss(params: Any) -> jax.Array:
        hidden = hidden_states(config, params, ids, segment, position)
        return jnp.sum(jnp.where(segment[..., None] > 0, hidden, 0) ** 2)

    by_blocks = jax.jit(jax.value_and_grad(loss))(params)
    text = str(jax.make_jaxpr(loss)(params))
    assert f"[2,{length},{length}]" not in text
    monkeypatch.setattr("trsi_jax.model.attention._WHOLE", length)
    whole = jax.jit(jax.value_and_grad(loss))(params)
    assert f"[2,{length},{length}]" in str(jax.make_jaxpr(lambda p: loss(p))(params))
    for ours, theirs in zip(jax.tree.leaves(by_blocks), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * float(jnp.abs(theirs).max()))


def test_values_and_gradients_of_a_segment_ignore_the_others_and_the_padding() -> None:
    config = tiny()
    params = noisy(config)
    segments, positions = rows_of(7, 8, total=20)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, VOCAB, (1, 20)).astype(np.int32)
    changed = ids.copy()
    changed[0, :7] = rng.integers(0, VOCAB, 7)
    changed[0, 15:] = rng.integers(0, VOCAB, 5)

    def loss(params: Any, ids: Any) -> Any:
        out = logits(config, params, hidden_states(config, params, ids, segments, positions))
        logprob = jax.nn.log_softmax(out[0, 7:14])
        return jnp.mean(jnp.take_along_axis(logprob, jnp.asarray(ids)[0, 8:15, None], -1))

    both = jax.jit(jax.value_and_grad(loss))
    first, second = both(params, ids), both(params, changed)
    assert first[0] == second[0]
    for path, grad in jax.tree_util.tree_leaves_with_path(first[1]):
        assert np.isfinite(grad).all(), jax.tree_util.keystr(path)
        assert np.any(grad != 0), jax.tree_util.keystr(path)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), first[1], second[1])


@pytest.mark.parametrize("pattern", ["hybrid", "dense"])
def test_gradients_of_a_packed_row_are_the_sum_of_those_of_separate_rows(pattern: str) -> None:
    wide = {"compute_dtype": "float64", "accum_dtype": "float64", "param_dtype": "float64"}
    dense = {"layer_pattern": ("full",), "num_layers": 1, "gated_attention": False}
    with jax.enable_x64(True):
        config = tiny(**(dense if pattern == "dense" else {}), **wide)
        params = noisy(config)
        lengths, total = (5, 1, 9, 3), 18
        ids = np.random.default_rng(3).integers(0, VOCAB, total).astype(np.int32)
        cotangent = jnp.asarray(np.random.default_rng(4).normal(size=(total, VOCAB)))

        @jax.jit
        def gradient(params: Any, ids: Any, segments: Any, positions: Any, weight: Any) -> Any:
            def loss(params: Any) -> Any:
                hidden = hidden_states(config, params, ids, segments, positions)
                return jnp.sum(logits(config, params, hidden)[0] * weight)

            return jax.grad(loss)(params)

        packed = gradient(params, ids[None], *rows_of(*lengths, total=total), cotangent)
        parts, at = [], 0
        for length in lengths:
            row, weight = np.zeros((1, total), np.int32), jnp.zeros((total, VOCAB))
            row[0, :length] = ids[at : at + length]
            weight = weight.at[:length].set(cotangent[at : at + length])
            parts.append(gradient(params, row, *rows_of(length, total=total), weight))
            at += length
        for path, leaf in jax.tree_util.tree_leaves_with_path(packed):
            name = jax.tree_util.keystr(path)
            whole = sum(dict(jax.tree_util.tree_leaves_with_path(part))[path] for part in parts)
            scale = float(np.abs(whole).max())
            assert scale > 0, name
            np.testing.assert_allclose(leaf, whole, rtol=0, atol=1e-9 * scale, err_msg=name)


def test_chunk_solver_and_remat_do_not_change_the_model() -> None:
    params = noisy(tiny())
    segments, positions = rows_of(11, 6, total=20)
    ids = np.random.default_rng(2).integers(0, VOCAB, (1, 20)).astype(np.int32)
    base = forward(tiny(), params, ids, segments, positions)
    for change in ({"gdn_chunk": 3, "remat": True}, {"gdn_chunk": 64, "gdn_solver": "solve"}):
        other = forward(tiny(**change), params, ids, segments, positions)
        np.testing.assert_allclose(other, base, atol=5e-4)


def test_the_critic_starts_at_zero_on_a_trunk_of_its_own() -> None:
    config = tiny()
    actor = noisy(config)
    critic = init_value_params(config, actor)
    segments, positions = rows_of(9, 4, total=16)
    ids = np.random.default_rng(4).integers(0, VOCAB, (1, 16)).astype(np.int32)
    value = evaluate(config, critic, ids, segments, positions)
    assert value.shape == (1, 16)
    assert value.dtype == jnp.float32
    assert np.all(value == 0)
    assert "lm_head" not in critic
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(actor)}
    assert all(leaf.unsafe_buffer_pointer() not in pointers for leaf in jax.tree.leaves(critic))
    critic["value_head"]["kernel"] = jnp.ones(config.hidden_size)
    hidden = jax.jit(hidden_states, static_argnums=0)(config, actor, ids, segments, positions)
    moved = evaluate(config, critic, ids, segments, positions)
    np.testing.assert_allclose(moved, hidden.sum(-1), rtol=1e-4, atol=1e-4)


def test_compute_in_bfloat16_keeps_logits_and_values_in_fp32() -> None:
    config = tiny(compute_dtype="bfloat16")
    params = init_params(config, jax.random.key(0))
    segments, positions = rows_of(9, total=9)
    ids = np.arange(9, dtype=np.int32)[None]
    out = forward(config, params, ids, segments, positions)
    assert out.dtype == jnp.float32
    assert np.isfinite(out).all()
    critic = init_value_params(config, params)
    assert evaluate(config, critic, ids, segments, positions).dtype == jnp.float32


def test_definitions_bind_the_same_without_the_graph_mode_of_nnx() -> None:
    # Graph mode is going to be off by default in flax; a module then may hold no shared reference.
    config = tiny(num_layers=8, max_position=512)  # A configuration that nothing has cached.
    rows = jax.ShapeDtypeStruct((2, 9), jnp.int32)
    before = flax.config.nnx_graph_mode
    flax.config.update("nnx_graph_mode", not before)
    try:
        out = jax.eval_shape(
            lambda params, ids: hidden_states(config, params, ids, ids, ids),
            abstract_params(config),
            rows,
        )
    finally:
        flax.config.update("nnx_graph_mode", before)
    assert out.shape == (2, 9, config.hidden_size)


def test_rows_that_the_model_would_misread_are_refused() -> None:
    check_rows(np.asarray([[1, 1, 2, 0], [1, 2, 3, 3], [0, 0, 0, 0]], np.int32))
    for bad, message in (
        ([[0, 1, 1, 1]], "row 0 is padded on the left"),
        ([[1, 1, 1, 1], [1, 0, 2, 0]], "row 1 has padding between"),
        ([[2, 2, 1, 1]], "do not ascend"),
    ):
        with pytest.raises(ValueError, match=message):
            check_rows(np.asarray(bad, np.int32))


def test_mixers_of_the_tiny_preset_start_as_copiers() -> None:
    """The output projection is `copy_scale` times the transposed value projection, head by head."""
    config = preset("tiny", vocab_size=VOCAB)
    groups = init_params(config, jax.random.key(0))["groups"]
    gdn, attention = groups["gdn"]["mixer"], groups["attention"]["mixer"]
    value = np.moveaxis(np.asarray(gdn["v_proj"]["kernel"]), 2, -1)
    np.testing.assert_array_equal(gdn["o_proj"]["kernel"], config.init.copy_scale * value)
    shared = np.moveaxis(np.asarray(attention["v_proj"]["kernel"]), 1, -1)
    for head in range(config.num_heads):
        output = np.asarray(attention["o_proj"]["kernel"])[:, head]
        np.testing.assert_array_equal(output, config.init.copy_scale * shared[:, 0])
