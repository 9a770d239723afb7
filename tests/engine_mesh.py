"""An engine on a mesh of two devices against one on a single device; run by tests/test_engine.py.

Log-probs agree to 1e-4 (float32, sums in another order), and updates from a trainer on one device
end up on the mesh.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from typing import Any

DEVICES = 2
TOLERANCE = 1e-4


async def main() -> None:
    import jax
    import numpy as np

    from rollout.protocols import WeightSnapshot
    from sharding.layouts import decoder_rules
    from sharding.mesh import make_mesh
    from sharding.rules import shardings, specs
    from tests.test_engine import ask, ids_of, tiny
    from trsi_jax.engine import JaxEngine
    from trsi_jax.model import init_params

    # The embedding is cut by vocabulary.
    config = dataclasses.replace(tiny(), vocab_size=64)
    weights = [init_params(config, jax.random.key(seed)) for seed in range(2)]
    mesh = make_mesh({"tensor": DEVICES})
    rules = decoder_rules(
        tensor=DEVICES, kv_heads=config.num_kv_heads, gated_attention=config.gated_attention
    )
    where = shardings(mesh, specs(rules, weights[0], mesh.shape))
    options: dict[str, Any] = {"context_len": 64, "max_sessions": 4}
    engine = JaxEngine(config, weights[0], shardings=where, **options)
    alone = JaxEngine(config, weights[0], **options)
    try:
        for version in range(2):
            snapshot = WeightSnapshot(version, params=weights[version])
            await engine.update_weights(snapshot)
            await alone.update_weights(snapshot)
            for index in range(2):
                request = ask(f"{version}/{index}", ids_of(index, 20 + index), 8)
                ours, theirs = await engine.generate(request), await alone.generate(request)
                assert ours.output_ids == theirs.output_ids
                np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=TOLERANCE)
        served = engine._params["embed"]["embedding"]
        assert len(served.sharding.device_set) == DEVICES
        assert not served.sharding.is_fully_replicated
    finally:
        await engine.aclose()
        await alone.aclose()


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"
    asyncio.run(main())
