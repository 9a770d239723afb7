"""The fleet against real SGLang servers on CPUs: contract, numbers, deaths, bad weights.

.ci/fleet.sh makes the servers' environment, starts one, and requires these tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rollout import snapshots
from rollout.engines.sglang import FleetOptions, SGLangFleet
from rollout.engines.sglang.servers import end_group, launch
from rollout.errors import SnapshotRefused
from rollout.protocols import (
    EngineState,
    FinishKind,
    GenerateRequest,
    GenerateResult,
    SamplingSpec,
    WeightSnapshot,
)
from tests import sglang_real as real
from tests.engine_contract import EngineContract, Open, Subject, ask
from tests.fault_proxy import Call, FaultProxy, Reply
from trsi_jax.publish import publish

# One test starts a server twice; the rest of this is spare for a loaded machine.
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3 * real.START_S)]

WEIGHTS = (0, 1)
"""Seeds of the two sets of parameters."""
OPTIONS = FleetOptions(recovery_s=240.0, poll_s=0.5, update_timeout_s=180.0)
LOOK_S = 5.0
"""`Server.label` gives up then."""


def longest(failures: int, looks: int) -> float:
    """Seconds that a fleet itself takes at most over failures of a server, by its own bounds.

    After each failure it looks so often, with waits between, and waits before it goes on.
    """
    options, waits = OPTIONS, 0.0
    for failure in range(failures):
        waits += looks * LOOK_S
        waits += sum(min(options.backoff_s * 2**n, options.backoff_max_s) for n in range(looks - 1))
        waits += min(options.backoff_s * 2**failure, options.backoff_max_s)
    return waits


class World:
    """A folder of snapshots, and the servers that live as long as the module's tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = folder / "weights"
        # Apart, since only the last three snapshots of a folder stay.
        params = real.dense_params(0)
        self.base = publish(folder / "base", 0, real.DENSE, params, dtype="F32").path

    def snapshot(self, which: int, version: int) -> WeightSnapshot:
        params = real.dense_params(WEIGHTS[which])
        return publish(self.weights, version, real.DENSE, params, dtype="F32")

    def broken(self, version: int) -> WeightSnapshot:
        """A copy of published weights with one tensor of another shape, as nobody publishes it."""
        newest = snapshots.latest(self.weights)
        assert newest
        target = self.folder / f"broken-{version}"
        shutil.copytree(newest, target)
        (target / snapshots.MANIFEST).unlink()
        tensors = load_file(target / "model.safetensors")
        # A projection that is too narrow would not do: the server pads it and says success.
        name = "model.norm.weight"
        tensors[name] = np.ascontiguousarray(tensors[name][:-1])
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        return WeightSnapshot(version, target)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    real.interpreter()
    return World(tmp_path_factory.mktemp("fleet"))


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[str]:
    """URL of the server that all tests share."""
    if url := os.environ.get(real.URL):
        yield url
        return
    assert world.base
    spec = real.spec(world.base, real.free_port())
    with real.running([spec], world.folder):
        yield spec.url


def fleet_of(urls: Sequence[str], **options: Any) -> SGLangFleet:
    return SGLangFleet(
        urls,
        vocab_size=real.DENSE.vocab_size,
        context_len=real.CONTEXT,
        options=replace(OPTIONS, **options),
    )


class TestRealServer(EngineContract):
    """The shared contract, on sglang's own server."""

    @pytest.fixture
    def subject(self, server: str, world: World) -> Open:
        @contextlib.asynccontextmanager
        async def opened() -> AsyncIterator[Subject]:
            fleet = fleet_of([server])
            params = [real.dense_params(seed) for seed in WEIGHTS]
            try:
                yield Subject(fleet, real.DENSE, params, world.snapshot, world.broken)
            finally:
                await fleet.aclose()

        return opened


