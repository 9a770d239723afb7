"""`trsi serve MODEL`: the JAX engine behind SGLang's routes and an OpenAI-compatible chat."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from rollout.errors import UserError


def serve(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A run's folder, RUN/checkpoints/STAGE, or a Hugging Face directory.",
        ),
    ],
    host: Annotated[str, typer.Option(help="Address; the control routes are open.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 30000,
    stage: Annotated[str | None, typer.Option(help="Of a run [default: the last].")] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="For clients [default: from MODEL].")
    ] = None,
    context_length: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of prompt and output [default: the run's or 8192]."),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 32,
    prefill_chunk: Annotated[
        int, typer.Option(min=0, help="Tokens that a context is read by; 0: one by one.")
    ] = 64,
    steps: Annotated[
        int, typer.Option(min=1, help="Tokens between two looks at new requests and aborts.")
    ] = 8,
    tensor: Annotated[int, typer.Option(min=1, help="Devices that share the model.")] = 1,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16 [default: the model's own].")
    ] = None,
    weight_version: Annotated[
        str, typer.Option(help="What the weights are called at first.")
    ] = "default",
    api_key: Annotated[
        str | None, typer.Option(envvar="TRSI_API_KEY", help="Asked of every request.")
    ] = None,
) -> None:
    """Serve a model over HTTP until interrupted."""
    if dtype not in (None, "float32", "bfloat16"):
        raise UserError(f"--dtype {dtype}: must be float32 or bfloat16")
    if not model.is_dir():
        raise UserError(f"no directory {model}; give a run, a checkpoint or a model directory")
    try:
        import starlette
        import uvicorn
    except ImportError as error:
        raise UserError(
            f"trsi serve needs the package {error.name}: pip install 'trsi-jax[serve]'"
        ) from error
    del starlette, uvicorn

    # Its advice is that weights need torch, which this needs not.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    listener = _listen(host, port)
    with listener:
        from trsi_jax.serve.run import Settings, serve_forever

        settings = Settings(
            stage=stage,
            name=name,
            context=context_length,
            slots=slots,
            prefill_chunk=prefill_chunk,
            steps=steps,
            tensor=tensor,
            dtype=dtype,
            weight_version=weight_version,
            api_key=api_key,
        )
        serve_forever(model, settings, listener, say=lambda line: print(line, flush=True))


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before anything is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(f"--host {host} --port {port}: {error}") from error
    return listener
