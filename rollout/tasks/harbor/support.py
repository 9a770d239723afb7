"""What a task asks of its environment, and which of it can't be given here.

The embedded sandbox has no images: it sees the host's /usr. A task that needs no more than that, a
Debian userland with Python 3, says so with `metadata.trsi.userland = "host"`; its Dockerfile may
then name a base image, set WORKDIR and ENV, and COPY files, which is done here in the same way.
Any other task runs on its image, `docker_image` or what its Dockerfile builds, where a container
engine serves the sandboxes. Everything else is refused by name.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from rollout.errors import (
    LimitUnsupported,
    SandboxUnavailable,
    StartTimeout,
    UnsupportedTask,
    UserError,
)
from rollout.protocols import ImageBackend, SandboxBackend, SandboxSpec
from rollout.records import Entry
from rollout.sandbox.egress import PREFIX, allowed_hosts
from rollout.sandbox.spec import check_directories
from rollout.tasks.harbor.config import Agent, Environment, Network, NetworkMode, Verifier
from rollout.tasks.harbor.reward import UNIT_RANGE, Range
from rollout.tasks.harbor.task import HarborTask, Step

WORKDIR = "/app"
TESTS, LOGS, SOLUTION = "/tests", "/logs", "/solution"
OWN_DIRECTORIES = (TESTS, LOGS, SOLUTION)

MAX_DISK_MB = 1024
DEFAULT_MEMORY_MB = 512
DEFAULT_DISK_MB = 64
USER = "agent"

_FETCHES = re.compile(
    r"(?:^|[;&|(]|\s)(curl|wget|apt-get|apt|apk|yum|dnf|pip3?|uvx?|npm|npx|conda|git\s+clone)\s"
)
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_HARMLESS = ("FROM", "LABEL", "CMD", "MAINTAINER")


@dataclass(frozen=True, slots=True)
class Plan:
    """How a sandbox is set up for a task.

    Attributes:
      workdir: the working directory; empty until `on_image` has asked the image for its own.
      files: relative to the working directory, beside what the image has there.
      reward_range: what the task's rewards may be.
      image: the image to run on; None for the host's userland.
      dockerfile: build context of an image that is not built yet, see `on_image`.
      build_s: seconds that a command of the build may be silent.
    """

    workdir: str
    files: Mapping[str, Entry]
    env: Mapping[str, str]
    memory_mb: int
    cpus: float
    disk_mb: int
    reward_range: Range = UNIT_RANGE
    image: str | None = None
    dockerfile: Mapping[str, Entry] | None = None
    build_s: float = 600.0

    def spec(self, env: Mapping[str, str], lifetime_s: float, network: str = "none") -> SandboxSpec:
        """The sandbox of a phase with further variables, and what it may reach (`network_of`)."""
        assert self.workdir
        assert self.dockerfile is None
        return SandboxSpec(
            image=self.image,
            profile="strict" if self.image is None else "compat",
            workdir=self.workdir,
            directories=OWN_DIRECTORIES,
            env={**self.env, **env},
            memory_mb=self.memory_mb,
            cpus=self.cpus,
            disk_mb=self.disk_mb,
            network=network,
            lifetime_s=lifetime_s,
        )


@dataclass(slots=True)
class _Dockerfile:
    """What the honoured part of a Dockerfile does."""

    workdir: str = WORKDIR
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, Entry] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


def own_metadata(task: HarborTask) -> Mapping[str, object]:
    """The table `metadata.trsi`; empty where the task has none."""
    table = task.config.metadata.get("trsi", {})
    if not isinstance(table, dict):
        raise UserError(f"{task.root / 'task.toml'}: metadata.trsi must be a table")
    return table


def plan(
    task: HarborTask,
    *,
    offline: bool = False,
    images: bool = False,
    host_env: Mapping[str, str] | None = None,
) -> Plan:
    """How to run a task.

    Args:
      task: the task.
      offline: run without a network a task that doesn't say what it needs; Harbor's default is a
        public one.
      images: sandboxes can run on images; `on_image` completes the plan of a task that has one.
      host_env: variables that `${NAME}` templates of the task may take from the host.

    Raises:
      UnsupportedTask: naming everything that this backend can't honour.
      UserError: a malformed value.
    """
    environment = task.config.environment
    context = task.context()
    docker = _Dockerfile()
    on_host = own_metadata(task).get("userland") == "host"
    refused = list(_refused(task, offline, images and not on_host))
    for name in ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml"):
        if name in context:
            refused.append(f"environment/{name} (services)")
    if (environment.storage_megabytes or 0) > MAX_DISK_MB and (on_host or not images):
        refused.append(
            f"environment.storage_mb = {environment.storage_megabytes} (at most {MAX_DISK_MB})"
        )
    if on_host or not images:
        if "Dockerfile" in context:
            docker = _read_dockerfile(context)
            refused += docker.refused
    elif environment.docker_image is None and "Dockerfile" not in context:
        refused.append("environment: it has neither docker_image nor environment/Dockerfile")
    if not on_host and not images:
        image = environment.docker_image or ("environment/Dockerfile" if docker.files else "")
        named = f"docker_image = {image!r}" if environment.docker_image else "its image"
        refused.append(
            f"environment: {named} (no images here, they need a container engine and --backend auto"
            " or docker; a task that a Debian userland with Python 3 serves says"
            ' metadata.trsi.userland = "host")'
        )
    if refused:
        raise UnsupportedTask(f"{task.root}: this sandbox can't honour {'; '.join(refused)}")
    built = images and not on_host and environment.docker_image is None
    return Plan(
        workdir=environment.workdir or ("" if images and not on_host else docker.workdir),
        files=docker.files,
        env=docker.env | resolve_env(task, environment.env, host_env or {}),
        memory_mb=environment.memory_megabytes or DEFAULT_MEMORY_MB,
        cpus=float(environment.cpus or 1),
        disk_mb=min(environment.storage_megabytes or DEFAULT_DISK_MB, MAX_DISK_MB),
        reward_range=_reward_range(task),
        image=environment.docker_image if images and not on_host else None,
        dockerfile=context if built else None,
        build_s=environment.build_timeout_sec,
    )


async def on_image(
    how: Plan, task: HarborTask, backend: SandboxBackend, *, network: str = "none"
) -> Plan:
    """A plan whose image is there: built if it has to be, in the image's own working directory.

    Args:
      how: from `plan`; the plan of a task without an image comes back as it is.
      task: the task.
      backend: gives the sandboxes.
      network: of a build's commands: "none", or "default" to let them fetch.

    Raises:
      UnsupportedTask: no engine, no such image, or a build that failed; with what mends it.
      StartTimeout: the engine is too busy to answer.
    """
    if how.image is None and how.dockerfile is None:
        return how
    named = f"docker_image = {how.image!r}" if how.image else "environment/Dockerfile"
    if not isinstance(backend, ImageBackend):
        raise UnsupportedTask(f"{task.root}: {backend.name} can't honour environment: {named}")
    try:
        image = how.image or await backend.build(
            how.dockerfile or {}, network=network, timeout_s=how.build_s
        )
        workdir = how.workdir or await backend.workdir_of(image) or WORKDIR
    except StartTimeout:
        raise
    except SandboxUnavailable as error:
        raise UnsupportedTask(f"{task.root}: environment: {named}: {error}") from error
    how = replace(how, image=image, dockerfile=None, workdir=workdir)
    try:
        check_directories(how.spec({}, 1.0))
    except SandboxUnavailable as error:
        raise UnsupportedTask(f"{task.root}: environment: {named}: {error}") from error
    return how


def network_of(task: HarborTask, phase: Network) -> str:
    """What a phase of a planned task may reach, as `SandboxSpec.network` says it."""
    _, mode, hosts = _reach(task, "", phase)
    return PREFIX + ",".join(hosts) if mode == "allowlist" and hosts else "none"


def _reach(
    task: HarborTask, name: str, phase: Network
) -> tuple[str, NetworkMode | None, tuple[str, ...]]:
    """Who says what a phase may reach, the mode, its hosts: its environment where it is silent."""
    if phase.network_mode is not None:
        return name, phase.network_mode, phase.allowed_hosts
    if isinstance(phase, Verifier) and phase.environment and phase.environment.network:
        return f"{name}.environment", phase.environment.network, phase.environment.allowed_hosts
    environment = task.config.environment
    return "environment", environment.network, environment.allowed_hosts


def _network_refused(task: HarborTask, offline: bool, images: bool) -> Iterator[str]:
    """What the phases ask of a network and don't get."""
    config = task.config
    for step in task.steps:
        phases: tuple[tuple[str, Network, Network], ...] = (
            ("agent", config.agent, step.config.agent),
            ("verifier", config.verifier, step.config.verifier),
        )
        for kind, whole, phase in phases:
            own = f"steps.{step.name}.{kind}" if phase is not whole else kind
            name, mode, hosts = _reach(task, own, phase)
            if mode is None and not offline:
                yield (
                    "environment.network_mode, which is not set and public by Harbor's default"
                    " (--offline runs it without a network)"
                )
            elif mode == "public":
                yield f"{name}.network_mode = 'public'"
            elif mode == "allowlist" and not images:
                yield f"{name}.network_mode = 'allowlist' (only for a task on its own image)"
            for host in hosts:
                try:
                    allowed_hosts(PREFIX + host)
                except LimitUnsupported:
                    yield f"{name}.allowed_hosts: {host!r} (host names, and *. before one)"


