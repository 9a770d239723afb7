"""Sandboxes: one contract, several backends."""

from rollout.sandbox.select import BACKENDS, BackendProbe, make_backend, probe

__all__ = ["BACKENDS", "BackendProbe", "make_backend", "probe"]
