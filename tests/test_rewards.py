"""Family dense and success-prioritised rewards, and their audit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.records import Check, CheckResult, Task, Verdict
from trsi_jax.rewards import audit, family_medians, fdr, spr, verdict_fdr, verdict_spr

BETA, CAP = 0.4, 0.9


def task(family, n_effective, n_guard=0, name="t"):
    checks = [Check(f"e{i}", "effective", ("exists", str(i))) for i in range(n_effective)]
    checks += [Check(f"g{i}", "guard", ("exists", str(i))) for i in range(n_guard)]
    return Task(
        id=f"{family}-{name}",
        family=family,
        tier="easy",
        split="train",
        seed=0,
        instruction="",
        steps=(),
        files={},
        directories=(),
        checks=tuple(checks),
        oracle=(),
    )


def verdict(effective, guards=(), weights=None):
    weights = weights or [1.0] * len(effective)
    results = [
        CheckResult(f"e{i}", "effective", bool(p), w)
        for i, (p, w) in enumerate(zip(effective, weights, strict=True))
    ]
    results += [CheckResult(f"g{i}", "guard", bool(p)) for i, p in enumerate(guards)]
    return Verdict(tuple(results))


CHECKS = st.lists(st.booleans(), min_size=1, max_size=12)
GUARDS = st.lists(st.booleans(), max_size=4)
MEDIAN = st.floats(1, 12)


# --- fdr --------------------------------------------------------------------------------------


def test_fdr_by_hand():
    """3 of 4 checks, median 2: .75 x 4 / 2 = 1.5, a failure above 1 as in the published audit."""
    assert fdr(0.75, 4, 2) == 1.5
    np.testing.assert_array_equal(fdr(np.array([0.0, 1.0]), np.array([4, 4]), 4), [0.0, 1.0])


def test_medians_come_from_the_manifests():
    tasks = [task("a", n, n_guard=3, name=str(n)) for n in (1, 2, 9)] + [task("b", 4)]
    assert family_medians(tasks) == {"a": 2.0, "b": 4.0}
    assert verdict_fdr(verdict([1, 0]), "a", {"a": 2.0}) == 0.5


def test_a_task_without_effective_checks_has_no_scale():
    with pytest.raises(ValueError, match="task a-t has no effective check"):
        family_medians([task("a", 0, n_guard=1)])


def test_unknown_family_is_named():
    with pytest.raises(ValueError, match="no median for family 'c'; known: a, b"):
        verdict_fdr(verdict([1]), "c", {"a": 1.0, "b": 1.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.5, 1, 1), r"progress must be in \[0, 1\], got 1.5"),
        ((np.nan, 1, 1), r"progress must be in \[0, 1\], got nan"),
        ((0.5, 0, 1), "n_effective must be >= 1, got 0"),
        ((0.5, 1, 0), "median_effective must be > 0, got 0"),
    ],
)
def test_fdr_refuses_impossible_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        fdr(*arguments)


# --- invariants -------------------------------------------------------------------------------


@settings(deadline=None)
@given(n=st.integers(1, 12), guards=st.integers(0, 4), median=MEDIAN)
def test_doing_nothing_scores_exactly_zero(n, guards, median):
    """On the untouched sandbox every effective check fails and every guard holds."""
    untouched = verdict([False] * n, [True] * guards)
    assert verdict_fdr(untouched, "f", {"f": median}) == 0.0
    assert verdict_spr(untouched, "f", {"f": median}, beta=BETA, cap=CAP) == 0.0


@settings(deadline=None)
@given(effective=CHECKS, guards=GUARDS, median=MEDIAN, data=st.data())
def test_one_check_more_never_scores_less(effective, guards, median, data):
    passed = effective + guards
    i = data.draw(st.integers(0, len(passed) - 1))
    more = [*passed[:i], True, *passed[i + 1 :]]
    n = len(effective)
    before, after = verdict(passed[:n], passed[n:]), verdict(more[:n], more[n:])
    medians = {"f": median}
    assert verdict_fdr(after, "f", medians) >= verdict_fdr(before, "f", medians)
    settings_ = {"beta": BETA, "cap": CAP}
    assert verdict_spr(after, "f", medians, **settings_) >= verdict_spr(
        before, "f", medians, **settings_
    )


@settings(deadline=None)
@given(
    success=st.tuples(st.integers(1, 12), MEDIAN),
    failure=st.tuples(CHECKS, GUARDS, MEDIAN),
    beta=st.floats(0, 0.999),
    cap=st.floats(0, 0.999),
    success_reward=st.floats(1, 5),
)
def test_any_success_beats_any_failure_in_any_family(success, failure, beta, cap, success_reward):
    (n, median_a), (effective, guards, median_b) = success, failure
    failed = verdict([*effective, False], guards)
    options = {"beta": beta, "cap": cap, "success_reward": success_reward}
    medians = {"a": median_a, "b": median_b}
    won = verdict_spr(verdict([True] * n), "a", medians, **options)
    lost = verdict_spr(failed, "b", medians, **options)
    assert won == success_reward
    assert lost < 1 <= won


@settings(deadline=None)
@given(effective=CHECKS, guards=GUARDS, median=MEDIAN, order=st.randoms())
def test_the_order_of_checks_does_not_matter(effective, guards, median, order):
    first = verdict(effective, guards)
    shuffled = list(first.results)
    order.shuffle(shuffled)
    medians = {"f": median}
    assert verdict_fdr(first, "f", medians) == pytest.approx(
        verdict_fdr(Verdict(tuple(shuffled)), "f", medians)
    )


def test_a_check_repeated_in_a_manifest_counts_once_for_the_family():
    repeated = task("a", 2)
    object.__setattr__(repeated, "checks", repeated.checks * 3)
    assert family_medians([repeated]) == {"a": 2.0}


def test_a_broken_guard_never_raises_progress():
    """Effective share 1, one of two guards broken: p = 1 x 1/2."""
    assert verdict_fdr(verdict([1, 1], [1, 0]), "f", {"f": 2.0}) == 0.5


# --- spr --------------------------------------------------------------------------------------


def test_spr_by_hand():
    """A failure keeps beta x FDR up to the cap: .5 x 1.5 = .75; .5 x 4 = 2 is cut to .9."""
    got = spr(np.array([True, False, False]), np.array([9.0, 1.5, 4.0]), beta=0.5, cap=0.9)
    np.testing.assert_allclose(got, [1.0, 0.75, 0.9])


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 1.0, "cap": 0.5},
        {"beta": 0.5, "cap": 1.0},
        {"beta": 0.5, "cap": 0.5, "success_reward": 0.9},
        {"beta": -0.1, "cap": 0.5},
        {"beta": float("nan"), "cap": 0.5},
    ],
)
def test_spr_refuses_settings_that_let_a_failure_win(options):
    with pytest.raises(ValueError, match="need 0 <= beta < 1 and 0 <= cap < 1 <= success_reward"):
        spr(True, 1.0, **options)


def test_spr_refuses_what_is_no_verdict():
    with pytest.raises(ValueError, match="strict_success must be bool"):
        spr(0.5, 1.0, beta=BETA, cap=CAP)
    with pytest.raises(ValueError, match="r_fdr must be finite and >= 0"):
        spr(False, float("nan"), beta=BETA, cap=CAP)


# --- audit ------------------------------------------------------------------------------------


def test_audit_by_hand():
    """Family a: 1 and 1 (failed); family b: 2 (failed) and 0. Total 4, failed 3; means 1 and 1."""
    got = audit([1.0, 1.0, 2.0, 0.0], [True, False, False, False], ["a", "a", "b", "b"])
    assert (got.trajectories, got.families) == (4, 2)
    assert got.failed_share == 0.75
    assert got.failed_at_least_one == 2
    assert got.std_families == 0.0
    assert got.std_trajectories == pytest.approx(np.sqrt(0.5))


def test_audit_of_a_pool_that_never_paid():
    assert audit([0.0, 0.0], [False, False], ["a", "b"]).failed_share == 0.0


def synthetic(seed, n=4352, families=46):
    """Families of different check scale; so many succeed that failures get half of the FDR."""
    rng = np.random.default_rng(seed)
    family = rng.integers(0, families, n)
    scale = rng.integers(1, 12, families)
    n_effective = np.maximum(scale[family] + rng.integers(-1, 2, n), 1)
    success = rng.random(n) < 0.3
    passed = np.where(success, n_effective, rng.binomial(n_effective - 1, 0.5))
    medians = {f: float(np.median(n_effective[family == f])) for f in range(families)}
    dense = fdr(passed / n_effective, n_effective, np.array([medians[f] for f in family]))
    return dense, success, [str(f) for f in family]


@pytest.mark.parametrize("seed", range(3))
def test_spr_moves_reward_from_failures_to_successes(seed):
    dense, success, family = synthetic(seed)
    before = audit(dense, success, family)
    after = audit(spr(success, dense, beta=BETA, cap=CAP), success, family)
    assert before.failed_at_least_one > 0
    assert after.failed_at_least_one == 0
    assert after.failed_share < 0.6 * before.failed_share


def test_beta_of_two_fifths_gives_the_published_shift():
    """Equal pay to failures and successes under FDR, none above the cap: .4 / 1.4 = 28.6 %.

    Published: 50.09 % -> 28.72 %.
    """
    success = np.array([True, False, False])
    dense = np.array([1.0, 0.4991, 0.5027])
    names = ["a", "b", "b"]
    assert audit(dense, success, names).failed_share == pytest.approx(0.5009, abs=1e-3)
    after = audit(spr(success, dense, beta=0.4, cap=CAP), success, names)
    assert after.failed_share == pytest.approx(0.2872, abs=2e-3)


def test_audit_names_what_does_not_fit():
    with pytest.raises(ValueError, match="equally long"):
        audit([1.0], [True, False], ["a"])
    with pytest.raises(ValueError, match="trajectory 1 has a reward not finite"):
        audit([1.0, float("nan")], [True, False], ["a", "b"])
