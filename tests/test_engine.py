"""The in-process engine holds the invariants of `rollout.protocols.RolloutEngine`."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout.errors import EngineError, InvalidRequest
from rollout.protocols import (
    GenerateRequest,
    GenerateResult,
    RolloutEngine,
    SamplingSpec,
    WeightSnapshot,
)
from tests.engine_contract import EngineContract, Open, Subject, busy
from trsi_jax.engine import JaxEngine
from trsi_jax.model import ModelConfig, init_params, preset, save_params
from trsi_jax.slots import Block

VOCAB, CONTEXT, CHUNK = 61, 256, 16


def tiny() -> ModelConfig:
    return dataclasses.replace(
        preset("tiny", vocab_size=VOCAB),
        hidden_size=32,
        intermediate_size=48,
        head_dim=8,
        rotary_dim=4,
        gdn_key_dim=8,
        gdn_value_dim=8,
    )


@pytest.fixture(scope="module")
def weights() -> list[Any]:
    return [init_params(tiny(), jax.random.key(seed)) for seed in range(2)]


def drive(params: Any, scenario: Callable[[JaxEngine], Awaitable[Any]], **options: Any) -> Any:
    """Run a scenario on a fresh engine of blocks of 4 slots."""
    settings = {"context_len": CONTEXT, "max_sessions": 10, "block_width": 4, "linger_s": 0.02}
    settings["steps_per_call"] = 4

    async def main() -> Any:
        engine = JaxEngine(tiny(), params, **(settings | options))
        try:
            return await asyncio.wait_for(scenario(engine), 60)
        finally:
            await engine.aclose()

    return asyncio.run(main())


def ids_of(seed: int, length: int = 6) -> tuple[int, ...]:
    return tuple(int(x) for x in np.random.default_rng(seed).integers(0, VOCAB, length))


def ask(
    name: str, ids: Sequence[int], new: int = 8, *, session: str | None = None, **sampling: Any
) -> GenerateRequest:
    spec = SamplingSpec(max_new_tokens=new, **sampling)
    return GenerateRequest(name, tuple(ids), spec, session_id=session)


def said(result: GenerateResult) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return result.output_ids, result.logprobs


class TestTheContract(EngineContract):
    """Contexts read by steps, and by chunks."""

    @pytest.fixture(params=[0, CHUNK], ids=["steps", "chunks"])
    def subject(self, weights: list[Any], request: pytest.FixtureRequest) -> Open:
        @asynccontextmanager
        async def open_subject() -> AsyncIterator[Subject]:
            engine = JaxEngine(
                tiny(),
                weights[0],
                context_len=CONTEXT,
                max_sessions=8,
                block_width=4,
                linger_s=0.0,
                steps_per_call=4,
                prefill_chunk=request.param,
                prefill_width=2,
            )
            broken = dict(weights[0]) | {"final_norm": {"scale": jnp.zeros(3)}}
            try:
                yield Subject(
                    engine=engine,
                    config=tiny(),
                    weights=weights,
                    snapshot=lambda which, version: WeightSnapshot(version, params=weights[which]),
                    broken=lambda version: WeightSnapshot(version, params=broken),
                )
            finally:
                await engine.aclose()

        return open_subject


def test_the_engine_is_a_rollout_engine(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        typed: RolloutEngine = engine
        assert typed.caps.seeded_sampling
        assert typed.caps.hybrid
        assert (typed.caps.vocab_size, typed.caps.context_len) == (VOCAB, CONTEXT)
        (status,) = await typed.status()
        assert (status.state, status.running, status.waiting) == ("ready", 0, 0)

    drive(weights[0], scenario)


def test_tokens_depend_on_seed_ids_and_weights_only(weights: list[Any]) -> None:
    async def alone(engine: JaxEngine) -> Any:
        return said(await engine.generate(ask("x", ids_of(2), 12, seed=3)))

    async def crowded(engine: JaxEngine) -> Any:
        names = [f"s{i}" for i in range(9)]
        await engine.open_sessions(names)

        async def late(index: int) -> GenerateResult:
            await asyncio.sleep(0.03 * (index % 3))
            if index == 6:
                return await engine.generate(ask("other name", ids_of(2), 12, session="s6", seed=3))
            return await engine.generate(
                ask(f"r{index}", ids_of(50 + index, 3 + index), 20, session=names[index])
            )

        return said((await asyncio.gather(*(late(i) for i in range(9))))[6])

    expected = drive(weights[0], alone)
    assert drive(weights[0], alone) == expected
    assert drive(weights[0], crowded) == expected
    assert drive(weights[0], alone, steps_per_call=1) == expected
    assert drive(weights[1], alone) != expected


def test_a_session_feeds_only_what_is_new_and_loses_no_bit_by_it(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        await engine.open_sessions(["s", "t"])
        first, _ = await asyncio.gather(
            engine.generate(ask("1", ids_of(4), session="s")),
            engine.generate(ask("1t", ids_of(14), 3, session="t")),
        )
        context = ids_of(4) + first.output_ids + (9, 10, 11)
        warm = await engine.generate(ask("2", context, session="s", seed=1))
        assert warm.cached_tokens == len(context) - 4
        cold = await engine.generate(ask("3", context, seed=1))
        assert cold.cached_tokens == 0
        assert said(warm) == said(cold)
        # Another history in the same session, and the very same context again: both restart.
        changed = (1, *context[1:])
        moved = await engine.generate(ask("4", changed, session="s", seed=1))
        assert moved.cached_tokens == 0
        assert said(moved) == said(await engine.generate(ask("5", changed, seed=1)))
        again = await engine.generate(ask("6", changed, session="s", seed=1))
        assert said(again) == said(moved)

    drive(weights[0], scenario)


def test_a_freed_slot_remembers_nothing(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        await engine.open_sessions(["a"])
        await engine.generate(ask("1", ids_of(5), session="a"))
        await engine.close_session("a")
        await engine.close_session("never opened")
        await engine.open_sessions(["b"])
        result = await engine.generate(ask("2", ids_of(6), session="b", seed=1))
        assert said(result) == said(await engine.generate(ask("3", ids_of(6), seed=1)))

    drive(weights[0], scenario)


def test_weights_of_another_shape_are_refused_by_name(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        broken = dict(weights[0]) | {"final_norm": {"scale": np.zeros(3, np.float32)}}
        with pytest.raises(EngineError, match=r"final_norm/scale has shape \(3,\), not \(32,\)"):
            await engine.update_weights(WeightSnapshot(1, params=broken))
        less = {k: v for k, v in weights[0].items() if k != "final_norm"}
        with pytest.raises(EngineError, match="final_norm/scale is missing"):
            await engine.update_weights(WeightSnapshot(1, params=less))
        with pytest.raises(EngineError, match="neither parameters nor a path"):
            await engine.update_weights(WeightSnapshot(1))
        assert (await engine.status())[0].version == 0

    drive(weights[0], scenario)


@pytest.mark.parametrize(
    ("ids", "new", "sampling", "message"),
    [
        ((), 1, {}, "no input ids"),
        ((1, VOCAB), 1, {}, f"id {VOCAB} is outside the vocabulary 0..{VOCAB - 1}"),
        ((1, -1), 1, {}, "id -1 is outside"),
        ((1,) * (CONTEXT + 1), 0, {}, "over the context of 256"),
        ((1,) * 250, 9, {}, "250 ids and 9 new tokens are over the context of 256"),
        ((1,), -1, {}, "max_new_tokens"),
        ((1,), 1, {"temperature": -0.5}, "temperature"),
        ((1,), 1, {"top_p": 0.0}, "top_p"),
        ((1,), 1, {"top_k": 0}, "top_k"),
        ((1,), 1, {"stop_token_ids": tuple(range(9))}, "at most 8 stop ids"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_any_work(
    weights: list[Any], ids: tuple[int, ...], new: int, sampling: Any, message: str
) -> None:
    async def scenario(engine: JaxEngine) -> None:
        with pytest.raises(InvalidRequest, match=message):
            await engine.generate(ask("bad", ids, new, **sampling))
        assert (await engine.status())[0].waiting == 0

    drive(weights[0], scenario)


def test_a_live_id_or_session_is_refused_and_free_again_afterwards(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        await engine.pause()
        first = asyncio.create_task(engine.generate(ask("1", ids_of(12), session="s")))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match=r"'1'.*live"):
            await engine.generate(ask("1", ids_of(12)))
        with pytest.raises(InvalidRequest, match="'s' already has a live request"):
            await engine.generate(ask("2", ids_of(12), session="s"))
        await engine.resume()
        await first
        await engine.generate(ask("1", ids_of(12), session="s"))

    drive(weights[0], scenario)


def test_sessions_over_the_limit_are_refused_and_closing_makes_room(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        await engine.open_sessions([f"s{i}" for i in range(10)])
        with pytest.raises(EngineError, match="10 sessions are open, at most 10"):
            await engine.open_sessions(["one more"])
        await engine.close_session("s3")
        await engine.open_sessions(["one more"])

    drive(weights[0], scenario)


def test_closing_fails_what_is_live_and_refuses_what_comes(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        await engine.pause()
        task = asyncio.create_task(engine.generate(ask("1", ids_of(14))))
        await asyncio.sleep(0)
        await engine.aclose()
        with pytest.raises(EngineError, match="closed"):
            await task
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(ask("2", ids_of(14)))
        assert (await engine.status())[0].state == "closed"

    drive(weights[0], scenario)


@pytest.mark.parametrize("name", ["context_len", "max_sessions", "block_width", "steps_per_call"])
def test_an_engine_of_no_size_is_refused(weights: list[Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        JaxEngine(tiny(), weights[0], **({"context_len": CONTEXT} | {name: 0}))


def test_a_context_by_chunks_gives_the_same_bits_whatever_is_cached_or_runs_beside(
    weights: list[Any],
) -> None:
    prompts = [ids_of(20 + i, 3 + 11 * i) for i in range(7)]

    async def alone(engine: JaxEngine) -> Any:
        return [said(await engine.generate(ask(f"{i}", ids))) for i, ids in enumerate(prompts)]

    async def together(engine: JaxEngine) -> Any:
        # Each prompt three times at once, and its turns before it.
        for ids in prompts[3:]:
            await engine.generate(ask("before", ids[: len(ids) // 2], session="s"))
        again = await asyncio.gather(
            *(
                engine.generate(ask(f"{copy}/{i}", ids, seed=zlib.crc32(f"{i}".encode())))
                for i, ids in enumerate(prompts)
                for copy in range(3)
            )
        )
        return [said(result) for result in again]

    chunks = {"prefill_chunk": CHUNK, "prefill_width": 2}
    expected = drive(weights[0], alone, **chunks)
    assert drive(weights[0], together, **chunks) == [e for e in expected for _ in range(3)]
    for (ids, scores), (by_steps, others) in zip(expected, drive(weights[0], alone), strict=True):
        assert ids == by_steps
        np.testing.assert_allclose(scores, others, atol=2e-5)


def test_two_streams_share_the_requests_and_change_no_bit(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> Any:
        requests = [ask(f"{i}", ids_of(i, 5 + i), 20) for i in range(8)]
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await busy(engine)
        await engine.update_weights(WeightSnapshot(1, params=weights[0]))
        return [said(result) for result in await asyncio.gather(*tasks)]

    one = drive(weights[0], scenario, linger_s=0.0)
    assert drive(weights[0], scenario, linger_s=0.0, streams=2) == one


def test_contexts_that_begin_alike_are_read_once(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        ids = ids_of(30, 4 * CHUNK + 5)
        first = await asyncio.gather(
            *(engine.generate(ask(f"{i}", ids, session=f"s{i}")) for i in range(4))
        )
        assert sorted(r.cached_tokens for r in first) == [0, *[4 * CHUNK] * 3]
        # The next turn goes on from the last multiple in the prompt before.
        longer = (*ids, *first[2].output_ids, *ids_of(31, 2 * CHUNK))
        second = await engine.generate(ask("turn", longer, session="s2"))
        assert second.cached_tokens == 4 * CHUNK
        other = await engine.generate(ask("fork", (*longer, 1), 1))
        assert other.cached_tokens == (len(longer) - 1) // CHUNK * CHUNK
        unlike = await engine.generate(ask("unlike", (0, *ids)))
        assert unlike.cached_tokens == 0

    drive(weights[0], scenario, prefill_chunk=CHUNK, block_width=10)


def test_a_request_joins_a_running_block_and_leaves_it_first(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        seen: list[int] = []
        long = asyncio.create_task(
            engine.generate(
                ask("long", ids_of(15), 200, ignore_eos=True),
                on_tokens=lambda ids, scores: seen.append(len(ids)),
            )
        )
        await busy(engine)
        short = await engine.generate(ask("short", ids_of(16), 3))
        assert not long.done()
        assert len(short.output_ids) == 3
        assert len((await long).output_ids) == 200
        assert seen == sorted(seen)
        assert len(seen) > 10

    drive(weights[0], scenario)


def test_requests_without_a_slot_wait_for_one(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        await engine.open_sessions(["a", "b"])
        ended: list[int] = []

        async def one(index: int) -> None:
            await engine.generate(ask(f"{index}", ids_of(index), 4 + index))
            ended.append(index)

        tasks = [asyncio.create_task(one(index)) for index in range(5)]
        await busy(engine)
        (status,) = await engine.status()
        assert (status.running, status.waiting) == (2, 3)
        await engine.abort(["4"])
        await tasks[4]
        assert ended == [4]
        await asyncio.gather(*tasks)
        assert sorted(ended) == [0, 1, 2, 3, 4]

    drive(weights[0], scenario, max_sessions=4, linger_s=0.0)


def test_weights_come_from_a_directory_of_the_same_model_only(
    weights: list[Any], tmp_path: Path
) -> None:
    good = save_params(tmp_path / "good", tiny(), weights[1], dtype="F32")
    wider = dataclasses.replace(tiny(), rope_theta=5e3)
    other = save_params(tmp_path / "other", wider, init_params(wider, jax.random.key(0)))

    async def scenario(engine: JaxEngine) -> None:
        direct = WeightSnapshot(1, params=weights[1])
        await engine.update_weights(direct)
        expected = said(await engine.generate(ask("1", ids_of(17))))
        await engine.update_weights(WeightSnapshot(2, params=weights[0]))
        await engine.update_weights(WeightSnapshot(3, path=good))
        assert said(await engine.generate(ask("1", ids_of(17)))) == expected
        with pytest.raises(EngineError, match=r"rope_theta is 5000\.0, not 10000\.0"):
            await engine.update_weights(WeightSnapshot(4, path=other))
        with pytest.raises(EngineError, match=r"no config\.json"):
            await engine.update_weights(WeightSnapshot(5, path=tmp_path))
        assert (await engine.status())[0].version == 3

    drive(weights[0], scenario)


def test_a_fault_reaches_the_callers_and_the_engine_goes_on(
    weights: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(engine: JaxEngine) -> None:
        expected = said(await engine.generate(ask("1", ids_of(18))))
        call = Block.call
        with monkeypatch.context() as patch:

            def broken(self: Block, *arguments: Any) -> Any:
                call(self, *arguments)
                raise RuntimeError("no memory")

            patch.setattr(Block, "call", broken)
            with pytest.raises(EngineError, match="no memory"):
                await engine.generate(ask("1", ids_of(18)))
        assert said(await engine.generate(ask("1", ids_of(18)))) == expected

    drive(weights[0], scenario)


@pytest.mark.engine
def test_weights_are_served_where_the_engine_was_told_and_updates_move_there() -> None:
    # Two devices, so a process of its own; the trainer's weights lie on one of them.
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine_mesh"],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
