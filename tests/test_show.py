"""`trsi show`: what a person reads of one trajectory, and one line for each mistake."""

import numpy as np
import pytest
import tokenizers
import typer
from rich.console import Console
from typer.testing import CliRunner

from rollout.errors import UserError
from rollout.records import CheckResult, Fault, Turn, Verdict
from rollout.store.segments import SegmentWriter
from tests.store_data import VOCAB, make
from trsi_jax.batch import token_rewards
from trsi_jax.cli.show import show, show_run

FAILED = Verdict((CheckResult("out.txt", "effective", False, 2.0),))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    writer = SegmentWriter(folder / "store", vocab_size=VOCAB)
    discovered = [
        make("rsr-1/a", stage="rsr-1", harness="survey"),
        make("rsr-1/b", stage="rsr-1", harness="general", verdict=FAILED),
        make("rsr-1/c", stage="rsr-1", verdict=None, fault=Fault("sandbox-dead", "gone")),
    ]
    writer.write("rsr-1/discover", discovered)
    trained = make(
        "rpr-1/0/7",
        turns=(
            Turn("grep -c '[bold]' a.txt", "3\x1b[2J\udce9\n", 0),
            Turn("done", "", None, "control"),
        ),
        provenance={"instruction": "count the lines of a.txt"},
    )
    writer.write("rpr-1/0", [trained])
    value_t = np.linspace(-1, 1, 12, dtype=np.float32)
    writer.write_columns("rpr-1/0", "reward_t", [token_rewards(trained, 1.25)])
    writer.write_columns("rpr-1/0", "value_t", [value_t])
    writer.write_columns("rpr-1/0", "advantage_t", [np.where(trained.acted_t, -value_t, 0)])
    return folder


def output(run, trajectory_id=None, **options) -> str:
    console = Console(width=110, record=True, force_terminal=False, color_system=None)
    with console.capture() as capture:
        show_run(run, trajectory_id, console=console, **options)
    return capture.get()


def test_one_trajectory_shows_what_was_asked_done_checked_and_earned(run) -> None:
    text = output(run, "rpr-1/0/7")
    for part in (
        "count-lines-0 (count-lines, easy, train)",
        "rpr-1, iteration 2, sample 1, seed 0",
        "12, 4 of them sampled in 2 turns, ended by done",
        "count the lines of a.txt",
        "$ grep -c '[bold]' a.txt",
        "[ok, exit 0]",
        "[control]",
        "progress  1.000",
        "reward    1.250",
    ):
        assert part in text, part
    # Output of a sandbox is shown and never obeyed by the terminal.
    assert "3\\x1b[2J\\udce9" in text
    assert "\x1b" not in text


def test_values_and_advantages_stand_by_the_sampled_tokens(run) -> None:
    rows = [line.split() for line in output(run, "rpr-1/0/7").splitlines()]
    start = next(i for i, row in enumerate(rows) if row[:1] == ["position"])
    assert rows[start] == ["position", "turn", "token", "log-prob", "value", "advantage"]
    table = [row for row in rows[start + 1 :] if len(row) == 6]
    # Positions that `make` acts on; linspace(-1, 1, 12)[5] = -1 + 10/11 = -0.091, [9] = 0.636.
    assert [row[0] for row in table] == ["5", "6", "9", "10"]
    assert table[0][4:] == ["-0.091", "+0.091"]
    assert table[2][4:] == ["0.636", "-0.636"]


def test_tokens_are_text_when_the_run_has_a_tokenizer(run, tmp_path) -> None:
    vocabulary = {f"w{i}": i for i in range(VOCAB)}
    (tmp_path / "tokenizer").mkdir()
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0")).save(
        str(tmp_path / "tokenizer" / "tokenizer.json")
    )
    (tmp_path / "store").symlink_to(run / "store")
    text = output(tmp_path, "rsr-1/a")
    prompt = make("rsr-1/a").token_ids[:5]
    assert "".join(f"w{i}" for i in prompt) in text


def test_a_list_shows_each_trajectory_with_its_outcome(run) -> None:
    lines = output(run).splitlines()
    for name, outcome in (
        ("rsr-1/a", "success"),
        ("rsr-1/b", "failure"),
        ("rsr-1/c", "fault sandbox-dead"),
        ("rpr-1/0/7", "success"),
    ):
        (line,) = (line for line in lines if line.startswith(f"{name} "))
        assert outcome in line
    assert "1.250" in next(line for line in lines if line.startswith("rpr-1/0/7"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stage": "rsr-1"}, {"rsr-1/a", "rsr-1/b", "rsr-1/c"}),
        ({"harness": "survey"}, {"rsr-1/a"}),
        ({"success": True}, {"rsr-1/a", "rpr-1/0/7"}),
        ({"success": False}, {"rsr-1/b"}),  # a fault is no failure
        ({"limit": 1}, {"rpr-1/0/7"}),
        ({"stage": "rpr-1", "success": False}, set()),
    ],
)
def test_filters_choose_what_is_listed(run, options, expected) -> None:
    text = output(run, **options)
    names = ("rsr-1/a", "rsr-1/b", "rsr-1/c", "rpr-1/0/7")
    assert {name for name in names if name in text} == expected
    assert ("the first 1 of more" in text) == (options == {"limit": 1})
    assert ("no trajectory matches" in text) == (not expected)


def test_each_mistake_is_one_line_that_says_what_is_allowed(run, tmp_path) -> None:
    for arguments, problem in (
        ((tmp_path / "none", None, {}), "no run at"),
        ((tmp_path, None, {}), "has stored no trajectory yet"),
        ((run, "rsr-1/z", {}), "no trajectory 'rsr-1/z'; it has rpr-1/0/7, rsr-1/a, rsr-1/b, ..."),
        ((run, "0/7x", {}), "`trsi show "),
        ((run, None, {"stage": "rsr-9"}), "no stage 'rsr-9'; it has rpr-1, rsr-1"),
        ((run, None, {"harness": "x"}), "no harness 'x'; it has general, survey"),
    ):
        folder, name, options = arguments
        with pytest.raises(UserError) as caught:
            output(folder, name, **options)
        assert problem in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_command_takes_its_options(run) -> None:
    app = typer.Typer()
    app.command()(show)
    done = CliRunner().invoke(app, [str(run), "--failure", "--limit", "3"])
    assert done.exit_code == 0, done.output
    assert "rsr-1/b" in done.output
    assert "rsr-1/a" not in done.output
    assert isinstance(CliRunner().invoke(app, [str(run), "nope"]).exception, UserError)
