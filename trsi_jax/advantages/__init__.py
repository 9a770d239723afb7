"""Advantage estimators: pure functions of one sequence, and a registry of their names."""

from trsi_jax.advantages.gae import gae
from trsi_jax.advantages.monte_carlo import monte_carlo
from trsi_jax.advantages.registry import bind, entry, get, names, options, register
from trsi_jax.advantages.tb_gae import tb_gae
from trsi_jax.advantages.whitening import whiten

__all__ = [
    "bind",
    "entry",
    "gae",
    "get",
    "monte_carlo",
    "names",
    "options",
    "register",
    "tb_gae",
    "whiten",
]
