"""Configurations: strict TOML, dotted overrides, a digest. Imports nothing heavy.

A configuration is one TOML file; what it leaves out has the defaults below. An unknown key, a
wrong type or an impossible value is a `UserError` that names file, key, value and what is
allowed. Stages are data: the list `[[stages]]` is the recursion, in the order it runs.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollout.errors import UserError
from rollout.records import TIERS, Tier

Unit = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]
HarnessName = Literal["general", "survey", "stepwise"]
StageName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
"""Names files, segments of the store and keys of overrides, so it has neither slash nor dot."""


class Section(BaseModel):
    """Base of every section: frozen, strict, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """The policy; the critic is the same trunk with a scalar head."""

    preset: str = "tiny"
    """Name of an architecture preset of `trsi_jax.model`."""


class EngineSection(Section):
    """The in-process generation engine."""

    sessions: Count = 128
    """Slots decoded together; also the size of a collection wave."""
    context: Annotated[int, Field(ge=32)] = 128
    """Tokens a session may hold."""


class FleetSection(Section):
    """SGLang servers that sample instead of this process (docs/fleet.md); None: no servers."""

    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    """Of the servers; they may change when a run goes on."""
    weights: str
    """Folder that weights are published in; servers read it under the same path."""
    base: str | None = None
    """Hugging Face directory that the parameters descend from; None exports a text-only model."""
    dtype: Literal["BF16", "F16", "F32"] = "BF16"
    """Of the published weights, without a base."""
    keep: Count = 3
    """Published snapshots that stay."""
    min_servers: Count = 1
    """Fewer that serve the current weights, for longer than `recovery`, end the run."""
    recovery: Positive = 300.0
    max_outstanding: Count = 256
    """Requests that a server has at once."""
    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Updates that PPO's rollouts may be behind; 0: sampling and training take turns."""
    over_stale: Literal["drop", "mask"] = "drop"
    """What becomes of a trajectory with an older token."""
    straggler: Positive = 600.0
    """Seconds that an update waits for its episodes; what ends later joins the next one."""


class SandboxSection(Section):
    """Where commands run."""

    backend: Literal["auto", "bubblewrap", "docker"] = "auto"
    command_timeout: Positive = 10.0
    """Seconds a command may take; then it is killed and the agent is told."""
    starts: Count = 4
    """Sandboxes that may be starting at the same time."""


class HarnessSection(Section):
    """Limits of an episode, the same in every harness."""

    max_turns: Count = 10
    max_new_tokens: Count = 24
    """Sampled tokens a turn."""


class PackingSection(Section):
    """The one packed shape of every update: few shapes, few compilations."""

    rows: Count = 12
    length: Annotated[int, Field(ge=8)] = 128


class AdamSection(Section):
    """AdamW and clipping, shared by all stages; rates are a stage's own."""

    b1: Unit = 0.9
    b2: Unit = 0.98
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    max_grad_norm: Positive = 1.0


class ShardingSection(Section):
    """How the train steps of a large model lie on many devices; the default is one device."""

    layout: str | None = None
    """Name of a layout of `sharding.layouts`, which says topology and mesh; None is one device."""
    data: Count | None = None
    """Size of a mesh axis instead of the layout's; so are the next three."""
    fsdp: Count | None = None
    tensor: Count | None = None
    sequence: Count | None = None
    micro_batches: Count = 1
    """Parts that a batch's rows are taken in; one denominator, one update."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """What Adam's moments are stored in; they are always updated in float32."""
    offload: bool = False
    """Keep Adam's moments in host memory while their network is idle."""
    head_chunk: Count = 512
    """Tokens of a row whose logits exist at a time."""


