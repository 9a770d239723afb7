"""The fleet over `trsi serve`: the same client and contract as for real SGLang servers.

It serves the tiny hybrid, and honours seeds; real servers do either on GPUs only.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import jax
import pytest

from rollout.engines.sglang import FleetOptions, SGLangFleet
from rollout.protocols import WeightSnapshot
from tests.engine_contract import EngineContract, Open, Subject
from tests.serve_client import serving
from tests.test_serve import tiny
from trsi_jax.model import init_params, save_params
from trsi_jax.publish import publish

pytestmark = pytest.mark.fleet

CONTEXT, LONG = 1024, 900
"""An abort takes the fleet two round trips; a request must outlive them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    params = init_params(tiny(), jax.random.key(0))
    model = save_params(folder / "model", tiny(), params, dtype="F32")
    options = ("--context-length", f"{CONTEXT}", "--slots", "8", "--steps", "1")
    with serving(model, *options, "--prefill-chunk", "16", "--weight-version", "0") as found:
        yield found


class TestFleetOfJaxEngines(EngineContract):
    @pytest.fixture
    def subject(self, url: str, folder: Path) -> Open:
        params = [init_params(tiny(), jax.random.key(seed)) for seed in (0, 1)]

        def snapshot(which: int, version: int) -> WeightSnapshot:
            return publish(folder / "weights", version, tiny(), params[which], dtype="F32")

        def broken(version: int) -> WeightSnapshot:
            """Published like the others, and then its file went."""
            good = publish(folder / "broken", version, tiny(), params[1], dtype="F32")
            assert good.path
            (good.path / "model.safetensors").unlink()
            return good

        @contextlib.asynccontextmanager
        async def opened() -> AsyncIterator[Subject]:
            fleet = SGLangFleet(
                [url],
                vocab_size=tiny().vocab_size,
                context_len=CONTEXT,
                hybrid=True,
                seeded_sampling=True,
                options=FleetOptions(poll_s=0.5),
            )
            try:
                yield Subject(fleet, tiny(), params, snapshot, broken, long=LONG)
            finally:
                await fleet.aclose()

        return opened
