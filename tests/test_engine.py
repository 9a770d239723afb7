"""The in-process engine holds the invariants of `rollout.protocols.RolloutEngine`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout.errors import EngineError, InvalidRequest
from rollout.protocols import (
    FinishKind,
    GenerateRequest,
    GenerateResult,
    RolloutEngine,
    SamplingSpec,
    WeightSnapshot,
)
from tests.engine_contract import EngineContract, Open, Subject
from trsi_jax.engine import JaxEngine
from trsi_jax.model import ModelConfig, init_params, preset

VOCAB, CONTEXT = 61, 48
LONG_CONTEXT, CHUNK = 256, 16


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
                context_len=LONG_CONTEXT,
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


def test_a_result_is_complete_and_scores_as_the_training_forward(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        for temperature in (1.0, 0.6, 0.0):
            ids = ids_of(1)
            result = await engine.generate(
                ask(f"a{temperature}", ids, seed=5, temperature=temperature)
            )
            assert len(result.output_ids) == len(result.logprobs) == 8
            assert result.finish is FinishKind.LENGTH
            assert [(s.version, s.start, s.end) for s in result.spans] == [(7, 0, 8)]
            assert (result.prompt_tokens, result.cached_tokens) == (6, 0)
            scored = await engine.score(ids + result.output_ids, len(ids), temperature)
            np.testing.assert_allclose(result.logprobs, scored, atol=2e-5)
        nothing = await engine.generate(ask("b", ids, 0))
        assert (nothing.output_ids, nothing.finish) == ((), FinishKind.LENGTH)

    drive(weights[0], scenario, version=7)


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


def test_without_a_seed_the_request_id_decides(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        first = said(await engine.generate(ask("one", ids_of(3), 12)))
        again = said(await engine.generate(ask("one", ids_of(3), 12)))
        other = said(await engine.generate(ask("two", ids_of(3), 12)))
        assert first == again
        assert first != other

    drive(weights[0], scenario)


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


def test_a_stop_id_is_included_and_named(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        free = await engine.generate(ask("1", ids_of(7), 12, seed=1))
        stop = free.output_ids[4]
        end = free.output_ids.index(stop) + 1
        result = await engine.generate(ask("2", ids_of(7), 12, seed=1, stop_token_ids=(60, stop)))
        if 60 in free.output_ids[:end]:
            end = free.output_ids.index(60) + 1
        assert result.output_ids == free.output_ids[:end]
        assert (result.finish, result.matched_stop) == (FinishKind.STOP, result.output_ids[-1])
        blind = await engine.generate(
            ask("3", ids_of(7), 12, seed=1, stop_token_ids=(stop,), ignore_eos=True)
        )
        assert said(blind) == said(free)

    drive(weights[0], scenario)


def test_new_weights_hold_for_every_later_request_and_drop_the_cache(weights: list[Any]) -> None:
    # The order A -> B -> A is where a stale cache shows.
    async def scenario(engine: JaxEngine) -> None:
        await engine.open_sessions(["s"])
        first = await engine.generate(ask("1", ids_of(8), session="s", seed=1))
        for version, params in ((1, weights[1]), (2, weights[0])):
            report = await engine.update_weights(WeightSnapshot(version, params=params))
            assert (report.version, report.updated, report.failed) == (version, ("jax",), {})
            context = ids_of(8) + first.output_ids[: 2 * version]
            result = await engine.generate(ask(f"u{version}", context, session="s", seed=1))
            assert result.cached_tokens == 0
            assert {s.version for s in result.spans} == {version}
            scored = await engine.score(context + result.output_ids, len(context), 1.0)
            np.testing.assert_allclose(result.logprobs, scored, atol=2e-5)
        back = await engine.generate(ask("2", ids_of(8), session="s", seed=1))
        assert said(back) == said(first)

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


def test_an_abort_returns_the_partial_output(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        full = await engine.generate(ask("full", ids_of(9), 40, seed=1))
        task = asyncio.create_task(engine.generate(ask("cut", ids_of(9), 40, seed=1)))
        while (await engine.status())[0].running == 0:
            await asyncio.sleep(0)
        await engine.abort(["cut", "unknown"])
        result = await task
        assert result.finish is FinishKind.ABORT
        count = len(result.output_ids)
        assert count == len(result.logprobs) < 40
        assert result.output_ids == full.output_ids[:count]
        assert result.logprobs == full.logprobs[:count]
        assert sum(s.end - s.start for s in result.spans) == count

    drive(weights[0], scenario, steps_per_call=1)


def test_a_deadline_ends_a_request_with_what_it_has(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        request = dataclasses.replace(ask("late", ids_of(9), 40), deadline_s=0.0)
        result = await engine.generate(request)
        assert (result.finish, result.output_ids) == (FinishKind.ABORT, ())

    drive(weights[0], scenario)


def test_requests_sent_while_paused_wait_and_can_be_aborted(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        expected = said(await engine.generate(ask("0", ids_of(10), seed=1)))
        await engine.pause()
        held = asyncio.create_task(engine.generate(ask("1", ids_of(10), seed=1)))
        gone = asyncio.create_task(engine.generate(ask("2", ids_of(11))))
        await asyncio.sleep(0.2)
        assert not held.done()
        assert (await engine.status())[0].state == "paused"
        await engine.abort(["2"])
        empty = await gone
        assert (empty.output_ids, empty.spans, empty.finish) == ((), (), FinishKind.ABORT)
        assert not held.done()
        await engine.update_weights(WeightSnapshot(4, params=weights[0]))
        await engine.resume()
        result = await held
        assert said(result) == expected
        assert result.spans[0].version == 4

    drive(weights[0], scenario)


@pytest.mark.parametrize(
    ("ids", "new", "sampling", "message"),
    [
        ((), 1, {}, "no input ids"),
        ((1, VOCAB), 1, {}, f"id {VOCAB} is outside the vocabulary 0..{VOCAB - 1}"),
        ((1, -1), 1, {}, "id -1 is outside"),
        ((1,) * (CONTEXT + 1), 0, {}, "over the context of 48"),
        ((1,) * 40, 9, {}, "40 ids and 9 new tokens are over the context of 48"),
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


def test_a_cancelled_caller_frees_its_request(weights: list[Any]) -> None:
    async def scenario(engine: JaxEngine) -> None:
        await engine.pause()
        task = asyncio.create_task(engine.generate(ask("1", ids_of(13))))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (status,) = await engine.status()
        assert (status.running, status.waiting) == (0, 0)
        await engine.resume()
        assert (await engine.generate(ask("1", ids_of(13)))).finish is FinishKind.LENGTH

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
