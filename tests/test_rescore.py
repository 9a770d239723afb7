"""The same trajectories under several rewards, and the published audit beside ours."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.records import CheckResult, Fault, Verdict
from rollout.store.segments import SegmentWriter
from tests.store_data import VOCAB, make
from trsi_jax.cli.main import call
from trsi_jax.rewards import fdr, verdict_fdr
from trsi_jax.rewards.rescore import KINDS, published, rescore, stored_medians

BETA, CAP = 0.4, 0.9


def trajectories(n: int, families: int, seed: int = 0) -> list:
    """Families of different check scale; so many succeed that failures get half of the FDR."""
    rng = np.random.default_rng(seed)
    scale = rng.integers(1, 12, families)
    found = []
    for i in range(n):
        family = int(rng.integers(families))
        task = int(rng.integers(10))
        checks = max(1, int(scale[family]) + task % 3 - 1)
        success = rng.random() < 0.3
        passed = checks if success else int(rng.binomial(checks - 1, 0.5))
        results = [CheckResult(f"e{j}", "effective", j < passed) for j in range(checks)]
        results.append(CheckResult("g", "guard", bool(success or rng.random() < 0.8)))
        found.append(
            make(
                f"t{i}",
                task_id=f"f{family}-{task}",
                family=f"f{family}",
                tier=("easy", "medium", "hard", "extreme")[family % 4],
                stage=("rsr-1", "rpr-1")[i % 2],
                verdict=Verdict(tuple(results)),
            )
        )
    return found


@pytest.fixture(scope="module")
def synthetic():
    """As many trajectories and families as the published audit has."""
    found = trajectories(4352, 46)
    return rescore(found, stored_medians(found), beta=BETA, cap=CAP)


def test_the_synthetic_audit_shifts_as_the_published_one(synthetic):
    """Published: failed share 50.09 % -> 28.72 %, failed >= 1 158 -> 0, both deviations rise."""
    audits = synthetic.audits()
    dense, prioritised = audits["fdr"], audits["spr"]
    assert (dense.trajectories, dense.families) == (4352, 46)
    assert dense.failed_at_least_one > 0
    assert prioritised.failed_at_least_one == 0
    assert prioritised.failed_share < 0.6 * dense.failed_share
    assert audits["strict"].failed_share == 0.0


def test_groups_add_up_to_the_whole(synthetic):
    for key in ("family", "stage", "tier"):
        groups = synthetic.groups(key)
        sizes = np.array([g.trajectories for g in groups.values()])
        assert sizes.sum() == 4352
        for kind in KINDS:
            means = np.array([g.mean[kind] for g in groups.values()])
            assert (sizes * means).sum() / 4352 == pytest.approx(synthetic.rewards[kind].mean())
        success = np.array([g.success for g in groups.values()])
        assert (sizes * success).sum() == pytest.approx(synthetic.success.sum())


def test_the_published_rows_are_labelled_numbers_of_the_paper():
    paper = published()
    assert set(paper) == {"fdr", "spr"}
    assert (paper["fdr"].failed_share, paper["spr"].failed_share) == (0.5009, 0.2872)
    assert (paper["fdr"].failed_at_least_one, paper["spr"].failed_at_least_one) == (158, 0)
    assert (paper["fdr"].std_families, paper["spr"].std_families) == (0.34, 0.47)
    assert (paper["fdr"].std_trajectories, paper["spr"].std_trajectories) == (0.50, 0.59)


def test_rewards_by_hand():
    """Medians: family f has tasks of 2 and 4 checks: 3. Half of 4 checks: .5 x 4 / 3."""

    def verdict(*passed):
        return Verdict(tuple(CheckResult(f"e{i}", "effective", p) for i, p in enumerate(passed)))

    found = [
        make("a", family="f", task_id="x", verdict=verdict(True, True)),
        make("b", family="f", task_id="y", verdict=verdict(True, True, False, False)),
        make("c", family="f", task_id="y", verdict=None, finish="fault", fault=Fault("v", "")),
    ]
    assert stored_medians(found) == {"f": 3.0}
    scores = rescore(found, {"f": 3.0}, beta=0.5, cap=0.9, success_reward=2.0)
    assert scores.masked == 1
    np.testing.assert_allclose(scores.rewards["strict"], [1, 0])
    np.testing.assert_allclose(scores.rewards["progress"], [1, 0.5])
    np.testing.assert_allclose(scores.rewards["fdr"], [2 / 3, 2 / 3])
    np.testing.assert_allclose(scores.rewards["spr"], [2.0, 1 / 3])


def test_what_does_not_fit_is_named():
    one = make("a")
    medians = {"count-lines": 1.0}
    with pytest.raises(ValueError, match="trajectory a was given twice"):
        rescore([one, one], medians, beta=BETA, cap=CAP)
    with pytest.raises(ValueError, match="none of 0 trajectories was graded"):
        rescore([], medians, beta=BETA, cap=CAP)
    with pytest.raises(ValueError, match="no median for family 'count-lines'"):
        rescore([one], {}, beta=BETA, cap=CAP)


@settings(deadline=None, max_examples=30)
@given(
    effective=st.lists(st.booleans(), min_size=1, max_size=8),
    copies=st.lists(st.integers(0, 7), max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_order_and_duplication_of_reported_checks_do_not_matter(effective, copies, order):
    results = [CheckResult(f"e{i}", "effective", p, 1.0 + i) for i, p in enumerate(effective)]
    results.append(CheckResult("g", "guard", True))
    medians = {"f": 3.0}
    plain = verdict_fdr(Verdict(tuple(results)), "f", medians)
    again = results + [results[i] for i in copies if i < len(results)]
    order.shuffle(again)
    assert verdict_fdr(Verdict(tuple(again)), "f", medians) == pytest.approx(plain)
    q = sum(r.weight for r in results[:-1] if r.passed) / sum(r.weight for r in results[:-1])
    assert plain == pytest.approx(fdr(q, len(effective), 3.0))


def test_trsi_rescore_prints_the_rows_and_writes_the_files(tmp_path, capsys):
    writer = SegmentWriter(tmp_path / "run" / "store", vocab_size=VOCAB)
    writer.write("rsr-1/discover", trajectories(120, 6))
    assert call(["rescore", str(tmp_path / "run"), "--beta", "0.4", "--cap", "0.9"]) == 0
    shown = capsys.readouterr().out
    assert "120 graded trajectories, 0 masked" in shown
    for part in ("50.09", "28.72", "158", "paper fdr", "paper spr", "failed with reward >= 1"):
        assert part in shown
    for part in ("rsr-1", "rpr-1", "easy", "extreme", "f0", "f5"):
        assert part in shown
    folder = tmp_path / "run" / "rescore"
    content = json.loads((folder / "rescore.json").read_text())
    assert len(content["trajectories"]) == 120
    assert set(content["audit"]) == set(KINDS)
    assert content["audit"]["spr"]["failed_at_least_one"] == 0
    for plot in ("spread.svg", "families.svg"):
        assert (folder / plot).read_text().startswith("<svg ")
    capsys.readouterr()
    assert call(["rescore", str(tmp_path / "run" / "store"), "--stage", "rsr-1"]) == 0
    assert "60 graded trajectories" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "no trajectory store at"),
        (("--stage", "rsr-9"), "--stage rsr-9: "),
        (("--beta", "1.5"), "need 0 <= beta < 1"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, capsys, options, message):
    if options:
        writer = SegmentWriter(tmp_path / "store", vocab_size=VOCAB)
        writer.write("s", trajectories(4, 1))
    assert call(["rescore", str(tmp_path / "store"), *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
