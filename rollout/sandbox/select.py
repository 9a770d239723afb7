"""Which sandboxes work here, and the choice among them. Nothing ever runs unsandboxed."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.errors import SandboxUnavailable, UserError
from rollout.protocols import SandboxBackend, SandboxSpec
from rollout.sandbox.bubblewrap import BubblewrapBackend

BACKENDS = ("auto", "bubblewrap")


@dataclass(frozen=True, slots=True)
class BackendProbe:
    """What one backend can do on this machine.

    Attributes:
      works: a sandbox was started, ran a command and was closed.
      enforced: the limits that hold.
      reason: why it does not work; empty if it does.
      hint: the command that mends it, or the one that adds the limits missing.
    """

    name: str
    works: bool
    enforced: frozenset[str] = frozenset()
    reason: str = ""
    hint: str = ""


def make_backend(name: str = "auto") -> SandboxBackend:
    """The backend called `name`; "auto" is bubblewrap.

    Raises:
      UserError: for an unknown name.
    """
    if name not in BACKENDS:
        raise UserError(f"sandbox backend {name!r} is unknown; allowed: {', '.join(BACKENDS)}")
    return BubblewrapBackend()


async def probe() -> tuple[BackendProbe, ...]:
    """Try every backend with a real sandbox and a command; one entry a backend."""
    return (await _probe(BubblewrapBackend()),)


async def _probe(backend: SandboxBackend) -> BackendProbe:
    try:
        sandbox = await backend.start(SandboxSpec(lifetime_s=30.0))
        result = await sandbox.exec("echo ready")
        if result.output != b"ready\n":
            return BackendProbe(
                backend.name, False, reason=f"a command printed {result.output[:80]!r}"
            )
        missing = sorted({"memory", "pids", "cpu"} - sandbox.enforced)
        hint = f"for {', '.join(missing)}: systemd-run --user --scope trsi ..." if missing else ""
        return BackendProbe(backend.name, True, sandbox.enforced, hint=hint)
    except SandboxUnavailable as error:
        return BackendProbe(backend.name, False, reason=error.reason, hint=error.hint)
    finally:
        await backend.aclose()
