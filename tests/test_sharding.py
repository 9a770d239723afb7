"""Meshes, rule tables, byte counts and the reading of HLO, without more than one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharding import hlo
from sharding.layouts import LAYOUTS, decoder_rules, layout
from sharding.mesh import AXES, make_mesh, mesh_shape, topology
from sharding.rules import Rule, device_bytes, specs
from trsi_jax import model, optim, state

ADAM = optim.adamw(b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)


def train_state(config, critic=False):
    def make():
        params = model.init_params(config, jax.random.key(0))
        return state.create(model.init_value_params(config, params) if critic else params, ADAM)

    return jax.eval_shape(make)


def rules_for(config, tensor):
    return decoder_rules(
        tensor=tensor, kv_heads=config.num_kv_heads, gated_attention=config.gated_attention
    )


@pytest.mark.parametrize("name", ["qwen3.8-27b", "qwen3-0.6b", "tiny"])
@pytest.mark.parametrize("critic", [False, True])
def test_exactly_one_rule_matches_every_leaf_of_a_train_state(name, critic):
    config = model.preset(name, vocab_size=256 if name == "tiny" else None)
    tree = train_state(config, critic)
    rules = rules_for(config, 1)
    specs(rules, tree, mesh_shape({}))  # Raises if not.
    # And every rule that speaks of this architecture is needed: without it a leaf has none.
    paths = [
        jax.tree_util.keystr(keys, simple=True, separator="/")
        for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    for rule in rules:
        if any(rule.matches(path) for path in paths):
            with pytest.raises(ValueError, match="no sharding rule matches"):
                specs([r for r in rules if r is not rule], tree, mesh_shape({}))


def test_the_27b_state_takes_its_bytes_divided_by_the_devices():
    config = model.preset("qwen3.8-27b")
    mesh = layout("v5e-256").mesh
    tree = train_state(config)
    got = device_bytes(tree, specs(rules_for(config, mesh["tensor"]), tree, mesh), mesh)
    # 12 bytes a parameter over 256 devices; on top keys and values of 16 layers, whole over
    # tensor 8, and under 2 % (norms).
    even = 12 * 26_895_998_464 / 256
    shared = 12 * 16 * 2 * 5120 * 4 * 256 * (1 / 32 - 1 / 256)
    assert even + shared <= got <= 1.02 * even + shared


def test_keys_and_values_are_whole_beyond_their_heads():
    tree = {"attention": {"mixer": {"k_proj": {"kernel": jnp.zeros((16, 64, 4, 8))}}}}
    four = specs(decoder_rules(tensor=4, kv_heads=4, gated_attention=True), tree, {"tensor": 4})
    eight = specs(decoder_rules(tensor=8, kv_heads=4, gated_attention=True), tree, {"tensor": 8})
    fsdp = ("fsdp", "sequence")
    assert jax.tree.leaves(four, is_leaf=lambda x: isinstance(x, P)) == [
        P(None, fsdp, "tensor", None)
    ]
    assert jax.tree.leaves(eight, is_leaf=lambda x: isinstance(x, P)) == [P(None, fsdp, None, None)]
    with pytest.raises(ValueError, match=r"'tensor' of 3 neither divides the 4 key and value"):
        decoder_rules(tensor=3, kv_heads=4, gated_attention=True)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule("other", P())], r"no sharding rule matches mlp/up/kernel \[6, 8\]"),
        (
            [Rule("kernel", P()), Rule("up/kernel", P())],
            "2 sharding rules match mlp/up/kernel: 'kernel', 'up/kernel'",
        ),
        (
            [Rule("kernel", P(None, ("fsdp", "tensor")))],
            r"mlp/up/kernel: dimension 1 of \[6, 8\] is not divisible by fsdp 3 x tensor 2",
        ),
        ([Rule("kernel", P("model"))], "unknown mesh axis 'model'; known: data, fsdp, tensor"),
        ([Rule("kernel", P("fsdp", "fsdp"))], "uses mesh axis 'fsdp' twice"),
        (
            [Rule("kernel", P(None, None, "fsdp"))],
            r"names 3 dimensions, mlp/up/kernel has \[6, 8\]",
        ),
    ],
)
def test_a_wrong_table_names_leaf_axis_and_known_names(rules, message):
    tree = {"mlp": {"up": {"kernel": np.zeros((6, 8), np.float32)}}}
    with pytest.raises(ValueError, match=message):
        specs(rules, tree, {"fsdp": 3, "tensor": 2})


def test_a_pattern_matches_whole_names_at_the_end_of_a_path():
    assert Rule("proj/kernel", P()).matches("a/proj/kernel")
    assert not Rule("proj/kernel", P()).matches("a/q_proj/kernel")
    assert not Rule("proj", P()).matches("a/proj/kernel")


def test_names_of_topologies():
    assert topology("v5e:16x16").devices == 256
    assert topology("v5p:4x4x4").devices == 64
    assert topology("tpu7x:2x2x2").devices == 16
    assert topology("cpu:8").generation.hbm_bytes is None
    for name, message in {
        "v9:4x4": "unknown topology 'v9:4x4'; known: v5e:AxB, v5p:AxBxC",
        "v5p-128": "unknown topology 'v5p-128'",
        "v5p:4x4": "topology 'v5p:4x4' is not of the form v5p:AxBxC",
        "cpu:0": "is not of the form cpu:A",
    }.items():
        with pytest.raises(ValueError, match=message):
            topology(name)


def test_every_layout_fills_its_topology():
    for one in LAYOUTS.values():
        assert np.prod(list(one.mesh.values())) == topology(one.topology).devices
        assert tuple(one.mesh) == AXES
    with pytest.raises(ValueError, match=r"unknown layout 'v5p'; known: v5e-256"):
        layout("v5p")


def test_a_mesh_of_another_size_or_axis_is_refused():
    with pytest.raises(ValueError, match=r"data 1 x fsdp 4 .* needs 4 devices, there are 2"):
        make_mesh({"fsdp": 4}, ["a", "b"])
    with pytest.raises(ValueError, match="unknown mesh axis 'rows'; known: data, fsdp, tensor"):
        mesh_shape({"rows": 2})
    with pytest.raises(ValueError, match="'data' has size 0"):
        mesh_shape({"data": 0})


PROGRAM = """\
HloModule jit_step, entry_computation_layout={(f32[4,8]{1,0})->f32[4,16]{1,0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p: f32[4,8], q: f32[8,16]) -> f32[4,16] {
  %p = f32[4,8]{1,0} parameter(0)
  %q = f32[8,16]{1,0} parameter(1)
  ROOT %product = f32[4,16]{1,0:T(8,128)} dot(%p, %q), lhs_contracting_dims={1}
}

%body (state: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %state = (s32[], f32[4,8]{1,0}) parameter(0)
  %x = f32[4,8]{1,0} get-tuple-element(%state), index=1
  %w = f32[2,16]{1,0} constant({...})
  %whole = f32[8,16]{1,0} all-gather(%w), channel_id=1, dimensions={0}
  %y = f32[4,16]{1,0} fusion(%x, %whole), kind=kOutput, calls=%fused
  %z = (f32[4,16]{1,0}, f32[4,16]{1,0}) all-reduce-start(%y), channel_id=2, to_apply=%add
  %done = f32[4,16]{1,0} all-reduce-done(%z)
  ROOT %next = (s32[], f32[4,8]{1,0}) tuple(%state, %x)
}

%cond (state: (s32[], f32[4,8])) -> pred[] {
  %state = (s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %n = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[4,8]) -> f32[4,16] {
  %x = f32[4,8]{1,0} parameter(0)
  %loop = (s32[], f32[4,8]{1,0}) while(%x), condition=%cond, body=%body
  %a = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  %k = f32[8,16]{1,0} constant({...})
  %moved = f32[4,8]{1,0} collective-permute(%a), channel_id=3, source_target_pairs={{0,1}}
  ROOT %out = f32[4,16]{1,0} fusion(%moved, %k), kind=kOutput, calls=%fused
}
"""


@pytest.mark.parametrize("known", [False, True])
def test_collectives_and_matmuls_count_as_often_as_their_loop_runs(known):
    text = PROGRAM
    if known:  # The compiler's own note wins over the condition.
        note = 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'
        text = text.replace("body=%body", note)
    trips = 7 if known else 5
    found = hlo.summarize(text)
    one = 2 * 4 * 16 * 8
    assert found.matmul_flops == (trips + 1) * one
    assert found.unknown_loops == 0
    assert found.collectives == {
        "all-gather": hlo.Collective(1, trips, trips * 8 * 16 * 4),
        "all-reduce": hlo.Collective(1, trips, trips * 4 * 16 * 4),
        "collective-permute": hlo.Collective(1, 1, 4 * 8 * 4),
    }


def test_a_collective_carried_on_beside_other_work_counts_once():
    text = """\
HloModule m

%start (w: f32[2,16]) -> f32[8,16] {
  %w = f32[2,16]{1,0} parameter(0)
  ROOT %g = f32[8,16]{1,0} all-gather(%w), channel_id=1, dimensions={0}
}

%async_collective_fusion.7 (w: f32[2,16], x: f32[4,8], y: f32[8,2]) -> f32[4,2] {
  %w = f32[2,16]{1,0} parameter(0)
  %x = f32[4,8]{1,0} parameter(1)
  %y = f32[8,2]{1,0} parameter(2)
  %g = f32[8,16]{1,0} all-gather(%w), channel_id=1, dimensions={0}
  ROOT %d = f32[4,2]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%end (w: f32[2,16]) -> f32[8,16] {
  %w = f32[2,16]{1,0} parameter(0)
  ROOT %g = f32[8,16]{1,0} all-gather(%w), channel_id=1, dimensions={0}
}

ENTRY %main (w: f32[2,16], x: f32[4,8], y: f32[8,2]) -> f32[8,16] {
  %w = f32[2,16]{1,0} parameter(0)
  %x = f32[4,8]{1,0} parameter(1)
  %y = f32[8,2]{1,0} parameter(2)
  %async-collective-start = f32[8,16]{1,0} fusion(%w), kind=kCustom, calls=%start
  %beside = f32[4,2]{1,0} fusion(%w, %x, %y), kind=kOutput, calls=%async_collective_fusion.7
  ROOT %async-collective-done = f32[8,16]{1,0} fusion(%w), kind=kCustom, calls=%end
}
"""
    found = hlo.summarize(text)
    assert found.collectives == {"all-gather": hlo.Collective(1, 1, 8 * 16 * 4)}
    assert found.matmul_flops == 2 * 4 * 2 * 8


def test_a_batched_product_written_as_a_convolution_counts_each_product_once():
    # 3 products of [2, 5] by [5, 7]: the batch is spatial, its window sees one valid place.
    text = """\
HloModule m

ENTRY %main (a: f32[3,2,5], b: f32[3,5,7]) -> f32[3,2,7] {
  %a = f32[3,2,5]{2,1,0} parameter(0)
  %b = f32[3,5,7]{2,1,0} parameter(1)
  ROOT %c = f32[3,2,7]{2,1,0} convolution(%a, %b), WINDOW, dim_labels=0bf_0io->0bf
}
"""
    text = text.replace("WINDOW", "window={size=3 stride=2 pad=0_0 lhs_dilate=3}")
    assert hlo.summarize(text).matmul_flops == 3 * 2 * 2 * 7 * 5


def test_the_counted_flops_of_a_real_loop_are_those_of_its_products():
    def f(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    x, w = jnp.zeros((4, 8)), jnp.zeros((6, 8, 8))
    text = jax.jit(f).lower(x, w).compile().as_text()
    found = hlo.summarize(text)
    assert found.matmul_flops == 6 * 2 * 4 * 8 * 8
    assert not found.collectives


def test_arrays_of_tokens_by_vocabulary_are_found_and_others_are_not():
    text = "f32[2,512,1000] bf16[16,64,1000] f32[4096,1000] f32[128,1000] f32[4096,128]"
    found = hlo.logit_arrays(text, tokens={512, 1024, 4096}, vocabulary={1000})
    assert found == ["bf16[16,64,1000]", "f32[2,512,1000]", "f32[4096,1000]"]


def test_what_is_no_hlo_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        hlo.summarize("hello")


def test_stored_moments_follow_float32_ones_within_their_rounding():
    params = {"w": jnp.linspace(-1, 1, 64)}
    half = optim.stored_as(ADAM, "bfloat16")
    moment = jax.tree.leaves(half.init(params))[1]
    assert moment.dtype == jnp.bfloat16
    states = [ADAM.init(params), half.init(params)]
    for step in range(20):
        gradient = {"w": jnp.sin(jnp.arange(64.0) + step / 5)}
        updates = []
        for index, optimizer in enumerate((ADAM, half)):
            update, states[index] = optimizer.update(gradient, states[index], params)
            updates.append(update["w"])
    # bfloat16 keeps 8 bits: each write is off by at most 2^-9 of itself, and errors of b1 = .9
    # add up to at most ten of them.
    error = np.abs(updates[0] - updates[1])
    assert 0 < np.max(error) < 10 * 2**-9 * np.max(np.abs(updates[0]))
