"""Builds engine and application of `trsi serve` and runs them until a signal comes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import uvicorn

from rollout.errors import UserError
from rollout.protocols import GenerateRequest, SamplingSpec
from sharding.layouts import decoder_rules
from sharding.mesh import make_mesh
from sharding.rules import shardings, specs
from trsi_jax.engine import JaxEngine
from trsi_jax.serve.app import make_app
from trsi_jax.serve.load import Served, load
from trsi_jax.serve.sglang import Server

_LEAVE_S = 3
"""How long open requests may take to end after a signal."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says; None is the model's own."""

    stage: str | None = None
    name: str | None = None
    context: int | None = None
    slots: int = 32
    prefill_chunk: int = 64
    steps: int = 8
    tensor: int = 1
    dtype: str | None = None
    weight_version: str = "default"
    api_key: str | None = None


def serve_forever(
    path: Path, settings: Settings, listener: socket.socket, *, say: Callable[[str], None]
) -> None:
    """Load, compile, listen, and say when requests are welcome; returns after SIGINT.

    Raises:
      UserError: for a model or a setting that cannot be served.
    """
    served = load(path, stage=settings.stage, dtype=settings.dtype)
    if settings.name is not None:
        served = replace(served, name=settings.name)
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host

    async def main() -> None:
        engine = make_engine(served, settings)

        async def started() -> None:
            await _warm_up(engine, settings.prefill_chunk)
            say(
                f"serving {served.name} at http://{host}:{port} on {jax.device_count()}"
                f" {jax.default_backend()} device(s), weights {settings.weight_version!r}"
            )

        state = Server(served, engine, weight_version=settings.weight_version)
        app = make_app(state, api_key=settings.api_key, started=started)
        options = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_LEAVE_S,
            lifespan="on",
        )
        await uvicorn.Server(options).serve(sockets=[listener])

    # uvicorn raises the signal again after it has ended everything in order.
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())


def make_engine(served: Served, settings: Settings) -> JaxEngine:
    """The engine of `trsi serve`: contexts by chunks, new requests at once, one block a stream.

    Raises:
      UserError: for a context the model has no positions for, or devices that are not there.
    """
    config, context = served.config, settings.context or served.context
    where: Any = None
    if settings.tensor > 1:
        if jax.default_backend() == "cpu":
            # The scoring forward, cut over CPU devices, was seen to wait for itself for ever.
            raise UserError(f"--tensor {settings.tensor}: only on accelerators")
        devices = jax.devices()
        if settings.tensor > len(devices):
            raise UserError(f"--tensor {settings.tensor}: there are {len(devices)} devices")
        mesh = make_mesh({"tensor": settings.tensor}, devices[: settings.tensor])
        try:
            rules = decoder_rules(
                tensor=settings.tensor,
                kv_heads=config.num_kv_heads,
                gated_attention=config.gated_attention,
            )
            where = shardings(mesh, specs(rules, served.params, mesh.shape))
        except ValueError as error:
            raise UserError(f"--tensor {settings.tensor}: {error}") from error
    # A step of a model that a CPU can serve keeps one core busy; a block for each shares the work.
    on_cpu = jax.default_backend() == "cpu"
    streams = min(os.cpu_count() or 1, settings.slots, 4) if on_cpu else 1
    try:
        return JaxEngine(
            config,
            served.params,
            context_len=context,
            max_sessions=settings.slots,
            block_width=-(-settings.slots // streams),
            streams=streams,
            linger_s=0.0,
            steps_per_call=settings.steps,
            prefill_chunk=settings.prefill_chunk,
            shardings=where,
            engine_id=served.name,
        )
    except ValueError as error:
        raise UserError(f"{served.path}: {error}") from error


async def _warm_up(engine: JaxEngine, chunk: int) -> None:
    """Compile before the first client waits for it."""
    length = max(1, min(chunk + 2, engine.caps.context_len - 2))
    spec = SamplingSpec(max_new_tokens=2, temperature=0.0, ignore_eos=True)
    await engine.generate(GenerateRequest("warm-up", (0,) * length, spec))
    await engine.score((0,) * length, 1, 1.0)
    await engine.flush_cache()