def _refused(task: HarborTask, offline: bool, images: bool) -> Iterator[str]:
    """What of task.toml and the tests no sandbox here can give; `images`: it runs on its own."""
    config = task.config
    yield from _environment_refused("environment", config.environment)
    yield from dict.fromkeys(_network_refused(task, offline, images))
    phases: list[tuple[str, Agent | Verifier]] = [("agent", config.agent)]
    phases += [("verifier", config.verifier)]
    for step in config.steps:
        phases += [(f"steps.{step.name}.agent", step.agent)]
        phases += [(f"steps.{step.name}.verifier", step.verifier)]
        if step.healthcheck is not None:
            yield f"steps.{step.name}.healthcheck"
    # On an image it is the image's user, whoever that is.
    known = (None,) if images else (None, USER)
    for name, phase in phases:
        if phase.user not in known:
            yield f"{name}.user = {phase.user!r}"
        if not isinstance(phase, Verifier):
            continue
        if phase.collect:
            yield f"{name}.collect"
        if phase.environment is not None:
            yield from _own_environment(name, phase.environment, config.environment)
    for artifact in [*config.artifacts, *(a for s in config.steps for a in s.artifacts)]:
        if not isinstance(artifact, str) and artifact.service:
            yield f"artifacts.service = {artifact.service!r}"
        if not isinstance(artifact, str) and artifact.exclude:
            yield f"artifacts.exclude = {list(artifact.exclude)!r}"
    for step_ in task.steps:
        if network_of(task, step_.config.verifier) == "none":
            yield from _fetching(task, step_)