class EvaluationSection(Section):
    """Final evaluation after every stage, under the general harness."""

    split: Literal["validation", "test"] = "test"
    tasks: Count = 128
    repeats: Count = 3
    """Independent runs of each task: mean@repeats."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.6


class BaseStage(Section):
    """Supervised training from scratch on few noisy demonstrations: weak on purpose."""

    kind: Literal["base"]
    name: StageName
    steps: Count
    curriculum_steps: Annotated[int, Field(ge=0)] = 0
    """First steps on demonstrations of one sub-goal, in whole blocks of 50."""
    learning_rate: Positive = 3e-3
    warmup_steps: Annotated[int, Field(ge=0)] = 60
    final_fraction: Unit = 0.1
    """Cosine decay ends at this share of `learning_rate`."""
    observation_weight: Unit = 0.1
    """Loss weight of tokens the policy will not sample; its own tokens weigh 1."""
    mistake_rate: Unit = 0.45
    """Chance that a demonstration does a sub-goal wrongly (scaled by 0.6 in `stepwise`)."""
    never_shown: tuple[str, ...] = ()
    """Families whose compositions no demonstration has."""


class RsrStage(Section):
    """Recursive self-rewrite: discover, rewrite, review, replay, fine-tune the actor."""

    kind: Literal["rsr"]
    name: StageName
    tasks: Count
    harnesses: Annotated[tuple[HarnessName, ...], Field(min_length=1)] = (
        "general",
        "survey",
        "stepwise",
    )
    attempts: Count = 1
    temperature: Positive = 1.0
    runbooks_per_task: Count = 2
    epochs: Count
    learning_rate: Positive
    warmup_steps: Annotated[int, Field(ge=0)] = 4
    final_fraction: Unit = 0.1


class RewardSection(Section):
    """FDR, or SPR = S R + (1 - S) min(beta FDR, cap)."""

    kind: Literal["spr", "fdr", "strict"] = "spr"
    success: Annotated[float, Field(ge=1.0)] = 1.0
    beta: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.3
    cap: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5


class RprStage(Section):
    """Recursive policy-refine: critic handover, critic-only rounds, then PPO of both."""

    kind: Literal["rpr"]
    name: StageName
    iterations: Annotated[int, Field(ge=1, lt=1000)]
    tasks_per_iteration: Count = 128
    tokens_per_iteration: Count | None = None
    """Sampled tokens an iteration on average, in place of a fixed number of tasks: an iteration
    takes as many tasks as should bring the stage to its budget so far, judged by the length of the
    episodes before, and at most four times `tasks_per_iteration`. For arms that must cost alike."""
    samples: Count = 1
    """Attempts a task. A critic is the baseline, so different tasks teach more than repeats."""
    tiers: Annotated[tuple[Tier, ...], Field(min_length=1)] = TIERS
    """Tiers that training tasks are drawn from: what is always solved teaches nothing."""
    temperature: Positive = 1.0
    actor_learning_rate: Positive
    actor_warmup_steps: Annotated[int, Field(ge=0)] = 8
    """Updates over which the actor's rate rises: a fresh Adam's first steps are the largest."""
    critic_learning_rate: Positive = 5e-4
    critic: Literal["handover", "fresh"] = "handover"
    """Start from the critic of the previous RPR stage, or always from the actor's trunk."""
    warm_up_rounds: Annotated[int, Field(ge=0)] = 4
    warm_up_batches: Count = 4
    epochs: Count = 1
    """Passes over a batch. Fresh episodes are cheap here, and a second pass mostly adds noise."""
    minibatches: Count = 2
    clip: Positive = 0.2
    value_clip: Positive | None = None
    value_loss: Literal["mse", "bce"] = "mse"
    """Squared error, or cross-entropy of a sigmoid head that says values in [0, reward.success]."""
    critic_updates: Count = 1
    """K: updates of the critic an update of the actor, on the same minibatch."""
    frozen_attention: bool = False
    """Train the critic without its token mixing layers (attention and gated delta rule)."""
    estimator: str = "tb_gae"
    estimator_options: dict[str, float] = Field(default_factory=dict)
    """Further settings that the estimator takes, such as {lam_in = 0.95}."""
    gamma: Unit = 0.99
    lam: Unit = 0.95
    lam_critic: Unit | None = None
    """Separate mixing for the critic's targets; None takes `lam`."""
    reward: RewardSection = RewardSection()

    @model_validator(mode="after")
    def _value_head(self) -> Self:
        if self.value_loss == "bce" and self.value_clip is not None:
            raise ValueError("value_clip must be left out with value_loss 'bce'")
        if self.value_loss == "bce" and self.reward.kind == "fdr":
            raise ValueError(
                "value_loss 'bce' needs bounded rewards, so reward.kind 'spr' or 'strict'"
            )
        return self


