"""The report, the summary and the stage records. The numbers of the sample run are made up."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rollout.errors import StoreError, UserError
from trsi_jax.report import seeds as seeds_report
from trsi_jax.report import summary
from trsi_jax.report.build import build
from trsi_jax.stages import record
from trsi_jax.stages.observer import StageRow
from trsi_jax.stages.record import PairedGain, StageRecord

STAGES = ("base", "rsr-1", "rpr-1", "rsr-2", "rpr-2")
SUCCESS = (0.164, 0.421, 0.553, 0.602, 0.648)
FAMILIES = (
    "archive",
    "config-edit",
    "counting",
    "csv-join",
    "dedupe",
    "log-scan",
    "rename",
    "tree",
)


def sample_record(index: int, seed: int = 0, shift: float = 0.0) -> StageRecord:
    name, success = STAGES[index], SUCCESS[index] + shift
    is_rsr, is_rpr = name.startswith("rsr"), name.startswith("rpr")
    tiers = {
        tier: max(0.0, min(1.0, success + delta))
        for tier, delta in (("easy", 0.25), ("medium", 0.08), ("hard", -0.09), ("extreme", -0.2))
    }
    steps = range(1, 26)
    return StageRecord(
        index=index,
        row=StageRow(
            name=name,
            strict_success=success,
            ci95=(success - 0.06, success + 0.06),
            progress=success + 0.11,
            tiers=tiers,
            explained_variance=0.41 + 0.05 * index if is_rpr else None,
            seconds=60.0 + 30 * index,
        ),
        seed=seed,
        config_digest="0123456789abcdef",
        actor_digest="89abcdef01234567",
        critic_digest="fedcba9876543210" if index > 1 else None,
        funnel={
            "attempts": 3600,
            "verified successes": 1204,
            "runbooks": 1187,
            "accepted by the reviewer": 1102,
            "verified replays": 1071,
            "demonstrations": 842,
        }
        if is_rsr
        else {},
        curves={
            "train success": [success - 0.3 * math.exp(-i / 8) for i in steps],
            "actor/loss": [math.sin(i) / 40 for i in steps],
            "actor/entropy": [0.6 * math.exp(-i / 20) for i in steps],
            "actor/kl": [0.01 + 0.004 * math.cos(i) for i in steps],
            "critic/loss": [0.2 * math.exp(-i / 6) + 0.03 for i in steps],
            "critic/explained variance": [0.5 - 0.6 * math.exp(-i / 4) for i in steps],
        }
        if is_rpr
        else {"sft/loss": [2.5 * math.exp(-i / 7) + 0.2 for i in steps]},
        seconds_by_part={
            "generation": 30.0 + 10 * index,
            "sandbox": 6.0 + index,
            "verification": 2.0,
            "actor update": 12.0 + 9 * index,
            "critic update": 8.0 if is_rpr else 0.0,
            "evaluation": 10.0,
        },
        families={f: min(1.0, (0.4 + 0.13 * i) * success) for i, f in enumerate(FAMILIES)},
        paired_gain=PairedGain(0.12, 0.07, 0.17) if index else None,
        masked=index // 3,
        tasks=128,
        samples=3,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run's folder as the machine leaves it."""
    folder = tmp_path / "run"
    for index in range(len(STAGES)):
        record.write(folder, sample_record(index))
    (folder / "config.toml").write_text('name = "sample"\nseed = 0\n# <script>alert(1)</script>\n')
    return folder


