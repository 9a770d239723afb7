"""A configuration is read strictly, written back exactly, and known by a digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.errors import UserError
from trsi_jax import config
from trsi_jax.stages import machine
from trsi_jax.stages.observer import NullObserver

TINY = Path(__file__).resolve().parent.parent / "configs" / "tiny.toml"


def problem(*overrides: str) -> str:
    """The one line that is said about configs/tiny.toml with these overrides."""
    with pytest.raises(UserError) as caught:
        config.load(TINY, overrides)
    (line,) = str(caught.value).splitlines()
    return line


def test_the_shipped_configuration_is_the_recursion() -> None:
    tiny = config.load(TINY)
    assert [stage.kind for stage in tiny.stages] == ["base", "rsr", "rpr", "rsr", "rpr"]
    rpr = [s for s in tiny.stages if isinstance(s, config.RprStage)]
    assert [s.warm_up_rounds for s in rpr] == [4, 4]
    assert {s.estimator for s in rpr} == {"tb_gae"}
    assert {s.reward.kind for s in rpr} == {"spr"}


def test_a_fleet_is_optional_and_where_it_runs_decides_nothing() -> None:
    places = ['fleet.urls=["http://a:1"]', 'fleet.weights="/w"']
    one = config.load(TINY, places)
    other = config.load(TINY, ['fleet.urls=["http://b:2"]', 'fleet.weights="/v"'])
    stale = config.load(TINY, [*places, "fleet.max_staleness=0"])
    assert one.fleet is not None
    assert (one.fleet.max_staleness, one.fleet.over_stale) == (1, "drop")
    assert one.digest() == other.digest()
    assert len({config.load(TINY).digest(), one.digest(), stale.digest()}) == 3
    with pytest.raises(UserError, match=r"rpr-1: tokens_per_iteration .* leave one out"):
        config.load(TINY, [*places, "stages.rpr-1.tokens_per_iteration=9000"])
    for bad in ("fleet.max_staleness=-1", 'fleet.over_stale="keep"', "fleet.urls=[]"):
        with pytest.raises(UserError, match=bad.partition("=")[0]):
            config.load(TINY, [*places, bad])


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("colour=1", ["unknown key colour", "allowed here: adam", "train_tasks"]),
        ("engine.slots=1", ["unknown key engine.slots", "context, sessions"]),
        ("stages.base.epochs=1", ["unknown key stages.base.epochs", "learning_rate"]),
        ("stages.rpr-1.reward.bonus=1", ["stages.rpr-1.reward.bonus", "beta, cap, kind, success"]),
        ("seed=true", ["seed = True", "valid integer"]),
        ("seed=0.5", ["seed = 0.5", "valid integer"]),
        ("seed='one'", ["seed = 'one'", "valid integer"]),
        ("engine=3", ["engine = 3", "object"]),
        ("stages=3", ["stages = 3", "array"]),
        ("seed=-1", ["seed = -1", "greater than or equal to 0"]),
        ("seed=4294967296", ["seed = 4294967296", "less than 4294967296"]),
        ("engine.sessions=0", ["engine.sessions = 0", "greater than or equal to 1"]),
        ("adam.b1=2", ["adam.b1 = 2", "less than or equal to 1"]),
        ("adam.eps=inf", ["adam.eps = inf", "finite"]),
        ("adam.eps=nan", ["adam.eps = nan", "finite"]),
        ("stages.rpr-1.reward.cap=1.0", ["stages.rpr-1.reward.cap = 1.0", "less than 1"]),
        ("stages.rpr-1.reward.success=0.5", ["reward.success = 0.5", "greater than or equal to 1"]),
        ("evaluation.split=train", ["evaluation.split = 'train'", "'validation' or 'test'"]),
        ("stages.rsr-1.harnesses=['x']", ["harnesses.0 = 'x'", "'general', 'survey'"]),
        ("stages.rsr-1.harnesses=[]", ["stages.rsr-1.harnesses = []", "at least 1"]),
        ("stages.rsr-1.harnesses=['survey', 'survey']", ["rsr-1", "harnesses must differ"]),
        ("stages.rsr-1.tasks=2401", ["rsr-1", "at most train_tasks (2400)"]),
        ("stages.rpr-2.tasks_per_iteration=2401", ["rpr-2", "at most train_tasks (2400)"]),
        ("stages.rpr-1.iterations=1000", ["stages.rpr-1.iterations = 1000", "less than 1000"]),
        ("stages.rpr-1.kind='sft'", ["'sft'", "'base', 'rsr', 'rpr'"]),
        ("stages.base.name='a/b'", ["name = 'a/b'", "pattern"]),
        ("stages.rsr-2.name=rsr-1", ["stage names must differ"]),
        ("stages=[]", ["first stage must have kind 'base'"]),
        ("name='A run'", ["name = 'A run'", "pattern"]),
        ("stages.rpr-1.value_loss=mae", ["value_loss = 'mae'", "'mse' or 'bce'"]),
        ("stages.rpr-1.value_loss=bce", ["value_loss must be the same in all stages"]),
        ("stages.rpr-1.critic_updates=0", ["critic_updates = 0", "greater than or equal to 1"]),
        ("engine.context=129", ["engine.context", "packing.length (128)", "got 129"]),
    ],
)
def test_a_mistake_is_one_line_with_file_key_value_and_what_is_allowed(override, parts) -> None:
    line = problem(override)
    assert line.startswith(f"{TINY}: ")
    for part in parts:
        assert part in line, line


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed", "-o seed: write an override as key=value"),
        ("=3", "-o =3: write an override as key=value"),
        ("name.x=1", "-o name.x=1: name is a value, it has no keys below it"),
        ("stages.nope.tasks=1", "there is no stage 'nope'; the stages are: base, rsr-1"),
        ("stages.rsr-1=1", "name the key of the stage, such as stages.rsr-1.learning_rate"),
    ],
)
def test_a_bad_override_is_quoted(override: str, said: str) -> None:
    line = problem(override)
    assert line.startswith(f"-o {override}: ")
    assert said in line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"name = ", "not valid TOML"),
        (b"\xff", "not UTF-8"),
        (b"", "key name is missing"),
        (b"name = 'x'\n[[stages]]\nkind = 'base'\nname = 'b'", "key stages.b.steps is missing"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        config.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the configuration"):
        config.load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.preset=huge", "model.preset = 'huge': must be one of"),
        ("stages.rpr-1.estimator=best", "stages.rpr-1.estimator = 'best': must be one of"),
        ("stages.rpr-1.estimator=grpo", "stages.rpr-1.estimator = 'grpo': must be one of"),
        ("stages.base.never_shown=['golf']", "stages.base.never_shown = 'golf': must be one of"),
        (
            "stages.rpr-1.estimator_options={lam_out=0.5}",
            "stages.rpr-1.estimator_options = 'lam_out': must be one of lam_in",
        ),
    ],
)
def test_a_name_that_does_not_exist_stops_a_run_before_it_begins(tmp_path, override, said) -> None:
    out = tmp_path / "run"
    with pytest.raises(UserError, match=said):
        machine.run(config.load(TINY, [override]), out, NullObserver())
    assert not out.exists()


def test_overrides_reach_sections_and_stages_and_the_last_one_wins() -> None:
    changed = config.load(
        TINY,
        [
            "evaluation.tasks = 64",
            "stages.rpr-1.iterations=3",
            "stages.rpr-1.reward.beta=0.1",
            "stages.rsr-2.harnesses=['survey']",
            "name=other",
            "seed=1",
            "seed=2",
        ],
    )
    assert (changed.evaluation.tasks, changed.name, changed.seed) == (64, "other", 2)
    by_name = {stage.name: stage for stage in changed.stages}
    first, second = by_name["rpr-1"], by_name["rpr-2"]
    assert isinstance(first, config.RprStage)
    assert (first.iterations, first.reward.beta) == (3, 0.1)
    assert second == config.load(TINY).stages[-1]
    rewrite = by_name["rsr-2"]
    assert isinstance(rewrite, config.RsrStage)
    assert rewrite.harnesses == ("survey",)


def test_options_that_came_later_leave_the_digest_of_a_run_before_them() -> None:
    """The digest of the same content as it was dumped before there were such options."""
    tiny = config.load(TINY)
    content = tiny.model_dump(mode="json", exclude={"seed", "sharding", "fleet"})
    later = (
        *("value_loss", "critic_updates", "frozen_attention", "estimator_options", "lam_critic"),
        "tokens_per_iteration",
    )
    for stage in content["stages"]:
        for key in later if stage["kind"] == "rpr" else ():
            del stage[key]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert tiny.digest() == hashlib.sha256(text.encode()).hexdigest()[:16]
    options = ["stages.rpr-1.estimator_options={lam_in=0.5}", "stages.rpr-1.lam_critic=1.0"]
    assert len({tiny.digest(), *(config.load(TINY, [o]).digest() for o in options)}) == 3


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["value_clip=0.2"], "value_clip must be left out"),
        (["reward.kind=fdr"], "needs bounded rewards"),
    ],
)
def test_a_sigmoid_head_needs_bounded_rewards_and_no_clip(overrides, said) -> None:
    both = [f"stages.{n}.{o}" for n in ("rpr-1", "rpr-2") for o in ("value_loss=bce", *overrides)]
    with pytest.raises(UserError, match=said):
        config.load(TINY, both)
    sigmoid = config.load(TINY, [o for o in both if "value_loss" in o])
    assert sigmoid.digest() != config.load(TINY).digest()


counts = st.integers(1, 10**6)
units = st.floats(0, 1)
positives = st.floats(0, 1e6, exclude_min=True)
names = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,8}", fullmatch=True)
harnesses = st.lists(
    st.sampled_from(["general", "survey", "stepwise"]), min_size=1, max_size=3, unique=True
).map(tuple)
base_stages = st.builds(
    config.BaseStage,
    kind=st.just("base"),
    name=names,
    steps=counts,
    learning_rate=positives,
    mistake_rate=units,
    # Any text: what a person quotes in TOML must survive being written back.
    never_shown=st.lists(st.text(max_size=6), max_size=2).map(tuple),
)
rsr_stages = st.builds(
    config.RsrStage,
    kind=st.just("rsr"),
    name=names,
    tasks=st.integers(1, 2400),
    harnesses=harnesses,
    temperature=positives,
    epochs=counts,
    learning_rate=positives,
)
rpr_stages = st.builds(
    config.RprStage,
    kind=st.just("rpr"),
    name=names,
    iterations=st.integers(1, 999),
    actor_learning_rate=positives,
    critic=st.sampled_from(["handover", "fresh"]),
    value_clip=st.none() | positives,
    gamma=units,
    critic_updates=st.integers(1, 9),
    frozen_attention=st.booleans(),
    estimator_options=st.dictionaries(st.sampled_from(["lam_in", "charged"]), units),
    lam_critic=st.none() | units,
    reward=st.builds(
        config.RewardSection,
        kind=st.sampled_from(["spr", "fdr", "strict"]),
        success=st.floats(1, 100),
        beta=st.floats(0, 1, exclude_max=True),
    ),
)
configs = st.builds(
    config.Config,
    name=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,12}", fullmatch=True),
    seed=st.integers(0, 2**32 - 1),
    train_tasks=st.integers(2400, 10**6),
    engine=st.builds(config.EngineSection, sessions=counts, context=st.integers(32, 128)),
    adam=st.builds(config.AdamSection, b1=units, eps=positives, weight_decay=st.floats(0, 10)),
    evaluation=st.builds(config.EvaluationSection, temperature=st.floats(0, 10)),
    stages=st.tuples(
        base_stages, st.lists(rsr_stages | rpr_stages, max_size=3, unique_by=lambda s: s.name)
    )
    .filter(lambda pair: pair[0].name not in {s.name for s in pair[1]})
    .map(lambda pair: (pair[0], *pair[1])),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(configs)
def test_what_is_written_is_read_back_equal(tmp_path, wanted) -> None:
    path = tmp_path / "config.toml"
    path.write_text(config.dump(wanted), encoding="utf-8")
    found = config.load(path)
    assert found == wanted
    assert found.digest() == wanted.digest()
    assert config.dump(found) == config.dump(wanted)


def leaves(content, path=()):
    """Path and value of every leaf of a dumped configuration."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, content


