"""Losses: pure functions of arrays."""

from trsi_jax.losses.kl import kl_estimate
from trsi_jax.losses.linear import linear_cross_entropy, linear_logprob
from trsi_jax.losses.policy import double_sided, gspo, ppo_clip, truncated_weight
from trsi_jax.losses.reduce import Aggregation, masked_sum, token_weight
from trsi_jax.losses.sft import sft_nll
from trsi_jax.losses.value import explained_variance, value_bce, value_mse, value_of_logit

__all__ = [
    "Aggregation",
    "double_sided",
    "explained_variance",
    "gspo",
    "kl_estimate",
    "linear_cross_entropy",
    "linear_logprob",
    "masked_sum",
    "ppo_clip",
    "sft_nll",
    "token_weight",
    "truncated_weight",
    "value_bce",
    "value_mse",
    "value_of_logit",
]
