"""Bounded staleness: what may run, what an update gets, and how long it waits."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rollout.asynchronous import STALE, AsyncCollector, AsyncOptions, oldest_version
from rollout.errors import FleetUnavailable
from rollout.records import Trajectory


def trajectory(name: str, *versions: int) -> Trajectory:
    """One whose sampled tokens have these versions."""
    acted = np.array([False, *[True] * len(versions)])
    return Trajectory(
        **dict.fromkeys(("task_id", "family", "tier", "split", "harness", "stage", "engine"), "x"),
        **dict.fromkeys(("iteration", "sample", "seed"), 0),
        id=name,
        temperature=1.0,
        token_ids=np.zeros(acted.size, np.int32),
        acted_t=acted,
        logprob_t=np.zeros(acted.size, np.float32),
        turn_t=np.zeros(acted.size, np.int32),
        weight_version_t=np.array([-1, *versions], np.int32),
        turns=(),
        finish="done",
        verdict=None,
    )


class Episodes:
    """A collection whose episodes end when they are told to, with the versions told."""

    def __init__(self) -> None:
        self.ends: dict[str, asyncio.Future[Trajectory]] = {}
        self.cancelled: list[str] = []

    async def __call__(self, specs, keep):
        async def one(name):
            self.ends[name] = asyncio.get_running_loop().create_future()
            try:
                keep(await self.ends[name])
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise

        await asyncio.gather(*map(one, specs))

    async def end(self, name: str, *versions: int) -> None:
        while name not in self.ends:
            await asyncio.sleep(0)
        self.ends[name].set_result(trajectory(name, *versions))
        for _ in range(3):
            await asyncio.sleep(0)


def drive(scenario, **options):
    async def bounded():
        episodes = Episodes()
        collector = AsyncCollector(episodes, AsyncOptions(**options))
        try:
            await asyncio.wait_for(scenario(collector, episodes), 10.0)
        finally:
            await collector.aclose()

    asyncio.run(bounded())


def names(taken):
    return [t.id for t in taken.trajectories]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_more_batches_run_than_the_staleness_allows(staleness):
    async def scenario(collector, episodes):
        for number in range(staleness + 1):
            collector.admit(number, [f"{number}"])
        with pytest.raises(ValueError, match="cannot be admitted"):
            collector.admit(staleness + 1, ["over"])
        await episodes.end("0", 0)
        assert names(await collector.take(0)) == ["0"]
        # Taking changes nothing; only a new version makes room.
        with pytest.raises(ValueError, match="cannot be admitted"):
            collector.admit(staleness + 1, ["over"])
        await collector.advance(1)
        collector.admit(staleness + 1, ["next"])

    drive(scenario, max_staleness=staleness)


@pytest.mark.parametrize("over_stale", ["drop", "mask"])
def test_an_over_stale_trajectory_is_dropped_or_masked_by_its_oldest_token(over_stale):
    async def scenario(collector, episodes):
        collector.admit(0, ["a"])
        await episodes.end("a", 0)
        await collector.take(0)
        await collector.advance(1)
        collector.admit(1, ["b", "c"])
        while "c" not in episodes.ends:
            await asyncio.sleep(0)
        await collector.advance(2)
        await collector.advance(3)
        # Batch 1 is too old to be waited for; what ended of it before is judged by its tokens.
        collector.admit(3, ["fresh", "mixed", "old"])
        await episodes.end("fresh", 3, 3)
        await episodes.end("mixed", 2, 3)
        await episodes.end("old", 1, 3)
        taken = await collector.take(3)
        assert (taken.over_stale, taken.abandoned) == (1, 2)
        assert sorted(episodes.cancelled) == ["b", "c"]
        by_name = {t.id: t for t in taken.trajectories}
        if over_stale == "drop":
            assert sorted(by_name) == ["fresh", "mixed"]
        else:
            assert by_name["old"].fault.kind == STALE
            assert by_name["old"].verdict is None
            # Which weights sampled what is still there.
            assert by_name["old"].weight_version_t.tolist() == [-1, 1, 3]
        assert by_name["fresh"].fault is by_name["mixed"].fault is None

    drive(scenario, max_staleness=1, over_stale=over_stale)


def test_the_trainer_waits_for_a_straggler_no_longer_than_the_deadline_and_gets_it_later():
    async def scenario(collector, episodes):
        collector.admit(0, ["quick", "slow"])
        collector.admit(1, ["next"])
        await episodes.end("quick", 0)
        taken = await collector.take(0)
        assert names(taken) == ["quick"]
        assert taken.late == 1
        assert 0.2 <= taken.waited_s < 1.0
        await collector.advance(1)
        await episodes.end("slow", 0)
        await episodes.end("next", 0)
        taken = await collector.take(1)
        assert names(taken) == ["next", "slow"]
        assert taken.waited_s < 0.2

    drive(scenario, straggler_s=0.2)


def test_a_batch_that_ended_early_is_left_to_its_own_update():
    async def scenario(collector, episodes):
        collector.admit(0, ["a"])
        collector.admit(1, ["b", "c"])
        for name in "bca":
            await episodes.end(name, 0)
        assert names(await collector.take(0)) == ["a"]
        await collector.advance(1)
        assert names(await collector.take(1)) == ["b", "c"]
        with pytest.raises(ValueError, match="was not admitted"):
            await collector.take(1)

    drive(scenario)


def test_synchronous_collection_gives_only_current_tokens():
    async def scenario(collector, episodes):
        for number in range(3):
            if number:
                await collector.advance(number)
            collector.admit(number, [f"{number}"])
            await episodes.end(f"{number}", number)
            taken = await collector.take(number)
            assert {oldest_version(t) for t in taken.trajectories} == {number}
            assert taken.over_stale == 0

    drive(scenario, max_staleness=0)


def test_what_ends_a_collection_ends_the_wait():
    async def failing(specs, keep):
        await asyncio.sleep(0.01)
        raise FleetUnavailable("0 of 2 servers")

    async def scenario():
        collector = AsyncCollector(failing, AsyncOptions())
        collector.admit(0, ["a"])
        with pytest.raises(FleetUnavailable):
            await collector.take(0)
        await collector.aclose()

    asyncio.run(scenario())


def test_bounds_that_make_no_sense_are_refused():
    for bad in ({"max_staleness": -1}, {"straggler_s": 0.0}):
        with pytest.raises(ValueError, match="need max_staleness"):
            AsyncOptions(**bad)
