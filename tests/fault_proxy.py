"""A small HTTP/1.1 server for tests, and a proxy on it that does to replies what networks do."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Call:
    """One request as it came in."""

    method: str
    route: str
    body: Any


@dataclass
class Reply:
    """What goes back.

    A `cut_at` below zero closes the connection without a byte; another one ends it after so many
    bytes of the body, of which the header still promises all.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None


def as_json(content: Any, status: int = 200) -> Reply:
    return Reply(status, json.dumps(content).encode())


Handler = Callable[[Call], Awaitable[Reply]]


class HttpServer:
    """Answers with `handler`; `calls` keeps what came. A handler whose client left is cancelled."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.calls: list[Call] = []
        self.url = ""
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    def count(self, route: str) -> int:
        return sum(call.route == route for call in self.calls)

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """As a killed process: nobody listens, and every connection is gone."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, ValueError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, route, _ = head[0].split(" ", 2)
        lengths = [int(x.split(":")[1]) for x in head if x.lower().startswith("content-length:")]
        raw = await reader.readexactly(lengths[0]) if lengths else b""
        call = Call(method, route, json.loads(raw) if raw else None)
        self.calls.append(call)
        work = asyncio.ensure_future(self.handler(call))
        gone = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            return False
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        reply = work.result()
        if reply.cut_at is not None and reply.cut_at < 0:
            writer.transport.abort()
            return False
        lines = [f"HTTP/1.1 {reply.status} X", f"content-length: {len(reply.body)}"]
        lines += [f"{name}: {value}" for name, value in reply.headers.items()]
        body = reply.body if reply.cut_at is None else reply.body[: reply.cut_at]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        return reply.cut_at is None


Fault = Callable[[Call, int], Reply | float | None]
"""(call, how many of its route came before) -> a reply instead, seconds to wait, or nothing."""


@dataclass
class FaultProxy:
    """Passes calls on, but for what `fault` says; `damage` changes a reply on its way back."""

    upstream: str
    fault: Fault = lambda call, number: None
    damage: Callable[[Call, Reply], Reply] = lambda call, reply: reply
    edit: Callable[[Call], Any] = lambda call: call.body

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[HttpServer]:
        seen: dict[str, int] = {}
        async with httpx.AsyncClient(timeout=None, trust_env=False) as http:

            async def handle(call: Call) -> Reply:
                number = seen.get(call.route, 0)
                seen[call.route] = number + 1
                said = self.fault(call, number)
                if isinstance(said, Reply):
                    return said
                if said is not None:
                    await asyncio.sleep(said)
                try:
                    got = await http.request(
                        call.method, self.upstream + call.route, json=self.edit(call)
                    )
                except httpx.TransportError:
                    return Reply(cut_at=-1)
                return self.damage(call, Reply(got.status_code, got.content))

            server = HttpServer(handle)
            await server.start()
            try:
                yield server
            finally:
                await server.stop()
