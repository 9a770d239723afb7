"""The fleet's contract with `trsi serve` as its server: the same client as for SGLang's own."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from safetensors.numpy import load_file, save_file

from rollout import snapshots
from rollout.engines.sglang import FleetOptions, SGLangFleet
from rollout.protocols import WeightSnapshot
from tests.engine_contract import EngineContract, Open, Subject
from tests.serve_client import serving
from tests.test_engine import tiny
from trsi_jax.model import init_params
from trsi_jax.publish import publish

pytestmark = pytest.mark.engine
CONTEXT = 1024


@pytest.fixture(scope="module")
def weights() -> list[Any]:
    return [init_params(tiny(), jax.random.key(seed)) for seed in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="module")
def url(folder: Path, weights: list[Any]) -> Iterator[str]:
    base = publish(folder / "base", 0, tiny(), weights[0], dtype="F32").path
    assert base is not None
    options = ("--context-length", f"{CONTEXT}", "--slots", "8", "--steps", "1")
    with serving(base, *options, "--prefill-chunk", "16", "--weight-version", "0") as found:
        yield found


class TestTheContract(EngineContract):
    @pytest.fixture
    def subject(self, url: str, folder: Path, weights: list[Any]) -> Open:
        def snapshot(which: int, version: int) -> WeightSnapshot:
            return publish(folder / "weights", version, tiny(), weights[which], dtype="F32")

        def broken(version: int) -> WeightSnapshot:
            newest = snapshots.latest(folder / "weights")
            assert newest is not None
            target = folder / f"broken-{version}"
            shutil.copytree(newest, target)
            (target / snapshots.MANIFEST).unlink()
            tensors = load_file(target / "model.safetensors")
            del tensors["model.norm.weight"]
            save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
            return WeightSnapshot(version, target)

        @contextlib.asynccontextmanager
        async def open_subject() -> AsyncIterator[Subject]:
            fleet = SGLangFleet(
                [url],
                vocab_size=tiny().vocab_size,
                context_len=CONTEXT,
                options=FleetOptions(poll_s=0.5),
                hybrid=True,
                seeded_sampling=True,
            )
            try:
                yield Subject(fleet, tiny(), weights, snapshot, broken, long=900)
            finally:
                await fleet.aclose()

        return open_subject
