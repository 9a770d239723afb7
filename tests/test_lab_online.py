"""Ablations of a stage: files, what arms share, the paired bootstrap, and whole arms trained."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from rollout.errors import UserError
from rollout.harness import shell_chat
from rollout.store.reader import SegmentReader
from rollout.tasks.pool.lexicon import vocabulary
from trsi_jax import checkpoint, config, model
from trsi_jax.lab import online
from trsi_jax.lab.online import paired_bootstrap
from trsi_jax.report import ablations
from trsi_jax.stages import machine, record, rpr
from trsi_jax.stages.observer import NullObserver

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "configs" / "ablations").glob("*.toml"))

TEXT = """
name = "a"
question = "?"
config = "{base}"
reference = "x"
[arms.x]
stages = ["base", "rsr-1", "rpr-1"]
[arms.y]
stages = ["base", "rsr-1", "rpr-1"]
overrides = ["stages.rpr-1.lam=0.5"]
"""


def written(tmp_path, *changes):
    text = TEXT.format(base=ROOT / "configs" / "tiny.toml")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "a.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_files_that_ship_have_arms_that_part_in_one_stage(path):
    plan = online.load(path)
    assert plan.shared >= 1
    parting = [c.stages[plan.shared : plan.shared + 1] for c in plan.arms.values()]
    assert any(stages != parting[0] for stages in parting)
    assert plan.ablation.reference in plan.arms


def test_arms_share_stages_up_to_the_first_difference(tmp_path):
    plan = online.load(written(tmp_path))
    assert plan.shared == 2
    assert [s.name for s in plan.arms["y"].stages] == ["base", "rsr-1", "rpr-1"]
    assert (plan.arms["x"].stages[2].lam, plan.arms["y"].stages[2].lam) == (0.95, 0.5)
    early = ('"stages.rpr-1.lam=0.5"', '"stages.base.steps=9", "stages.rpr-1.lam=0.5"')
    assert online.load(written(tmp_path, early)).shared == 0
    outside = ('"stages.rpr-1.lam=0.5"', '"train_tasks=500"')
    assert online.load(written(tmp_path, outside)).shared == 0


def test_overrides_reach_every_arm_before_its_own(tmp_path):
    plan = online.load(written(tmp_path), ["stages.rpr-1.lam=0.7", "stages.rpr-1.iterations=3"])
    assert [c.stages[2].lam for c in plan.arms.values()] == [0.7, 0.5]
    assert [c.stages[2].iterations for c in plan.arms.values()] == [3, 3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('reference = "x"', 'reference = "z"'), "reference = 'z': must be one of x, y"),
        (('question = "?"', 'query = "?"'), "question: field required"),
        (('"rsr-1", "rpr-1"]\noverrides', '"rsr"]\noverrides'), "arms.y.stages = 'rsr': must be"),
        (('["base", "rsr-1", "rpr-1"]\n[', '["rsr-1"]\n['), "the first stage must be base"),
        (("rpr-1.lam=0.5", "rpr-1.lam=5"), "stages.rpr-1.lam = 5: input should be less"),
        (('question = "?"', 'question = "?'), "not valid TOML"),
    ],
)
def test_mistakes_name_the_file_and_the_key(tmp_path, change, said):
    path = written(tmp_path, change)
    with pytest.raises(UserError, match=said):
        online.load(path)


def test_a_shared_warm_up_needs_equal_warm_ups(tmp_path):
    shared = ('reference = "x"', 'reference = "x"\nshared_warm_up = true')
    assert online.load(written(tmp_path, shared)).ablation.shared_warm_up
    other = ("stages.rpr-1.lam=0.5", "stages.rpr-1.warm_up_batches=2")
    with pytest.raises(UserError, match="shared_warm_up needs arms that differ in one last stage"):
        online.load(written(tmp_path, shared, other))


def stage_with(**settings):
    stage = config.load(ROOT / "configs" / "tiny.toml").stages[2]
    return stage.model_copy(update=settings)


def test_a_token_budget_decides_how_many_tasks_an_iteration_takes():
    """By hand: what is left of the budget, over the tokens of a task judged by the latest."""
    stage = stage_with(tokens_per_iteration=1000, tasks_per_iteration=100, samples=2)
    count = functools.partial(rpr._affordable, stage)
    assert count([], []) == 100
    assert count([], [10, 30]) == 25  # 1000 / (2 * 20)
    assert count([900], [10, 10]) == 55  # (2000 - 900) / 20
    assert count([1900], [10, 10]) == 5
    assert count([2100], [10, 10]) == 1
    assert count([0], [0, 0]) == 400  # a policy that falls silent costs no more than four times


def test_budgets_come_out_equal_whatever_the_length_of_episodes():
    """Two policies, one that grows terse, one verbose: both end within an iteration's error."""
    stage = stage_with(tokens_per_iteration=1600, samples=1)
    for drift in (0.97, 1.0, 1.03):
        rng = np.random.default_rng(0)
        spent, latest = [], rng.integers(5, 26, 512)
        for i in range(32):
            count = rpr._affordable(stage, spent, latest.tolist())
            latest = np.round(rng.integers(5, 26, count) * drift**i).astype(int)
            spent.append(int(latest.sum()))
        # Standard error of 110 episodes' mean is 4 %, the drift 3 %, of one of 32 iterations.
        assert sum(spent) == pytest.approx(32 * 1600, rel=0.01), drift


