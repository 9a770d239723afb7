"""Jitted train steps: (state, batch) -> (state, metrics)."""