def judge(
    subject: Subject, request: GenerateRequest, result: GenerateResult, versions: dict[int, int]
) -> float:
    """`Subject.check`, and the largest difference of a log-prob from the forward's."""
    subject.check(request, result, versions)
    start, whole, worst = len(request.input_ids), (*request.input_ids, *result.output_ids), 0.0
    for span in result.spans:
        expected = subject.reference(versions[span.version], whole, request.sampling.temperature)
        said = np.asarray(result.logprobs[span.start : span.end])
        gap = np.abs(said - expected[start - 1 + span.start : start - 1 + span.end])
        worst = max(worst, float(gap.max(initial=0.0)))
    return worst


def test_1000_sampled_tokens_have_the_forwards_logprobs_before_and_after_an_update(
    server: str, world: World
) -> None:
    async def scenario() -> None:
        fleet = fleet_of([server])
        params = [real.dense_params(seed) for seed in WEIGHTS]
        s = Subject(fleet, real.DENSE, params, world.snapshot, world.broken)
        try:
            for which in (0, 1):
                version = await s.use(which)
                versions = {version: which}
                for temperature in (0.6, 1.0):
                    requests = [
                        ask(s.prompt(300 + i, 12), 100, temperature=temperature, ignore_eos=True)
                        for i in range(10)
                    ]
                    results = await asyncio.gather(*map(fleet.generate, requests))
                    pairs = list(zip(requests, results, strict=True))
                    worst = max(judge(s, request, result, versions) for request, result in pairs)
                    count = sum(len(result.output_ids) for result in results)
                    print(f"version {version}, T {temperature}: {count} tokens, gap {worst:.2g}")
                    assert count == 1000
                    assert worst < 1e-4
                    assert {v.version for r in results for v in r.spans} == {version}
                    if temperature == 0.6:
                        # These prompts were read under the other weights: nothing of it is used.
                        assert sum(result.cached_tokens for result in results) == 0
            # The two weights differ by far more than that.
            other = s.reference(0, (*requests[0].input_ids, *results[0].output_ids), 1.0)
            mine = s.reference(1, (*requests[0].input_ids, *results[0].output_ids), 1.0)
            assert np.abs(other - mine).mean() > 0.1
        finally:
            await fleet.aclose()

    asyncio.run(scenario())


TURNS, TURN_TOKENS = 3, 60


async def trajectory(fleet: SGLangFleet, s: Subject, name: str, versions: dict[int, int]) -> int:
    """Three turns of one session, each judged; gives the number of different versions in it."""
    context, seen = s.prompt(zlib.crc32(name.encode()), 8), set()
    for turn in range(TURNS):
        request = GenerateRequest(
            f"{name}/{turn}",
            context,
            SamplingSpec(TURN_TOKENS, temperature=1.0, ignore_eos=True),
            session_id=name,
        )
        result = await fleet.generate(request)
        assert result.finish is FinishKind.LENGTH
        assert len(result.output_ids) == TURN_TOKENS
        judge(s, request, result, versions)
        seen |= {span.version for span in result.spans}
        context = (*context, *result.output_ids, 7, 8, 9)
    await fleet.close_session(name)
    return len(seen)


