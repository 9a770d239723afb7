"""`trsi serve` over HTTP from a real process: the engine's contract, SGLang's routes, the chat."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jax
import pytest
from safetensors.numpy import load_file, save_file

from rollout.harness import shell_chat
from rollout.protocols import WeightSnapshot
from rollout.tasks.pool.lexicon import vocabulary
from tests.engine_contract import EngineContract, Open, Subject
from tests.serve_client import ServeClient, serving
from trsi_jax.model import ModelConfig, init_params, preset, save_params

pytestmark = pytest.mark.engine
CHAT = shell_chat(vocabulary())
CONTEXT = 2048


def tiny() -> ModelConfig:
    return dataclasses.replace(
        preset("tiny", vocab_size=CHAT.tokenizer.vocab_size),
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


@pytest.fixture(scope="module")
def folders(weights: list[Any], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Both weights as directories, and one that lacks a tensor."""
    base = tmp_path_factory.mktemp("weights")
    made = [
        save_params(base / f"{index}", tiny(), params, dtype="F32")
        for index, params in enumerate(weights)
    ]
    broken = save_params(base / "broken", tiny(), weights[1], dtype="F32")
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    return [*made, broken]


@pytest.fixture(scope="module")
def url(folders: list[Path]) -> Iterator[str]:
    CHAT.tokenizer.save(folders[0])
    options = ("--context-length", f"{CONTEXT}", "--slots", "8", "--steps", "2", "--name", "tiny")
    with serving(folders[0], *options, "--prefill-chunk", "16", "--weight-version", "0") as found:
        yield found


def post(url: str, route: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(url + route, json=body, timeout=60, trust_env=False, **options)


class TestTheContract(EngineContract):
    @pytest.fixture
    def subject(self, url: str, folders: list[Path], weights: list[Any]) -> Open:
        @asynccontextmanager
        async def open_subject() -> AsyncIterator[Subject]:
            engine = ServeClient(url)
            # Whatever an earlier test left.
            await engine.resume()
            await engine.abort()
            try:
                yield Subject(
                    engine=engine,
                    config=tiny(),
                    weights=weights,
                    snapshot=lambda which, version: WeightSnapshot(version, path=folders[which]),
                    broken=lambda version: WeightSnapshot(version, path=folders[2]),
                    # 900 calls of the loop: a quiet machine is through 200 tokens at once.
                    long=1800,
                )
            finally:
                await engine.aclose()

        return open_subject


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": [1], "sampling_params": {"max_tokens": 3}}, "unknown sampling field"),
        ({"input_ids": [1], "sampling_params": {"min_p": 0.1}}, "'min_p' is not implemented"),
        ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"input_ids": [1, 10_000]}, "id 10000 is outside the vocabulary"),
        ({"input_ids": [1] * 2100}, "over the context of 2048"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({}, "give input_ids or text"),
        ({"input_ids": [1], "rid": ["a", "b"]}, "rid: 2 for 1 prompts"),
        ({"input_ids": [1], "top_logprobs_num": 2}, "top_logprobs_num is not implemented"),
    ],
)
def test_what_cannot_be_served_is_a_400_with_a_reason(url: str, body: Any, message: str) -> None:
    reply = post(url, "/generate", body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


def test_no_json_and_no_route_are_errors_in_json(url: str) -> None:
    reply = httpx.post(f"{url}/generate", content=b"{nope", trust_env=False)
    assert reply.status_code == 400
    assert "no JSON" in reply.json()["error"]["message"]
    reply = httpx.get(f"{url}/nowhere", trust_env=False)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, 404)


def test_batches_and_copies_keep_their_order_and_names(url: str) -> None:
    sampling = {"max_new_tokens": 3, "sampling_seed": 7, "ignore_eos": True}
    reply = post(
        url,
        "/generate",
        {"input_ids": [[1, 2], [3]], "rid": ["a", "b"], "sampling_params": sampling | {"n": 2}},
    ).json()
    assert [entry["meta_info"]["id"] for entry in reply] == ["a_0", "a_1", "b_0", "b_1"]
    assert [entry["meta_info"]["prompt_tokens"] for entry in reply] == [2, 2, 1, 1]
    assert reply[0]["output_ids"] != reply[1]["output_ids"]
    alone = post(url, "/generate", {"input_ids": [1, 2], "sampling_params": sampling}).json()
    assert alone["output_ids"] == reply[0]["output_ids"]
    assert alone["text"] == CHAT.command(tuple(alone["output_ids"]))


