"""Images: found by name or digest, built from a task's Dockerfile, prepared for the driver.

Nothing is pulled unless `pull` is called. A prepared image is the task's image with one more layer:
the copy of its own bash that process 1 runs, a name for the sandbox's user, and, where a file
system with a size is to cover the working directory, what the image has there. It is made once an
image and engine, and found again by its name.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
import tarfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from docker.errors import ImageNotFound as NoSuchImage
from docker.errors import NotFound

from rollout.errors import ImageNotFound, SandboxUnavailable
from rollout.records import FileTree
from rollout.sandbox import container_driver
from rollout.sandbox.engine import Engine

PREPARED = "trsi-prepared"
BUILT = "trsi-task"
KIND_LABEL = "trsi.kind"
UID = 65_500
USER = "agent"
MAX_WORKDIR_BYTES = 256 << 20
_BASH_PLACES = ("bin/bash", "usr/bin/bash", "usr/local/bin/bash")
_MAX_PROGRAM_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """An image that sandboxes can start from.

    Attributes:
      id: of the prepared image.
      filled: it has the working directory's content in `container_driver.WORKDIR_TAR`.
      env: variables that the image sets.
    """

    id: str
    filled: bool
    env: Mapping[str, str]


class Images:
    """The images of one engine.

    Args:
      engine: where they are.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._prepared: dict[tuple[str, str, bool], Prepared] = {}

    async def pull(self, name: str) -> None:
        """Fetch an image from its registry: the only thing here that does."""
        name, _, tag = name.partition(":") if "@" not in name else (name, "", "")
        await self._engine.call(self._engine.client.pull, name, tag or None)

    async def build(
        self, context: FileTree, *, dockerfile: str, network: str, timeout_s: float
    ) -> str:
        """As `DockerBackend.build`; the name is the same on every engine."""
        digest = hashlib.sha256(f"{dockerfile}\0{network}\0".encode())
        for path, entry in sorted(context.items()):
            digest.update(f"{path}\0{entry.kind}\0{entry.mode}\0{len(entry.data)}\0".encode())
            digest.update(entry.data)
        name = f"{BUILT}:{digest.hexdigest()[:24]}"
        async with self._locks[name]:
            await asyncio.to_thread(self._build, name, context, dockerfile, network, timeout_s)
        return name

    async def workdir_of(self, name: str) -> str:
        """As `DockerBackend.workdir_of`."""
        found = await asyncio.to_thread(self._require, name)
        return str((found.get("Config") or {}).get("WorkingDir") or "")

    def _build(
        self, name: str, context: FileTree, dockerfile: str, network: str, timeout_s: float
    ) -> None:
        client, run = self._engine.client, self._engine.run
        if self._find(name) is not None:
            return
        if dockerfile not in context:
            raise SandboxUnavailable(f"the build context has no {dockerfile}")
        for base in bases_of(context[dockerfile].data.decode("utf-8", "replace")):
            self._require(base)
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for path, entry in sorted(context.items()):
                member = tarfile.TarInfo(path)
                member.mode = entry.mode
                if entry.kind == "directory":
                    member.type = tarfile.DIRTYPE
                elif entry.kind == "symlink":
                    member.type = tarfile.SYMTYPE
                    member.linkname = entry.data.decode("utf-8", "surrogateescape")
                else:
                    member.size = len(entry.data)
                tar.addfile(member, io.BytesIO(entry.data if member.isreg() else b""))
        out.seek(0)
        lines = run(
            client.build,
            fileobj=out,
            custom_context=True,
            dockerfile=dockerfile,
            tag=name,
            rm=True,
            forcerm=True,
            network_mode=network,
            timeout=timeout_s,
            labels={KIND_LABEL: "task"},
            decode=True,
        )
        said = ""
        for line in lines:
            if "error" in line:
                reason = " ".join(str(line["error"]).split())
                tail = " ".join(said.split())[-300:]
                raise SandboxUnavailable(f"{dockerfile} can't be built: {reason} {tail}".strip())
            said = (said + str(line.get("stream", "")))[-2000:]

    def _find(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._engine.client.inspect_image(name)
        except NoSuchImage:
            return None
        except NotFound:
            return None
        return found

    def _require(self, name: str) -> dict[str, Any]:
        found = self._engine.run(self._find, name)
        if found is None:
            raise ImageNotFound(
                f"image {name!r} is not in the engine, and nothing is pulled unasked",
                f"run: docker pull {name}",
            )
        return found

    async def prepare(self, name: str, workdir: str, *, fill: bool) -> Prepared:
        """The prepared form of an image, made at its first use.

        Args:
          name: of the image: name and tag, name and digest, or id.
          workdir: the working directory.
          fill: a file system is mounted there, which is to have the image's content.

        Raises:
          ImageNotFound: the image is not there.
          SandboxUnavailable: the image can run no sandbox: it has no bash.
        """
        key = (name, workdir, fill)
        async with self._locks[f"{name} {workdir} {fill}"]:
            # What a name stands for is asked once: an attempt and its replay get the same image.
            if key not in self._prepared:
                self._prepared[key] = await asyncio.to_thread(self._prepare, name, workdir, fill)
            return self._prepared[key]

    def forget(self, name: str) -> None:
        """Ask anew what `name` stands for: its prepared image was removed."""
        for key in [key for key in self._prepared if key[0] == name]:
            del self._prepared[key]

    def _prepare(self, name: str, workdir: str, fill: bool) -> Prepared:
        client, run = self._engine.client, self._engine.run
        base = self._require(name)
        config = base.get("Config") or {}
        env = dict(pair.split("=", 1) for pair in config.get("Env") or () if "=" in pair)
        what = f"{container_driver.VERSION} {base['Id']} {workdir if fill else ''}"
        tag = hashlib.sha256(what.encode()).hexdigest()[:24]
        found = run(self._find, f"{PREPARED}:{tag}")
        if found is None:
            container = run(
                client.create_container, base["Id"], ["none"], labels={KIND_LABEL: "preparation"}
            )["Id"]
            try:
                layer, filled = self._layer(container, name, workdir if fill else None)
                run(client.put_archive, container, "/", layer)
                labels = [f"LABEL {KIND_LABEL}=prepared", f"LABEL trsi.filled={int(filled)}"]
                run(client.commit, container, PREPARED, tag, changes=labels)
            finally:
                run(client.remove_container, container, force=True, v=True)
            found = self._require(f"{PREPARED}:{tag}")
        return Prepared(found["Id"], found["Config"]["Labels"]["trsi.filled"] == "1", env)

    def _layer(self, container: str, name: str, workdir: str | None) -> tuple[bytes, bool]:
        """The tar of what a prepared image has more, and whether a working directory is in it."""
        bash = self._bash(container)
        if bash is None:
            raise SandboxUnavailable(
                f"image {name!r} has no bash, in which commands are run",
                "add it to the image: RUN apt-get install bash (or: apk add bash)",
            )
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:

            def add(path: str, data: bytes, mode: int, kind: bytes = tarfile.REGTYPE) -> None:
                member = tarfile.TarInfo(path.lstrip("/"))
                member.type, member.mode, member.size = kind, mode, len(data)
                tar.addfile(member, io.BytesIO(data))

            add(container_driver.FOLDER, b"", 0o755, tarfile.DIRTYPE)
            # Executable and not readable: see `container_driver`.
            add(container_driver.BASH, bash, 0o711)
            for path, text in container_driver.FILES.items():
                add(path, text.encode(), 0o644)
            for path, line in (
                ("etc/passwd", f"{USER}:x:{UID}:{UID}:{USER}:/tmp:/bin/bash\n"),
                ("etc/group", f"{USER}:x:{UID}:\n"),
            ):
                known = self._file(container, path) or b""
                if known and not known.endswith(b"\n"):
                    known += b"\n"
                if f"{USER}:" not in known.decode("utf-8", "replace"):
                    add(path, known + line.encode(), 0o644)
            if workdir and self._engine.podman:
                # A file system in memory gets the mode of what it is mounted on, and root as owner.
                for path in (workdir, "/tmp"):
                    add(path, b"", 0o777, tarfile.DIRTYPE)
            content = self._workdir(container, workdir) if workdir else b""
            if content:
                add(container_driver.WORKDIR_TAR, content, 0o644)
        return out.getvalue(), bool(content)

    def _bash(self, container: str) -> bytes | None:
        for place in _BASH_PLACES:
            found = self._file(container, place)
            if found is not None:
                return found
        return None

    def _file(self, container: str, path: str) -> bytes | None:
        """A regular file of a container, through links; None if there is none."""
        for _ in range(8):
            try:
                chunks, _ = self._engine.client.get_archive(container, f"/{path}")
            except NotFound:
                return None
            data = self._collect(chunks, _MAX_PROGRAM_BYTES)
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                member = tar.next()
                if member is None:
                    return None
                if member.issym():
                    path = str(PurePosixPath(f"/{path}").parent / member.linkname).lstrip("/")
                    continue
                content = tar.extractfile(member)
                return None if content is None else content.read()
        return None

    def _workdir(self, container: str, workdir: str) -> bytes:
        """What an image has in the working directory; empty if nothing."""
        try:
            chunks, _ = self._engine.client.get_archive(container, workdir)
        except NotFound:
            return b""
        data = self._collect(chunks, MAX_WORKDIR_BYTES)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            return data if tar.next() is not None and tar.next() is not None else b""

    @staticmethod
    def _collect(chunks: Any, max_bytes: int) -> bytes:
        data = bytearray()
        for chunk in chunks:
            data += chunk
            if len(data) > max_bytes:
                raise SandboxUnavailable(
                    f"the image has over {max_bytes >> 20} MB where the working directory is",
                    'use profile "compat", which runs on the image itself',
                )
        return bytes(data)


_DIGITS = re.compile(r"\d+")
_ARGUMENT = re.compile(r"\$\{?(\w+)(?::-([^}]*))?\}?")


def bases_of(dockerfile: str) -> list[str]:
    """Images that a Dockerfile stands on or copies from, in order, each once."""
    arguments: dict[str, str] = {}
    stages: set[str] = set()
    bases: dict[str, None] = {}
    for line in re.sub(r"\\\r?\n", " ", dockerfile).splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        keyword = words[0].upper()
        if keyword == "ARG" and len(words) > 1:
            name, _, value = words[1].partition("=")
            arguments[name] = value.strip("\"'")
        elif keyword == "FROM":
            plain = [word for word in words[1:] if not word.startswith("--")]
            image = _ARGUMENT.sub(
                lambda found: arguments.get(found[1]) or found[2] or "", plain[0] if plain else ""
            )
            if image and image != "scratch" and image not in stages:
                bases[image] = None
            if len(plain) > 2 and plain[1].upper() == "AS":
                stages.add(plain[2])
        elif keyword in ("COPY", "ADD"):
            for word in words[1:]:
                source = word.removeprefix("--from=")
                if source != word and source not in stages and not _DIGITS.fullmatch(source):
                    bases[source] = None
    return list(bases)
