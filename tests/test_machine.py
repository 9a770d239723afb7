"""A small recursion, whole and real: sandboxes, replays, updates, records, resumption, faults."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from rollout.errors import SandboxDead, UserError
from rollout.harness import shell_chat
from rollout.rewrite.replay import FUNNEL
from rollout.sandbox import make_backend
from rollout.store.reader import SegmentReader
from rollout.tasks.pool.lexicon import vocabulary
from tests.small_recursion import STAGES, small, without_seconds
from trsi_jax import batch, checkpoint, config, model, state, steps
from trsi_jax.report.build import build
from trsi_jax.stages import machine, record, rpr
from trsi_jax.stages.observer import NullObserver, StageRow

pytestmark = pytest.mark.timeout(900)

CHAT = shell_chat(vocabulary())
MODEL = model.preset("tiny", vocab_size=CHAT.tokenizer.vocab_size)
CONFIG = small()
STAGE = {stage.name: stage for stage in CONFIG.stages}


class Before(NullObserver):
    """Does something just before one stage."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name, self.act = name, act
        self.notes: list[str] = []
        self.rows: list[StageRow] = []

    def stage_started(self, name: str, index: int, total: int) -> None:
        if name == self.name:
            self.act()

    def stage_finished(self, row: StageRow) -> None:
        self.rows.append(row)

    def note(self, text: str) -> None:
        self.notes.append(text)


class Enough(Exception):
    """Ends a run that a test has seen enough of."""