def test_the_bootstrap_is_exact_where_there_is_nothing_to_draw():
    same = paired_bootstrap([np.full(5, 0.25), np.full(3, 0.25)], np.random.default_rng(0))
    assert (same.mean, same.lo, same.hi, same.n) == (0.25, 0.25, 0.25, 2)
    with pytest.raises(ValueError, match="seeds that share a task"):
        paired_bootstrap([np.zeros(0)], np.random.default_rng(0))


def test_the_bootstrap_spreads_as_theory_says():
    """One seed: sd of the mean of n tasks is sd / sqrt(n). Many equal seeds: they add theirs."""
    rng = np.random.default_rng(1)
    d = rng.normal(0.0, 1.0, 400)
    one = paired_bootstrap([d], rng)
    expected = 2 * 1.96 * d.std() / np.sqrt(400)
    # 10,000 resamples: the quantiles' own error is about 1.5 % of the width.
    assert one.hi - one.lo == pytest.approx(expected, rel=0.06)
    offsets = rng.normal(0.0, 1.0, 30)
    many = paired_bootstrap([np.full(50, x) for x in offsets], rng)
    expected = 2 * 1.96 * offsets.std() / np.sqrt(30)
    assert many.hi - many.lo == pytest.approx(expected, rel=0.06)
    assert many.mean == pytest.approx(offsets.mean())


