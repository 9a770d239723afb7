"""Advantage estimators: pure functions of one sequence, and a registry of their names."""

from trsi_jax.advantages.batched import tb_gae_batch
from trsi_jax.advantages.bilevel_gae import bilevel_gae
from trsi_jax.advantages.compaction import (
    action_index,
    compact,
    expand,
    tb_gae_compacted,
    turn_starts,
)
from trsi_jax.advantages.contract import check_tokens
from trsi_jax.advantages.cross_segment_gae import cross_segment_gae, later_tokens
from trsi_jax.advantages.decoupled import decoupled
from trsi_jax.advantages.gae import gae
from trsi_jax.advantages.groups import dr_grpo, grpo, rloo, spread
from trsi_jax.advantages.length_adaptive_gae import length_adaptive_gae
from trsi_jax.advantages.monte_carlo import monte_carlo
from trsi_jax.advantages.pact import pact, pact_weight
from trsi_jax.advantages.registry import bind, entry, get, names, options, register
from trsi_jax.advantages.reinforce_pp import reinforce_pp
from trsi_jax.advantages.study import gae_gap, gae_unmasked, gae_zeroed
from trsi_jax.advantages.tb_gae import tb_gae
from trsi_jax.advantages.turn_gae import turn_gae
from trsi_jax.advantages.whitening import whiten

__all__ = [
    "action_index",
    "bilevel_gae",
    "bind",
    "check_tokens",
    "compact",
    "cross_segment_gae",
    "decoupled",
    "dr_grpo",
    "entry",
    "expand",
    "gae",
    "gae_gap",
    "gae_unmasked",
    "gae_zeroed",
    "get",
    "grpo",
    "later_tokens",
    "length_adaptive_gae",
    "monte_carlo",
    "names",
    "options",
    "pact",
    "pact_weight",
    "register",
    "reinforce_pp",
    "rloo",
    "spread",
    "tb_gae",
    "tb_gae_batch",
    "tb_gae_compacted",
    "turn_gae",
    "turn_starts",
    "whiten",
]
