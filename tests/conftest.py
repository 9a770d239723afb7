"""What several test files share."""

from __future__ import annotations

import os
from functools import cache

import pytest

from rollout.errors import SandboxError
from rollout.sandbox.engine import Engine, default_host
from rollout.sandbox.select import IMAGE_VARIABLE

# LLVM's optimisations take longer than what the tests' small programs compute. Parity, `make demo`
# and the benchmarks are compiled with them. JAX reads this when it starts.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

REQUIRED = "TRSI_REQUIRE_DOCKER"
"""Set where the container tests must run and a missing engine is a failure."""


@cache
def _why_no_engine() -> str:
    """Why no container tests can run here; empty if they can."""
    engine = Engine(default_host())
    try:
        engine.connect()
        image = os.environ.get(IMAGE_VARIABLE, "")
        if not image:
            return f"{IMAGE_VARIABLE} names no image; bash .ci/sandbox.sh makes one"
        engine.run(engine.client.inspect_image, image)
    except SandboxError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.fixture(scope="session")
def docker_engine() -> None:
    """A container engine with the tests' image; without one the test is skipped, and says why."""
    reason = _why_no_engine()
    if reason and os.environ.get(REQUIRED):
        pytest.fail(reason)
    if reason:
        pytest.skip(f"no container tests: {reason}")
