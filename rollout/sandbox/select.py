"""Which sandboxes work here, and the choice among them. Nothing ever runs unsandboxed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from rollout.errors import SandboxError, SandboxUnavailable, UserError
from rollout.protocols import Sandbox, SandboxBackend, SandboxSpec
from rollout.records import FileTree
from rollout.sandbox import cgroups
from rollout.sandbox.bubblewrap import BubblewrapBackend
from rollout.sandbox.docker import DEFAULT_IMAGE, DockerBackend
from rollout.sandbox.slots import Slots

BACKENDS = ("auto", "bubblewrap", "docker")
HOSTS_VARIABLE = "TRSI_DOCKER_HOSTS"
"""Engines to spread sandboxes over, separated by commas; without it DOCKER_HOST, or the usual."""
IMAGE_VARIABLE = "TRSI_DOCKER_IMAGE"
"""What tasks without an image of their own run on in Docker."""


@dataclass(frozen=True, slots=True)
class BackendProbe:
    """What one backend can do on this machine.

    Attributes:
      works: a sandbox was started, ran a command and was closed.
      enforced: the limits that hold.
      reason: why it does not work; empty if it does.
      hint: the command that mends it, or the one that adds the limits missing.
      seconds: from nothing to the end of the first command.
    """

    name: str
    works: bool
    enforced: frozenset[str] = frozenset()
    reason: str = ""
    hint: str = ""
    seconds: float = 0.0


class AutoBackend:
    """Docker for a task that needs an image, bubblewrap for every other."""

    def __init__(self) -> None:
        slots = Slots()
        self._embedded = BubblewrapBackend(slots=slots)
        self._docker = _docker(slots)

    @property
    def name(self) -> str:
        """Short name."""
        return "auto"

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A fresh sandbox of the kind that the task needs.

        Raises:
          SandboxUnavailable: with the reason and the hint that mends it.
        """
        return await (self._embedded if spec.image is None else self._docker).start(spec)

    async def build(
        self,
        context: FileTree,
        *,
        dockerfile: str = "Dockerfile",
        network: str = "none",
        timeout_s: float = 600.0,
    ) -> str:
        """As `DockerBackend.build`."""
        return await self._docker.build(
            context, dockerfile=dockerfile, network=network, timeout_s=timeout_s
        )

    async def workdir_of(self, image: str) -> str:
        """As `DockerBackend.workdir_of`."""
        return await self._docker.workdir_of(image)

    async def aclose(self) -> None:
        """Close every sandbox of either kind."""
        await self._embedded.aclose()
        await self._docker.aclose()


def _docker(slots: Slots | None = None) -> DockerBackend:
    named = os.environ.get(HOSTS_VARIABLE, "").split(",")
    hosts = [host.strip() for host in named if host.strip()]
    image = os.environ.get(IMAGE_VARIABLE) or DEFAULT_IMAGE
    return DockerBackend(hosts, image=image, slots=slots)


def make_backend(name: str = "auto") -> SandboxBackend:
    """The backend called `name`; "auto" takes Docker where a task needs an image, else bubblewrap.

    Raises:
      UserError: for an unknown name.
    """
    if name == "auto":
        return AutoBackend()
    if name == "bubblewrap":
        return BubblewrapBackend()
    if name == "docker":
        return _docker()
    raise UserError(f"sandbox backend {name!r} is unknown; allowed: {', '.join(BACKENDS)}")


async def probe() -> tuple[BackendProbe, ...]:
    """Try every backend with a real sandbox and a command; one entry a backend."""
    return (await _probe(BubblewrapBackend()), await _probe(_docker()))


async def _probe(backend: SandboxBackend) -> BackendProbe:
    begun = time.monotonic()
    try:
        sandbox = await backend.start(SandboxSpec(lifetime_s=30.0))
        result = await sandbox.exec("echo ready")
        seconds = time.monotonic() - begun
        if result.output != b"ready\n":
            return BackendProbe(
                backend.name, False, reason=f"a command printed {result.output[:80]!r}"
            )
        missing = ", ".join(sorted({"memory", "pids", "cpu"} - sandbox.enforced))
        hint = ""
        if missing and backend.name == "bubblewrap":
            hint = f"for limits of {missing}: {cgroups.mend()}"
        return BackendProbe(backend.name, True, sandbox.enforced, hint=hint, seconds=seconds)
    except SandboxUnavailable as error:
        return BackendProbe(backend.name, False, reason=error.reason, hint=error.hint)
    except SandboxError as error:
        return BackendProbe(backend.name, False, reason=str(error))
    finally:
        await backend.aclose()
