"""Weights in and out: Hugging Face directories of the `qwen3_5` and the dense `qwen3` family."""

from trsi_jax.model.hf.load import load_params
from trsi_jax.model.hf.save import save_params

__all__ = ["load_params", "save_params"]
