"""The one way out of a sandbox with an allowlist: a proxy that lives in its network namespace.

Such a sandbox has no network but its own loopback. There a socket listens whose other side is this
process: it takes HTTP requests and CONNECT for hosts on the list, resolves the name itself, and
connects only to addresses of the public Internet, so neither the host, nor its networks, nor a
cloud's metadata can be reached by any name. When this process ends, so does the way out. Inside TLS
nothing is looked at: whoever serves an allowed name decides what more it gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from rollout.errors import LimitUnsupported, SandboxUnavailable

PREFIX = "allowlist:"
PORT = 3128
PORTS = (80, 443)
MAX_HEAD_BYTES = 16_384
MAX_CONNECTIONS = 32
HEAD_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 10.0
CLONE_NEWNET = 0x40000000

_NAME = re.compile(r"(\*\.)?([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]*[a-z0-9])?")


def allowed_hosts(network: str) -> tuple[str, ...] | None:
    """Hosts that `SandboxSpec.network` lists; None for "none".

    Raises:
      LimitUnsupported: for anything else.
    """
    if network == "none":
        return None
    names = tuple(name.strip().lower() for name in network.removeprefix(PREFIX).split(","))
    if not network.startswith(PREFIX) or not all(_NAME.fullmatch(name) for name in names):
        raise LimitUnsupported(
            f"network {network!r} is unknown", "write none, or allowlist:example.org,*.example.net"
        )
    return names


def proxy_env() -> dict[str, str]:
    """Variables by which programs find the proxy."""
    proxy = f"http://127.0.0.1:{PORT}"
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    return {**dict.fromkeys(names, proxy), "no_proxy": "", "NO_PROXY": ""}


def listen_in(pid: int) -> socket.socket:
    """A socket that listens on the loopback of the network namespace of process `pid`. Blocks.

    Raises:
      LimitUnsupported: this process may not enter it.
    """
    made: list[socket.socket | OSError] = []

    def enter() -> None:
        # A namespace is a thread's: this thread ends in it.
        try:
            fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(fd, CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
                made.append(socket.create_server(("127.0.0.1", PORT), backlog=MAX_CONNECTIONS))
            finally:
                os.close(fd)
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(found := made[0], OSError):
        raise LimitUnsupported(
            f"no allowlist here: the sandbox's network can't be entered ({found.strerror})",
            "run as root, with an engine on this machine",
        ) from found
    return found


def is_in_container(pid: int, container: str) -> bool:
    """Whether process `pid` of this machine is of a container: an engine may be on another one."""
    with contextlib.suppress(OSError):
        return pid > 0 and container in Path(f"/proc/{pid}/cgroup").read_text()
    return False


def is_public(address: str) -> bool:
    """Whether an address is of the public Internet."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_global and not parsed.is_multicast


class Egress:
    """A proxy for one sandbox.

    Args:
      hosts: names that it lets through; "*.name" is every name below `name`.
      permitted: which addresses it connects to.
      ports: which ports.
    """

    def __init__(
        self,
        hosts: tuple[str, ...],
        *,
        permitted: Callable[[str], bool] = is_public,
        ports: tuple[int, ...] = PORTS,
    ) -> None:
        self._hosts = hosts
        self._ports = ports
        self._permitted = permitted
        self._server: asyncio.Server | None = None
        self._gate = asyncio.Semaphore(MAX_CONNECTIONS)
        self._tasks: set[asyncio.Task[None]] = set()
        self.refused: list[str] = []

    async def serve(self, listener: socket.socket) -> None:
        """Begin to answer on a socket."""
        self._server = await asyncio.start_server(
            self._on_connection, sock=listener, limit=MAX_HEAD_BYTES
        )

    async def close(self) -> None:
        """End every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def allows(self, host: str) -> bool:
        """Whether a name is on the list."""
        host = host.lower().rstrip(".")
        return any(
            host == name or (name.startswith("*.") and host.endswith(name[1:]))
            for name in self._hosts
        )

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with self._gate:
                await self._serve(reader, writer)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            pass
        except asyncio.LimitOverrunError:
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HEAD_TIMEOUT_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *fields = head[:-4].split("\r\n")
        method, _, rest = line.partition(" ")
        target = rest.rpartition(" ")[0]
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = parts.hostname or "", parts.port or 80
        if not self.allows(host) or port not in self._ports or parts.scheme not in ("", "http"):
            return await self._refuse(writer, f"{host}:{port} is not on the list")
        try:
            peer_reader, peer_writer = await self._connect(host, port)
        except SandboxUnavailable as error:
            return await self._refuse(writer, str(error))
        try:
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                # The name that was allowed is the name that is asked for, once a connection.
                kept = [
                    field
                    for field in fields
                    if not field.lower().startswith(("host:", "connection:", "proxy-"))
                ]
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                request = [f"{method} {path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
                text = "\r\n".join([*request, *kept, "Connection: close", "", ""])
                peer_writer.write(text.encode("latin-1"))
            await asyncio.gather(_copy(reader, peer_writer), _copy(peer_reader, writer))
        finally:
            peer_writer.transport.abort()

    async def _connect(
        self, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise SandboxUnavailable(f"{host} is not known ({error})") from error
        addresses = [str(entry[4][0]) for entry in found]
        # All of them: a name that also stands for a machine of ours is no name of the Internet.
        if not addresses or not all(self._permitted(address) for address in addresses):
            raise SandboxUnavailable(f"{host} is no host of the public Internet")
        try:
            # To the address that was judged: asked again, the name might give another.
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await asyncio.open_connection(addresses[0], port)
        except OSError as error:
            raise SandboxUnavailable(f"{host} does not answer ({error})") from error

    async def _refuse(self, writer: asyncio.StreamWriter, reason: str) -> None:
        self.refused = [*self.refused[-99:], reason]
        body = f"refused by the sandbox: {reason}\n".encode()
        head = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            data = await reader.read(65_536)
        if not data:
            break
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
