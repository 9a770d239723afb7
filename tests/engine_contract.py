"""What every `rollout.protocols.RolloutEngine` must hold, as one suite over a factory.

To hold an engine to it, subclass `EngineContract` in a `test_*.py` file and give the fixture
`subject`, which opens the engine anew for one test (the server behind it may live longer):

    class TestMyEngine(EngineContract):
        @pytest.fixture
        def subject(self, weights) -> Open:
            @asynccontextmanager
            async def open_subject():
                engine = ...
                try:
                    yield Subject(engine, config, weights, snapshot, broken)
                finally:
                    await engine.aclose()
            return open_subject

Numbers are judged by the training forward of the same parameters, in this process.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
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
from trsi_jax.model import ModelConfig, hidden_states, logits

TIME_LIMIT_S = 60
_PAD = 128
_versions = itertools.count(1)
_names = itertools.count()


@dataclass(frozen=True)
class Subject:
    """One open engine and what is needed to judge it.

    Attributes:
      engine: open; the suite gives it weights first.
      config: the model that it serves.
      weights: two parameter trees of it, in this process.
      snapshot: (which of the two, version) -> a snapshot that the engine takes.
      broken: version -> a snapshot that must be refused.
      tolerance: of a log-prob.
      long: new tokens of a request that is still running when the next call arrives.
    """

    engine: RolloutEngine
    config: ModelConfig
    weights: Sequence[Any]
    snapshot: Callable[[int, int], WeightSnapshot]
    broken: Callable[[int], WeightSnapshot]
    tolerance: float = 1e-4
    long: int = 200

    async def use(self, which: int) -> int:
        """Serve one of the two weights; returns the version."""
        version = next(_versions)
        report = await self.engine.update_weights(self.snapshot(which, version))
        assert report.version == version
        assert report.updated
        assert not report.failed
        return version

    def prompt(self, seed: int, length: int = 6) -> tuple[int, ...]:
        """Random ids."""
        numbers = np.random.default_rng(seed).integers(0, self.config.vocab_size, length)
        return tuple(int(x) for x in numbers)

    def reference(self, which: int, ids: Sequence[int], temperature: float) -> np.ndarray:
        """Log-probs of ids[1:] by the training forward."""
        padded = -(-len(ids) // _PAD) * _PAD
        tokens = np.zeros((1, padded), np.int32)
        tokens[0, : len(ids)] = ids
        segments = (np.arange(padded) < len(ids)).astype(np.int32)[None]
        scale = np.float32(temperature or 1.0)
        return np.asarray(_forward(self.config, self.weights[which], tokens, segments, scale))[
            : len(ids) - 1
        ]

    def check(
        self, request: GenerateRequest, result: GenerateResult, versions: dict[int, int]
    ) -> None:
        """A result is whole, and each token's log-prob is that of the weights its span names.

        `versions` says which of the two weights a version is.
        """
        count, start = len(result.output_ids), len(request.input_ids)
        assert result.request_id == request.request_id
        assert len(result.logprobs) == count <= request.sampling.max_new_tokens
        assert result.prompt_tokens == start
        assert 0 <= result.cached_tokens <= start
        edges = [0, *(span.end for span in result.spans)]
        assert [span.start for span in result.spans] == edges[:-1]
        assert edges == sorted(set(edges))
        assert edges[-1] == count
        whole = (*request.input_ids, *result.output_ids)
        for span in result.spans:
            expected = self.reference(versions[span.version], whole, request.sampling.temperature)
            np.testing.assert_allclose(
                result.logprobs[span.start : span.end],
                expected[start - 1 + span.start : start - 1 + span.end],
                atol=self.tolerance,
            )


Open = Callable[[], AbstractAsyncContextManager[Subject]]


@partial(jax.jit, static_argnums=0)
def _forward(
    config: ModelConfig, params: Any, tokens: jax.Array, segments: jax.Array, scale: jax.Array
) -> jax.Array:
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = hidden_states(config, params, tokens, segments, positions)
    logprob = jax.nn.log_softmax(logits(config, params, hidden[0, :-1]) / scale)
    return jnp.take_along_axis(logprob, tokens[0, 1:, None], axis=-1)[:, 0]


def ask(
    ids: Sequence[int],
    new: int = 8,
    *,
    name: str | None = None,
    session: str | None = None,
    deadline_s: float | None = None,
    **sampling: Any,
) -> GenerateRequest:
    """A request, of a name that was never used if none is given."""
    request_id = f"r{next(_names)}" if name is None else name
    spec = SamplingSpec(max_new_tokens=new, **sampling)
    return GenerateRequest(request_id, tuple(ids), spec, session_id=session, deadline_s=deadline_s)


def drive(subject: Open, scenario: Callable[[Subject], Awaitable[None]]) -> None:
    """Run a scenario on an engine that was just opened."""

    async def main() -> None:
        async with subject() as opened:
            await asyncio.wait_for(scenario(opened), TIME_LIMIT_S)

    asyncio.run(main())


async def busy(engine: RolloutEngine, *, idle: bool = False, limit_s: float = 30.0) -> None:
    """Wait until the engine runs a request, or until it has none at all."""
    end = time.monotonic() + limit_s
    while True:
        status = await engine.status()
        running = sum(s.running for s in status)
        if (running + sum(s.waiting for s in status) == 0) if idle else running > 0:
            return
        assert time.monotonic() < end, status
        await asyncio.sleep(0.001)


class EngineContract:
    """The suite. A subclass gives the fixture `subject`."""

    def test_a_result_is_whole_and_its_logprobs_are_those_of_the_forward(
        self, subject: Open
    ) -> None:
        async def scenario(s: Subject) -> None:
            versions = {await s.use(0): 0}
            for temperature in (1.0, 0.6, 0.0):
                request = ask(s.prompt(1, 9), 12, temperature=temperature, seed=5, ignore_eos=True)
                result = await s.engine.generate(request)
                assert (result.finish, result.matched_stop) == (FinishKind.LENGTH, None)
                assert len(result.output_ids) == 12
                s.check(request, result, versions)
            nothing = await s.engine.generate(ask(s.prompt(1), 0))
            assert (nothing.output_ids, nothing.spans) == ((), ())
            assert nothing.finish is FinishKind.LENGTH

        drive(subject, scenario)

    def test_a_truncated_draw_has_the_logprob_of_the_full_vocabulary(self, subject: Open) -> None:
        async def scenario(s: Subject) -> None:
            versions = {await s.use(0): 0}
            for sampling in ({"top_k": 2}, {"top_p": 0.3}, {"top_k": 3, "top_p": 0.9}):
                request = ask(s.prompt(2), 8, ignore_eos=True, **sampling)
                result = await s.engine.generate(request)
                s.check(request, result, versions)
            # The best of all is greedy, whatever the temperature.
            one = await s.engine.generate(ask(s.prompt(2), top_k=1, temperature=0.7))
            best = await s.engine.generate(ask(s.prompt(2), temperature=0.0))
            assert one.output_ids == best.output_ids

        drive(subject, scenario)

    def test_scores_are_those_of_the_forward(self, subject: Open) -> None:
        async def scenario(s: Subject) -> None:
            await s.use(0)
            ids = s.prompt(3, 40)
            for temperature, start in ((1.0, 1), (0.6, 17), (0.0, 39)):
                scores = await s.engine.score(ids, start, temperature)
                expected = s.reference(0, ids, temperature)[start - 1 :]
                np.testing.assert_allclose(scores, expected, atol=s.tolerance)
            assert await s.engine.score(ids, 40, 1.0) == ()
            for bad, start in (((), 1), (ids, 0), (ids, 41), ((1, s.config.vocab_size), 1)):
                with pytest.raises(InvalidRequest):
                    await s.engine.score(bad, start, 1.0)

        drive(subject, scenario)

    def test_a_stop_id_ends_the_output_and_belongs_to_it(self, subject: Open) -> None:
        async def scenario(s: Subject) -> None:
            await s.use(0)
            greedy = partial(ask, s.prompt(4), 16, temperature=0.0)
            free = await s.engine.generate(greedy(ignore_eos=True))
            stop = free.output_ids[5]
            end = free.output_ids.index(stop) + 1
            result = await s.engine.generate(greedy(stop_token_ids=(stop,)))
            assert result.output_ids == free.output_ids[:end]
            assert (result.finish, result.matched_stop) == (FinishKind.STOP, stop)
            blind = await s.engine.generate(greedy(stop_token_ids=(stop,), ignore_eos=True))
            assert blind.output_ids == free.output_ids

        drive(subject, scenario)

    def test_a_session_goes_on_where_it_was_and_says_what_it_would_anew(
        self, subject: Open
    ) -> None:
        async def scenario(s: Subject) -> None:
            versions = {await s.use(0): 0}
            name = f"session {next(_names)}"
            await s.engine.open_sessions([name])
            context, cached = s.prompt(5, 30), []
            for turn in range(3):
                request = ask(context, 8, session=name, temperature=0.0, ignore_eos=True)
                result = await s.engine.generate(request)
                s.check(request, result, versions)
                anew = await s.engine.generate(ask(context, 8, temperature=0.0, ignore_eos=True))
                assert anew.output_ids == result.output_ids
                cached.append(result.cached_tokens)
                context = (*context, *result.output_ids, *s.prompt(60 + turn, 5))
            # A context that is no continuation of the session's.
            request = ask((*context[1:9], 3), 8, session=name, ignore_eos=True)
            s.check(request, await s.engine.generate(request), versions)
            await s.engine.close_session(name)
            await s.engine.close_session("never opened")

        drive(subject, scenario)

    def test_many_requests_at_once_are_all_served_and_none_is_mixed_up(self, subject: Open) -> None:
        async def scenario(s: Subject) -> None:
            versions = {await s.use(0): 0}
            requests = [ask(s.prompt(100 + i, 3 + i % 7), 4 + i % 9) for i in range(24)]
            results = await asyncio.gather(*map(s.engine.generate, requests))
            for request, result in zip(requests, results, strict=True):
                s.check(request, result, versions)

        drive(subject, scenario)

    def test_the_seed_decides_the_tokens_whatever_runs_beside(self, subject: Open) -> None:
        async def scenario(s: Subject) -> None:
            if not s.engine.caps.seeded_sampling:
                pytest.skip("the engine does not promise it")
            await s.use(0)
            ids = s.prompt(6)
            alone = await s.engine.generate(ask(ids, 12, seed=3, name="a"))
            crowd = [ask(s.prompt(200 + i, 3 + i), 16, top_p=0.5 + i / 10) for i in range(6)]
            results = await asyncio.gather(
                *map(s.engine.generate, [*crowd, ask(ids, 12, seed=3, name="b")])
            )
            assert results[-1].output_ids == alone.output_ids
            assert results[-1].logprobs == alone.logprobs
            other = await s.engine.generate(ask(ids, 12, seed=4, name="c"))
            assert other.output_ids != alone.output_ids
            # Without a seed the request's name decides.
            first, again = [await s.engine.generate(ask(ids, 12, name="d")) for _ in range(2)]
            assert first.output_ids == again.output_ids
            unlike = await s.engine.generate(ask(ids, 12, name="e"))
            assert unlike.output_ids != first.output_ids

        drive(subject, scenario)

    def test_an_abort_returns_what_was_sampled(self, subject: Open) -> None:
        async def scenario(s: Subject) -> None:
            versions = {await s.use(0): 0}
            await s.engine.abort(["unknown"])
            for named in (True, False):
                request = ask(s.prompt(7), s.long, ignore_eos=True)
                task = asyncio.create_task(s.engine.generate(request))
                await busy(s.engine)
                await s.engine.abort([request.request_id, "unknown"] if named else None)
                result = await task
                assert result.finish is FinishKind.ABORT
                assert len(result.output_ids) < s.long
                s.check(request, result, versions)

        drive(subject, scenario)

    def test_a_deadline_returns_what_was_sampled(self, subject: Open) -> None:
        async def scenario(s: Subject) -> None:
            versions = {await s.use(0): 0}
            for deadline in (0.0, 0.02):
                request = ask(s.prompt(8), s.long, deadline_s=deadline, ignore_eos=True)
                result = await s.engine.generate(request)
                assert result.finish is FinishKind.ABORT
                assert len(result.output_ids) < s.long
                s.check(request, result, versions)

        drive(subject, scenario)

    def test_requests_sent_while_paused_wait_and_can_be_aborted(self, subject: Open) -> None:
        async def scenario(s: Subject) -> None:
            versions = {await s.use(0): 0}
            await s.engine.resume()
            await s.engine.pause()
            await s.engine.pause()
            held = ask(s.prompt(9), 8, ignore_eos=True)
            gone = ask(s.prompt(10), 8, ignore_eos=True)
            tasks = [asyncio.create_task(s.engine.generate(r)) for r in (held, gone)]
            await asyncio.sleep(0.3)
            assert not any(task.done() for task in tasks)
            await s.engine.abort([gone.request_id])
            aborted = await tasks[1]
            assert (aborted.output_ids, aborted.spans) == ((), ())
            assert aborted.finish is FinishKind.ABORT
            assert not tasks[0].done()
            versions[await s.use(1)] = 1
            await s.engine.resume()
            await s.engine.resume()
            result = await tasks[0]
            s.check(held, result, versions)
            assert [versions[span.version] for span in result.spans] == [1]

        drive(subject, scenario)

    def test_a_request_that_runs_when_paused_loses_no_token(self, subject: Open) -> None:
        async def scenario(s: Subject) -> None:
            versions = {await s.use(0): 0}
            request = ask(s.prompt(11), s.long, ignore_eos=True)
            task = asyncio.create_task(s.engine.generate(request))
            await busy(s.engine)
            await s.engine.pause()
            await asyncio.sleep(0.1)
            await s.engine.resume()
            result = await task
            assert len(result.output_ids) == s.long
            s.check(request, result, versions)

        drive(subject, scenario)

    def test_new_weights_hold_for_every_later_request_and_no_old_cache_is_read(
        self, subject: Open
    ) -> None:
        # A -> B -> A on one context is where a cache that outlived its weights shows.
        async def scenario(s: Subject) -> None:
            versions, name, said = {}, f"session {next(_names)}", []
            await s.engine.open_sessions([name])
            for which in (0, 1, 0):
                versions[version := await s.use(which)] = which
                request = ask(s.prompt(12, 20), 8, session=name, temperature=0.0, ignore_eos=True)
                result = await s.engine.generate(request)
                s.check(request, result, versions)
                assert [span.version for span in result.spans] == [version]
                assert {status.version for status in await s.engine.status()} == {version}
                said.append(result.output_ids)
            assert said[0] == said[2]
            await s.engine.close_session(name)

        drive(subject, scenario)

    def test_a_request_that_runs_over_an_update_says_which_weights_made_each_token(
        self, subject: Open
    ) -> None:
        async def scenario(s: Subject) -> None:
            versions = {await s.use(0): 0}
            request = ask(s.prompt(13), s.long, ignore_eos=True)
            task = asyncio.create_task(s.engine.generate(request))
            await busy(s.engine)
            versions[await s.use(1)] = 1
            result = await task
            assert len(result.output_ids) == s.long
            s.check(request, result, versions)
            order = [span.version for span in result.spans]
            assert order == sorted(order)

        drive(subject, scenario)

    def test_weights_that_cannot_be_served_change_nothing(self, subject: Open) -> None:
        async def scenario(s: Subject) -> None:
            versions = {await s.use(0): 0}
            with pytest.raises(EngineError):
                await s.engine.update_weights(s.broken(next(_versions)))
            request = ask(s.prompt(14), 8, ignore_eos=True)
            s.check(request, await s.engine.generate(request), versions)

        drive(subject, scenario)

    def test_a_request_that_cannot_be_served_is_refused(self, subject: Open) -> None:
        async def scenario(s: Subject) -> None:
            vocab, context = s.engine.caps.vocab_size, s.engine.caps.context_len
            assert vocab == s.config.vocab_size
            good = ask((1,), 1)
            bad = {
                "no ids": replace(good, input_ids=()),
                "id over the vocabulary": replace(good, input_ids=(1, vocab)),
                "negative id": replace(good, input_ids=(1, -1)),
                "over-long prompt": replace(good, input_ids=(1,) * (context + 1)),
                "over-long output": ask((1,) * (context - 4), 5),
            }
            spec = good.sampling
            settings: list[dict[str, Any]] = [
                {"max_new_tokens": -1},
                {"temperature": -0.5},
                {"temperature": float("nan")},
                {"top_p": 0.0},
                {"top_p": 1.5},
                {"top_k": 0},
                {"top_k": -2},
            ]
            for setting in settings:
                bad[str(setting)] = replace(good, sampling=replace(spec, **setting))
            taken = []
            for what, request in bad.items():
                try:
                    await s.engine.generate(request)
                except InvalidRequest:
                    continue
                taken.append(what)
            assert not taken
            status = await s.engine.status()
            assert sum(entry.running + entry.waiting for entry in status) == 0

        drive(subject, scenario)

    def test_a_live_request_id_is_refused_and_free_again_afterwards(self, subject: Open) -> None:
        async def scenario(s: Subject) -> None:
            await s.use(0)
            await s.engine.pause()
            request = ask(s.prompt(15), 4)
            first = asyncio.create_task(s.engine.generate(request))
            await asyncio.sleep(0.05)
            with pytest.raises(InvalidRequest):
                await s.engine.generate(request)
            await s.engine.resume()
            await first
            await s.engine.generate(request)

        drive(subject, scenario)

    def test_a_cancelled_caller_leaves_nothing_behind(self, subject: Open) -> None:
        async def scenario(s: Subject) -> None:
            versions = {await s.use(0): 0}
            request = ask(s.prompt(16), s.long, ignore_eos=True)
            task = asyncio.create_task(s.engine.generate(request))
            await busy(s.engine)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await busy(s.engine, idle=True)
            result = await s.engine.generate(request)
            s.check(request, result, versions)

        drive(subject, scenario)

    def test_a_closed_engine_says_so(self, subject: Open) -> None:
        async def scenario(s: Subject) -> None:
            await s.engine.aclose()
            await s.engine.aclose()
            with pytest.raises(EngineError, match="closed"):
                await s.engine.generate(ask((1,), 1))

        drive(subject, scenario)
