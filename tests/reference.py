"""Small Hugging Face checkpoints whose weights are a function of their names.

The golden arrays, the live comparison with `transformers` and the import tests all build their
models here, so that no weights need to be stored.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

# Every size differs from every other where it can, so that a swapped axis has a wrong shape.
HYBRID: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
    },
}
DENSE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": 248_320,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262_144,
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "output_gate_type": "swish",
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    },
    "vision_config": {
        "model_type": "qwen3_5_vision",
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 5120,
        "num_position_embeddings": 2304,
    },
}
"""Qwen3.8-27B (facts of its published configuration)."""

_SMALL = {
    "text_config": {
        "vocab_size": 24,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 2,
        "linear_value_head_dim": 3,
    },
    "vision_config": {
        "hidden_size": 4,
        "intermediate_size": 6,
        "num_heads": 2,
        "patch_size": 2,
        "out_hidden_size": 8,
        "num_position_embeddings": 9,
    },
}

CASES = ("hybrid", "dense")
TOKENS = np.random.default_rng(7).integers(0, 96, (2, 75)).astype(np.int32)
"""Two rows of one chunk of the delta rule and a part of the next."""
PROMPT = TOKENS[0, :9]
NEW_TOKENS = 60


def description(case: str) -> Any:
    """The `transformers` configuration of a case."""
    from transformers import Qwen3_5TextConfig, Qwen3Config

    if case == "hybrid":
        return Qwen3_5TextConfig(**HYBRID, architectures=["Qwen3_5ForCausalLM"])
    return Qwen3Config(**DENSE, architectures=["Qwen3ForCausalLM"])


def published_description(*, small: bool = False) -> Any:
    """The vision-language configuration of Qwen3.8-27B; `small` keeps its depth and every name."""
    from transformers import Qwen3_5Config

    settings = dict(PUBLISHED)
    for part in ("text_config", "vision_config"):
        settings[part] = PUBLISHED[part] | (_SMALL[part] if small else {})
    return Qwen3_5Config(**settings)


def weight(name: str, shape: tuple[int, ...], *, offset_norms: bool) -> np.ndarray:
    """Float64 numbers that depend on the name alone; every norm weight is off its neutral value."""
    numbers = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    if name.endswith("A_log"):
        return np.log(1 + 3 * np.abs(numbers))
    if name.endswith("dt_bias"):
        return numbers - 2
    if name.endswith("conv1d.weight"):
        return numbers / 2
    if name.endswith("norm.weight"):
        plain = name.endswith("linear_attn.norm.weight") or not offset_norms
        return 0.2 * numbers + (1.0 if plain else 0.0)
    if name.endswith("embed_tokens.weight"):
        # Small beside what the layers add, so that a tied head does not just say its input again.
        return 0.1 * numbers
    if name.endswith(".bias") or len(shape) < 2:
        return 0.1 * numbers
    return numbers / np.sqrt(shape[-1])


def inventory(shapes: dict[str, tuple[int, ...]]) -> str:
    """SHA-256 of sorted names and shapes."""
    lines = [f"{name} {list(shape)}" for name, shape in sorted(shapes.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def summary(tensor: np.ndarray, name: str) -> np.ndarray:
    """Norm of a tensor and its product with a random one of its shape."""
    other = np.random.default_rng(zlib.crc32(f"{name} summary".encode())).normal(size=tensor.shape)
    return np.asarray([np.linalg.norm(tensor), np.sum(tensor * other)])


def weights(shapes: dict[str, tuple[int, ...]], *, offset_norms: bool) -> dict[str, np.ndarray]:
    """`weight` of every name."""
    return {n: weight(n, s, offset_norms=offset_norms) for n, s in shapes.items()}


def write_directory(
    directory: Path, config: Any, tensors: dict[str, np.ndarray], *, shards: int = 1
) -> Path:
    """A Hugging Face directory, by `transformers` and `safetensors` alone."""
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(directory))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    names = sorted(tensors)
    where = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = names[index::shards]
        save_file({n: tensors[n] for n in part}, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
    (directory / "model.safetensors.index.json").write_text(index_text + "\n")
    return directory