def stop() -> None:
    raise Enough


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run, and copies of its folder before the second and the third stage."""

    out: Path
    after_base: Path
    after_rsr: Path

    def records(self) -> dict[str, record.StageRecord]:
        return {r.row.name: r for r in record.read_all(self.out)}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("runs")
    made = Run(folder / "whole", folder / "after-base", folder / "after-rsr")

    class Copies(NullObserver):
        def stage_started(self, name: str, index: int, total: int) -> None:
            copies = {"rsr-1": made.after_base, "rpr-1": made.after_rsr}
            if name in copies:
                shutil.copytree(made.out, copies[name])

    machine.run(CONFIG, made.out, Copies())
    build(made.out)
    return made


@pytest.fixture(scope="module")
def reader(run: Run) -> SegmentReader:
    return SegmentReader(run.out / "store")


def of(reader: SegmentReader, prefix: str):
    return [t for name in reader.segments() if name.startswith(prefix) for t in reader.read(name)]


def test_the_summary_has_the_published_form(run: Run) -> None:
    summary = json.loads((run.out / "summary.json").read_text())
    assert list(summary) == ["seed", "config_digest", "stages", "report"]
    assert (summary["seed"], summary["config_digest"]) == (0, CONFIG.digest())
    assert (run.out / summary["report"]).is_file()
    assert [stage["name"] for stage in summary["stages"]] == list(STAGES)
    for stage in summary["stages"]:
        assert set(stage) == {
            *("name", "strict_success", "ci95", "progress"),
            *("tiers", "explained_variance", "seconds"),
        }
        low, high = stage["ci95"]
        assert 0 <= low <= stage["strict_success"] <= high <= 1
        assert 0 <= stage["strict_success"] <= stage["progress"] <= 1
        assert set(stage["tiers"]) <= {"easy", "medium", "hard", "extreme"}
        assert (stage["explained_variance"] is None) == (not stage["name"].startswith("rpr"))
        assert stage["seconds"] > 0


def test_every_stage_left_a_whole_record(run: Run) -> None:
    records = run.records()
    assert tuple(records) == STAGES
    for index, (name, found) in enumerate(records.items()):
        assert (found.index, found.seed, found.config_digest) == (index, 0, CONFIG.digest())
        assert (found.tasks, found.samples, found.masked) == (16, 2, 0)
        assert (found.paired_gain is None) == (name == "base")
        assert set(found.funnel) == (set(FUNNEL) if name.startswith("rsr") else set())
        parts = sum(found.seconds_by_part.values())
        assert 0.5 * found.row.seconds < parts <= found.row.seconds
        assert not (run.out / "checkpoints" / f"{name}.partial").exists()


def test_a_rewrite_changes_the_actor_and_no_byte_of_the_critic(run: Run) -> None:
    records = run.records()
    assert records["base"].critic_digest is records["rsr-1"].critic_digest is None
    assert records["rsr-2"].critic_digest == records["rpr-1"].critic_digest is not None
    assert records["rpr-2"].critic_digest != records["rpr-1"].critic_digest
    actors = [found.actor_digest for found in records.values()]
    assert len(set(actors)) == len(STAGES)
    for name in ("rsr-1", "rsr-2"):
        assert records[name].funnel["kept"] > 0


def test_the_checkpoints_are_the_recorded_pairs(run: Run) -> None:
    actor = model.abstract_params(MODEL)
    critic = jax.eval_shape(partial(model.init_value_params, MODEL), actor)
    for name, found in run.records().items():
        like = {"actor": actor} | ({"critic": critic} if found.critic_digest else {})
        pair = checkpoint.restore(run.out / "checkpoints" / name, 0, like)
        assert state.digest(pair["actor"]) == found.actor_digest
        if found.critic_digest:
            assert state.digest(pair["critic"]) == found.critic_digest


def test_masks_cover_exactly_what_the_policy_sampled(reader: SegmentReader) -> None:
    episodes = list(reader)
    assert len(episodes) > 300
    assert reader.quarantined() == ()
    for t in episodes:
        assert t.fault is None
        acted = t.acted_t
        assert not acted[0]
        assert (t.weight_version_t[acted] >= 0).all()
        assert (t.weight_version_t[~acted] == -1).all()
        assert not t.logprob_t[~acted].any()
        assert (np.diff(t.turn_t) >= 0).all()
        # What was sampled in a turn reads as the command that the turn ran.
        for number, turn in enumerate(t.turns):
            said = tuple(t.token_ids[acted & (t.turn_t == number)].tolist())
            assert CHAT.command(said).strip() == turn.command.strip()


def test_only_the_training_split_is_trained_on(reader: SegmentReader) -> None:
    for name in reader.segments():
        split = "test" if name.startswith("evaluation/") else "train"
        assert {t.split for t in reader.read(name)} == {split}
    tested = {t.task_id for t in of(reader, "evaluation/")}
    assert tested.isdisjoint(t.task_id for t in reader if t.split == "train")


def test_replays_are_verified_under_the_general_harness(run: Run, reader: SegmentReader) -> None:
    for name in ("rsr-1", "rsr-2"):
        found = of(reader, f"{name}/discover")
        assert {t.harness for t in found} == {"general", "survey", "stepwise"}
        successes = {t.id for t in found if t.verdict.strict_success}
        replays = of(reader, f"{name}/replay")
        assert len(replays) == run.records()[name].funnel["kept"]
        for t in replays:
            assert (t.harness, t.provenance["role"]) == ("general", "executor")
            assert t.verdict.strict_success
            assert t.provenance["source"] in successes


@pytest.mark.parametrize("name", ["rpr-1", "rpr-2"])
def test_rewards_stand_on_the_last_sampled_token(run: Run, reader: SegmentReader, name) -> None:
    curves = run.records()[name].curves
    for i in range(STAGE[name].iterations):
        (segment,) = [s for s in reader.segments() if s.startswith(f"{name}/iteration-{i:03d}.")]
        assert reader.columns(segment) == ("advantage_t", "return_t", "reward_t", "value_t")
        rewards = []
        for t, reward_t, advantage_t in zip(
            reader.read(segment),
            reader.read_columns(segment, "reward_t"),
            reader.read_columns(segment, "advantage_t"),
            strict=True,
        ):
            last = int(np.flatnonzero(t.acted_t)[-1])
            assert not np.delete(reward_t, last).any()
            assert not advantage_t[~t.acted_t].any()
            # SPR: a success earns 1, a failure less than its cap, nothing done nothing.
            assert (reward_t[last] == 1.0) == t.verdict.strict_success
            if not t.verdict.strict_success:
                assert 0 <= reward_t[last] <= 0.5
                assert (reward_t[last] > 0) == (t.verdict.progress > 0)
            rewards.append(float(reward_t[last]))
        assert curves["train/reward"][i] == pytest.approx(np.mean(rewards), rel=1e-5)
        assert len(curves["warm-up/explained_variance"]) == STAGE[name].warm_up_rounds == 4


def test_the_engine_served_the_checkpoint(run: Run, reader: SegmentReader) -> None:
    params = checkpoint.restore(
        run.out / "checkpoints" / "rpr-2",
        0,
        {"actor": model.abstract_params(MODEL)}
        | {
            "critic": jax.eval_shape(
                partial(model.init_value_params, MODEL), model.abstract_params(MODEL)
            )
        },
    )["actor"]
    episodes = of(reader, "evaluation/rpr-2")
    packing = batch.pack(
        [batch.trajectory_example(t, purpose="evaluate") for t in episodes],
        rows=CONFIG.packing.rows,
        length=CONFIG.packing.length,
        seed=0,
    )
    score = jax.jit(partial(steps.token_logprobs, MODEL))
    temperature = CONFIG.evaluation.temperature
    logprobs = packing.gather(
        [score(params, b, temperature=temperature)[0] for b in packing.batches]
    )
    for t, logprob_t in zip(episodes, logprobs, strict=True):
        # An fp32 model, decoded token by token and scored in packed rows.
        np.testing.assert_allclose(logprob_t[t.acted_t], t.logprob_t[t.acted_t], atol=2e-3)


def test_the_warm_up_trains_the_critic_alone(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(run.after_rsr, out)
    stage = STAGE["rpr-1"]
    assert isinstance(stage, config.RprStage)
    with (
        machine._context(CONFIG, out, NullObserver()) as context,
        machine._compiling_ahead(context),
    ):
        actor = checkpoint.restore(
            context.checkpoints("rsr-1"), 0, {"actor": model.abstract_params(MODEL)}
        )["actor"]
        before = state.digest(actor)
        assert before == run.records()["rsr-1"].actor_digest
        params = jax.tree.map(jax.numpy.copy, model.init_value_params(MODEL, actor))
        critic = state.create(params, context.steps.optimizer)
        fresh = state.digest(critic.params)
        context.serve(2000, actor)
        critic, explained = rpr._warm_up(context, stage, critic)
        assert state.digest(actor) == before
        assert state.digest(critic.params) != fresh
        assert explained.tolist() == [
            pytest.approx(x, abs=1e-6)
            for x in run.records()["rpr-1"].curves["warm-up/explained_variance"]
        ]
        # Before the first round a new critic says nothing.
        assert explained[0] == pytest.approx(0.0, abs=1e-5)
        versions = {
            int(v) for t in of(context.reader, "rpr-1/") for v in t.weight_version_t if v >= 0
        }
        assert versions == {2000}


class Faulty:
    """The real backend, but some of its sandboxes die under their first command."""

    def __init__(self, dies: Callable[[int, frozenset[str]], bool]) -> None:
        self.backend = make_backend()
        self.name = self.backend.name
        self.dies = dies
        self.started = self.died = 0

    async def start(self, spec):
        box = await self.backend.start(spec)
        self.started += 1
        return _Mortal(box, self, self.started)

    async def aclose(self):
        await self.backend.aclose()


class _Mortal:
    def __init__(self, box, backend, number) -> None:
        self.box, self.backend, self.number = box, backend, number
        self.doomed = False

    def __getattr__(self, name):
        return getattr(self.box, name)

    async def put_files(self, files, **options):
        self.doomed = self.backend.dies(self.number, frozenset(files))
        await self.box.put_files(files, **options)

    async def exec(self, command, **options):
        if self.doomed:
            self.backend.died += 1
            raise SandboxDead("killed by the test")
        return await self.box.exec(command, **options)


def test_a_run_repeats_itself_and_chance_faults_change_nothing(run, tmp_path, monkeypatch) -> None:
    out = tmp_path / "again"
    shutil.copytree(run.after_base, out)
    # Every 11th sandbox dies, but not twice for one world: second attempts succeed.
    hit: set[frozenset[str]] = set()

    def by_chance(number: int, files: frozenset[str]) -> bool:
        dies = number % 11 == 0 and files not in hit
        hit.update([files] if dies else [])
        return dies

    backend = Faulty(by_chance)
    monkeypatch.setattr(machine, "make_backend", lambda name: backend)
    observer = Before("none", stop)
    machine.run(CONFIG, out, observer)
    build(out)
    assert backend.died > 10
    assert [row.name for row in observer.rows] == list(STAGES)
    assert any("base: finished before" in note for note in observer.notes)
    again, first = without_seconds(out), without_seconds(run.out)
    assert again["summary"] == first["summary"]
    assert again == first


def test_lasting_faults_mask_and_never_score_zero(run, tmp_path, monkeypatch) -> None:
    out = tmp_path / "faulty"
    shutil.copytree(run.after_rsr, out)
    # A third of the tasks, told apart by the files of their world, can't be run at all.
    backend = Faulty(lambda number, files: zlib.crc32("".join(sorted(files)).encode()) % 3 == 0)
    monkeypatch.setattr(machine, "make_backend", lambda name: backend)
    with pytest.raises(Enough):
        machine.run(CONFIG, out, Before("rsr-2", stop))
    reader = SegmentReader(out / "store")
    found = {r.row.name: r for r in record.read_all(out)}["rpr-1"]
    evaluated = of(reader, "evaluation/rpr-1")
    masked = [t for t in evaluated if t.fault is not None]
    assert 0 < len(masked) == found.masked < len(evaluated) == 32
    assert {t.fault.kind for t in masked} == {"sandbox-dead"}
    assert all(t.verdict is None and t.finish == "fault" for t in masked)
    # Their tasks are out of the mean: they don't count as failures.
    assert found.tasks == len({t.task_id for t in evaluated if t.fault is None})
    graded = [t.verdict for t in evaluated if t.verdict is not None]
    by_task = {t.task_id: [] for t in evaluated if t.verdict is not None}
    for t in evaluated:
        if t.verdict is not None:
            by_task[t.task_id].append(t.verdict.strict_success)
    assert len(graded) == sum(map(len, by_task.values()))
    assert found.row.strict_success == pytest.approx(
        np.mean([np.mean(v) for v in by_task.values()])
    )
    # In training the mean reward is that of the graded episodes, and the others carry nothing.
    for i, mean in enumerate(found.curves["train/reward"]):
        (segment,) = [s for s in reader.segments() if s.startswith(f"rpr-1/iteration-{i:03d}.")]
        episodes = reader.read(segment)
        assert any(t.fault for t in episodes)
        rewards = []
        for name in reader.columns(segment):
            for t, column in zip(episodes, reader.read_columns(segment, name), strict=True):
                if t.fault is not None:
                    assert not column.any()
                elif name == "reward_t":
                    rewards.append(float(column.sum()))
        assert len(rewards) == sum(t.fault is None for t in episodes)
        assert mean == pytest.approx(np.mean(rewards), rel=1e-5)


def test_a_folder_in_use_is_refused_in_one_line(run: Run) -> None:
    hold = (
        "import fcntl, sys; lock = open(sys.argv[1], 'w');"
        "fcntl.flock(lock, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, run.out / ".lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="another process runs in this folder") as caught:
            machine.run(CONFIG, run.out, NullObserver())
        assert len(str(caught.value).splitlines()) == 1
        with suppress(BrokenPipeError):
            other.communicate(b"")


def test_a_folder_of_another_run_is_refused_in_one_line(run: Run) -> None:
    for other in (
        CONFIG.model_copy(update={"seed": 1}),
        CONFIG.model_copy(update={"train_tasks": 65}),
    ):
        with pytest.raises(UserError, match="another configuration") as caught:
            machine.run(other, run.out, NullObserver())
        line = str(caught.value)
        assert len(line.splitlines()) == 1
        assert CONFIG.digest() in line
        assert "--fresh" in line


def test_a_finished_run_does_nothing_again(run: Run) -> None:
    before = without_seconds(run.out)
    observer = Before("none", stop)
    machine.run(CONFIG, run.out, observer)
    assert [row.name for row in observer.rows] == list(STAGES)
    assert without_seconds(run.out) == before