def test_a_pair_of_servers_one_killed_one_stale_one_fed_bad_weights(
    server: str, world: World
) -> None:
    # The first server is behind a proxy that can point its updates at another directory.
    elsewhere: list[Path] = []
    updates: list[float] = []

    def redirect(call: Any) -> Any:
        if call.route == "/update_weights_from_disk" and elsewhere:
            return call.body | {"model_path": str(elsewhere[0])}
        return call.body

    assert world.base
    first = real.spec(world.base, real.free_port())

    async def state(fleet: SGLangFleet, url: str) -> EngineState:
        return {entry.engine_id: entry.state for entry in await fleet.status()}[url]

    async def scenario(groups: list[int]) -> None:
        async with FaultProxy(first.url, edit=redirect).running() as front:
            passed_on = front.handler

            async def handler(call: Call) -> Reply:
                reply = await passed_on(call)
                if call.route == "/update_weights_from_disk":
                    updates.append(time.monotonic())
                return reply

            front.handler = handler
            fleet = fleet_of([front.url, server])
            params = [real.dense_params(seed) for seed in WEIGHTS]
            s = Subject(fleet, real.DENSE, params, world.snapshot, world.broken)
            try:
                versions = {await s.use(0): 0}

                def start(label: str, n: int = 12) -> list[asyncio.Task[int]]:
                    names = [f"{label}-{i}" for i in range(n)]
                    return [asyncio.create_task(trajectory(fleet, s, x, versions)) for x in names]

                began = time.monotonic()
                assert await asyncio.gather(*start("calm")) == [1] * 12
                calm = time.monotonic() - began

                # Killed while it generates: half the servers do the rest.
                tasks, began = start("killed"), time.monotonic()
                while front.count("/generate") < 8:
                    await asyncio.sleep(0.02)
                os.killpg(groups[0], signal.SIGKILL)
                calls = len(front.calls)
                assert await asyncio.gather(*tasks) == [1] * len(tasks)
                took = time.monotonic() - began
                assert await state(fleet, front.url) is EngineState.DEAD
                calls = len(front.calls) - calls
                print(
                    f"killed: 12 trajectories in {took:.1f} s, {calls} calls to the dead;", end=""
                )
                print(f" in {calm:.1f} s before")
                assert took < 4 * calm + longest(OPTIONS.retries, looks=2)
                # Each request that was lost looks twice; then the watch does, after doubling waits.
                assert calls <= 3 * len(tasks) + took / OPTIONS.backoff_s

                # Restarted with the weights that it had at first.
                await asyncio.to_thread(end_group, groups[0])
                log = world.folder / "restarted.log"
                began = time.monotonic()
                groups[0] = (await asyncio.to_thread(launch, first, log)).pid
                before = front.count("/generate")
                tasks = start("restarted")
                await asyncio.to_thread(real.await_answer, first, log)
                start_up, began = time.monotonic() - began, time.monotonic()
                # Looked at, and brought up to date: its first forward is no quicker than its start.
                limit = OPTIONS.backoff_max_s + longest(1, looks=1) + start_up
                while await state(fleet, front.url) is not EngineState.READY:
                    assert time.monotonic() - began < limit, await fleet.status()
                    await asyncio.sleep(0.05)
                print(f"stale: started in {start_up:.1f} s, current again", end=" ")
                print(f"{time.monotonic() - began:.1f} s after it answered")
                assert await asyncio.gather(*tasks, *start("again")) == [1] * 24
                assert front.count("/generate") > before
                assert {entry.version for entry in await fleet.status()} == set(versions)

                # Given other weights than the others: valid ones, so only looking tells.
                tasks = start("mixed")
                version = max(versions) + 1000
                elsewhere[:] = [world.snapshot(0, version - 1).path or Path()]
                snapshot = world.snapshot(1, version)
                versions[version] = 1
                report = await fleet.update_weights(snapshot)
                print(f"wrong weights: {dict(report.failed)}")
                assert list(report.failed) == [front.url]
                counts = await asyncio.gather(*tasks)
                assert max(counts) == 2
                before = front.count("/generate")
                await asyncio.gather(*start("one left", 4))
                assert front.count("/generate") == before
                assert await state(fleet, front.url) is EngineState.POISONED

                # The next version mends it.
                elsewhere.clear()
                version += 1
                versions[version] = 0
                report = await fleet.update_weights(world.snapshot(0, version))
                assert not report.failed

                # Weights of another shape end the first server; the second never sees them.
                elsewhere[:] = [world.broken(version + 1).path or Path()]
                began = time.monotonic()
                with pytest.raises(SnapshotRefused, match="was lost with it"):
                    await fleet.update_weights(world.snapshot(1, version + 1))
                died, ended = updates[-1], time.monotonic()
                print(f"deadly weights: gone after {died - began:.1f} s,", end=" ")
                print(f"refused {ended - died:.1f} s later")
                assert ended - began < 60
                assert ended - died < longest(1, looks=3)
                assert set(await asyncio.gather(*start("survivor", 4))) == {1}
                assert await state(fleet, server) is EngineState.READY
            finally:
                await fleet.aclose()

    with real.running([first], world.folder) as groups:
        asyncio.run(scenario(groups))
