"""The fleet against what networks and dying servers do; each outcome is one of docs/fleet.md.

The upstream here has no model (tests/fake_sglang.py); the same fleet meets real servers in
tests/test_fleet_real.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollout import snapshots
from rollout.engines.sglang import FleetOptions, SGLangFleet
from rollout.errors import EngineError, FleetUnavailable, InvalidRequest, SnapshotRefused
from rollout.protocols import EngineState, FinishKind, GenerateRequest, SamplingSpec, WeightSnapshot
from tests.fake_sglang import VOCAB, FakeSGLang, token_of
from tests.fault_proxy import FaultProxy, Reply

QUICK = FleetOptions(
    recovery_s=1.5,
    request_timeout_s=5.0,
    busy_s=1.0,
    backoff_s=0.02,
    backoff_max_s=0.2,
    poll_s=0.05,
    update_timeout_s=5.0,
    drain_s=2.0,
    abort_grace_s=0.5,
)
PROMPT = (3, 1, 4, 1, 5)


def ask(name: str, new: int = 8, *, session: str | None = None, deadline_s: float | None = None):
    return GenerateRequest(
        name, PROMPT, SamplingSpec(new), session_id=session, deadline_s=deadline_s
    )


def publish(folder: Path, version: int, **tensors: np.ndarray) -> WeightSnapshot:
    """A snapshot of two tensors, or of those given."""
    content = {"a": np.full((2, 3), float(version), np.float32), "b": np.ones(4, np.float32)}
    partial = folder / f".{version}.partial"
    partial.mkdir(parents=True)
    save_file(content | tensors, partial / "model.safetensors")
    found = snapshots.examine(partial, snapshots.read_manifest(partial))
    snapshots.write_manifest(partial, version, found, None)
    snapshots.reveal(partial, folder / snapshots.snapshot_name(version))
    return WeightSnapshot(version, folder / snapshots.snapshot_name(version), found)


def check(request: GenerateRequest, result) -> None:
    """Every token is what the weights that its span names give after exactly that context."""
    edges = [0, *(span.end for span in result.spans)]
    assert [span.start for span in result.spans] == edges[:-1]
    assert edges[-1] == len(result.output_ids) == len(result.logprobs)
    for span in result.spans:
        for place in range(span.start, span.end):
            context = request.input_ids + result.output_ids[:place]
            expected = token_of(str(span.version), context)
            assert (result.output_ids[place], result.logprobs[place]) == expected


@contextlib.asynccontextmanager
async def world(
    n: int = 1, *, options: FleetOptions = QUICK, proxy: FaultProxy | None = None, **of
):
    """`n` servers with version 1, the first one behind `proxy`, and a fleet."""
    servers = [FakeSGLang(version="1", **of) for _ in range(n)]
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        urls = [server.url for server in servers]
        front = None
        if proxy is not None:
            proxy.upstream = urls[0]
            front = await stack.enter_async_context(proxy.running())
            urls[0] = front.url
        fleet = SGLangFleet(urls, vocab_size=VOCAB, context_len=512, options=options)
        stack.push_async_callback(fleet.aclose)
        await fleet.start()
        await ready(fleet, n)
        yield fleet, servers, front


async def ready(fleet: SGLangFleet, n: int, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while True:
        states = [entry.state for entry in await fleet.status()]
        if states.count(EngineState.READY) >= n:
            return
        assert time.monotonic() < until, states
        await asyncio.sleep(0.01)


async def until(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def drive(scenario) -> None:
    async def bounded():
        await asyncio.wait_for(scenario(), 20.0)

    asyncio.run(bounded())


# --- faults of one reply ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "least_s"),
    [
        (Reply(429, b"busy"), 0.0),
        (Reply(429, b"busy", {"retry-after": "1"}), 0.9),
        (Reply(502, b"<html>bad gateway"), 0.0),
        (Reply(503, b'{"error": "paused"}'), 0.0),
        (Reply(500, b"{}"), 0.0),
        (Reply(cut_at=-1), 0.0),
        (Reply(200, b'{"output_ids": [1, 2], "meta_info"', cut_at=20), 0.0),
        (Reply(200, b"not json"), 0.0),
        (Reply(200, json.dumps({"output_ids": [1], "meta_info": {}}).encode()), 0.0),
    ],
    ids=["429", "429-after", "502", "503", "500", "cut", "truncated", "no-json", "half"],
)
def test_a_fault_of_a_reply_is_tried_again_and_leaves_no_token(reply, least_s):
    failures = 1 if least_s else 2

    def fault(call, number):
        return reply if call.route == "/generate" and number < failures else None

    async def scenario():
        async with world(proxy=FaultProxy("", fault)) as (fleet, _, front):
            began = time.monotonic()
            request = ask("a")
            result = await fleet.generate(request)
            assert (result.finish, len(result.output_ids)) == (FinishKind.LENGTH, 8)
            check(request, result)
            assert time.monotonic() - began >= least_s
            assert front.count("/generate") == failures + 1

    drive(scenario)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_stays_busy_holds_a_request_off_for_a_bounded_time_and_is_not_flooded(status):
    def fault(call, number):
        return Reply(status) if call.route == "/generate" else None

    async def scenario():
        async with world(proxy=FaultProxy("", fault)) as (fleet, _, front):
            began = time.monotonic()
            with pytest.raises(EngineError, match="held off"):
                await fleet.generate(ask("a"))
            assert 0.9 < time.monotonic() - began < 4.0
            # Waits double from 10..20 ms to 100..200 ms: a loop without them made thousands.
            assert 5 <= front.count("/generate") <= 25

    drive(scenario)


@pytest.mark.parametrize("reply", [Reply(500), Reply(cut_at=-1), Reply(200, b"{}")])
def test_a_request_that_a_server_keeps_failing_ends_as_an_error(reply):
    def fault(call, number):
        return reply if call.route == "/generate" else None

    async def scenario():
        async with world(proxy=FaultProxy("", fault)) as (fleet, _, front):
            with pytest.raises(EngineError, match="failed 4 times"):
                await fleet.generate(ask("a"))
            assert front.count("/generate") == 1 + QUICK.retries

    drive(scenario)


def test_a_refused_request_is_not_sent_again():
    refusal = Reply(400, b'{"error": {"message": "no such thing"}}')

    def fault(call, number):
        return refusal if call.route == "/generate" else None

    async def scenario():
        async with world(proxy=FaultProxy("", fault)) as (fleet, _, front):
            with pytest.raises(InvalidRequest, match="no such thing"):
                await fleet.generate(ask("a"))
            assert front.count("/generate") == 1

    drive(scenario)


def test_a_slow_reply_is_cut_at_the_deadline_with_what_was_sampled():
    async def scenario():
        async with world(token_s=0.02) as (fleet, servers, _):
            request = ask("a", 200, deadline_s=0.3)
            began = time.monotonic()
            result = await fleet.generate(request)
            assert time.monotonic() - began < 1.0
            assert result.finish is FinishKind.ABORT
            assert 3 < len(result.output_ids) < 20
            check(request, result)
            assert not servers[0].running

    drive(scenario)


def test_a_reply_that_never_comes_costs_the_deadline_and_a_grace():
    def fault(call, number):
        return 60.0 if call.route == "/generate" else None

    async def scenario():
        async with world(proxy=FaultProxy("", fault)) as (fleet, _, _front):
            began = time.monotonic()
            result = await fleet.generate(ask("a", deadline_s=0.2))
            assert 0.2 + QUICK.abort_grace_s <= time.monotonic() - began < 2.0
            assert (result.finish, result.output_ids) == (FinishKind.ABORT, ())

    drive(scenario)


def test_another_server_takes_over_from_one_that_hangs():
    def fault(call, number):
        return 60.0 if call.route == "/generate" else None

    options = FleetOptions(**{**_fields(QUICK), "request_timeout_s": 0.3})

    async def scenario():
        async with world(2, options=options, proxy=FaultProxy("", fault)) as (
            fleet,
            servers,
            front,
        ):
            for number in range(4):
                request = ask(f"r{number}")
                check(request, await fleet.generate(request))
            assert servers[1].count("/generate") >= 4
            assert front.count("/generate") <= 4

    drive(scenario)


def _fields(options: FleetOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in FleetOptions.__dataclass_fields__}


# --- what no server may see -------------------------------------------------------------------


def test_an_id_outside_the_vocabulary_never_leaves():
    async def scenario():
        async with world() as (fleet, servers, _):
            for ids in ((1, VOCAB), (-1,), (), (1,) * 513):
                bad = GenerateRequest("a", ids, SamplingSpec(4))
                with pytest.raises(InvalidRequest):
                    await fleet.generate(bad)
                with pytest.raises(InvalidRequest):
                    await fleet.score(ids, 1, 1.0)
            assert servers[0].count("/generate") == 0

    drive(scenario)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"b": np.ones((2, 2), np.float32)}, "b has shape"),
        ({"b": np.ones(4, np.float16)}, "b has dtype"),
        ({"c": np.ones(1, np.float32)}, "c is not one"),
        ({"b": np.array([1, np.nan, 1, 1], np.float32)}, "b holds numbers"),
        ({"b": np.array([1, np.inf, 1, 1], np.float32)}, "b holds numbers"),
        (None, "b is missing"),
    ],
    ids=["shape", "dtype", "extra", "nan", "inf", "missing"],
)
def test_a_broken_snapshot_never_reaches_a_server(tmp_path, tensors, named):
    async def scenario():
        async with world() as (fleet, servers, _):
            await fleet.update_weights(publish(tmp_path, 2))
            content = {"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.float32)}
            content = {"a": content["a"]} if tensors is None else content | tensors
            broken = tmp_path / "broken"
            broken.mkdir()
            save_file(content, broken / "model.safetensors")
            with pytest.raises(SnapshotRefused, match=named):
                await fleet.update_weights(WeightSnapshot(3, broken))
            with pytest.raises(SnapshotRefused):
                await fleet.update_weights(WeightSnapshot(3))
            assert servers[0].count("/update_weights_from_disk") == 1
            request = ask("a")
            result = await fleet.generate(request)
            check(request, result)
            assert [span.version for span in result.spans] == [2]

    drive(scenario)


# --- weights ----------------------------------------------------------------------------------


def test_a_request_goes_on_over_updates_without_losing_a_token(tmp_path):
    async def scenario():
        async with world(2, token_s=0.01) as (fleet, _, _front):
            requests = [ask(f"r{n}", 60) for n in range(6)]
            tasks = [asyncio.create_task(fleet.generate(r)) for r in requests]
            for version in (2, 3):
                await asyncio.sleep(0.15)
                report = await fleet.update_weights(publish(tmp_path, version))
                assert len(report.updated) == 2
            for request, result in zip(requests, await asyncio.gather(*tasks), strict=True):
                assert len(result.output_ids) == 60
                assert [span.version for span in result.spans] == [1, 2, 3]
                check(request, result)

    drive(scenario)


def test_a_server_whose_files_are_missing_stays_out_until_the_next_version(tmp_path):
    def elsewhere(call):
        body = dict(call.body) if call.body else call.body
        if call.route == "/update_weights_from_disk" and body["weight_version"] == "2":
            body["model_path"] = "/nowhere"
        return body

    async def scenario():
        async with world(2, proxy=FaultProxy("", edit=elsewhere)) as (fleet, servers, front):
            report = await fleet.update_weights(publish(tmp_path, 2))
            assert list(report.failed) == [front.url]
            await asyncio.sleep(0.5)
            assert servers[0].count("/update_weights_from_disk") == 1
            states = {entry.engine_id: entry.state for entry in await fleet.status()}
            assert states[front.url] is EngineState.POISONED
            for n in range(4):
                request = ask(f"r{n}")
                check(request, await fleet.generate(request))
            assert servers[0].count("/generate") == 0
            report = await fleet.update_weights(publish(tmp_path, 3))
            assert (len(report.updated), report.failed) == (2, {})

    drive(scenario)


def test_a_server_with_other_weights_than_it_claims_stays_out(tmp_path):
    async def scenario():
        async with world(3) as (fleet, servers, _):
            servers[1].wrong_weights = True
            report = await fleet.update_weights(publish(tmp_path, 2))
            assert set(report.failed) == {servers[1].url}
            assert "differs" in report.failed[servers[1].url]
            for n in range(6):
                await fleet.generate(ask(f"r{n}"))
            assert servers[1].count("/generate") == 0

    drive(scenario)


def test_what_a_refused_server_samples_after_it_goes_on_is_thrown_away(tmp_path):
    async def scenario():
        async with world(2, token_s=0.002) as (fleet, servers, _):
            wrong, whole = servers[1], servers[1].handler
            wrong.wrong_weights = True

            async def slow(call):
                # Requests reach it while it is paused, wait there, and run on what it loaded.
                if call.route == "/generate" and wrong.held != "other":
                    await until(lambda: wrong.paused)
                if call.route == "/update_weights_from_disk":
                    await until(lambda: wrong.running)
                return await whole(call)

            wrong.handler = slow
            snapshot = publish(tmp_path, 2)
            requests = [ask(f"r{n}", 30) for n in range(8)]
            tasks = [asyncio.create_task(fleet.generate(r)) for r in requests]
            await until(lambda: wrong.count("/generate"))
            report = await fleet.update_weights(snapshot)
            assert list(report.failed) == [wrong.url]
            for request, result in zip(requests, await asyncio.gather(*tasks), strict=True):
                assert len(result.output_ids) == 30
                check(request, result)
            # Some were there when it went on, or this test shows nothing.
            assert wrong.sampled_other > 0

    drive(scenario)


def test_weights_that_kill_the_first_server_are_given_to_no_other(tmp_path):
    async def scenario():
        async with world(3) as (fleet, servers, _):
            for server in servers:
                server.dies_of = {"v000002"}
            with pytest.raises(SnapshotRefused, match="was lost with it"):
                await fleet.update_weights(publish(tmp_path, 2))
            assert [s.count("/update_weights_from_disk") for s in servers] == [1, 0, 0]
            request = ask("a")
            result = await fleet.generate(request)
            check(request, result)
            assert [span.version for span in result.spans] == [1]

    drive(scenario)


def test_a_connection_lost_while_weights_load_counts_as_a_death(tmp_path):
    # The scheduler of a real server dies first; its HTTP process answers for some seconds more.
    def fault(call, number):
        return Reply(cut_at=-1) if call.route == "/update_weights_from_disk" else None

    async def scenario():
        async with world(2, proxy=FaultProxy("", fault)) as (fleet, servers, front):
            with pytest.raises(SnapshotRefused, match="was lost with it"):
                await fleet.update_weights(publish(tmp_path, 2))
            assert [s.count("/update_weights_from_disk") for s in servers] == [0, 0]
            result = await fleet.generate(ask("a"))
            assert [span.version for span in result.spans] == [1]
            assert result.engine_id == servers[1].url != front.url

    drive(scenario)


def test_below_min_servers_an_update_says_who_failed_and_how_to_go_on(tmp_path):
    options = FleetOptions(**{**_fields(QUICK), "min_servers": 2})

    async def scenario():
        async with world(2, options=options) as (fleet, servers, _):
            servers[1].wrong_weights = True
            with pytest.raises(FleetUnavailable, match=r"1 of 2 .* min_servers is 2: .*differs"):
                await fleet.update_weights(publish(tmp_path, 2))

    drive(scenario)


# --- servers that die and come back -----------------------------------------------------------


def test_a_killed_server_costs_no_request_and_comes_back_with_the_current_weights(tmp_path):
    async def scenario():
        async with world(2, token_s=0.01) as (fleet, servers, _):
            await fleet.update_weights(publish(tmp_path, 2))
            requests = [ask(f"r{n}", 40, session=f"s{n}") for n in range(8)]
            tasks = [asyncio.create_task(fleet.generate(r)) for r in requests]
            await until(lambda: len(servers[0].running) == 4)
            port = int(servers[0].url.rsplit(":", 1)[1])
            await servers[0].stop()
            for request, result in zip(requests, await asyncio.gather(*tasks), strict=True):
                assert len(result.output_ids) == 40
                check(request, result)
                assert result.engine_id == servers[1].url
            # A restart: weights "default", which no token may come from.
            servers[0].version = servers[0].held = "default"
            await servers[0].start(port)
            await ready(fleet, 2)
            assert servers[0].version == "2"

    drive(scenario)


def test_tokens_of_unknown_weights_are_thrown_away(tmp_path):
    async def scenario():
        async with world(2, options=FleetOptions(**{**_fields(QUICK), "poll_s": 60.0})) as (
            fleet,
            servers,
            _,
        ):
            await fleet.update_weights(publish(tmp_path, 2))
            # Restarted between two looks: the fleet learns it from the reply itself.
            servers[0].version = servers[0].held = "default"
            for n in range(6):
                request = ask(f"r{n}")
                result = await fleet.generate(request)
                assert {span.version for span in result.spans} == {2}
                check(request, result)

    drive(scenario)


def test_without_servers_requests_wait_a_bounded_time_and_then_say_what_to_do():
    async def scenario():
        async with world(2) as (fleet, servers, _):
            for server in servers:
                await server.stop()
            began = time.monotonic()
            with pytest.raises(FleetUnavailable, match=r"0 of 2 .*trsi fleet up"):
                await fleet.generate(ask("a"))
            assert time.monotonic() - began < 6.0

    drive(scenario)


def test_a_request_that_two_servers_died_with_is_given_to_no_third():
    async def scenario():
        async with world(3) as (fleet, servers, _):

            def deadly(server):
                whole = server.handler

                async def handle(call):
                    if call.route == "/generate" and call.body["rid"].startswith("bad~"):
                        await server.stop()
                        return Reply(cut_at=-1)
                    return await whole(call)

                server.handler = handle

            for server in servers:
                deadly(server)
            with pytest.raises(EngineError, match="2 servers died"):
                await fleet.generate(ask("bad"))
            request = ask("good")
            check(request, await fleet.generate(request))

    drive(scenario)


# --- where requests go ------------------------------------------------------------------------


def test_a_session_keeps_its_server_and_others_go_where_least_is_done():
    async def scenario():
        async with world(3, token_s=0.005) as (fleet, servers, _):
            homes = {}
            for turn in range(3):
                requests = [ask(f"{s}/{turn}", session=f"s{s}") for s in range(6)]
                for request, result in zip(
                    requests, await asyncio.gather(*map(fleet.generate, requests)), strict=True
                ):
                    home = homes.setdefault(request.session_id, result.engine_id)
                    assert result.engine_id == home
            assert [s.count("/generate") for s in servers] == [6, 6, 6]

    drive(scenario)


def test_a_caller_that_is_cancelled_leaves_nothing_running():
    async def scenario():
        async with world(token_s=0.01) as (fleet, servers, _):
            task = asyncio.create_task(fleet.generate(ask("a", 400)))
            await until(lambda: servers[0].running)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: not servers[0].running)
            await fleet.generate(ask("a"))

    drive(scenario)
