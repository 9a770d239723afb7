"""Estimators on stored trajectories: what must not hear of logs does not, by exact comparison."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import scipy.stats

from rollout.records import CheckResult, Verdict
from rollout.store.segments import SegmentWriter
from tests.test_store import VOCAB, make
from trsi_jax.cli.main import call
from trsi_jax.lab import stored
from trsi_jax.lab.arms import STANDARD
from trsi_jax.lab.stored import Episode

COUNTING = ("gap", "unmasked", "zeroed")
GROUPED = ("RLOO", "GRPO", "Dr. GRPO")
SOUND = tuple(arm.name for arm in STANDARD if arm.name not in COUNTING)
ALONE = tuple(name for name in SOUND if name not in GROUPED)


def episode(i, rng):
    """Three turns of two actions, logs of 1 to 9 tokens, the outcome on the last action."""
    acted, turn = [False, False], [0, 0]
    for k in range(3):
        n = int(rng.integers(1, 10)) if k < 2 else 1
        acted += [True, True] + [False] * n
        turn += [k] * (2 + n)
    acted, turn = np.array(acted), np.array(turn, np.int32)
    good = bool(rng.random() < 0.5)
    reward = np.zeros(acted.size, np.float32)
    reward[np.flatnonzero(acted)[-1]] = good
    value = rng.normal(0.5, 0.2, acted.size).astype(np.float32)
    return Episode(f"e{i}", f"task {i // 4}", reward, value, acted, turn, good)


@pytest.fixture(scope="module")
def episodes():
    rng = np.random.default_rng(0)
    return [episode(i, rng) for i in range(24)]


@pytest.fixture(scope="module")
def comparison(episodes):
    return stored.compare(episodes)


def test_logs_change_no_bit_of_a_sound_estimator_and_all_of_the_wrong_ones(comparison):
    rows = {row.arm: row for row in comparison.rows}
    assert (comparison.groups, comparison.notes) == (1.0, ())
    for name in SOUND:
        for s in rows[name].sensitivity:
            assert (s.change, s.flipped, s.rank) == (0.0, 0.0, pytest.approx(1.0))
    for name in COUNTING:
        assert all(s.change > 0.01 for s in rows[name].sensitivity), name


def test_without_logs_the_gap_is_token_gae(episodes):
    """The trailing observation stays, and the recursions over all slots read it; gap does not."""
    bare = [e.with_logs(0.0) for e in episodes]
    rows = {row.arm: row for row in stored.compare(bare, factors=()).rows}
    assert rows["gap"].mean == pytest.approx(rows["token"].mean, abs=1e-6)
    assert rows["gap"].spread == pytest.approx(rows["token"].spread, abs=1e-6)


def test_figures_against_numpy_and_scipy(episodes, comparison):
    """TB and MC recomputed by their definitions; ranks by scipy."""
    tb, mc, returns = [], [], []
    for e in episodes:
        at = np.flatnonzero(e.acted_t)
        outcome = float(e.reward_t.sum())
        v = e.value_t[at].astype(np.float64)
        a = np.zeros(6)
        after = 0.0
        for j in reversed(range(6)):
            last = j % 2 == 1
            g, gl = (0.99, 0.99 * 0.95) if last else (1.0, 1.0)
            following = v[j + 1] if j < 5 else 0.0
            after = a[j] = e.reward_t[at[j]] + g * following - v[j] + gl * after
        tb.append(a)
        mc.append(outcome - v)
        returns.append(np.full(6, outcome))
    tb, mc, returns = (np.concatenate(x) for x in (tb, mc, returns))
    rows = {row.arm: row for row in comparison.rows}
    assert comparison.tokens == tb.size
    assert rows["TB"].mean == pytest.approx(tb.mean(), abs=1e-6)
    assert rows["TB"].spread == pytest.approx(tb.std(), rel=1e-5)
    assert rows["TB"].variance_ratio == pytest.approx(tb.var() / mc.var(), rel=1e-5)
    assert rows["MC"].rank == pytest.approx(scipy.stats.spearmanr(mc, tb)[0], abs=1e-6)
    assert rows["MC"].sign_agreement == pytest.approx(np.mean(np.sign(mc) == np.sign(tb)))
    target = tb + np.concatenate([e.value_t[e.acted_t] for e in episodes])
    assert rows["TB"].return_explained == pytest.approx(
        1 - (returns - target).var() / returns.var(), abs=1e-5
    )
    assert rows["MC"].return_explained == pytest.approx(1.0)


def test_stretched_logs_keep_the_actions(episodes):
    e = episodes[0]
    for factor in (0.0, 0.5, 3.0):
        longer = e.with_logs(factor)
        at, to = np.flatnonzero(e.acted_t), np.flatnonzero(longer.acted_t)
        for name in ("reward_t", "value_t", "turn_t"):
            np.testing.assert_array_equal(getattr(e, name)[at], getattr(longer, name)[to])
        logs = np.diff(at)[1:4:2] - 1
        np.testing.assert_array_equal(np.diff(to)[1:4:2] - 1, np.round(factor * logs))
        assert to[0] == at[0]
        assert longer.acted_t.size - to[-1] == e.acted_t.size - at[-1]


def test_a_task_tried_once_says_nothing_of_groups(episodes):
    alone = [dataclasses.replace(e, task=e.id) for e in episodes]
    result = stored.compare(alone, factors=())
    assert [row.arm for row in result.rows] == [*ALONE, "RLOO of batch", *COUNTING]
    assert result.groups == 0.0
    assert result.notes[0].startswith(
        "RLOO, GRPO, Dr. GRPO: left out, for every task was tried once"
    )
    assert "samples above 1" in result.notes[0]
    # One batch: every episode against the mean of the others.
    outcome = np.array([float(e.success) for e in episodes])
    others = (outcome.sum() - outcome) / (len(outcome) - 1)
    (row,) = (r for r in result.rows if r.arm == "RLOO of batch")
    assert row.spread == pytest.approx((outcome - others).std(), abs=1e-6)
    apart = [dataclasses.replace(e, batch=e.id) for e in alone]
    assert [r.arm for r in stored.compare(apart, factors=()).rows] == [*ALONE, *COUNTING]


def test_some_tasks_tried_once_are_said_to_be(episodes):
    mixed = [dataclasses.replace(e, task=e.id) if i < 6 else e for i, e in enumerate(episodes)]
    result = stored.compare(mixed, factors=())
    assert [row.arm for row in result.rows] == [*SOUND, *COUNTING]
    assert result.groups == 0.75
    assert result.notes == (
        "25 % of the episodes are the only one of their task: RLOO, GRPO, Dr. GRPO give them 0.",
    )


def test_a_limit_draws_whole_groups_in_their_order(episodes):
    few = stored.drawn(episodes, 10, np.random.default_rng(0))
    assert len(few) == 8
    assert [e for e in episodes if e in few] == few
    assert all(sum(e.task == f.task for e in few) == 4 for f in few)
    assert stored.drawn(episodes, 24, np.random.default_rng(0)) == episodes
    other = stored.drawn(episodes, 10, np.random.default_rng(1))
    assert [e.id for e in other] != [e.id for e in few]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward_t": lambda x: x.astype(np.int64)}, "rewards must be floating point, got int64"),
        ({"reward_t": lambda x: x * np.float32(np.nan)}, "reward nan at token 0 is not finite"),
        ({"reward_t": lambda x: np.roll(x + (x == x.max()), 1)}, "stands on a token the policy"),
        ({"turn_t": lambda x: x[::-1].copy()}, "turns go backwards at token"),
        ({"value_t": lambda x: x * np.float32(np.inf)}, "the critic's values are not finite"),
    ],
)
def test_what_an_estimator_would_lose_is_refused_by_name(episodes, change, said):
    ((name, fn),) = change.items()
    bad = dataclasses.replace(episodes[1], **{name: fn(getattr(episodes[1], name))})
    with pytest.raises(ValueError, match=f"trajectory e1: .*{said}"):
        stored.compare([episodes[0], bad])


def test_trsi_ablate_stored_reads_a_run(tmp_path, capsys):
    rng = np.random.default_rng(1)
    found, reward, value = [], [], []
    for i in range(12):
        good = bool(i % 2)
        t = make(f"t{i}", stage="rpr-1", verdict=Verdict((CheckResult("e", "effective", good),)))
        found.append(t)
        reward.append(np.zeros(t.acted_t.size, np.float32))
        reward[-1][np.flatnonzero(t.acted_t)[-1]] = good
        value.append(rng.random(t.acted_t.size).astype(np.float32))
    writer = SegmentWriter(tmp_path / "store", vocab_size=VOCAB)
    writer.write("rpr-1/iteration-000.000", found)
    assert call(["ablate", "stored", str(tmp_path)]) == 2
    assert "no trajectory has values yet" in capsys.readouterr().err
    writer.write_columns("rpr-1/iteration-000.000", "reward_t", reward)
    writer.write_columns("rpr-1/iteration-000.000", "value_t", value)
    assert call(["ablate", "stored", str(tmp_path), "--factor", "2"]) == 0
    content = json.loads((tmp_path / "ablate-stored" / "stored.json").read_text())
    assert content["episodes"] == 12
    assert [s["factor"] for s in content["rows"][0]["sensitivity"]] == [2.0]
    assert "sign = TB" in capsys.readouterr().out
    assert call(["ablate", "stored", str(tmp_path), "--stage", "rpr-2"]) == 2
    assert "--stage rpr-2:" in capsys.readouterr().err