def test_the_digest_ignores_the_seed_and_nothing_else() -> None:
    tiny = config.load(TINY)
    assert config.load(TINY, ["seed=7"]).digest() == tiny.digest()
    assert config.load(TINY, ["seed=7"]) != tiny
    content = tiny.model_dump(mode="json")
    changes = [f"{'.'.join(path)}={_other(path, value)}" for path, value in _settings(content)]
    digests = {change: config.load(TINY, [change]).digest() for change in changes}
    # Every change leads to a digest of its own.
    assert len({tiny.digest(), *digests.values()}) == len(changes) + 1, digests


def _settings(content):
    # A fleet is absent here; its own test is above.
    whole = {k: v for k, v in content.items() if k not in ("seed", "stages", "fleet")}
    for path, value in leaves(whole):
        yield path, value
    for stage in content["stages"]:
        for path, value in leaves(stage):
            # A critic that is handed over has one kind of head: another stage must change too.
            if path[-1] not in ("kind", "value_loss") or len(path) > 1:
                yield ("stages", stage["name"], *path), value


OTHERS = {
    "backend": "docker",
    "split": "validation",
    "harnesses": "['general']",
    "tiers": "['hard']",
    "never_shown": "['report']",
    "critic": "fresh",
    "kind": "strict",
    "value_clip": "0.1",
    "frozen_attention": "true",
    "lam_critic": "0.5",
    "tokens_per_iteration": "1000",
    "preset": "other",
    "estimator": "gae",
    "success": "2.0",
    "layout": "cpu-8",
    "data": "2",
    "fsdp": "2",
    "tensor": "2",
    "sequence": "2",
    "moments": "bfloat16",
    "offload": "true",
    "context": "96",
    "length": "256",
}


def _other(path, value):
    """Another allowed value of a setting."""
    if path[-1] == "name":
        return f"{value}-b"
    if path[-1] in OTHERS:
        return OTHERS[path[-1]]
    return value + 1 if isinstance(value, int) else value / 2 + 0.01
