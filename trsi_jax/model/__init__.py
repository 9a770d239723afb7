"""The architecture of Qwen3.8: definitions, weights in and out, decoding."""

from trsi_jax.model.config import InitConfig, ModelConfig, preset, preset_names
from trsi_jax.model.decoder import (
    Params,
    abstract_params,
    check_rows,
    head_kernel,
    hidden_states,
    init_params,
    logits,
)
from trsi_jax.model.hf import load_params, save_params
from trsi_jax.model.value import init_value_params, values

__all__ = [
    "InitConfig",
    "ModelConfig",
    "Params",
    "abstract_params",
    "check_rows",
    "head_kernel",
    "hidden_states",
    "init_params",
    "init_value_params",
    "load_params",
    "logits",
    "preset",
    "preset_names",
    "save_params",
    "values",
]
