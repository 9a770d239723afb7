"""One container engine: the Docker SDK for its commands, and raw streams for what is interactive.

The SDK's own streams block a thread each, know no time-out, and may swallow the first bytes behind
the answer's header. So a stream is opened here: one HTTP request that the engine answers by handing
over the connection.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import docker
import requests
from docker.errors import APIError, DockerException, NotFound
from docker.errors import ImageNotFound as NoSuchImage
from docker.utils import kwargs_from_env, parse_host

from rollout.errors import (
    ImageNotFound,
    SandboxDead,
    SandboxError,
    SandboxUnavailable,
    StartTimeout,
)

DEFAULT_HOST = "unix:///var/run/docker.sock"
CALL_TIMEOUT_S = 60
CONNECT_TIMEOUT_S = 10.0
STREAM_BYTES = 1 << 18
CONNECTIONS = 64

T = TypeVar("T")


def default_host() -> str:
    """What DOCKER_HOST names, else the usual socket."""
    return os.environ.get("DOCKER_HOST") or DEFAULT_HOST


class Engine:
    """A Docker engine, or anything that speaks its API, such as Podman's socket.

    Args:
      host: `unix:///path`, or `tcp://name:port`, with TLS if DOCKER_TLS_VERIFY and DOCKER_CERT_PATH
        say so, as for the `docker` command.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self._client: docker.APIClient | None = None
        self.info: Mapping[str, Any] = {}
        self.podman = False

    def connect(self) -> None:
        """Reach the engine and learn what it can do. Blocks.

        Raises:
          SandboxUnavailable: nobody answers; with the one command that mends it.
        """
        if self._client is not None:
            return
        try:
            options = kwargs_from_env()
            options["base_url"] = self.host
            client = docker.APIClient(
                version="auto", timeout=CALL_TIMEOUT_S, max_pool_size=CONNECTIONS, **options
            )
            self.info = client.info()
            parts = client.version().get("Components") or ()
        except (DockerException, requests.RequestException, OSError) as error:
            raise SandboxUnavailable(*self._explain(error)) from error
        self.podman = any("podman" in str(part.get("Name", "")).lower() for part in parts)
        self._client = client

    def _explain(self, error: Exception) -> tuple[str, str]:
        path = Path(urlsplit(self.host).path)
        if self.host.startswith("unix:") and not path.exists():
            return (
                f"no container engine at {self.host}",
                "run: sudo apt-get install docker.io && sudo service docker start"
                " (or set DOCKER_HOST to an engine's or Podman's socket)",
            )
        if self.host.startswith("unix:") and not os.access(path, os.R_OK | os.W_OK):
            return (
                f"{path} may not be used by this user",
                "run: sudo usermod -aG docker $USER, and log in again",
            )
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        return (
            f"no container engine answers at {self.host} ({what[:200]})",
            "run: sudo service docker start (or set DOCKER_HOST)",
        )

    @property
    def client(self) -> docker.APIClient:
        """The SDK's client of an engine that was reached."""
        assert self._client is not None
        return self._client

    def close(self) -> None:
        """Let the connections go."""
        if self._client is not None:
            self._client.close()
            self._client = None

    async def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run a blocking function of the SDK beside the event loop, its errors typed.

        Raises:
          SandboxDead: there is no such container.
          SandboxUnavailable: the engine is gone, or did not answer in time.
          SandboxError: the engine refused.
        """
        return await asyncio.to_thread(self.run, function, *args, **options)

    def run(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """The same, here and now."""
        try:
            return function(*args, **options)
        except NoSuchImage as error:
            raise ImageNotFound(f"no such image ({error.explanation})") from error
        except NotFound as error:
            raise SandboxDead(f"the container is gone ({error.explanation})") from error
        except APIError as error:
            raise SandboxError(f"the engine refused: {error.explanation or error}") from error
        except requests.Timeout as error:
            raise StartTimeout(f"{self.host} gave no answer in {CALL_TIMEOUT_S} s") from error
        except (requests.RequestException, DockerException, OSError) as error:
            raise SandboxUnavailable(*self._explain(error)) from error

    async def stream(self, path: str, body: Mapping[str, object] | None = None) -> Stream:
        """Send a request whose connection becomes a two-way stream.

        Args:
          path: of the API, without its version: "/containers/ID/attach?...".
          body: what to send, as JSON.

        Raises:
          SandboxDead: there is no such container, or it does not run.
          SandboxError: the engine is gone or refused.
        """
        try:
            reader, writer = await asyncio.wait_for(self._connection(), CONNECT_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            raise SandboxUnavailable(*self._explain(error)) from error
        stream = Stream(reader, writer)
        data = b"" if body is None else json.dumps(body).encode()
        head = (
            f"POST /v{self.client.api_version}{path} HTTP/1.1\r\nHost: docker\r\n"
            "Content-Type: application/json\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        try:
            writer.write(head.encode() + data)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), CALL_TIMEOUT_S)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            stream.close()
            raise SandboxUnavailable(*self._explain(error)) from error
        except BaseException:
            stream.close()
            raise
        status = int(answer.split(b" ", 2)[1])
        if status in (101, 200):
            return stream
        said = (await reader.read(500)).decode(errors="replace").strip()
        stream.close()
        kind = SandboxDead if status in (404, 409) else SandboxError
        raise kind(f"the engine gave no stream ({status}: {said})")

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = parse_host(self.host, False, bool(os.environ.get("DOCKER_TLS_VERIFY")))
        parts = urlsplit(url)
        if url.startswith(("http+unix:", "unix:")):
            path = "/" + url.split("://", 1)[1].lstrip("/")
            return await asyncio.open_unix_connection(path, limit=STREAM_BYTES)
        if parts.scheme not in ("http", "https", "tcp"):
            raise SandboxUnavailable(
                f"{self.host}: only unix and tcp sockets are spoken",
                "forward it: ssh -NL /tmp/engine.sock:/var/run/docker.sock HOST",
            )
        secure = _tls_context() if parts.scheme == "https" else None
        return await asyncio.open_connection(
            parts.hostname, parts.port, ssl=secure, limit=STREAM_BYTES
        )


def _tls_context() -> ssl.SSLContext:
    folder = Path(os.environ.get("DOCKER_CERT_PATH") or Path.home() / ".docker")
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


class Stream:
    """Standard input, output and error of a process in a container, over one connection.

    Output arrives in frames: one byte that names the channel, three of nothing, four of length.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._buffer = bytearray()
        self._channel, self._left = 0, 0

    async def send(self, data: bytes) -> None:
        """Write to its standard input.

        Raises:
          SandboxDead: the process is gone.
        """
        try:
            self._writer.write(data)
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise SandboxDead("the sandbox ended: its channel is closed") from error

    def end_input(self) -> None:
        """Let its standard input end, where the transport can say so (TLS can't)."""
        if self._writer.can_write_eof():
            self._writer.write_eof()

    async def read(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """The next pieces of output, as (1 or 2, bytes); none at its end.

        Raises:
          TimeoutError: nothing came.
        """
        found: list[tuple[int, bytes]] = []
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not found:
            left = deadline - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(max(0.0, left)):
                    data = await self._reader.read(STREAM_BYTES)
            except OSError as error:
                if isinstance(error, TimeoutError):
                    raise
                data = b""
            if not data:
                return []
            self._buffer += data
            self._split(found)
        return found

    def _split(self, found: list[tuple[int, bytes]]) -> None:
        at, buffer = 0, self._buffer
        while at < len(buffer):
            if not self._left:
                if len(buffer) - at < 8:
                    break
                self._channel = buffer[at]
                self._left = int.from_bytes(buffer[at + 4 : at + 8], "big")
                at += 8
            piece = bytes(buffer[at : at + self._left])
            at += len(piece)
            self._left -= len(piece)
            if piece:
                found.append((self._channel, piece))
        del buffer[:at]

    def close(self) -> None:
        """Close the connection at once."""
        self._writer.transport.abort()
