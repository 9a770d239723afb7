"""`config.json` of a Hugging Face directory to a `ModelConfig` and back.

`transformers`' own configuration classes read and write the file, so its defaults and its older
spellings are theirs; nothing here needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout.errors import UserError
from trsi_jax.model.config import LayerKind, ModelConfig

_FAMILIES = ("qwen3_5", "qwen3_5_text", "qwen3")
_KINDS: dict[str, LayerKind] = {"linear_attention": "linear", "full_attention": "full"}
_COMPUTE_DTYPES = ("bfloat16", "float32", "float16", "float64")


def read_description(directory: Path) -> Any:
    """The `transformers` configuration object of a directory.

    Raises:
      UserError: when there is no readable `config.json`, or one of another family.
    """
    # Imported here: it takes about a second, and most runs read no checkpoint.
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"no config.json in {directory}; a Hugging Face model directory is needed")
    try:
        description = AutoConfig.from_pretrained(str(directory))
    except (ValueError, TypeError, OSError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path}: {reason}") from error
    if description.model_type not in _FAMILIES:
        raise UserError(
            f"{path}: model_type {description.model_type!r} is not one of {', '.join(_FAMILIES)}"
        )
    return description


def model_config(directory: Path) -> ModelConfig:
    """The model that a Hugging Face directory describes.

    Args:
      directory: holds `config.json`; a vision-language configuration gives its text part.

    Returns:
      The configuration, named after the directory, with rematerialisation on and the compute
      dtype of the file; parameters are float32, or float64 where the file is.

    Raises:
      UserError: names the file, the key and its value where the model would not be ours.
    """
    description = read_description(directory)
    text = description.get_text_config()
    path = directory / "config.json"
    gdn = description.model_type != "qwen3"

    def refuse(key: str, value: object, allowed: str) -> UserError:
        return UserError(f"{path}: {key} is {value!r}; {allowed}")

    def need(key: str, *allowed: object) -> None:
        value = getattr(text, key, allowed[0])
        if value not in allowed:
            raise refuse(key, value, f"only {' or '.join(map(repr, allowed))} is implemented")

    need("hidden_act", "silu")
    need("attention_bias", False)
    need("attn_output_gate", True)
    need("output_gate_type", "swish", "silu")
    need("mamba_ssm_dtype", "float32")
    need("use_sliding_window", False)
    rope: dict[str, Any] = text.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":
        raise refuse("rope_type", rope["rope_type"], "only 'default' is implemented")
    if "rope_theta" not in rope:
        raise refuse("rope_parameters", rope, "a rope_theta is needed")
    rotary = rope.get("partial_rotary_factor", getattr(text, "partial_rotary_factor", None) or 1.0)

    kinds = list(text.layer_types)
    unknown = sorted({kind for kind in kinds if kind not in _KINDS})
    if unknown:
        raise refuse("layer_types", unknown[0], f"allowed: {', '.join(_KINDS)}")
    period = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds)
    if not kinds or kinds != kinds[:period] * (len(kinds) // period):
        raise refuse("layer_types", kinds, "only repetitions of one group of layers will do")
    dtype = str(getattr(text, "dtype", None) or "float32").removeprefix("torch.")
    if dtype not in _COMPUTE_DTYPES:
        raise refuse("dtype", dtype, f"allowed: {', '.join(_COMPUTE_DTYPES)}")

    extra: dict[str, Any] = {}
    if dtype == "float64":
        extra = {"accum_dtype": dtype, "param_dtype": dtype}
    if gdn:
        extra |= {
            "gdn_key_heads": text.linear_num_key_heads,
            "gdn_value_heads": text.linear_num_value_heads,
            "gdn_key_dim": text.linear_key_head_dim,
            "gdn_value_dim": text.linear_value_head_dim,
            "conv_width": text.linear_conv_kernel_dim,
        }
    try:
        return ModelConfig(
            name=directory.resolve().name,
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            num_layers=text.num_hidden_layers,
            intermediate_size=text.intermediate_size,
            layer_pattern=tuple(_KINDS[kind] for kind in kinds[:period]),
            num_heads=text.num_attention_heads,
            num_kv_heads=text.num_key_value_heads,
            head_dim=text.head_dim,
            rotary_dim=int(text.head_dim * rotary),
            rope_theta=float(rope["rope_theta"]),
            gated_attention=gdn,
            norm_offset=1.0 if gdn else 0.0,
            tie_embeddings=bool(description.tie_word_embeddings),
            max_position=text.max_position_embeddings,
            norm_eps=text.rms_norm_eps,
            compute_dtype=dtype,
            remat=True,
            **extra,
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def describe(config: ModelConfig, dtype: str) -> Any:
    """The `transformers` configuration object of a text-only model of ours.

    Args:
      config: the model.
      dtype: of the weights, for example "bfloat16".

    Returns:
      A configuration with `save_pretrained`, for `Qwen3_5ForCausalLM` or `Qwen3ForCausalLM`.

    Raises:
      UserError: for a model that neither family can express.
    """
    from transformers import Qwen3_5TextConfig, Qwen3Config

    hybrid = config.gated_attention and config.norm_offset == 1.0
    dense = not config.uses_gdn and not config.gated_attention and config.norm_offset == 0.0
    if not hybrid and not dense:
        raise UserError(
            f"model {config.name!r}: gated_attention={config.gated_attention} with norm_offset="
            f"{config.norm_offset} is neither the qwen3_5 nor the qwen3 architecture"
        )
    spelled = {kind: name for name, kind in _KINDS.items()}
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "layer_types": [spelled[kind] for kind in config.layer_pattern] * config.num_groups,
        "dtype": dtype,
    }
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if dense:
        if config.rotary_dim != config.head_dim:
            raise UserError(f"model {config.name!r}: a qwen3 model rotates whole heads")
        return Qwen3Config(**common, rope_parameters=rope, architectures=["Qwen3ForCausalLM"])
    third = config.rotary_dim // 2 // 3
    sections = [config.rotary_dim // 2 - 2 * third, third, third]
    return Qwen3_5TextConfig(
        **common,
        rope_parameters=rope
        | {
            "partial_rotary_factor": config.rotary_dim / config.head_dim,
            "mrope_interleaved": True,
            "mrope_section": sections,
        },
        linear_num_key_heads=max(config.gdn_key_heads, 1),
        linear_num_value_heads=max(config.gdn_value_heads, 1),
        linear_key_head_dim=max(config.gdn_key_dim, 1),
        linear_value_head_dim=max(config.gdn_value_dim, 1),
        linear_conv_kernel_dim=config.conv_width,
        architectures=["Qwen3_5ForCausalLM"],
    )