BUDGET = 240
SMALL = (
    *("train_tasks=64", "engine.sessions=16", "evaluation.tasks=16", "evaluation.repeats=2"),
    *("stages.base.steps=70", "stages.base.curriculum_steps=100", "stages.base.mistake_rate=0.0"),
    *("stages.base.warmup_steps=10", "stages.base.learning_rate=4e-3"),
    *("stages.rsr-1.tasks=24", "stages.rsr-1.epochs=2", "stages.rpr-1.iterations=2"),
    *("stages.rpr-1.tasks_per_iteration=12", "stages.rpr-1.samples=2"),
    *(f"stages.rpr-1.tokens_per_iteration={BUDGET}", "stages.rpr-1.minibatches=2"),
    *("stages.rpr-1.warm_up_batches=1", 'stages.rpr-1.tiers=["easy", "medium"]'),
    # Stages that no arm runs must be possible all the same.
    *("stages.rsr-2.tasks=24", "stages.rpr-2.tasks_per_iteration=12"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The arms of estimators.toml and one with other critic's settings, on the small recursion."""
    folder = tmp_path_factory.mktemp("ablation")
    shipped = (ROOT / "configs" / "ablations" / "estimators.toml").read_text()
    assert '"../tiny.toml"' in shipped
    arm = """
[arms.critic]
overrides = ["stages.rpr-1.critic_updates=2", "stages.rpr-1.lam_critic=1.0"]
stages = ["base", "rsr-1", "rpr-1"]
"""
    path = folder / "arms.toml"
    path.write_text(shipped.replace('"../tiny.toml"', f'"{ROOT}/configs/tiny.toml"') + arm)
    plan = online.load(path, SMALL)
    return plan, online.run(plan, [0], folder, NullObserver()), folder


def column(folder, arm, name):
    reader = SegmentReader(folder / "seed-0" / arm / "store")
    return np.concatenate(reader.read_columns("rpr-1/iteration-000.000", name))


@pytest.mark.lab
def test_arms_train_from_one_start(trained):
    """Tokens, rewards and values of the first iteration equal, bit for bit; advantages not."""
    plan, result, folder = trained
    assert plan.shared == 2
    for name in ("token", "gap-100", "critic"):
        for what in ("reward_t", "value_t"):
            mine, its = column(folder, name, what), column(folder, "tb", what)
            assert mine.tobytes() == its.tobytes(), (name, what)
        same = np.array_equal(
            column(folder, name, "advantage_t"), column(folder, "tb", "advantage_t")
        )
        assert same == (name == "critic")
    # lam_critic moves the targets alone: at 1 those of TB-GAE do not depend on the values.
    assert not np.array_equal(
        column(folder, "critic", "return_t"), column(folder, "tb", "return_t")
    )
    reader = SegmentReader(folder / "seed-0" / "start" / "store")
    warm_up = sum(x.sum() for x in reader.read_tokens("rpr-1/warm-up-0.000", "acted_t"))
    for of_seed in result.results.values():
        arm = of_seed[0]
        assert (arm.iterations, len(arm.by_task)) == (2, 16)
        # Two minibatches an iteration, more than the packed rows that so few episodes fill.
        assert arm.updates == 4
        # The warm-up is shared. An arm misses its budget by what the last iteration's
        # episodes, about 20 of 10 to 20 tokens, deviate from those before.
        assert arm.tokens - warm_up == pytest.approx(2 * BUDGET, rel=0.25)
        assert len(arm.explained_variance) == 2
        assert arm.commands >= 1
    assert set(result.differences) == {"token", "gap-100", "critic"}


@pytest.mark.lab
def test_a_finished_ablation_is_read_and_not_run_again(trained):
    plan, result, folder = trained
    before = sorted(p.stat().st_mtime_ns for p in folder.rglob("stages/*.json"))
    again = online.run(plan, [0], folder, NullObserver())
    assert again.results == result.results
    assert sorted(p.stat().st_mtime_ns for p in folder.rglob("stages/*.json")) == before
    page = ablations.online_page(again)
    assert [row[0] for row in page.sections[0].table.rows] == ["tb", "token", "gap-100", "critic"]


@pytest.mark.lab
def test_a_stage_trains_a_sigmoid_critic_with_frozen_mixers(trained):
    """From the same start: values in (0, 1), the mixers' bytes those of the actor's trunk."""
    _, _, folder = trained
    both = ("rpr-1", "rpr-2")
    options = [f"stages.{s}.value_loss=bce" for s in both]
    options += ["stages.rpr-1.frozen_attention=true", "stages.rpr-1.iterations=1"]
    resolved = config.load(ROOT / "configs" / "tiny.toml", [*SMALL, *options])
    resolved = resolved.model_copy(update={"stages": resolved.stages[:3]})
    mine = folder / "seed-0" / "bce"
    shutil.copytree(folder / "seed-0" / "start", mine)
    (mine / "config.toml").unlink()
    shutil.rmtree(mine / "checkpoints" / "rpr-1.partial")
    machine.run(resolved, mine, NullObserver())
    # An episode that sampled nothing has no values, and zeros stand for them.
    value = column(folder, "bce", "value_t")
    value = value[value != 0]
    assert 0.0 < value.min() < value.max() < 1.0
    last = record.read_all(mine)[-1]
    assert 0.0 < last.curves["critic/loss"][0] < np.log(2.0)
    vocab_size = shell_chat(vocabulary()).tokenizer.vocab_size
    architecture = model.preset("tiny", vocab_size=vocab_size)
    actor = model.abstract_params(architecture)
    like = {
        "actor": actor,
        "critic": jax.eval_shape(functools.partial(model.init_value_params, architecture), actor),
    }
    critic = checkpoint.restore(mine / "checkpoints" / "rpr-1", 0, like)["critic"]
    start = checkpoint.restore(mine / "checkpoints" / "rsr-1", 0, {"actor": actor})["actor"]
    moved = {"mixer": set(), "mlp": set()}
    trunk = {name: tree for name, tree in critic.items() if name != "value_head"}
    for (path, leaf), (_, old) in zip(
        jax.tree_util.tree_flatten_with_path(trunk)[0],
        jax.tree_util.tree_flatten_with_path({name: start[name] for name in trunk})[0],
        strict=True,
    ):
        for part, seen in moved.items():
            if f"'{part}'" in jax.tree_util.keystr(path):
                seen.add(np.asarray(leaf).tobytes() != np.asarray(old).tobytes())
    assert moved == {"mixer": {False}, "mlp": {True}}
