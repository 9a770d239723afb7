"""How much asynchronous collection saves, by staleness and number of servers: a simulation.

    python benchmarks/async_sim.py [--servers 1 8 64 1024] [--staleness 0 1 2 4] [--seed N]

`rollout.asynchronous.AsyncCollector` itself runs here, on an event loop whose clock jumps to the
next event; only what takes long is replaced by its duration. An episode has turns: a completion on
its server (which has so many slots; a session keeps its server), then a tool call whose latency is
log-normal, so a few take very long. The trainer takes a batch, trains, pushes weights (which stops
all servers for a moment) and goes on. Batches grow with the fleet, so an ideal fleet makes the same
steps an hour at any size. Nothing here was measured on servers: the durations are options.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import math
import random
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout.asynchronous import AsyncCollector, AsyncOptions
from rollout.records import Trajectory


class _Jump(selectors.SelectSelector):
    """Nothing to wait for but timers: waiting moves the loop's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """No event ever; the wait is over at once."""
        if timeout is None:
            raise RuntimeError("the simulation waits for nothing that will ever come")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is that of its timers."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Seconds since the simulation began."""
        return self._jump.now


@dataclass(frozen=True)
class World:
    """Durations in seconds, and sizes.

    Attributes:
      slots: completions that a server makes at a time.
      per_slot: episodes of a batch for each slot.
      turns: of an episode, on average (geometric, at least 1).
      turn_s: a completion, uniform within half of it around.
      tool_s, tool_sigma: median and log-standard-deviation of a tool call.
      train_s: an update. push_s: all servers stop for this long.
    """

    servers: int
    slots: int = 8
    per_slot: float = 4.0
    turns: float = 8.0
    turn_s: float = 6.0
    tool_s: float = 2.0
    tool_sigma: float = 1.5
    train_s: float = 240.0
    push_s: float = 20.0
    straggler_s: float = 900.0


@dataclass
class Fleet:
    """Slots of servers, and the time that they work."""

    world: World
    busy_s: float = 0.0
    load: list[tuple[int, int]] = field(default_factory=list)
    free: list[asyncio.Semaphore] = field(default_factory=list)
    stopped_until: float = 0.0

    def __post_init__(self) -> None:
        self.free = [asyncio.Semaphore(self.world.slots) for _ in range(self.world.servers)]
        self.load = [(0, server) for server in range(self.world.servers)]

    def home(self) -> int:
        """The server with the fewest sessions so far."""
        sessions, server = heapq.heappop(self.load)
        heapq.heappush(self.load, (sessions + 1, server))
        return server

    async def complete(self, server: int, seconds: float) -> None:
        """Hold a slot for so long, pauses not counted."""
        async with self.free[server]:
            loop = asyncio.get_running_loop()
            end = loop.time() + seconds
            while (left := max(end, self.stopped_until) - loop.time()) > 0:
                if self.stopped_until > loop.time():
                    # What a pause takes is added behind; the tokens so far are kept.
                    end += self.stopped_until - loop.time()
                    await asyncio.sleep(self.stopped_until - loop.time())
                    continue
                began = loop.time()
                await asyncio.sleep(left)
                self.busy_s += loop.time() - began


@dataclass(frozen=True)
class Outcome:
    """Rates and shares of the time after the first update, and what the trainer got."""

    steps_hour: float
    servers_idle: float
    trainer_idle: float
    late: int
    over_stale: int
    mean_age: float


def trajectory(name: str, versions: Sequence[int]) -> Trajectory:
    n = len(versions)
    return Trajectory(
        **dict.fromkeys(("task_id", "family", "tier", "split", "harness", "stage", "engine"), "s"),
        **dict.fromkeys(("iteration", "sample", "seed"), 0),
        id=name,
        temperature=1.0,
        token_ids=np.zeros(n, np.int32),
        acted_t=np.ones(n, np.bool_),
        logprob_t=np.zeros(n, np.float32),
        turn_t=np.arange(n, dtype=np.int32),
        weight_version_t=np.array(versions, np.int32),
        turns=(),
        finish="done",
        verdict=None,
    )


async def simulate(world: World, staleness: int, steps: int, seed: int) -> Outcome:
    """`steps` updates; the first is left out of the figures."""
    loop, chance = asyncio.get_running_loop(), random.Random(seed)
    fleet = Fleet(world)
    size = max(1, round(world.servers * world.slots * world.per_slot))
    version = 0

    async def episode(name: str, keep: Callable[[Trajectory], None]) -> None:
        server, versions = fleet.home(), []
        for _ in range(1 + int(math.log(1 - chance.random()) / math.log(1 - 1 / world.turns))):
            versions.append(version)
            await fleet.complete(server, world.turn_s * (0.5 + chance.random()))
            await asyncio.sleep(world.tool_s * math.exp(chance.gauss(0.0, world.tool_sigma)))
        keep(trajectory(name, versions))

    async def collect(specs: Sequence[str], keep: Callable[[Trajectory], None]) -> None:
        await asyncio.gather(*(episode(name, keep) for name in specs))

    options = AsyncOptions(max_staleness=staleness, straggler_s=world.straggler_s)
    collector = AsyncCollector(collect, options)
    admitted, waited, late, stale, age, count = 0, 0.0, 0, 0, 0, 0
    began, worked = 0.0, 0.0
    for step in range(steps):
        while admitted <= collector.room and admitted < steps:
            collector.admit(admitted, [f"{admitted}.{i}" for i in range(size)])
            admitted += 1
        taken = await collector.take(step)
        if step > 0:
            waited += taken.waited_s
            late, stale = late + taken.late, stale + taken.over_stale
            age += sum(step - int(t.weight_version_t.min()) for t in taken.trajectories)
            count += len(taken.trajectories)
        await asyncio.sleep(world.train_s)
        fleet.stopped_until = loop.time() + world.push_s
        await asyncio.sleep(world.push_s)
        version = step + 1
        await collector.advance(version)
        if step == 0:
            began, worked = loop.time(), fleet.busy_s
    whole = loop.time() - began
    await collector.aclose()
    busy = (fleet.busy_s - worked) / (whole * world.servers * world.slots)
    return Outcome(
        3600.0 * (steps - 1) / whole,
        1.0 - busy,
        waited / whole,
        late,
        stale,
        age / max(count, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    for name in ("slots", "per_slot", "turns", "turn_s", "tool_s", "tool_sigma"):
        kind = int if name == "slots" else float
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None)
    for name in ("train_s", "push_s", "straggler_s"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=None)
    given = parser.parse_args()
    fields = {name: value for name, value in vars(given).items() if value is not None}
    for name in ("servers", "staleness", "steps", "seed"):
        fields.pop(name)
    world = World(1, **fields)
    print(f"{world}, {given.steps} steps, seed {given.seed}")
    print("servers  staleness  steps/h  servers idle  trainer idle  late  over-stale  age  (wall)")
    for servers in given.servers:
        for staleness in given.staleness:
            started = time.perf_counter()
            with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                outcome = runner.run(
                    simulate(World(servers, **fields), staleness, given.steps, given.seed)
                )
            print(
                f"{servers:7d}  {staleness:9d}  {outcome.steps_hour:7.2f}"
                f"  {100 * outcome.servers_idle:10.1f} %  {100 * outcome.trainer_idle:10.1f} %"
                f"  {outcome.late:4d}  {outcome.over_stale:10d}  {outcome.mean_age:3.1f}"
                f"  ({time.perf_counter() - started:.1f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