Stage = Annotated[BaseStage | RsrStage | RprStage, Field(discriminator="kind")]


_LATER = (
    *("value_loss", "critic_updates", "frozen_attention", "estimator_options", "lam_critic"),
    "tokens_per_iteration",
)
"""Options of RPR that came after the first published digests: at their default they leave a
configuration, and so its digest, what it was."""


_PLACES = {"urls", "weights", "keep", "min_servers", "recovery", "max_outstanding"}
"""Options of a fleet that say where and how well it runs, and may change when a run goes on."""


class Config(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    train_tasks: Count = 2400
    """Size of the training pool that RSR and RPR draw from."""
    checkpoint_every: Count = 5
    """PPO iterations between checkpoints inside a stage; a kill repeats at most these."""
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    sandbox: SandboxSection = SandboxSection()
    harness: HarnessSection = HarnessSection()
    packing: PackingSection = PackingSection()
    adam: AdamSection = AdamSection()
    sharding: ShardingSection = ShardingSection()
    evaluation: EvaluationSection = EvaluationSection()
    fleet: FleetSection | None = None
    stages: tuple[Stage, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"stage names must differ, got {names}")
        if not names or self.stages[0].kind != "base":
            raise ValueError("the first stage must have kind 'base'")
        if any(stage.kind == "base" for stage in self.stages[1:]):
            raise ValueError("only the first stage may have kind 'base'")
        if self.engine.context > self.packing.length:
            raise ValueError(
                f"engine.context must be at most packing.length ({self.packing.length}), or an"
                f" episode would not fit in a row, got {self.engine.context}"
            )
        heads = {s.value_loss for s in self.stages if isinstance(s, RprStage)}
        handed = any(s.critic == "handover" for s in self.stages if isinstance(s, RprStage))
        if len(heads) > 1 and handed:
            raise ValueError("value_loss must be the same in all stages that hand a critic over")
        for stage in self.stages:
            budgeted = isinstance(stage, RprStage) and stage.tokens_per_iteration is not None
            if budgeted and self.fleet is not None:
                raise ValueError(
                    f"stage {stage.name}: tokens_per_iteration counts what earlier iterations"
                    " sampled, which a fleet that samples ahead does not know; leave one out"
                )
            if isinstance(stage, RsrStage) and len(set(stage.harnesses)) < len(stage.harnesses):
                raise ValueError(f"stage {stage.name}: harnesses must differ")
            if isinstance(stage, RsrStage) and stage.tasks > self.train_tasks:
                raise ValueError(
                    f"stage {stage.name}: tasks must be at most train_tasks ({self.train_tasks})"
                )
            if isinstance(stage, RprStage) and stage.tasks_per_iteration > self.train_tasks:
                raise ValueError(
                    f"stage {stage.name}: tasks_per_iteration must be at most train_tasks"
                    f" ({self.train_tasks})"
                )
        return self

    def digest(self) -> str:
        """SHA-256 of everything that decides the result but the seed, as 16 hex digits."""
        ignored = {"seed", "fleet"}
        if self.sharding == ShardingSection():
            ignored.add("sharding")  # Digests of runs on one device are older than the section.
        content = self.model_dump(mode="json", exclude=ignored)
        if self.fleet is not None:  # As old; and what servers there are decides nothing.
            content["fleet"] = self.fleet.model_dump(mode="json", exclude=_PLACES)
        for stage, dumped in zip(self.stages, content["stages"], strict=True):
            for key in _LATER if isinstance(stage, RprStage) else ():
                if getattr(stage, key) == RprStage.model_fields[key].get_default(
                    call_default_factory=True
                ):
                    del dumped[key]
        encoded = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        return hashlib.sha256(encoded).hexdigest()[:16]


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration and apply `key=value` overrides.

    Args:
      path: a TOML file.
      overrides: dotted keys with TOML values, such as "evaluation.tasks=64"; a stage is named by
        its name, "stages.rpr-1.iterations=4". A value that is no TOML is taken as a string.

    Returns:
      The validated configuration.

    Raises:
      UserError: the file cannot be read or parsed, or a key or value is not allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"{path}: cannot read the configuration ({reason})") from None
    try:
        content: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    for override in overrides:
        _apply(content, override)
    try:
        return Config.model_validate_json(as_json(content))
    except ValidationError as error:
        raise UserError(f"{path}: {_first_problem(error, content)}") from None


