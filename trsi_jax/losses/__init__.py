"""Losses: pure functions of arrays."""

from trsi_jax.losses.kl import kl_estimate
from trsi_jax.losses.linear import linear_cross_entropy, linear_logprob
from trsi_jax.losses.policy import ppo_clip
from trsi_jax.losses.reduce import masked_sum
from trsi_jax.losses.sft import sft_nll
from trsi_jax.losses.value import explained_variance, value_mse

__all__ = [
    "explained_variance",
    "kl_estimate",
    "linear_cross_entropy",
    "linear_logprob",
    "masked_sum",
    "ppo_clip",
    "sft_nll",
    "value_mse",
]
