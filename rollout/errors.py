"""The failures of the acting side, one class a boundary.

A non-zero exit, a time-out of a command or a refused action is *data* and no exception.
What is raised here is a fault of the infrastructure or of the verifier: the trajectory is masked
(`records.Fault`), it never becomes reward 0.
"""


class RolloutError(Exception):
    """Base of every typed failure; `kind` is what a masked trajectory records."""

    kind = "rollout"


class UserError(RolloutError):
    """A person's mistake: one line that names what, where and what is allowed (exit code 2)."""

    kind = "user"


class SandboxError(RolloutError):
    """A fault of a sandbox."""

    kind = "sandbox"


class SandboxUnavailable(SandboxError):
    """No sandbox can be started here; `hint` is the one command or setting that mends it."""

    kind = "sandbox-unavailable"

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(f"{reason}; {hint}" if hint else reason)
        self.reason = reason
        self.hint = hint


class StartTimeout(SandboxUnavailable):
    """A sandbox did not become ready in time."""

    kind = "sandbox-start-timeout"


class ImageNotFound(SandboxUnavailable):
    """The task's image is not in the engine; nothing is pulled implicitly."""

    kind = "sandbox-image"


class LimitUnsupported(SandboxUnavailable):
    """A limit in `SandboxSpec.require` cannot be enforced by this backend on this machine."""

    kind = "sandbox-limit"


class SandboxDead(SandboxError):
    """The sandbox is gone (killed, engine restarted, lifetime over)."""

    kind = "sandbox-dead"


class SandboxPoisoned(SandboxError):
    """The sandbox is alive but can no longer be trusted to run a command cleanly."""

    kind = "sandbox-poisoned"


class TransferError(SandboxError):
    """Files could not be moved into or out of a sandbox."""

    kind = "sandbox-transfer"


class EngineError(RolloutError):
    """A fault of a generation engine."""

    kind = "engine"


class InvalidRequest(EngineError):
    """A request no engine can serve: an id outside the vocabulary, a prompt over the context."""

    kind = "engine-request"


class SnapshotRefused(EngineError):
    """Weights that no server may be given; the message names the tensor or file."""

    kind = "engine-snapshot"


class FleetUnavailable(EngineError):
    """Too few servers are left to go on: no fault of an episode, so none is masked for it."""

    kind = "fleet"


class HarnessError(RolloutError):
    """A fault of a harness."""

    kind = "harness"


class TaskError(RolloutError):
    """A task that cannot be loaded, generated or set up."""

    kind = "task"


class VerifierError(RolloutError):
    """The verifier failed; the attempt has no verdict and is masked."""

    kind = "verifier"


class VerifierTimeout(VerifierError):
    """The verifier did not end in time."""

    kind = "verifier-timeout"


class VerifierFailed(VerifierError):
    """The verifier could not do its work: no bootstrap, no tests collected, killed, no memory."""

    kind = "verifier-failed"


class RewardMissing(VerifierError):
    """The verifier ended and left no reward."""

    kind = "verifier-reward-missing"


class RewardInvalid(VerifierError):
    """The verifier left something that is no reward, or results that contradict each other."""

    kind = "verifier-reward-invalid"


class StoreError(RolloutError):
    """A fault of the trajectory store."""

    kind = "store"


class ContractViolation(StoreError):
    """A trajectory breaks the contract at the store's door; it went to quarantine."""

    kind = "store-contract"

    def __init__(self, trajectory_id: str, problem: str) -> None:
        super().__init__(f"trajectory {trajectory_id}: {problem}")
        self.trajectory_id = trajectory_id
        self.problem = problem


class UnsupportedTask(TaskError):
    """A task needs what this backend can't give; the message names each such thing."""

    kind = "task-unsupported"


class ProtectedSplit(TaskError):
    """Validation or test tasks were asked for as training data."""

    kind = "protected-split"
