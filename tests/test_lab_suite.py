"""The default study on small worlds: bookkeeping, rules, and its page."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from trsi_jax.cli.main import call
from trsi_jax.lab import suite
from trsi_jax.lab.arms import STANDARD
from trsi_jax.lab.simulator import World
from trsi_jax.lab.study import GradientQuality, Recipe
from trsi_jax.report import ablations, page

ARMS = tuple(a for a in STANDARD if a.name in ("TB", "token", "MC", "RLOO", "gap"))
QUALITY = GradientQuality(1.0, 0.5, 0.1, 1.0, 0.0)
RECIPE = Recipe(iterations=3, batch=16, warmup_batches=1, warmup_batch=16)


@pytest.fixture(scope="module")
def study():
    world = World(turns=2, tokens=2, log=3)
    task = suite.Task("long-logs", "Small.", world, RECIPE, without=("zeroed",))
    seen = []
    arms = [*ARMS, *(a for a in STANDARD if a.name == "zeroed")]
    result = suite.run([task], arms=arms, seeds=[0, 1], batches=2, jobs=2, advance=seen.append)
    assert seen == ["long-logs"] * 10
    return result


def test_every_arm_has_a_cell_at_every_gamma_in_order(study):
    assert [(c.gamma, c.arm) for c in study.cells] == [
        (gamma, arm.name) for gamma in (0.99, 1.0) for arm in ARMS
    ]
    for cell in study.cells:
        assert cell.start == pytest.approx(0.765**2, rel=1e-5)
        assert len(cell.final) == 2
        assert len(cell.curve) == 4
        assert cell.curve[-1] == pytest.approx(np.mean(cell.final))
    by = {(c.arm, c.gamma): c for c in study.cells}
    # Monte-Carlo does not discount, so it was run once; token-level GAE does.
    assert by["MC", 0.99].final == by["MC", 1.0].final
    assert by["token", 0.99].gradient != by["token", 1.0].gradient


def test_the_page_shows_rules_tables_and_plots(study, tmp_path):
    paths = page.write(
        tmp_path, "simulator", ablations.simulator_page(study), ablations.simulator_json(study)
    )
    assert [p.name for p in paths] == [
        *("simulator.json", "simulator.html", "simulator.md", "long-logs.png"),
    ]
    content = json.loads(paths[0].read_text())
    assert [c["arm"] for c in content["cells"]] == 2 * [a.name for a in ARMS]
    html = paths[1].read_text()
    assert html.count("<tr>") == 1 + len(study.verdicts) + 2 * (1 + len(ARMS))
    assert "://" not in html
    assert "| TB |" in paths[2].read_text()
    assert paths[3].read_bytes().startswith(b"\x89PNG")


def test_an_arm_without_a_critic_has_no_explained_variance(study):
    by = {c.arm: c for c in study.cells if c.gamma == 1.0}
    assert by["RLOO"].explained_variance is None
    assert by["MC"].explained_variance is not None
    page = ablations.simulator_page(study)
    (row,) = (r for r in page.sections[1].table.rows if r[0] == "RLOO")
    assert row[3] == "-"


def cell(task, arm, gamma, final, curve=(0.5, 0.5)):
    return suite.Cell(task, arm, gamma, 0.95, (final,), (final,), curve, 0.0, QUALITY, (QUALITY,))


@pytest.mark.parametrize(
    ("task", "finals", "kept"),
    [
        ("long-logs", {"TB": 0.97, "token": 0.965, "MC": 0.97, "gap": 0.84}, [True, True]),
        ("long-logs", {"TB": 0.97, "token": 0.95, "MC": 0.97, "gap": 0.93}, [False, False]),
        ("quiet-trap", {"TB": 0.8, "token": 0.8, "MC": 0.8, "gap": 0.3}, [True]),
        ("quiet-trap", {"TB": 0.8, "token": 0.8, "MC": 0.8, "gap": 0.6}, [False]),
        ("long-command-trap", {"TB": 0.8, "token": 0.48, "MC": 0.8, "gap": 0.5}, [True, False]),
        ("delayed-credit", {"TB": 0.7, "token": 0.77, "MC": 0.8, "gap": 0.5}, [False]),
    ],
)
def test_rules_are_judged_by_their_bounds(task, finals, kept):
    """Figures as measured elsewhere and others; the same at gamma 1, where token must catch up."""
    cells = [cell(task, arm, g, final) for g in (0.99, 1.0) for arm, final in finals.items()]
    one = dataclasses.replace(suite.TASKS[1], name=task)
    arms = [arm for arm in ARMS if arm.name in finals]
    verdicts = suite.judge(one, arms, cells, (0.99, 1.0), 0.95)
    assert [v.passed for v in verdicts] == kept


def test_the_control_rule_compares_advantages():
    task = suite.Task("control", "", World(turns=2, tokens=2, log=0), RECIPE)
    (verdict,) = suite.judge(task, STANDARD, [], (0.99, 1.0), 0.95)
    assert verdict.passed
    logs = dataclasses.replace(task, world=World(turns=2, tokens=2, log=9))
    (verdict,) = suite.judge(logs, STANDARD, [], (0.99, 1.0), 0.95)
    assert not verdict.passed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--task", "nothing"], "--task nothing: must be one of control, long-logs"),
        (["--seeds", "4..0"], "--seeds 4..0: give a range"),
        (["stored", "/nowhere"], "no trajectory store at /nowhere"),
        (["online", "/nowhere.toml"], "/nowhere.toml: cannot read the ablation"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, said, capsys):
    assert call(["ablate", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err