def _environment_refused(name: str, environment: Environment) -> Iterator[str]:
    if environment.os != "linux":
        yield f"{name}.os = {environment.os!r}"
    if environment.gpus:
        yield f"{name}.gpus = {environment.gpus}"
    if (environment.cpus or 0) > (os.cpu_count() or 1):
        yield f"{name}.cpus = {environment.cpus} (this machine has {os.cpu_count()})"
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    if (environment.memory_megabytes or 0) > physical:
        yield f"{name}.memory_mb = {environment.memory_megabytes} (this machine has {physical})"
    for key in ("tpu", "mcp_servers", "skills_dir", "healthcheck"):
        if getattr(environment, key):
            yield f"{name}.{key}"


def _own_environment(name: str, own: Environment, task: Environment) -> Iterator[str]:
    """What of a verifier's environment is not that of the task, in which it runs here."""
    elsewhere = {"network_mode", "allowed_hosts", "allow_internet", "build_timeout_sec"}
    for key in sorted(own.model_fields_set - elsewhere):
        if (value := getattr(own, key)) != getattr(task, key):
            yield f"{name}.environment.{key} = {value!r}"


def _fetching(task: HarborTask, step: Step) -> Iterator[str]:
    """A verifier that fetches its tools has none without a network, and may call that a failure."""
    script = task.tests(step)["test.sh"].data.decode("utf-8", "replace")
    for number, line in enumerate(script.splitlines(), 1):
        found = _FETCHES.search(line.split("#", 1)[0] + " ")
        if found:
            at = f"steps/{step.name}/tests/test.sh" if step.name else "tests/test.sh"
            yield f"{at} line {number}: {found[1]!r} (the verifier has no network)"


