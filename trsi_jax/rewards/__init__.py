"""Rewards from per-check results."""

from trsi_jax.rewards.audit import Audit, audit
from trsi_jax.rewards.fdr import family_medians, fdr, verdict_fdr
from trsi_jax.rewards.spr import spr, verdict_spr

__all__ = ["Audit", "audit", "family_medians", "fdr", "spr", "verdict_fdr", "verdict_spr"]
