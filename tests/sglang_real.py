"""The tiny dense model that real SGLang servers run in tests, and how they are started."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest

from rollout.engines.sglang.servers import ServerSpec, end_group, launch, reachable
from trsi_jax.model import InitConfig, ModelConfig, init_params

PYTHON = "TRSI_SGLANG_PYTHON"
"""Names the interpreter of the servers' environment; without it their tests are skipped."""
REQUIRED = "TRSI_REQUIRE_SGLANG"
"""Set where they must run."""
URL = "TRSI_SGLANG_URL"
"""Of a running server of `DENSE` in float32 with a context of `CONTEXT`; without it tests start
one."""
START_S = 600.0

CONTEXT = 512
FLAGS = ("--dtype", "float32", "--max-total-tokens", "8192", "--max-running-requests", "16")
DENSE = ModelConfig(
    name="dense-tiny",
    vocab_size=320,
    hidden_size=64,
    num_layers=2,
    intermediate_size=128,
    layer_pattern=("full",),
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rotary_dim=16,
    rope_theta=10_000.0,
    gated_attention=False,
    norm_offset=0.0,
    tie_embeddings=False,
    max_position=CONTEXT,
    init=InitConfig(embed_std=1.0),
)


@cache
def dense_params(seed: int) -> Any:
    """Random weights, sharpened so that log-probs range over many nats."""
    params = init_params(DENSE, jax.random.key(seed))
    params["lm_head"]["kernel"] = 2.0 * params["lm_head"]["kernel"]
    return params


def interpreter() -> str:
    """Of the servers' environment; skips the test without one, or fails it where required."""
    python = os.environ.get(PYTHON, "")
    if python:
        return python
    reason = f"{PYTHON} names no interpreter; bash .ci/fleet.sh makes one"
    if os.environ.get(REQUIRED):
        pytest.fail(reason)
    pytest.skip(reason)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spec(model: Path, port: int, *, weights: Path | None = None) -> ServerSpec:
    return ServerSpec(
        python=interpreter(),
        model=str(model),
        port=port,
        context_len=CONTEXT,
        weights=str(weights) if weights else "",
        cpu=True,
        flags=FLAGS,
    )


def await_answer(server: ServerSpec, log: Path) -> None:
    until = time.monotonic() + START_S
    while reachable(server.url, 2.0) is None:
        if time.monotonic() > until:
            pytest.fail(f"{server.url} did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.3)


@contextlib.contextmanager
def running(specs: Sequence[ServerSpec], folder: Path) -> Iterator[list[int]]:
    """Servers, started one after the other; gives their process groups."""
    groups: list[int] = []
    try:
        for server in specs:
            log = folder / f"server-{server.port}.log"
            groups.append(launch(server, log).pid)
            await_answer(server, log)
        yield groups
    finally:
        for group in groups:
            end_group(group)
