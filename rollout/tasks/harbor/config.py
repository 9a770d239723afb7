"""`task.toml` of schema 1.0 to 1.4: bad values are errors, unknown keys are listed.

Source: the fields, defaults and corner cases of harbor 0.26.0 (`models/task/config.py`), read, not
imported: a dependency on it would bring over a hundred distributions.
"""

from __future__ import annotations

import json
import re
import tomllib
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from rollout.errors import UserError

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")

Seconds = Annotated[float, Field(gt=0)]
Megabytes = Annotated[int, Field(gt=0)]
NetworkMode = Literal["no-network", "public", "allowlist"]
Number = Annotated[float, Field()]

_SIZE = re.compile(r"([0-9]+)([KMGT])i?B?", re.IGNORECASE)
_MEGABYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
_STEP_NAME = re.compile(r"[^/\\\0]+")


class Table(BaseModel):
    """Base of every table: frozen, strict; what it doesn't know is kept to be listed."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)


class Network(Table):
    """What a phase may reach; None where the task says nothing."""

    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _hosts_need_an_allowlist(self) -> Self:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError('allowed_hosts is only allowed with network_mode = "allowlist"')
        return self


class HealthCheck(Table):
    """A command that says when the environment is ready."""

    command: str
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Annotated[float, Field(ge=0)] = 0.0
    start_interval_sec: Seconds = 5.0
    retries: Annotated[int, Field(ge=1)] = 3


class Environment(Network):
    """The machine that a phase runs on."""

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: Annotated[int, Field(gt=0)] | None = None
    memory_mb: Megabytes | None = None
    storage_mb: Megabytes | None = None
    memory: str | None = None
    storage: str | None = None
    gpus: Annotated[int, Field(ge=0)] = 0
    gpu_types: tuple[str, ...] | None = None
    tpu: dict[str, Any] | None = None
    allow_internet: bool | None = None
    mcp_servers: tuple[dict[str, Any], ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: HealthCheck | None = None
    workdir: str | None = None

    @field_validator("cpus", mode="before")
    @classmethod
    def _whole_cpus(cls, value: object) -> object:
        return int(value) if isinstance(value, float) and value.is_integer() else value

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> Self:
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            text, number = getattr(self, old), getattr(self, new)
            if text is not None and _megabytes(text) != (number or _megabytes(text)):
                raise ValueError(f"{old} = {text!r} and {new} = {number} contradict each other")
        if self.allow_internet is not None and self.network_mode is not None:
            allowed = self.network_mode != "no-network"
            if self.allow_internet != allowed:
                raise ValueError(
                    f"allow_internet = {str(self.allow_internet).lower()} and network_mode = "
                    f"{self.network_mode!r} contradict each other"
                )
        return self

    @property
    def memory_megabytes(self) -> int | None:
        """Memory asked for, by either key."""
        return self.memory_mb or (None if self.memory is None else _megabytes(self.memory))

    @property
    def storage_megabytes(self) -> int | None:
        """Storage asked for, by either key."""
        return self.storage_mb or (None if self.storage is None else _megabytes(self.storage))

    @property
    def network(self) -> NetworkMode | None:
        """What may be reached, by either key; None where nothing is said."""
        if self.network_mode is None and self.allow_internet is not None:
            return "public" if self.allow_internet else "no-network"
        return self.network_mode


class Agent(Network):
    """The agent's phase."""

    timeout_sec: Seconds | None = None
    user: str | int | None = None


class Collect(Table):
    """A command that fetches something for the verifier."""

    command: str
    service: str | None = None
    timeout_sec: Seconds = 60.0
    user: str | int | None = None


class Verifier(Network):
    """The verifier's phase."""

    timeout_sec: Seconds = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Environment | None = None
    collect: tuple[Collect, ...] = ()

    @model_validator(mode="after")
    def _an_environment_is_separate(self) -> Self:
        if self.environment is not None and self.environment_mode == "shared":
            raise ValueError('environment_mode = "shared" has no [verifier.environment]')
        return self


class Solution(Table):
    """The reference solution."""

    env: dict[str, str] = Field(default_factory=dict)


class Artifact(Table):
    """Something that a phase leaves for later ones."""

    source: str
    destination: str | None = None
    exclude: tuple[str, ...] = ()
    service: str | None = None


class StepConfig(Table):
    """One step of a multi-step task."""

    name: str
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    min_reward: Number | dict[str, Number] | None = None
    healthcheck: HealthCheck | None = None
    artifacts: tuple[str | Artifact, ...] = ()

    @field_validator("name")
    @classmethod
    def _a_directory_name(cls, name: str) -> str:
        if not _STEP_NAME.fullmatch(name) or name in (".", ".."):
            raise ValueError(f"name = {name!r} is no name of a directory")
        return name


class Author(Table):
    """Who wrote the task."""

    name: str
    email: str | None = None


class Package(Table):
    """What the task is called."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$")]
    version: str | None = None
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()


class TaskConfig(Table):
    """The whole of `task.toml`."""

    schema_version: Literal["1.0", "1.1", "1.2", "1.3", "1.4"] = Field(
        "1.4", validation_alias=AliasChoices("schema_version", "version")
    )
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"
    artifacts: tuple[str | Artifact, ...] = ()
    task: Package | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    environment: Environment = Environment()
    solution: Solution = Solution()
    steps: tuple[StepConfig, ...] = ()

    @model_validator(mode="after")
    def _steps_differ(self) -> Self:
        seen: dict[str, str] = {}
        for step in self.steps:
            key = unicodedata.normalize("NFKC", step.name).casefold()
            if key in seen:
                raise ValueError(
                    f"steps {seen[key]!r} and {step.name!r} have the same name up to case and"
                    " Unicode form"
                )
            seen[key] = step.name
        return self

    @property
    def unknown_keys(self) -> tuple[str, ...]:
        """Dotted names of the keys that this reader doesn't know; they have no effect."""
        return tuple(_unknown(self, ""))


def _megabytes(size: str) -> int:
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(f"size {size!r} is not of the form 512M or 2G")
    return max(1, round(int(match[1]) * _MEGABYTES[match[2].upper()]))


def _unknown(table: BaseModel, prefix: str) -> Iterator[str]:
    for key in table.model_extra or {}:
        yield prefix + key
    for key in type(table).model_fields:
        value = getattr(table, key)
        for i, item in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(item, BaseModel):
                at = f"{key}[{i}]" if isinstance(value, tuple) else key
                yield from _unknown(item, f"{prefix}{at}.")


def read_config(path: Path) -> TaskConfig:
    """The validated configuration of a task.

    Raises:
      UserError: naming file, key, value and what is allowed.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a task directory has a task.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    if "version" in content and "schema_version" in content:
        raise UserError(f"{path}: version and schema_version say the same; keep one of them")
    try:
        # JSON mode: TOML arrays become tuples, yet types stay strict.
        return TaskConfig.model_validate_json(json.dumps(content, default=str))
    except ValidationError as error:
        raise UserError(f"{path}: {_problem(error)}") from None


def _problem(error: ValidationError) -> str:
    # A value of a union fails once for each member: the last of them says what else is allowed.
    problem = error.errors(include_url=False)[0]
    kinds = {"str", "int", "float", "Artifact", "dict[str,float]"}
    key = ".".join(str(part) for part in problem["loc"] if str(part) not in kinds)
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"key {key} is missing"
    if problem["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key} = {problem['input']!r}: {message[0].lower()}{message[1:]}"