class Page(HTMLParser):
    """Collects a page's text and tags, and fails on one that is closed but not open."""

    VOID = frozenset({"meta", "br", "path", "use", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_stage_record_survives_its_file(tmp_path: Path) -> None:
    records = [sample_record(index) for index in (3, 0, 2)]
    for one in records:
        record.write(tmp_path, one)
    assert record.read_all(tmp_path) == tuple(sorted(records, key=lambda one: one.index))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"row": 3}'])
def test_a_broken_stage_record_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rsr-1.json"
    path.write_text(text)
    with pytest.raises(StoreError, match=r"rsr-1\.json is no stage record"):
        record.read(path)


def test_a_failed_write_leaves_the_old_file_and_no_part(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    record.write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        record.write_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_summary_has_exactly_the_published_keys_and_survives_its_file(run: Path) -> None:
    made = build(run)
    content = json.loads((run / "summary.json").read_text())
    assert list(content) == ["seed", "config_digest", "stages", "report"]
    for stage in content["stages"]:
        assert list(stage) == [
            "name",
            "strict_success",
            "ci95",
            "progress",
            "tiers",
            "explained_variance",
            "seconds",
        ]
    assert [stage["name"] for stage in content["stages"]] == list(STAGES)
    assert content["stages"][1]["ci95"] == pytest.approx([0.361, 0.481])
    assert summary.read(run) == made


def test_building_twice_gives_the_same_bytes(run: Path) -> None:
    build(run)
    first = {name: (run / name).read_bytes() for name in ("summary.json", "report.html")}
    build(run)
    assert {name: (run / name).read_bytes() for name in first} == first


def test_the_report_is_well_formed_self_contained_and_shows_the_numbers(run: Path) -> None:
    build(run)
    page = Page((run / "report.html").read_text())
    assert page.open == []
    text = " ".join(" ".join(page.words).split())
    for shown in ("64.8 %", "54.2 – 66.2", "1,204", "verified replays", "0123456789abcdef"):
        assert shown in text
    # Five curves, one by tier, two funnels, one of time, and the stage curve.
    charts = [attrs for tag, attrs in page.tags if attrs.get("class") == "chart"]
    assert len(charts) == 10
    # Nothing is fetched: no script, no link, and only references inside the page.
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    for _, attrs in page.tags:
        for key in ("src", "href", "xlink:href"):
            assert (attrs.get(key) or "#").startswith("#")
    # Settings are text, not markup.
    assert "<script>alert(1)</script>" in " ".join(page.words)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    references = [attrs["xlink:href"] for _, attrs in page.tags if "xlink:href" in attrs]
    assert {str(reference)[1:] for reference in references} <= set(ids)


def test_a_report_of_the_first_stage_alone_is_possible(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('name = "one"\n')
    lone = StageRecord(
        0,
        StageRow("base", 0.0, (0.0, 0.03), 0.1),
        0,
        "d" * 16,
        actor_digest="a" * 16,
        critic_digest=None,
    )
    record.write(tmp_path, lone)
    assert build(tmp_path).stages == (lone.row,)
    assert Page((tmp_path / "report.html").read_text()).open == []


def test_stages_of_two_runs_are_not_mixed(run: Path) -> None:
    record.write(run, sample_record(2, seed=1))
    with pytest.raises(StoreError, match="different runs"):
        build(run)


def test_a_folder_without_a_run_is_the_persons_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.toml here"):
        build(tmp_path)
    with pytest.raises(UserError, match=r"no summary\.json here"):
        summary.read(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(UserError, match="no stage is finished"):
        build(tmp_path)


def test_the_seeds_report_lists_every_seed_and_the_interval(tmp_path: Path) -> None:
    runs = [
        summary.of_records([sample_record(i, seed, shift) for i in range(5)])
        for seed, shift in ((0, 0.0), (1, 0.03), (2, -0.03))
    ]
    markdown, chart, data = seeds_report.write(tmp_path, "sample", runs)
    rows = [line.split("|")[1:-1] for line in markdown.read_text().splitlines() if "|" in line]
    assert [row[0].strip() for row in rows[2:5]] == ["0", "1", "2"]
    assert rows[5][5].strip() == "**64.8**"
    # Values 61.8, 64.8, 67.8: sd 3, t(0.975, 2) = 4.3027, half width 4.3027 * 3 / sqrt(3) = 7.45.
    assert rows[6][5].strip() == "57.3 to 72.3"
    assert Page(chart.read_text()).open == []
    assert json.loads(data.read_text())["seeds"] == [0, 1, 2]


def test_a_single_seed_has_no_interval(tmp_path: Path) -> None:
    one = summary.of_records([sample_record(0)])
    markdown, _, data = seeds_report.write(tmp_path, "sample", [one])
    assert "interval |" not in markdown.read_text()
    assert json.loads(data.read_text())["stages"][0]["strict_success"]["lo"] is None


def test_runs_of_different_configs_are_not_averaged(tmp_path: Path) -> None:
    one = summary.of_records([sample_record(0)])
    other = summary.Summary(1, "another", one.stages)
    with pytest.raises(ValueError, match="one config"):
        seeds_report.write(tmp_path, "sample", [one, other])
