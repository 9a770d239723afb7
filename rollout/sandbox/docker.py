"""Sandboxes in containers of a Docker engine, or of Podman's socket.

Profile "strict" is for generated tasks: an unprivileged user without capabilities on a read-only
image, with file systems of a fixed size for the working directory and /tmp. Profile "compat" is for
images made elsewhere, which want their own user (root, mostly) and a system that can be written to:
a reduced set of capabilities, and no bound on the disk. In both no program gains privileges, and
there is no network.

The host talks to process 1 over the container's standard streams (`container_driver`), so a command
costs two round trips and no new process of the engine. When the host is gone the input ends, with
it process 1, and the engine removes the container. The kernel is shared with the engine's host:
this is no virtual machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, NotFound
from docker.types import Ulimit

from rollout.errors import (
    LimitUnsupported,
    SandboxDead,
    SandboxError,
    SandboxPoisoned,
    SandboxUnavailable,
    StartTimeout,
    TransferError,
)
from rollout.protocols import SandboxSpec
from rollout.records import FileTree
from rollout.sandbox import archive, container_driver, egress, owner
from rollout.sandbox.engine import Engine, Stream, default_host
from rollout.sandbox.files import MAX_ENTRIES, parts_of
from rollout.sandbox.images import KIND_LABEL, UID, Images, Prepared
from rollout.sandbox.output import Output
from rollout.sandbox.session import Session
from rollout.sandbox.slots import Slots
from rollout.sandbox.spec import check_directories, check_required

START_TIMEOUT_S = 30.0
STOP_GRACE_S = 0.4
REPLY_TIMEOUT_S = 5.0
TRANSFER_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 60.0
DOWN_S = 30.0
"""How long an engine that did not answer is passed over while another one serves."""

DEFAULT_IMAGE = "python:3.12-slim-bookworm"
SPARE_PIDS = 8
"""Processes of the driver and of a transfer, beside the ones that the spec allows."""
PODMAN_PROCESSES = 16_384
OUT, REPORT = 1, 2
OWNER_LABEL, BOOT_LABEL = "trsi.owner", "trsi.boot"
_COMPAT_DROPPED = ["NET_RAW", "MKNOD", "AUDIT_WRITE", "SETFCAP"]


def _boot_id() -> str:
    """Tells this machine since its last start from every other that uses the same engine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class DockerSandbox(Session):
    """One container; made by `DockerBackend.start` only."""

    def __init__(
        self, backend: DockerBackend, place: _Place, spec: SandboxSpec, enforced: frozenset[str]
    ) -> None:
        super().__init__(spec, enforced)
        self._backend = backend
        self._place = place
        self._engine = place.engine
        self._strict = spec.profile == "strict"
        self._transfer = asyncio.Lock()
        self._secret = secrets.token_hex(16)
        self._id: str | None = None
        self._stream: Stream | None = None
        self._reports = b""
        self._early = bytearray()
        self._unclaimed: list[tuple[str, str, int]] = []
        self._final = False
        self._hosts = egress.allowed_hosts(spec.network)
        self._egress: egress.Egress | None = None

    @property
    def container_id(self) -> str | None:
        """The engine's id of the container."""
        return self._id

    @property
    def pid(self) -> int:
        """Id of process 1 on the engine's host, as the engine tells it; blocks."""
        client = self._engine.client
        return int(self._engine.run(client.inspect_container, self._id)["State"]["Pid"])

    # --- starting -----------------------------------------------------------------------------

    async def _start(self) -> None:
        prepared = await self._place.images.prepare(
            self._spec.image or self._backend.image, self._spec.workdir, fill=self._strict
        )
        options = self._options(prepared)
        create = asyncio.ensure_future(
            self._engine.call(self._engine.client.create_container_from_config, options)
        )
        try:
            created = await asyncio.shield(create)
        except asyncio.CancelledError:
            # The engine makes it all the same: it has to be known to be removed.
            with contextlib.suppress(SandboxError):
                self._id = (await create)["Id"]
            raise
        self._id = created["Id"]
        # Attached before it runs: nothing that it says is lost, and its input ends with us.
        self._stream = await self._engine.stream(
            f"/containers/{self._id}/attach?stream=1&stdin=1&stdout=1&stderr=1"
        )
        await self._engine.call(self._engine.client.start, self._id)
        await self._send(self._secret)
        await self._ping(START_TIMEOUT_S)
        if self._hosts is not None:
            await self._open_egress(self._hosts)
        self._ooms = await self._oom_kills()

    async def _open_egress(self, hosts: tuple[str, ...]) -> None:
        """Let the sandbox reach some hosts, through this process alone."""
        assert self._id is not None
        told = await self._engine.call(self._engine.client.inspect_container, self._id)
        pid = int(told["State"]["Pid"])
        if not egress.is_in_container(pid, self._id):
            raise LimitUnsupported(
                "no allowlist with an engine on another machine", "use an engine on this one"
            )
        listener = await asyncio.to_thread(egress.listen_in, pid)
        self._egress = egress.Egress(hosts)
        await self._egress.serve(listener)

    def _options(self, prepared: Prepared) -> Any:
        spec, client = self._spec, self._engine.client
        owned = f"uid={UID},gid={UID},mode=755" if self._strict else "mode=777"
        if self._engine.podman:
            # It knows no owner of a file system in memory, and by itself fills it from the image.
            owned = "mode=777,notmpcopyup"
        size = f"size={spec.disk_mb}m"
        mounts = dict.fromkeys(spec.directories, f"{size},{owned},exec,nosuid,nodev")
        if self._strict:
            mounts[spec.workdir] = f"{size},{owned},exec,nosuid,nodev"
            mounts["/tmp"] = mounts[spec.workdir]
            if self._engine.podman:
                # It would make them writable, and without a size.
                mounts |= dict.fromkeys(("/run", "/var/tmp"), "ro,size=4k,mode=555,notmpcopyup")
        pids = spec.pids + SPARE_PIDS
        # Podman asks for more than it may give where it may not raise limits: there they are named.
        # That of processes counts those of all sandboxes on the machine; each has its own in
        # `pids_limit`.
        named = (("nofile", 1024), ("nproc", PODMAN_PROCESSES))
        limits = [Ulimit(name=n, soft=most, hard=most) for n, most in named]
        host = client.create_host_config(
            network_mode="none",
            auto_remove=True,
            read_only=self._strict,
            tmpfs=mounts,
            cap_drop=["ALL"] if self._strict else _COMPAT_DROPPED,
            security_opt=["no-new-privileges"],
            mem_limit=spec.memory_mb << 20,
            memswap_limit=spec.memory_mb << 20,
            pids_limit=pids,
            nano_cpus=round(spec.cpus * 1e9),
            shm_size=spec.disk_mb << 20,
            log_config={"type": "none"},
            ulimits=limits if self._engine.podman else None,
        )
        env = {"LANG": "C.UTF-8", **prepared.env, "TERM": "dumb"}
        if self._hosts is not None:
            env |= egress.proxy_env()
        if self._strict:
            env |= {"HOME": "/tmp", "USER": "agent"}
        return client.create_container_config(
            image=prepared.id,
            command=[],
            entrypoint=container_driver.driver_command(
                lifetime_s=spec.lifetime_s,
                file_mb=spec.disk_mb if self._strict else 0,
                fill=self._strict and prepared.filled,
            ),
            hostname="sandbox",
            user=f"{UID}:{UID}" if self._strict else None,
            stdin_open=True,
            detach=False,
            environment={**env, **spec.env},
            working_dir=spec.workdir,
            labels={**self._backend.labels, KIND_LABEL: "sandbox"},
            healthcheck={"test": ["NONE"]},
            # Process 1 hears no signal but this one; an engine that stops need not wait for it.
            stop_signal="SIGKILL",
            host_config=host,
        )

    # --- the channel --------------------------------------------------------------------------

    async def _send(self, *texts: str) -> None:
        assert self._stream is not None
        data = b"".join(text.replace("\0", "").encode("utf-8", "replace") + b"\0" for text in texts)
        try:
            await self._stream.send(data)
        except SandboxDead as error:
            raise self._dead() from error

    async def _report(self, deadline: float, output: Output | None = None) -> tuple[str, str, int]:
        """The next report; output that arrives before it goes to `output`.

        Raises:
          TimeoutError: none came in time.
          SandboxDead: the sandbox has ended.
        """
        while True:
            line, found, rest = self._reports.partition(b"\n")
            if found:
                self._reports = rest
                words = line.decode("ascii", "replace").split(" ", 2)
                if words[0] == "!":
                    raise SandboxUnavailable(" ".join(words[1:]))
                if len(words) == 3 and words[2].isdecimal() and len(words[2]) < 11:
                    return words[0], words[1], int(words[2])
                continue
            for channel, data in await self._read(deadline):
                if channel == REPORT:
                    # A report is short; what goes on without an end is noise.
                    self._reports = (self._reports + data)[-65_536:]
                elif output is not None:
                    output.add(data)
                else:
                    self._keep(data)

    def _keep(self, data: bytes) -> None:
        """Output that nobody waits for now belongs to the next command; a pipe's fill at most."""
        self._early += data
        del self._early[65_536:]

    async def _read(self, deadline: float) -> list[tuple[int, bytes]]:
        assert self._stream is not None
        found = await self._stream.read(max(0.0, deadline - time.monotonic()))
        if not found:
            raise self._dead()
        return found

    async def _ask(
        self, verb: str, output: Output | None = None, timeout_s: float = REPLY_TIMEOUT_S
    ) -> int:
        """Send an order to process 1 and wait for its number.

        Raises:
          TimeoutError: no answer.
        """
        tag = secrets.token_hex(8)
        await self._send(verb, tag)
        deadline = time.monotonic() + timeout_s
        while True:
            report = await self._report(deadline, output)
            if report[:2] == (verb, tag):
                return report[2]
            # The shell's own word may come first.
            self._unclaimed = [*self._unclaimed[-63:], report]

    async def _ping(self, timeout_s: float) -> None:
        """Wait until the shell runs a command."""
        tag = secrets.token_hex(8)
        await self._send("r", tag, ":")
        deadline = time.monotonic() + timeout_s
        while await self._report(deadline) != ("s", tag, 0):
            pass

    async def _flush(self, output: Output, deadline: float) -> None:
        """Take all output that was printed until now: a mark is printed behind it."""
        mark = f"\1{secrets.token_hex(16)}\1"
        await self._send("f", mark)
        wanted, held = mark.encode(), bytearray()
        while True:
            at = held.find(wanted)
            if at >= 0:
                output.add(bytes(held[:at]))
                self._keep(bytes(held[at + len(wanted) :]))
                return
            sure = max(0, len(held) - len(wanted))
            output.add(bytes(held[:sure]))
            del held[:sure]
            for channel, data in await self._read(deadline):
                if channel == OUT:
                    held += data
                else:
                    self._reports = (self._reports + data)[-65_536:]

    # --- commands -----------------------------------------------------------------------------

    async def _run(self, command: str, timeout_s: float, output: Output) -> tuple[str, int]:
        output.add(bytes(self._early))
        self._early.clear()
        ended = await self._settle(command, timeout_s, output)
        await self._flush(output, time.monotonic() + REPLY_TIMEOUT_S)
        return ended

    async def _oom_kills(self) -> int:
        return await self._ask("o") if "memory" in self._enforced else 0

    async def _settle(self, command: str, timeout_s: float, output: Output) -> tuple[str, int]:
        tag = secrets.token_hex(8)
        self._unclaimed.clear()
        await self._send("r", tag, command)
        try:
            return await self._end_of(tag, time.monotonic() + timeout_s, output)
        except TimeoutError:
            pass
        left = await self._ask("k", output)
        with contextlib.suppress(TimeoutError):
            status, _ = await self._end_of(tag, time.monotonic() + STOP_GRACE_S, output)
            if status == "ok" and not left:
                return "timeout", 0
        # The shell doesn't come back, or programs fork faster than they are found. Every process
        # but the first is killed in one system call, which no fork outruns.
        if await self._ask("a", output):
            self._poisoned = "processes of a command survived its time-out"
        await self._ping(REPLY_TIMEOUT_S)
        return "timeout", 0

    async def _end_of(self, tag: str, deadline: float, output: Output) -> tuple[str, int]:
        while True:
            if self._unclaimed:
                kind, of, code = self._unclaimed.pop(0)
            else:
                kind, of, code = await self._report(deadline, output)
            if kind == "s" and of == tag:
                return "ok", code
            if kind == "x" and of == self._secret:
                return "shell-exit", code

    def _started(self) -> bool:
        return self._stream is not None

    # --- files --------------------------------------------------------------------------------

    def _folder(self, below: str | None) -> str:
        known = (self._spec.workdir, *self._spec.directories)
        path = below or self._spec.workdir
        if path not in known:
            raise TransferError(f"{path!r} is none of the sandbox's {', '.join(known)}")
        return path

    async def _script(self, argv: list[str], data: bytes, max_bytes: int) -> bytes:
        """Run a program of ours beside the shell; what it prints, at most `max_bytes`.

        Raises:
          TransferError: it failed or printed more.
          SandboxDead: the container is gone.
        """
        client = self._engine.client
        async with self._transfer:
            made = await self._engine.call(client.exec_create, self._id, argv, stdin=True)
            stream = await self._engine.stream(
                f"/exec/{made['Id']}/start", {"Detach": False, "Tty": False}
            )
            out, said = bytearray(), bytearray()
            deadline = time.monotonic() + TRANSFER_TIMEOUT_S
            feed = asyncio.ensure_future(self._feed(stream, data))
            try:
                while pieces := await stream.read(deadline - time.monotonic()):
                    for channel, piece in pieces:
                        (out if channel == OUT else said).extend(piece)
                    if len(out) > max_bytes:
                        raise TransferError(f"there are more than {max_bytes} bytes")
                    del said[4096:]
            except TimeoutError as error:
                raise TransferError(f"no end in {TRANSFER_TIMEOUT_S:g} s") from error
            finally:
                feed.cancel()
                with contextlib.suppress(asyncio.CancelledError, SandboxDead):
                    await feed
                stream.close()
            ended = await self._engine.call(client.exec_inspect, made["Id"])
            if ended["ExitCode"] != 0:
                text = said.decode("utf-8", "replace").strip().splitlines()
                raise TransferError(text[-1] if text else f"exit code {ended['ExitCode']}")
            return bytes(out)

    @staticmethod
    async def _feed(stream: Stream, data: bytes) -> None:
        await stream.send(data)
        stream.end_input()

    async def put_files(
        self,
        files: Mapping[str, bytes],
        *,
        directories: Iterable[str] = (),
        modes: Mapping[str, int] | None = None,
        links: Mapping[str, str] | None = None,
        below: str | None = None,
    ) -> None:
        """As `rollout.protocols.Sandbox.put_files`."""
        self._check_usable()
        folder = self._folder(below)
        directories = list(directories)
        data = archive.pack(files, directories, modes or {}, links or {})
        if not files and not directories and not links:
            return
        try:
            done = await self._script(
                container_driver.script(container_driver.PUT, folder), data, 65_536
            )
        except TransferError as error:
            raise TransferError(f"cannot write below {folder}: {error}") from error
        if done != b"done":
            raise TransferError(f"cannot write below {folder}")

    async def get_file(
        self, path: str, *, max_bytes: int = 1_000_000, below: str | None = None
    ) -> bytes:
        """As `rollout.protocols.Sandbox.get_file`."""
        self._check_open()
        folder = self._folder(below)
        name = "/".join(parts_of(path))
        argv = container_driver.script(container_driver.GET, folder, name, str(max_bytes + 1))
        try:
            return await self._script(argv, b"", max_bytes)
        except TransferError as error:
            raise TransferError(f"cannot read {path!r}: {error}") from error

    async def snapshot(self, *, max_bytes: int = 16_000_000, below: str | None = None) -> FileTree:
        """As `rollout.protocols.Sandbox.snapshot`."""
        self._check_open()
        folder = self._folder(below)
        async with self._lock:
            if not self._final:
                try:
                    left = await self._ask("e")
                except TimeoutError as error:
                    raise SandboxPoisoned("its first process does not answer") from error
                if left:
                    raise SandboxPoisoned("a process survived SIGKILL")
                self._final = True
                self._gone = "the sandbox's processes were ended"
        try:
            data = await self._script(
                container_driver.script(container_driver.SNAPSHOT, folder),
                b"",
                max_bytes + MAX_ENTRIES * archive.MEMBER_BYTES,
            )
        except TransferError as error:
            raise TransferError(f"cannot read {folder}: {error}") from error
        return archive.unpack(data, max_bytes)

    # --- ending -------------------------------------------------------------------------------

    async def _close(self) -> None:
        await self._remove()
        self._closed = True
        self._backend.release(self, self._place)

    async def _remove(self) -> None:
        if self._egress is not None:
            await self._egress.close()
        if self._stream is not None:
            self._stream.close()
        if self._id is not None:
            await self._engine.call(_remove, self._engine.client, self._id)


