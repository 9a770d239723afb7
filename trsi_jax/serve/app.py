"""The ASGI application: which route is answered by what, errors as JSON, an optional key."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollout.errors import EngineError
from trsi_jax.serve import wire
from trsi_jax.serve.chat import ChatRoutes
from trsi_jax.serve.sglang import Server


class _Key:
    """Refuses requests without the key; `/health` is open."""

    def __init__(self, app: Any, key: str) -> None:
        self.app = app
        self.expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given: Mapping[bytes, bytes] = dict(scope["headers"])
            if not hmac.compare_digest(given.get(b"authorization", b""), self.expected):
                error = HTTPException(401, "no or a wrong API key")
                await (await _said(Request(scope), error))(scope, receive, send)
                return
        await self.app(scope, receive, send)


def make_app(
    server: Server,
    *,
    api_key: str | None = None,
    started: Callable[[], Awaitable[None]] | None = None,
) -> Any:
    """The ASGI application; it closes the engine when it ends.

    Args:
      server: with its engine.
      api_key: asked of every request but `/health`.
      started: awaited before the first request.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        if started is not None:
            await started()
        yield
        await server.engine.aclose()

    chat = ChatRoutes(server)
    both = ["GET", "POST"]
    routes = [
        Route("/generate", server.generate, methods=["POST"]),
        Route("/update_weights_from_disk", server.update, methods=["POST"]),
        Route("/abort_request", server.abort, methods=["POST"]),
        Route("/pause_generation", server.pause, methods=["POST"]),
        Route("/continue_generation", server.resume, methods=["POST"]),
        Route("/flush_cache", server.flush, methods=both),
        Route("/health", server.health),
        Route("/ready", server.ready),
        Route("/health_generate", server.probe),
        Route("/model_info", server.model_info),
        Route("/get_model_info", server.model_info),
        Route("/server_info", server.server_info),
        Route("/get_server_info", server.server_info),
        Route("/v1/loads", server.loads),
        Route("/v1/models", chat.models),
        Route("/v1/chat/completions", chat.complete, methods=["POST"]),
    ]
    handlers: Any = {HTTPException: _said, EngineError: _said}
    app: Any = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    return app if api_key is None else _Key(app, api_key)


async def _said(request: Request, error: Exception) -> Response:
    status, content = wire.problem(error)
    return JSONResponse(content, status)
