"""SGLang servers as a rollout engine: the fleet, one server's protocol, and launching them."""

from rollout.engines.sglang.fleet import FleetOptions, SGLangFleet

__all__ = ["FleetOptions", "SGLangFleet"]
