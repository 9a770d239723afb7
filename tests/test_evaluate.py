"""Evaluation numbers. References are brute force, scipy, or worked in the test."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats

from rollout.errors import VerifierError
from rollout.records import CheckResult, Fault, Trajectory, Verdict
from trsi_jax.evaluate import protocol, seeds, stats


def attempt(
    task: str,
    sample: int,
    passed: int | None,
    *,
    tier: str = "easy",
    family: str = "rename",
) -> Trajectory:
    """An attempt that passes `passed` of two effective checks; None: masked by a fault."""
    n = 3
    checks = tuple(CheckResult(f"c{i}", "effective", i < (passed or 0)) for i in range(2))
    return Trajectory(
        id=f"{task}/{sample}",
        task_id=task,
        family=family,
        tier=tier,
        split="test",
        harness="general",
        stage="base",
        iteration=0,
        sample=sample,
        seed=sample,
        engine="scripted",
        temperature=0.6,
        token_ids=np.arange(n, dtype=np.int32),
        acted_t=np.array([False, True, True]),
        logprob_t=np.zeros(n, np.float32),
        turn_t=np.zeros(n, np.int32),
        weight_version_t=np.array([-1, 0, 0], np.int32),
        turns=(),
        finish="fault" if passed is None else "done",
        verdict=None if passed is None else Verdict(checks),
        fault=Fault("sandbox-dead", "engine restarted") if passed is None else None,
    )


def test_mean_at_k_is_the_mean_over_tasks_of_the_means_over_attempts() -> None:
    # Task means 2/3, 0, 1: the task with one attempt weighs as much as that with three.
    got = stats.mean_at_k([[1, 0, 1], [0, 0], [1]])
    np.testing.assert_allclose(got, [2 / 3, 0, 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("outcomes", [[], [[1.0], []]])
def test_mean_at_k_wants_graded_attempts(outcomes: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="task"):
        stats.mean_at_k(outcomes)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 8, 29, 127, 128])
def test_student_quantile_equals_scipy(degrees: int) -> None:
    expected = scipy.stats.t.ppf(0.975, degrees)
    assert stats.student_quantile_975(degrees) == pytest.approx(expected, rel=1e-9)


def test_wilson_bounds_solve_their_equation() -> None:
    # At a bound b, |p - b| is exactly z sqrt(b (1 - b) / n_eff), n_eff by its definition in plain
    # Python from the cluster-robust variance.
    rng = np.random.default_rng(7)
    m = rng.binomial(3, rng.beta(0.7, 0.9, 60)) / 3
    got = stats.clustered_proportion(m)
    p = sum(m) / 60
    squared_error = sum((x - p) ** 2 for x in m) / (60 * 59)
    n_eff = p * (1 - p) / squared_error
    assert got.mean == pytest.approx(p, abs=1e-12)
    for bound in (got.lo, got.hi):
        half = 1.959963984540054 * math.sqrt(bound * (1 - bound) / n_eff)
        assert abs(p - bound) == pytest.approx(half, abs=1e-9)


def test_independent_attempts_give_the_ordinary_wilson_interval() -> None:
    # One attempt a task: SE^2 = p (1 - p) / (n - 1), so n_eff = n - 1 exactly.
    got = stats.clustered_proportion([1.0] * 30 + [0.0] * 71)
    lo, hi = scipy.stats.binomtest(30, 101).proportion_ci(method="wilson")
    # The same formula with 100 in place of 101 for n at p = 30 / 101.
    z2 = 1.959963984540054**2
    p = 30 / 101
    centre, spread = p + z2 / 200, math.sqrt(z2) * math.sqrt(p * (1 - p) / 100 + z2 / 40_000)
    assert got.lo == pytest.approx((centre - spread) / (1 + z2 / 100), abs=1e-12)
    assert got.hi == pytest.approx((centre + spread) / (1 + z2 / 100), abs=1e-12)
    assert (got.lo, got.hi) == pytest.approx((lo, hi), abs=1e-3)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_unanimous_tasks_do_not_give_certainty(value: float) -> None:
    # Wilson at p = 0: [0, z^2 / (n + z^2)].
    got = stats.clustered_proportion([value] * 20)
    z2 = 1.959963984540054**2
    assert got.hi - got.lo == pytest.approx(z2 / (20 + z2), abs=1e-12)
    assert got.lo <= value <= got.hi


def test_the_interval_covers_and_its_width_counts_tasks_not_attempts() -> None:
    # Brute force: the true mean of Beta(0.7, 1.1) task difficulties is 0.7 / 1.8; 64 tasks, three
    # attempts. 2,000 draws put the coverage of a 95 % interval within about 1 point (2 sd).
    rng = np.random.default_rng(3)
    truth = 0.7 / 1.8
    covered, naive = 0, 0
    for _ in range(2000):
        passes = rng.binomial(3, rng.beta(0.7, 1.1, 64))
        got = stats.clustered_proportion(passes / 3)
        covered += got.lo <= truth <= got.hi
        p = passes.sum() / 192
        naive += abs(p - truth) <= 1.96 * math.sqrt(p * (1 - p) / 192)
    assert 0.935 < covered / 2000 < 0.97
    # An interval that takes attempts as independent is too narrow on the same draws.
    assert naive / 2000 < 0.88


def test_the_bootstrap_over_tasks_agrees() -> None:
    rng = np.random.default_rng(11)
    m = rng.binomial(3, rng.beta(2, 2, 200)) / 3
    draws = m[rng.integers(0, 200, (20_000, 200))].mean(1)
    got = stats.clustered_proportion(m)
    # Both are 95 % intervals of the same mean; 1 point is a seventh of their width.
    assert (got.lo, got.hi) == pytest.approx(tuple(np.quantile(draws, (0.025, 0.975))), abs=0.01)


@pytest.mark.parametrize("means", [[], [0.5, 1.5], [-0.1], [[0.5]]])
def test_a_proportion_refuses_what_is_none(means: list[float]) -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\]|non-empty"):
        stats.clustered_proportion(means)


def test_paired_difference_equals_the_paired_t_interval_on_shared_tasks() -> None:
    rng = np.random.default_rng(5)
    before = {f"t{i}": float(rng.integers(0, 4)) / 3 for i in range(40)}
    after = {f"t{i}": float(rng.integers(0, 4)) / 3 for i in range(10, 60)}
    shared = [f"t{i}" for i in range(10, 40)]
    test = scipy.stats.ttest_rel([after[t] for t in shared], [before[t] for t in shared])
    expected = test.confidence_interval(0.95)
    got = stats.paired_difference(before, after)
    assert got.n == 30
    assert (got.lo, got.hi) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_pairing_needs_a_shared_task() -> None:
    with pytest.raises(ValueError, match="both evaluations"):
        stats.paired_difference({"a": 1.0}, {"b": 1.0})
    assert stats.paired_difference({"a": 0.0}, {"a": 1.0}) == stats.Estimate(1.0, -1.0, 1.0, 1)


def test_student_mean_equals_scipy_and_one_value_has_no_spread() -> None:
    values = [0.61, 0.64, 0.7, 0.66, 0.58]
    expected = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    got = stats.student_mean(values)
    assert (got.lo, got.hi) == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert stats.student_mean([0.5]) == stats.Estimate(0.5, -math.inf, math.inf, 1)


def test_evaluation_excludes_and_counts_masked_attempts() -> None:
    # a: strict 1, 0 (progress 1, 1/2); b: masked, 1; c: all masked; d: 0 of 2 checks, twice.
    attempts = [
        attempt("a", 0, 2),
        attempt("a", 1, 1),
        attempt("b", 0, None),
        attempt("b", 1, 2, tier="extreme", family="tree"),
        attempt("c", 0, None),
        attempt("d", 0, 0, tier="extreme", family="tree"),
        attempt("d", 1, 0, tier="extreme", family="tree"),
    ]
    got = protocol.evaluate(attempts)
    assert got.strict_success.mean == pytest.approx((0.5 + 1 + 0) / 3)
    assert got.progress == pytest.approx((0.75 + 1 + 0) / 3)
    assert (got.attempts, got.masked, got.ungraded_tasks) == (5, 2, ("c",))
    assert list(got.tiers) == ["easy", "extreme"]
    assert {name: e.mean for name, e in got.tiers.items()} == {"easy": 0.5, "extreme": 0.5}
    assert {name: (e.mean, e.n) for name, e in got.families.items()} == {
        "rename": (0.5, 1),
        "tree": (0.5, 2),
    }


def test_evaluation_does_not_depend_on_the_order_of_collection() -> None:
    rng = np.random.default_rng(2)
    attempts = [attempt(f"t{i % 30}", i // 30, int(rng.integers(0, 3))) for i in range(90)]
    shuffled = [attempts[i] for i in rng.permutation(90)]
    assert protocol.evaluate(shuffled) == protocol.evaluate(attempts)


def test_a_fault_never_scores_zero() -> None:
    graded = [attempt("a", 0, 2), attempt("b", 0, 2)]
    with_fault = [*graded, attempt("a", 1, None), attempt("b", 1, None)]
    assert protocol.evaluate(with_fault).strict_success == protocol.evaluate(graded).strict_success


def test_evaluation_refuses_what_cannot_be_graded() -> None:
    with pytest.raises(VerifierError, match=r"none of 2 .*sandbox-dead: engine restarted"):
        protocol.evaluate([attempt("a", 0, None), attempt("a", 1, None)])
    with pytest.raises(VerifierError, match="none of 0"):
        protocol.evaluate([])
    with pytest.raises(ValueError, match="given twice"):
        protocol.evaluate([attempt("a", 0, 1), attempt("a", 0, 1)])
    moved = dataclasses.replace(attempt("a", 1, 1), tier="hard")
    with pytest.raises(ValueError, match="task a appears as"):
        protocol.evaluate([attempt("a", 0, 1), moved])


def test_gain_pairs_tasks() -> None:
    before = protocol.evaluate([attempt(f"t{i}", 0, 0) for i in range(10)])
    after = protocol.evaluate([attempt(f"t{i}", 0, 2 if i < 4 else 0) for i in range(10)])
    got = protocol.gain(before, after)
    assert got.mean == pytest.approx(0.4)
    assert protocol.gain(after, before).mean == pytest.approx(-0.4)
    # Student over ten differences, four of them 1.
    half = scipy.stats.t.ppf(0.975, 9) * np.std([1.0] * 4 + [0.0] * 6, ddof=1) / math.sqrt(10)
    assert got.hi == pytest.approx(0.4 + half, abs=1e-9)


def test_seeds_aggregate_keeps_every_seed() -> None:
    got = seeds.aggregate({3: {"base": 0.1, "rsr-1": 0.4}, 1: {"base": 0.2, "rsr-1": 0.6}})
    assert [stage.name for stage in got] == ["base", "rsr-1"]
    assert got[1].by_seed == {1: 0.6, 3: 0.4}
    # Two values 0.2 apart: sd = 0.1 sqrt(2), half width t(0.975, 1) sd / sqrt(2) = 1.2706.
    assert got[1].strict_success.mean == pytest.approx(0.5)
    assert got[1].strict_success.hi - 0.5 == pytest.approx(1.27062, abs=1e-5)
    with pytest.raises(ValueError, match="different stages"):
        seeds.aggregate({0: {"base": 0.1}, 1: {"rsr-1": 0.1}})
    with pytest.raises(ValueError, match="at least one seed"):
        seeds.aggregate({})
