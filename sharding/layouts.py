"""Layouts: a mesh on a topology, and the rule tables of the decoder's parameters and batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from sharding.mesh import mesh_shape
from sharding.rules import Rule

FSDP = ("fsdp", "sequence")
"""Axes that cut a parameter which is gathered before it is used."""

ROWS = P(("data", "fsdp"), "sequence")
"""[rows, tokens] of a batch."""


@dataclass(frozen=True)
class Layout:
    """How a train step lies on a topology.

    Attributes:
      topology: name of the topology it is made for.
      mesh: axis -> size, all four.
    """

    topology: str
    mesh: Mapping[str, int]


def _layout(topology: str, **axes: int) -> Layout:
    return Layout(topology, mesh_shape(axes))


LAYOUTS: Mapping[str, Layout] = {
    "v5e-256": _layout("v5e:16x16", fsdp=32, tensor=8),
    "v5e-256-long": _layout("v5e:16x16", fsdp=4, tensor=4, sequence=16),
    "v5p-64": _layout("v5p:4x4x4", fsdp=16, tensor=4),
    "v6e-64": _layout("v6e:8x8", fsdp=16, tensor=4),
    "v6e-256-long": _layout("v6e:16x16", fsdp=16, tensor=4, sequence=4),
    "h200-8": _layout("h200:8", fsdp=8),
    "cpu-8": _layout("cpu:8", fsdp=8),
    "cpu-4x2": _layout("cpu:8", fsdp=4, tensor=2),
    "cpu-2x2x2": _layout("cpu:8", fsdp=2, tensor=2, sequence=2),
}


def layout(name: str) -> Layout:
    """The layout of a name.

    Raises:
      ValueError: for an unknown name; lists the known ones.
    """
    if name not in LAYOUTS:
        raise ValueError(f"unknown layout {name!r}; known: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def decoder_rules(*, tensor: int, kv_heads: int, gated_attention: bool) -> tuple[Rule, ...]:
    """The table of a decoder's train state: parameters, Adam moments, counters, value head.

    Projections are cut by `tensor` over heads or channels and by `FSDP` over the residual
    dimension. Queries, keys and values, and their convolutions, are separate leaves, so that no
    cut falls across them. Beyond `kv_heads` ways keys and values stay whole over `tensor`.

    Args:
      tensor: size of the axis.
      kv_heads: key and value heads of full attention.
      gated_attention: whether its query kernel also holds a gate, [D, heads, 2, d].

    Returns:
      Rules of which exactly one matches each leaf.

    Raises:
      ValueError: where neither divides the other.
    """
    if kv_heads % tensor and tensor % kv_heads:
        raise ValueError(
            f"mesh axis 'tensor' of {tensor} neither divides the {kv_heads} key and value heads"
            " nor is a multiple of them"
        )
    query = (None, None) if gated_attention else (None,)
    kv = "tensor" if kv_heads % tensor == 0 else None
    return (
        Rule(r"embed/embedding", P("tensor", FSDP)),
        Rule(r"lm_head/kernel", P(FSDP, "tensor")),
        Rule(r"value_head/(kernel|bias)", P()),
        Rule(r"(final_norm|input_norm|post_norm|q_norm|k_norm)/scale", P()),
        Rule(r"attention/mixer/q_proj/kernel", P(FSDP, "tensor", *query)),
        Rule(r"attention/mixer/(k_proj|v_proj)/kernel", P(FSDP, kv, None)),
        Rule(r"(attention|gdn)/mixer/o_proj/kernel", P("tensor", None, FSDP)),
        Rule(r"gdn/mixer/(q_proj|k_proj|v_proj|z_proj)/kernel", P(FSDP, "tensor", None)),
        Rule(r"gdn/mixer/(a_proj|b_proj)/kernel", P(FSDP, "tensor")),
        Rule(r"gdn/mixer/(q_conv|k_conv|v_conv)", P(None, "tensor", None)),
        Rule(r"gdn/mixer/(A_log|dt_bias)", P("tensor")),
        Rule(r"gdn/mixer/norm", P()),
        Rule(r"mlp/(gate_proj|up_proj)/kernel", P(FSDP, "tensor")),
        Rule(r"mlp/down_proj/kernel", P("tensor", FSDP)),
        Rule(r"step|count", P()),
    )