def as_json(content: dict[str, Any]) -> str:
    """Parsed TOML for pydantic's JSON mode: arrays become tuples there, yet types stay strict."""
    return json.dumps(content, default=str)


def dump(config: Config) -> str:
    """The resolved configuration as TOML that `load` reads back to an equal one."""
    content = config.model_dump(mode="json", exclude_none=True)
    return "\n".join(_toml_table(content, ())).strip() + "\n"


def _apply(content: dict[str, Any], override: str) -> None:
    key, separator, raw = override.partition("=")
    if not separator or not key.strip():
        raise UserError(f"-o {override}: write an override as key=value, for example seed=1")
    try:
        value = tomllib.loads(f"value = {raw.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    parts = key.strip().split(".")
    node: Any = content
    for depth, part in enumerate(parts[:-1]):
        if isinstance(node, list):
            node = _named_stage(node, part, override)
        else:
            node = node.setdefault(part, {})
        if not isinstance(node, dict | list):
            where = ".".join(parts[: depth + 1])
            raise UserError(f"-o {override}: {where} is a value, it has no keys below it")
    if isinstance(node, list):
        raise UserError(f"-o {override}: name the key of the stage, such as {key}.learning_rate")
    node[parts[-1]] = value


def _named_stage(stages: list[Any], name: str, override: str) -> Any:
    for stage in stages:
        if isinstance(stage, dict) and stage.get("name") == name:
            return stage
    names = ", ".join(str(s.get("name")) for s in stages if isinstance(s, dict))
    raise UserError(f"-o {override}: there is no stage {name!r}; the stages are: {names}")


def _first_problem(error: ValidationError, content: dict[str, Any]) -> str:
    problem = error.errors(include_url=False)[0]
    location = [part for part in problem["loc"] if part not in ("base", "rsr", "rpr")]
    named = []
    node: Any = content
    for part in location:
        node = node[part] if _has(node, part) else None
        is_stage = isinstance(part, int) and isinstance(node, dict) and "name" in node
        named.append(str(node["name"]) if is_stage else str(part))
    key = ".".join(named) or "the configuration"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        allowed = _allowed_keys(content, location[:-1])
        return f"unknown key {key}; allowed here: {', '.join(allowed)}"
    if problem["type"] == "missing":
        return f"key {key} is missing"
    if problem["type"] == "value_error":
        return message if not named else f"{key}: {message}"
    return f"{key} = {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _has(node: Any, part: str | int) -> bool:
    if isinstance(node, dict):
        return part in node
    return isinstance(node, list) and isinstance(part, int) and part < len(node)


def _allowed_keys(content: dict[str, Any], location: Sequence[str | int]) -> list[str]:
    model: type[BaseModel] = Config
    node: Any = content
    for part in location:
        node = node[part] if _has(node, part) else {}
        if isinstance(part, int):
            kinds: dict[str, type[BaseModel]] = {
                "base": BaseStage,
                "rsr": RsrStage,
                "rpr": RprStage,
            }
            model = kinds[node.get("kind", "base")]
        elif part != "stages":
            annotation = model.model_fields[part].annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                model = annotation
    return sorted(model.model_fields)


def _toml_table(table: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"{key} = {_toml_value(v)}" for key, v in table.items() if not _is_table(v)]
    for key, value in table.items():
        inner = (*path, key)
        if isinstance(value, dict):
            lines += ["", f"[{'.'.join(inner)}]", *_toml_table(value, inner)]
        elif _is_table(value):
            for item in value:
                lines += ["", f"[[{'.'.join(inner)}]]", *_toml_table(item, inner)]
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    )


def _toml_value(value: Any) -> str:
    # JSON's strings, numbers, booleans and flat arrays are valid TOML, but for two things: TOML has
    # no surrogate pairs, and it wants DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
