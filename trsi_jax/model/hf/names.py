"""Which checkpoint tensor is which slice of which parameter, for both families.

A checkpoint stores a linear map as [out, in] and one tensor a layer; ours are [in, out] and
stacked over groups (and over the gated-delta-net layers of a group). Fused tensors are row blocks:
`in_proj_qkv` and `conv1d` hold queries, keys and values one below the other, so splitting them is
a choice of rows, and fusing them is writing one part behind the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax

from trsi_jax.model.config import ModelConfig
from trsi_jax.model.decoder import Params, abstract_params

VLM_PREFIX = "model.language_model."
TEXT_PREFIX = "model."
HEAD = "lm_head.weight"

Path = tuple[str, ...]

# Checkpoint suffix -> leaves below a layer, first rows first, and how many of a leaf's leading
# axes are the input of its map (0: stored as it is).
_NORMS: dict[str, tuple[tuple[str, ...], int]] = {
    "input_layernorm.weight": (("input_norm/scale",), 0),
    "post_attention_layernorm.weight": (("post_norm/scale",), 0),
}
_MLP: dict[str, tuple[tuple[str, ...], int]] = {
    f"mlp.{name}.weight": ((f"mlp/{name}/kernel",), 1)
    for name in ("gate_proj", "up_proj", "down_proj")
}
_LINEAR: dict[str, tuple[tuple[str, ...], int]] = {
    "linear_attn.A_log": (("mixer/A_log",), 0),
    "linear_attn.conv1d.weight": (("mixer/q_conv", "mixer/k_conv", "mixer/v_conv"), 1),
    "linear_attn.dt_bias": (("mixer/dt_bias",), 0),
    "linear_attn.in_proj_a.weight": (("mixer/a_proj/kernel",), 1),
    "linear_attn.in_proj_b.weight": (("mixer/b_proj/kernel",), 1),
    "linear_attn.in_proj_qkv.weight": (
        ("mixer/q_proj/kernel", "mixer/k_proj/kernel", "mixer/v_proj/kernel"),
        1,
    ),
    "linear_attn.in_proj_z.weight": (("mixer/z_proj/kernel",), 1),
    "linear_attn.norm.weight": (("mixer/norm",), 0),
    "linear_attn.out_proj.weight": (("mixer/o_proj/kernel",), 2),
}
_FULL: dict[str, tuple[tuple[str, ...], int]] = {
    "self_attn.k_norm.weight": (("mixer/k_norm/scale",), 0),
    "self_attn.k_proj.weight": (("mixer/k_proj/kernel",), 1),
    "self_attn.o_proj.weight": (("mixer/o_proj/kernel",), 2),
    "self_attn.q_norm.weight": (("mixer/q_norm/scale",), 0),
    "self_attn.q_proj.weight": (("mixer/q_proj/kernel",), 1),
    "self_attn.v_proj.weight": (("mixer/v_proj/kernel",), 1),
}


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a checkpoint tensor that are one layer's slice of one parameter.

    Attributes:
      path: of the parameter in the tree.
      layer: index into its stacked leading axes; () where it has none.
      rows: first row and the row behind the last, in the checkpoint tensor.
      in_shape, out_shape: of the slice, which is [*in_shape, *out_shape].
    """

    path: Path
    layer: tuple[int, ...]
    rows: tuple[int, int]
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint: its shape there, and the parts it consists of."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def flatten(params: Params) -> dict[Path, Any]:
    """Path -> leaf of a nested dict."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {tuple(entry.key for entry in path): leaf for path, leaf in leaves}


def text_tensors(config: ModelConfig, prefix: str = TEXT_PREFIX) -> dict[str, Tensor]:
    """Every tensor of the text model in a checkpoint of `config`, by name.

    Args:
      config: the model.
      prefix: `VLM_PREFIX` in a vision-language checkpoint, else `TEXT_PREFIX`.

    Returns:
      851 entries for Qwen3.8-27B; none for the head where it is tied to the embedding.

    Source: tensor lists of the published checkpoints.
    """
    leaves = {path: leaf.shape for path, leaf in flatten(abstract_params(config)).items()}
    found: dict[str, Tensor] = {}

    def add(
        name: str, base: Path, below: tuple[str, ...], layer: tuple[int, ...], ins: int
    ) -> None:
        parts, at = [], 0
        for leaf in below:
            path = (*base, *leaf.split("/"))
            shape = leaves[path][len(layer) :]
            rows = math.prod(shape[ins:]) if ins else shape[0]
            parts.append(Part(path, layer, (at, at + rows), shape[:ins], shape[ins:]))
            at += rows
        first = parts[0]
        if name.endswith("conv1d.weight"):
            whole = (at, 1, *first.in_shape)
        elif ins:
            whole = (at, math.prod(first.in_shape))
        else:
            whole = first.out_shape
        found[name] = Tensor(name, tuple(whole), tuple(parts))

    add(f"{prefix}embed_tokens.weight", (), ("embed/embedding",), (), 0)
    for index in range(config.num_layers):
        group, inner = divmod(index, len(config.layer_pattern))
        linear = config.layer_pattern[inner] == "linear"
        base = ("groups", "gdn" if linear else "attention")
        layer = (group, inner) if linear else (group,)
        for suffix, (below, ins) in (_NORMS | (_LINEAR if linear else _FULL) | _MLP).items():
            add(f"{prefix}layers.{index}.{suffix}", base, below, layer, ins)
    add(f"{prefix}norm.weight", (), ("final_norm/scale",), (), 0)
    if not config.tie_embeddings:
        add(HEAD, (), ("lm_head/kernel",), (), 1)
    return found


def tied_head(config: ModelConfig) -> Tensor:
    """The copy of the embedding that a checkpoint of a tied model may hold as its head."""
    shape = (config.vocab_size, config.hidden_size)
    return Tensor(HEAD, shape, (Part(("embed", "embedding"), (), (0, shape[0]), (), shape),))


def untrained_tensors(description: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what a checkpoint holds beside the text model, never loaded, only copied.

    Args:
      description: the `transformers` configuration object of the directory.

    Returns:
      The multi-token-prediction block (`mtp.`, 15 tensors for one layer) and the vision tower
      (`model.visual.`, 333 for Qwen3.8-27B); empty for a text-only description of neither.

    Source: tensor lists of the published checkpoints.
    """
    text = description.get_text_config()
    hidden, inner, dim = text.hidden_size, text.intermediate_size, text.head_dim
    queries, keys = text.num_attention_heads * dim, text.num_key_value_heads * dim
    found: dict[str, tuple[int, ...]] = {}
    depth = int(getattr(text, "mtp_num_hidden_layers", 0) or 0)
    if depth:
        found["mtp.fc.weight"] = (hidden, 2 * hidden)
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            found[f"mtp.{norm}.weight"] = (hidden,)
    for index in range(depth):
        shapes = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "self_attn.q_proj": (2 * queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
        }
        found |= {f"mtp.layers.{index}.{name}.weight": shape for name, shape in shapes.items()}
    vision = getattr(description, "vision_config", None)
    if vision is None:
        return found

    def affine(name: str, *shape: int) -> None:
        found[f"model.visual.{name}.weight"] = shape
        found[f"model.visual.{name}.bias"] = shape[:1]

    width, wide = vision.hidden_size, vision.intermediate_size
    side, merged = vision.patch_size, width * vision.spatial_merge_size**2
    affine("patch_embed.proj", width, vision.in_channels, vision.temporal_patch_size, side, side)
    found["model.visual.pos_embed.weight"] = (vision.num_position_embeddings, width)
    for index in range(vision.depth):
        block = f"blocks.{index}"
        affine(f"{block}.norm1", width)
        affine(f"{block}.norm2", width)
        affine(f"{block}.attn.qkv", 3 * width, width)
        affine(f"{block}.attn.proj", width, width)
        affine(f"{block}.mlp.linear_fc1", wide, width)
        affine(f"{block}.mlp.linear_fc2", width, wide)
    affine("merger.norm", width)
    affine("merger.linear_fc1", merged, merged)
    affine("merger.linear_fc2", vision.out_hidden_size, merged)
    return found
