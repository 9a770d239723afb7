"""Rewards from per-check results."""