def test_a_stream_grows_to_the_whole(url: str) -> None:
    sampling = {"max_new_tokens": 12, "sampling_seed": 7, "ignore_eos": True}
    body = {"input_ids": [1, 2], "sampling_params": sampling, "return_logprob": True}
    whole = post(url, "/generate", body).json()
    lines = post(url, "/generate", body | {"stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert len(parts) > 2
    for part in parts:
        count = len(part["output_ids"])
        assert part["output_ids"] == whole["output_ids"][:count]
        assert part["meta_info"]["output_token_logprobs_length"] == count
    assert parts[-1]["output_ids"] == whole["output_ids"]
    assert parts[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


def test_a_pause_of_mode_abort_returns_parts_and_health_answers_meanwhile(url: str) -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            sampling = {"max_new_tokens": 200, "ignore_eos": True}
            body = {"input_ids": [1, 2], "sampling_params": sampling}
            running = asyncio.create_task(http.post("/generate", json=body))
            while not (await http.get("/v1/loads")).json()["loads"][0]["num_running_reqs"]:
                await asyncio.sleep(0.001)
            assert (await http.post("/flush_cache")).status_code == 400
            await http.post("/pause_generation", json={})
            part = (await running).json()
            assert part["meta_info"]["finish_reason"]["type"] == "abort"
            assert len(part["output_ids"]) < 200
            waiting = asyncio.create_task(http.post("/generate", json=body))
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).status_code == 503
            await asyncio.sleep(0.1)
            assert not waiting.done()
            wrong = await http.post("/pause_generation", json={"mode": "x"})
            assert wrong.status_code == 400
            await http.post("/continue_generation")
            assert len((await waiting).json()["output_ids"]) == 200
            assert (await http.get("/health_generate")).status_code == 200
            assert (await http.post("/flush_cache")).status_code == 200

    asyncio.run(scenario())


def test_weights_are_named_and_a_directory_without_a_model_changes_nothing(
    url: str, folders: list[Path]
) -> None:
    body = {"model_path": str(folders[1]), "weight_version": "step-9"}
    assert post(url, "/update_weights_from_disk", body).json()["success"]
    for path, message in (("/nowhere", "no config.json in /nowhere"), (folders[2], "norm")):
        reply = post(url, "/update_weights_from_disk", {"model_path": str(path)})
        assert reply.status_code == 400
        assert message in reply.json()["message"]
    info = httpx.get(f"{url}/get_model_info", trust_env=False).json()
    assert (info["weight_version"], info["model_path"]) == ("step-9", str(folders[1]))
    reply = post(url, "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}})
    assert reply.json()["meta_info"]["weight_version"] == "step-9"


def test_a_chat_is_laid_out_as_the_harnesses_do_and_its_start_is_cached(url: str) -> None:
    words = " ".join(["list", "the", "files"] * 4)
    messages = [{"role": "user", "content": words}]
    ids = CHAT.prompt(words)
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 8}
    reply = post(url, "/v1/chat/completions", body).json()
    sampling = {"temperature": 0, "max_new_tokens": 8, "stop_token_ids": list(CHAT.stop_ids)}
    same = post(url, "/generate", {"input_ids": list(ids), "sampling_params": sampling}).json()
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": same["text"]}
    assert same["meta_info"]["cached_tokens"] == (len(ids) - 1) // 16 * 16 > 0
    assert reply["usage"]["prompt_tokens"] == len(ids)
    # Another turn, and the same as a stream.
    turn = [{"role": "assistant", "content": "ls"}, {"role": "tool", "content": "a b"}]
    body |= {"messages": messages + turn, "stop": ["zebra never said"]}
    longer = post(url, "/v1/chat/completions", body).json()
    expected = (*ids, *CHAT.action("ls"), *CHAT.observation("a b"))
    assert longer["usage"]["prompt_tokens"] == len(expected)
    lines = post(url, "/v1/chat/completions", body | {"stream": True}).text.split("\n\n")[:-2]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
    assert text == longer["choices"][0]["message"]["content"]
    assert chunks[-1]["finish_reason"] == longer["choices"][0]["finish_reason"]


def test_a_stop_text_ends_a_chat_before_it(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "files"}], "temperature": 0, "max_tokens": 60}
    free = post(url, "/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    stop = free[len(free) // 2 :][:3]
    for stream in (False, True):
        reply = post(url, "/v1/chat/completions", body | {"stop": stop, "stream": stream})
        if stream:
            lines = reply.text.split("\n\n")[:-2]
            chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
            text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
            reason = chunks[-1]["finish_reason"]
        else:
            (choice,) = reply.json()["choices"]
            text, reason = choice["message"]["content"], choice["finish_reason"]
        assert (text, reason) == (free[: free.index(stop)], "stop")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_token": 3}, "unknown field 'max_token'"),
        ({"tools": [{"type": "function"}]}, "'tools' is not implemented"),
        ({"model": "gpt"}, "'gpt' is not served"),
        ({"messages": []}, "a user message must come first"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]: content must be text"),
        ({"messages": [{"role": "user", "content": "a"}] * 2}, "messages[1]: an assistant message"),
        ({"messages": [{"role": "user", "content": "zq" * 2100}]}, "the context is 2048"),
        ({"n": 0}, "n must be in 1..128"),
    ],
)
def test_a_chat_that_cannot_be_held_is_a_400(url: str, changes: Any, message: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2} | changes
    reply = post(url, "/v1/chat/completions", body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
