"""Losses: pure functions of arrays."""
