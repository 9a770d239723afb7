"""A whole small run whose rollouts come from servers: ahead of the trainer, and resumable.

The servers have no model (tests/fake_sglang.py), so nothing is learnt here; what is looked at is
who sampled what when, and what a run without servers leaves for the next one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollout import snapshots
from rollout.errors import FleetUnavailable, UserError
from rollout.harness import shell_chat
from rollout.store.reader import SegmentReader
from rollout.tasks.pool.lexicon import vocabulary
from tests.fake_sglang import FakeSGLang
from tests.small_recursion import small
from trsi_jax.config import Config, FleetSection
from trsi_jax.stages import machine
from trsi_jax.stages.loop import LoopThread
from trsi_jax.stages.observer import NullObserver

pytestmark = pytest.mark.fleet

ITERATIONS = 3


def configuration(urls: list[str], weights: Path, **fleet: object) -> Config:
    whole = small()
    base, rpr = whole.stages[0], whole.stages[2]
    return whole.model_copy(
        update={
            "stages": (
                base.model_copy(update={"steps": 2}),
                rpr.model_copy(
                    update={
                        **{"iterations": ITERATIONS, "tasks_per_iteration": 6, "samples": 1},
                        **{"warm_up_rounds": 1},
                    }
                ),
            ),
            "evaluation": whole.evaluation.model_copy(update={"tasks": 4, "repeats": 1}),
            "fleet": FleetSection(
                urls=tuple(urls), weights=str(weights), dtype="F32", recovery=1.0, **fleet
            ),
        }
    )


@pytest.fixture
def servers():
    vocab = shell_chat(vocabulary()).tokenizer.vocab_size
    with LoopThread() as loop:
        made = [FakeSGLang(vocab=vocab) for _ in range(2)]
        for server in made:
            server.reads_probe = True
            loop.run(server.start())
        yield loop, made
        for server in made:
            loop.run(server.stop())


def test_a_run_samples_ahead_of_its_trainer_and_goes_on_when_servers_come_back(tmp_path, servers):
    loop, made = servers
    urls = [server.url for server in made]
    weights, out = tmp_path / "weights", tmp_path / "run"
    config = configuration(urls, weights)

    # All servers go when the third weights are pushed.
    first = made[0]
    handler = first.handler

    async def deadly(call):
        newest = snapshots.latest(weights)
        if call.route == "/pause_generation" and newest and newest.name == "v001002":
            for server in made:
                await server.stop()
        return await handler(call)

    first.handler = deadly
    with pytest.raises(FleetUnavailable, match="run the same command again"):
        machine.run(config, out, NullObserver())
    first.handler = handler
    for server, url in zip(made, urls, strict=True):
        server.version = server.held = "default"
        loop.run(server.start(int(url.rpartition(":")[2])))
    machine.run(config, out, NullObserver())

    reader = SegmentReader(out / "store")
    ages = []
    for iteration in range(ITERATIONS):
        (segment,) = [s for s in reader.segments() if f"iteration-{iteration:03d}" in s]
        for trajectory in reader.read(segment):
            versions = trajectory.weight_version_t[trajectory.acted_t]
            now = 1000 + iteration
            assert now - 1 <= versions.min() <= versions.max() <= now
            np.testing.assert_array_equal(trajectory.weight_version_t >= 0, trajectory.acted_t)
            ages.append(now - int(versions.min()))
    # Some were sampled while the trainer trained, and none before that.
    assert set(ages) == {0, 1}
    assert [version for version, _ in snapshots.published(weights)][-1] == 1999

    # Servers may move; what decides the result may not change.
    moved = configuration(["http://127.0.0.1:1"], weights)
    assert moved.digest() == config.digest()
    with pytest.raises(UserError, match="another configuration"):
        machine.run(configuration(urls, weights, max_staleness=0), out, NullObserver())


def test_without_a_fleet_the_digest_is_what_it_was():
    assert small().digest() == small().model_copy(update={"fleet": None}).digest()
    assert "fleet" not in small().model_dump(exclude_none=True)