def _remove(client: docker.APIClient, container: str) -> None:
    """Remove a container and wait until the engine knows of none. Blocks."""
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    while time.monotonic() < deadline:
        remove = partial(client.remove_container, force=True, v=True)
        for ask in (remove, client.inspect_container):
            try:
                ask(container)
            except NotFound:
                return
            except APIError as error:
                # Podman, of one that goes in this very moment.
                if "no such container" in str(error.explanation):
                    return
                # It is being removed already, by the engine itself.
                if error.status_code not in (409, 500):
                    raise
        time.sleep(0.01)
    raise SandboxError(f"container {container[:12]} could not be removed")


class _Place:
    """One engine, its images, and how many sandboxes are there."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.images = Images(engine)
        self.live = 0
        self.down_until = 0.0
        self.opening = asyncio.Lock()
        self.opened = False


class DockerBackend:
    """Makes sandboxes in containers.

    Args:
      hosts: engines to spread the sandboxes over, as in DOCKER_HOST; by default that one.
      image: what a task without an image of its own runs on.
      slots: how many may live and start.
    """

    def __init__(
        self,
        hosts: Iterable[str] = (),
        *,
        image: str = DEFAULT_IMAGE,
        slots: Slots | None = None,
    ) -> None:
        self.image = image
        self._slots = slots or Slots()
        self._hosts = tuple(hosts) or (default_host(),)
        self._places = [_Place(Engine(host)) for host in self._hosts]
        self._sandboxes: set[DockerSandbox] = set()
        self._mark = owner.new_mark()
        self.labels = {OWNER_LABEL: self._mark, BOOT_LABEL: _boot_id()}

    @property
    def name(self) -> str:
        """Short name."""
        return "docker"

    async def _open(self, place: _Place) -> None:
        """Reach an engine, once, and remove what dead owners left there."""
        async with place.opening:
            if not place.opened:
                await asyncio.to_thread(place.engine.connect)
                await place.engine.call(reap, place.engine)
                place.opened = True

    def _choose(self) -> list[_Place]:
        """Engines in the order to try: those that answer first, then the least busy."""
        now = time.monotonic()
        return sorted(self._places, key=lambda place: (place.down_until > now, place.live))

    def enforced(self, place: _Place, spec: SandboxSpec) -> frozenset[str]:
        """Limits that hold on an engine."""
        info = place.engine.info
        limits = {"network", "lifetime"}
        for limit, key in (
            ("memory", "MemoryLimit"),
            ("pids", "PidsLimit"),
            ("cpu", "CpuCfsQuota"),
        ):
            if info.get(key):
                limits.add(limit)
        if spec.profile == "strict":
            limits.add("disk")
        filtered = any("name=seccomp" in option for option in info.get("SecurityOptions") or ())
        # That of Podman lets programs make user namespaces of their own.
        if filtered and not place.engine.podman:
            limits.add("syscalls")
        return frozenset(limits)

    # --- the protocol -------------------------------------------------------------------------

    async def start(self, spec: SandboxSpec) -> DockerSandbox:
        """A fresh sandbox, ready for commands, on the least busy engine.

        Raises:
          ImageNotFound: the image is not there; nothing is pulled.
          LimitUnsupported: a limit in `spec.require` does not hold there.
          SandboxUnavailable: with the reason and the hint that mends it.
        """
        _check_spec(spec)
        await self._slots.live.acquire()
        try:
            return await self._start_somewhere(spec)
        except BaseException:
            self._slots.live.release()
            raise

    async def _start_somewhere(self, spec: SandboxSpec) -> DockerSandbox:
        failure: SandboxUnavailable | None = None
        for place in self._choose():
            place.live += 1
            try:
                await self._open(place)
                return await self._start_at(place, spec)
            except SandboxUnavailable as error:
                place.live -= 1
                if isinstance(error, LimitUnsupported) or place.opened:
                    raise
                place.down_until = time.monotonic() + DOWN_S
                failure = error
            except BaseException:
                place.live -= 1
                raise
        assert failure is not None
        raise failure

    async def _start_at(self, place: _Place, spec: SandboxSpec) -> DockerSandbox:
        enforced = self.enforced(place, spec)
        check_required(
            "docker", spec, enforced, "use an engine whose kernel has these control groups"
        )
        sandbox = DockerSandbox(self, place, spec, enforced)
        try:
            async with self._slots.starting:
                await sandbox._start()
        except BaseException as error:
            # What counts it is taken back by the callers.
            with contextlib.suppress(SandboxError):
                await asyncio.shield(sandbox._remove())
            if isinstance(error, TimeoutError):
                raise StartTimeout(f"no sandbox after {START_TIMEOUT_S:g} s") from error
            if isinstance(error, SandboxError) and not isinstance(error, SandboxUnavailable):
                raise SandboxUnavailable(f"no container started: {error}") from error
            raise
        self._sandboxes.add(sandbox)
        return sandbox

    def release(self, sandbox: DockerSandbox, place: _Place) -> None:
        """Take back what a sandbox that is gone counted for."""
        self._sandboxes.discard(sandbox)
        place.live -= 1
        self._slots.live.release()

    async def build(
        self,
        context: FileTree,
        *,
        dockerfile: str = "Dockerfile",
        network: str = "none",
        timeout_s: float = 600.0,
    ) -> str:
        """Build a Dockerfile on every engine, once for a content; the image's name.

        Args:
          context: the build context.
          dockerfile: its path in the context.
          network: of the build's commands: "none", or "default" to let them fetch.
          timeout_s: seconds that a command of the build may be silent.

        Raises:
          ImageNotFound: a base image is not there; nothing is pulled.
          SandboxUnavailable: no engine, or the build failed.
        """
        await self._open_all()
        names = await asyncio.gather(
            *(
                place.images.build(
                    context, dockerfile=dockerfile, network=network, timeout_s=timeout_s
                )
                for place in self._places
            )
        )
        return names[0]

    async def workdir_of(self, image: str) -> str:
        """The working directory that an image names; empty if it names none.

        Raises:
          ImageNotFound: it is not there; nothing is pulled.
          SandboxUnavailable: no engine.
        """
        await self._open_all()
        return await self._places[0].images.workdir_of(image)

    async def _open_all(self) -> None:
        for place in self._places:
            await self._open(place)

    async def pull(self, name: str) -> None:
        """Fetch an image to every engine: never done unasked."""
        await self._open_all()
        await asyncio.gather(*(place.images.pull(name) for place in self._places))

    async def aclose(self) -> None:
        """Close every sandbox of this backend that still lives, and the connections."""
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._sandboxes)))
        for place in self._places:
            if place.opened:
                await place.engine.call(reap, place.engine)
            place.engine.close()
            place.opened = False


def _check_spec(spec: SandboxSpec) -> None:
    if spec.profile not in ("strict", "compat"):
        raise LimitUnsupported(f"profile {spec.profile!r} is unknown; allowed: strict, compat")
    egress.allowed_hosts(spec.network)
    check_directories(spec)


def reap(engine: Engine) -> int:
    """Remove the containers of this machine's owners that are gone; how many. Blocks."""
    boot = _boot_id()
    client = engine.client
    removed = 0
    for found in client.containers(all=True, filters={"label": f"{BOOT_LABEL}={boot}"}):
        if owner.is_orphaned(found["Labels"].get(OWNER_LABEL, "")):
            # Others may be removing it too; what is slow to go keeps no new owner from starting.
            with contextlib.suppress(SandboxError):
                _remove(client, found["Id"])
                removed += 1
    return removed
