"""`trsi plan`: budgets that follow from shapes, verdicts, and a person's mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec

from sharding.rules import Rule
from trsi_jax import config
from trsi_jax.cli.main import call
from trsi_jax.steps import sharded_forward
from trsi_jax.steps.plan import plan

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
V5P = CONFIGS / "qwen3_8_27b_v5p64.toml"
ACTOR, HEAD = 26_895_998_464, 248_320 * 5120
CRITIC = ACTOR - HEAD + 5121


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("qwen3_8_27b_*.toml")), ids=lambda p: p.stem)
def test_every_27b_config_leaves_room_by_its_shapes(path):
    found = plan(config.load(path), compile_step=False)
    assert found.parameters == (ACTOR, CRITIC)
    assert found.fits
    assert found.compiled is None
    assert "--no-compile" in found.left_out


def test_the_budget_is_twelve_bytes_a_parameter_and_the_layers_inputs(capsys):
    assert call(["plan", str(V5P), "--no-compile", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    budget = found["budget"]
    # Parameters and two moments in float32, cut 64 ways but for the norms (under 2 %).
    for name, parameters in (("actor", ACTOR), ("critic", CRITIC)):
        assert 12 * parameters / 64 <= budget[name] <= 1.02 * 12 * parameters / 64
    # 64 rows over 16 fsdp and 4 micro-batches: one row a device, cut 4 ways, bfloat16, 64 layers.
    assert budget["layer_inputs"] == 16384 // 4 * 5120 * 2 * 64
    assert found["model_flops"] == pytest.approx(6 * (ACTOR + CRITIC) * 64 * 16384 / 64)
    # Six products of half of T^2 by 24 heads of 256, in 16 layers of two networks.
    assert found["attention_flops"] == pytest.approx(
        2 * 6 * 2 * 16384**2 / 2 * 24 * 256 * 16 * 64 / 64
    )
    assert found["fits"] is True
    assert found["compiled"] is None


def test_what_does_not_fit_names_the_knob():
    # Eight devices of 131 GiB hold the states cut eight ways, but not cut four ways.
    four = ["sharding.data=2", "sharding.fsdp=4", "sharding.tensor=1"]
    states = plan(config.load(V5P, four), "h200:8", compile_step=False)
    assert states.fits is False
    assert "sharding.moments = 'bfloat16'" in states.knob
    less = plan(
        config.load(V5P, [*four, "sharding.moments='bfloat16'", "sharding.offload=true"]),
        "h200:8",
        compile_step=False,
    )
    assert less.needed < states.needed
    assert less.budget.host > 0
    rows = config.load(
        V5P, ["packing.rows=512", "packing.length=98304", "sharding.micro_batches=1"]
    )
    found = plan(rows, compile_step=False)
    assert found.fits is False
    assert "raise sharding.micro_batches to 32" in found.knob
    one = config.load(CONFIGS / "qwen3_8_27b_v5e256.toml", ["packing.length=262144"])
    assert "sharding.sequence, now 1" in plan(one, compile_step=False).knob


def test_a_step_counts_the_network_that_it_trains(capsys):
    for step, parameters in {"sft": (ACTOR, 0), "critic": (0, CRITIC)}.items():
        assert call(["plan", str(V5P), "--no-compile", "--json", "--step", step]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["parameters"] == {"actor": parameters[0], "critic": parameters[1]}
        assert found["model_flops"] == 6 * sum(parameters) * 16384
        assert [found["budget"][n] > 0 for n in ("actor", "critic")] == [p > 0 for p in parameters]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v9:4x4"], "unknown topology 'v9:4x4'; known: v5e:AxB"),
        (["--topology", "v5p:2x2x2"], "mesh of 64 devices"),
        (["-o", "sharding.layout='v5p'"], "unknown layout 'v5p'; known: v5e-256"),
        (["-o", "sharding.tensor=8", "-o", "sharding.fsdp=5"], "mesh of 40 devices"),
        (["-o", "packing.rows=60"], "'data' x 'fsdp' of 16 do not divide 15 rows"),
        (["-o", "packing.length=16386"], "do not divide rows of 16386 tokens"),
        (["-o", "sharding.micro_batches=7"], "64 rows do not divide into 7 micro-batches"),
        (["-o", "sharding.sequense=2"], "unknown key sharding.sequense; allowed here: data"),
        (
            ["-o", "sharding.fsdp=4", "-o", "sharding.tensor=16"],
            "'tensor' of 16 does not divide 24",
        ),
        (
            # 3 divides the rows of a micro-batch and the MLP's channels, but not the hidden size.
            [
                *("--topology", "cpu:3", "-o", "packing.rows=12"),
                *("-o", "sharding.fsdp=3", "-o", "sharding.tensor=1"),
            ],
            "embed/embedding: dimension 1 of [248320, 5120] is not divisible by fsdp 3 x sequence",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_it(arguments, message, capsys):
    assert call(["plan", str(V5P), "--no-compile", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rules: rules[1:], "no sharding rule matches params/embed/embedding [248320, 5120]"),
        (
            lambda rules: (*rules, Rule("embedding", PartitionSpec())),
            "2 sharding rules match params/embed/embedding: 'embed/embedding', 'embedding'",
        ),
    ],
)
def test_a_wrong_rule_table_is_one_line_that_names_the_leaf(change, message, monkeypatch, capsys):
    made = sharded_forward.decoder_rules
    monkeypatch.setattr(sharded_forward, "decoder_rules", lambda **sizes: change(made(**sizes)))
    assert call(["plan", str(V5P), "--no-compile"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_a_config_without_a_layout_needs_a_topology(capsys):
    tiny = str(CONFIGS / "tiny.toml")
    assert call(["plan", tiny, "--no-compile"]) == 2
    assert "name a topology, such as v5p:4x4x4" in capsys.readouterr().err
    assert call(["plan", tiny, "--no-compile", "--topology", "cpu:4"]) == 0
    assert "there is no verdict" in capsys.readouterr().out