def _reward_range(task: HarborTask) -> Range:
    value = own_metadata(task).get("reward_range", list(UNIT_RANGE))
    numbers = isinstance(value, list) and all(type(x) in (int, float) for x in value)
    if not numbers or len(value) != 2 or not value[0] < value[1]:  # type: ignore[arg-type,index]
        raise UserError(
            f"{task.root / 'task.toml'}: metadata.trsi.reward_range = {value!r}: write two numbers,"
            " the smaller first"
        )
    return float(value[0]), float(value[1])  # type: ignore[index]


def resolve_env(
    task: HarborTask, env: Mapping[str, str], host_env: Mapping[str, str]
) -> dict[str, str]:
    """Variables with their `${NAME}` and `${NAME:-default}` templates filled.

    Raises:
      UserError: for a variable that is neither passed on nor has a default.
    """

    def value(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name in host_env:
            return host_env[name]
        if default is None:
            raise UserError(
                f"{task.root / 'task.toml'}: the task takes {name} from this machine; pass it on"
                f" with --pass-env {name}"
            )
        return default

    return {key: _VARIABLE.sub(value, text) for key, text in env.items()}


# --- Dockerfiles ------------------------------------------------------------------------------


def _read_dockerfile(context: Mapping[str, Entry]) -> _Dockerfile:
    """Do what a Dockerfile says as far as files go; collect the rest."""
    made = _Dockerfile()
    here = "/"
    copies: list[tuple[str, list[str]]] = []
    for number, instruction, rest in _instructions(context["Dockerfile"].data):
        at = f"environment/Dockerfile line {number}: {instruction}"
        if instruction == "WORKDIR":
            here = made.workdir = str(PurePosixPath(here, rest.strip()))
        elif instruction == "ENV":
            for pair in shlex.split(rest):
                key, separator, text = pair.partition("=")
                if not separator:
                    made.refused.append(f"{at} {rest} (write NAME=value)")
                    break
                made.env[key] = text
        elif instruction in ("COPY", "ADD"):
            words = shlex.split(rest)
            if len(words) < 2 or any(w.startswith(("--", "http:", "https:", "[")) for w in words):
                made.refused.append(f"{at} {rest}")
                continue
            target = str(PurePosixPath(here, words[-1]))
            slash = "/" if words[-1].endswith("/") or words[-1] == "." else ""
            copies.append((target + slash, words[:-1]))
        elif instruction not in _HARMLESS:
            made.refused.append(f"{at} {rest[:60]}")
    for target, sources in copies:
        for source in sources:
            _copy(context, source, target, made)
    return made


def _instructions(data: bytes) -> Iterator[tuple[int, str, str]]:
    """(line, instruction, arguments), continuations joined, comments left out."""
    joined, first = "", 0
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        if line.lstrip().startswith("#") or not (joined or line.strip()):
            continue
        first = first if joined else number
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1] + " "
            continue
        word, _, rest = (joined + line).strip().partition(" ")
        joined = ""
        yield first, word.upper(), rest.strip()


def _copy(context: Mapping[str, Entry], source: str, target: str, made: _Dockerfile) -> None:
    """COPY one source to an absolute target, which must lie in the working directory."""
    name = str(PurePosixPath(source)).strip("/")
    below = "" if name in ("", ".") else f"{name}/"
    inside = {k[len(below) :]: e for k, e in context.items() if k.startswith(below)}
    is_folder = not below or context.get(name, Entry("other")).kind == "directory"
    if not is_folder and name not in context:
        made.refused.append(f"environment/Dockerfile: COPY {source} (no such file in environment/)")
        return
    if not PurePosixPath(target).is_relative_to(made.workdir):
        made.refused.append(f"environment/Dockerfile: COPY to {target}, outside {made.workdir}")
        return
    base = PurePosixPath(target).relative_to(made.workdir)
    if is_folder:
        placed = {base / k: e for k, e in inside.items()}
    else:
        placed = {base / PurePosixPath(name).name if target.endswith("/") else base: context[name]}
    for path, entry in placed.items():
        made.files[str(path)] = entry
