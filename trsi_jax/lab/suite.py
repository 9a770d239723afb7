"""The default study: tasks on which estimators must agree or differ, and the rules that say so.

A task is a world, a recipe, and what it is for. Each arm runs at gamma < 1 and at gamma = 1: what
differs at the first alone is discounting, what differs at both is credit.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from trsi_jax.evaluate.stats import Estimate, student_mean
from trsi_jax.lab.arms import STANDARD, Arm
from trsi_jax.lab.simulator import World
from trsi_jax.lab.study import GradientQuality, Laboratory, Recipe, gradient_quality

GRADIENT_SEEDS = 3
"""Gradient tables take the first so many seeds; a seed has many batches of its own."""


@dataclass(frozen=True)
class Task:
    """One part of the study.

    Attributes:
      name: what tables and options call it.
      question: what it shows, for people.
      world: the simulated family.
      recipe: how its race is run.
      race: whether there is one; else the gradient table alone.
      without: names of arms that are another one by construction here, and so are not run.
    """

    name: str
    question: str
    world: World
    recipe: Recipe
    race: bool = True
    without: tuple[str, ...] = ()

    def of(self, arms: Sequence[Arm]) -> list[Arm]:
        """Those of the arms that are run."""
        return [arm for arm in arms if arm.name not in self.without]


AGREEING = ("TB", "token", "macro", "bi-level", "MC", "RLOO")
COUNTING = ("gap", "unmasked", "zeroed")

TASKS: tuple[Task, ...] = (
    Task(
        "control",
        "No logs: the recursions that count them have nothing to count.",
        World(log=0),
        Recipe(),
        race=False,
    ),
    Task(
        "long-logs",
        "Six turns, logs of 50 to 150 tokens that depend on nothing.",
        World(log=100),
        Recipe(iterations=120, lr=0.03),
    ),
    Task(
        "quiet-trap",
        "A wrong decision prints a log ten times shorter, so it looks nearer to the reward.",
        World(log=100, outcome="soft", start=0.5, trap="quiet"),
        Recipe(iterations=120, lr=0.02),
    ),
    Task(
        "long-command-trap",
        "A right command is 32 tokens long, a wrong one a single token; there are no logs.",
        World(turns=4, tokens=32, log=0, outcome="soft", start=0.5, trap="long-command"),
        Recipe(iterations=100, lr=0.02),
        # Without logs they are token-level GAE, which the control shows.
        without=COUNTING,
    ),
    Task(
        "delayed-credit",
        "The first of twelve turns decides; compare the mean over iterations, the end saturates.",
        World(turns=12, log=0, outcome="early", start=0.5),
        Recipe(iterations=120, lr=0.02),
        without=COUNTING,
    ),
    Task(
        "within-turn",
        "The last of a turn's 32 tokens decides: where a decay inside the turn helps.",
        World(turns=2, tokens=32, log=20, outcome="soft", start=0.5, decision=31),
        Recipe(),
        race=False,
    ),
)


@dataclass(frozen=True)
class Cell:
    """One arm on one task at one gamma.

    Attributes:
      final: exact success at the end, one a seed; empty without a race.
      mean: mean of it over iterations, one a seed.
      curve: mean over seeds of exact success, before the first and after each update.
      explained_variance: of the undiscounted return by the critic: mean over seeds and the last
        quarter of the race, or over the batches of the gradient table; None without a critic.
      gradient: quality of the gradient at the initial policy after 30 batches of critic training.
      gradient_by_seed: the same for each seed alone.
    """

    task: str
    arm: str
    gamma: float
    lam: float
    final: tuple[float, ...]
    mean: tuple[float, ...]
    curve: tuple[float, ...]
    explained_variance: float | None
    gradient: GradientQuality
    gradient_by_seed: tuple[GradientQuality, ...]

    @property
    def start(self) -> float:
        """Exact success of the initial policy."""
        return self.curve[0] if self.curve else float("nan")

    def success(self) -> Estimate | None:
        """Final success with Student's interval over seeds; None without a race."""
        return student_mean(self.final) if self.final else None


@dataclass(frozen=True)
class Verdict:
    """One pass rule and how it came out.

    Attributes:
      rule: in words, with the bound.
      measured: the figures it was judged by.
      passed: whether they keep the rule.
    """

    task: str
    rule: str
    measured: str
    passed: bool


@dataclass(frozen=True)
class Study:
    """Everything one run of the study measured."""

    seeds: tuple[int, ...]
    gammas: tuple[float, ...]
    lam: float
    tasks: tuple[Task, ...]
    cells: tuple[Cell, ...]
    verdicts: tuple[Verdict, ...]


Advance = Callable[[str], None]


def run(
    tasks: Sequence[Task],
    *,
    arms: Sequence[Arm] = STANDARD,
    seeds: Sequence[int],
    gammas: Sequence[float] = (0.99, 1.0),
    lam: float = 0.95,
    batches: int = 64,
    jobs: int = 1,
    advance: Advance = lambda label: None,
) -> Study:
    """Run tasks, `jobs` at a time, and judge them.

    Args:
      tasks: of `TASKS` or like them.
      arms: the estimators.
      seeds: of policy noise, critic and data; all arms see the same.
      gammas: discounts; the rules speak of the first and of 1.
      lam: mixing parameter of every arm that has one.
      batches: gradient estimates a seed.
      jobs: threads; the results do not depend on it.
      advance: called from the caller's thread after every cell with the task's name.

    Returns:
      The study; cells in the order task, gamma, arm.
    """
    done: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    stop = threading.Event()

    def work(task: Task) -> None:
        for cell in _cells(task, arms, seeds, gammas, lam, batches):
            done.put(cell)
            if stop.is_set():
                return

    cells: list[Cell] = []

    def drain() -> None:
        while not done.empty():
            cells.append(done.get())
            advance(cells[-1].task)

    pool = ThreadPoolExecutor(max(1, jobs), thread_name_prefix="study")
    try:
        futures = [pool.submit(work, task) for task in tasks]
        pending = set(futures)
        while pending:
            finished, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
            drain()
            for future in finished:
                future.result()
        drain()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
    order = {task.name: i for i, task in enumerate(tasks)}
    names = [arm.name for arm in arms]
    cells.sort(key=lambda c: (order[c.task], gammas.index(c.gamma), names.index(c.arm)))
    verdicts = [v for task in tasks for v in judge(task, task.of(arms), cells, gammas, lam)]
    return Study(tuple(seeds), tuple(gammas), lam, tuple(tasks), tuple(cells), tuple(verdicts))


def _cells(
    task: Task,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    gammas: Sequence[float],
    lam: float,
    batches: int,
) -> Iterator[Cell]:
    arms = task.of(arms)
    laboratory = Laboratory(task.world, arms, task.recipe)
    without_gamma: dict[str, Cell] = {}
    for gamma in gammas:
        for arm in arms:
            if arm.name in without_gamma:
                yield dataclasses.replace(without_gamma[arm.name], gamma=gamma)
                continue
            cell = _cell(laboratory, task, arm, seeds, gamma, lam, batches)
            if not arm.discounts:
                without_gamma[arm.name] = cell
            yield cell


def _cell(
    laboratory: Laboratory,
    task: Task,
    arm: Arm,
    seeds: Sequence[int],
    gamma: float,
    lam: float,
    batches: int,
) -> Cell:
    some = tuple(seeds)[:GRADIENT_SEEDS]
    table = laboratory.gradients(arm.name, some, gamma=gamma, lam=lam, batches=batches)
    by_seed = tuple(gradient_quality(e, table.truth, task.world) for e in table.estimates)
    explained = float(table.explained_variance.mean())
    final: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()
    curve: tuple[float, ...] = ()
    if task.race:
        race = laboratory.race(arm.name, seeds, gamma=gamma, lam=lam)
        final = tuple(race.success[:, -1].tolist())
        mean = tuple(race.success.mean(axis=1).tolist())
        curve = tuple(race.success.mean(axis=0).tolist())
        last = max(1, race.explained_variance.shape[1] // 4)
        explained = float(race.explained_variance[:, -last:].mean())
    return Cell(
        task=task.name,
        arm=arm.name,
        gamma=gamma,
        lam=lam,
        final=final,
        mean=mean,
        curve=curve,
        explained_variance=explained if arm.critic else None,
        gradient=GradientQuality(*np.mean([dataclasses.astuple(q) for q in by_seed], axis=0)),
        gradient_by_seed=by_seed,
    )


# --- pass rules -------------------------------------------------------------------------------


def judge(
    task: Task, arms: Sequence[Arm], cells: Sequence[Cell], gammas: Sequence[float], lam: float
) -> list[Verdict]:
    """The pass rules of one task, those whose arms were run.

    The bounds were fixed before the study ran, from the effects that an independent prototype of
    the same simulator had shown.
    """
    at = {(c.arm, c.gamma): c for c in cells if c.task == task.name}
    gamma = gammas[0]
    names = [arm.name for arm in arms]

    def final(arm: str, g: float = gamma) -> float:
        return float(np.mean(at[arm, g].final))

    def have(*needed: str) -> bool:
        return all(name in names for name in needed)

    verdicts = []

    def rule(text: str, passed: bool, **measured: float) -> None:
        shown = ", ".join(f"{name.replace('_', ' ')} {x:.3g}" for name, x in measured.items())
        verdicts.append(Verdict(task.name, text, shown, bool(passed)))

    if task.name == "control" and have("token", *COUNTING):
        arrays = Laboratory(task.world, arms, task.recipe).advantages(0, gamma=gamma, lam=lam)
        own = np.asarray(arrays["token"])
        worst = max(float(np.abs(np.asarray(arrays[n]) - own).max()) for n in COUNTING)
        text = "gap, unmasked and zeroed give token's advantages to 1e-5"
        rule(text, worst <= 1e-5, largest_difference=worst)
    if task.name == "long-logs":
        agreeing = [n for n in AGREEING if have(n)]
        if have("TB") and len(agreeing) > 1:
            spread = max(abs(final(n) - final("TB")) for n in agreeing)
            text = f"{', '.join(agreeing[1:])} end within 1 point of TB"
            rule(text, spread <= 0.01, TB=final("TB"), largest_difference=spread)
        if have("TB", "gap"):
            difference = final("TB") - final("gap")
            rule("TB - gap >= .05", difference >= 0.05, TB=final("TB"), gap=final("gap"))
        if have("TB", "zeroed"):
            difference = final("TB") - final("zeroed")
            rule("TB - zeroed >= .3", difference >= 0.3, TB=final("TB"), zeroed=final("zeroed"))
    if task.name == "quiet-trap" and have("TB", "gap"):
        start = at["TB", gamma].start
        passed = final("gap") < start < final("TB")
        rule(
            "gap ends below the start, TB above",
            passed,
            gap=final("gap"),
            start=start,
            TB=final("TB"),
        )
    if task.name == "long-command-trap" and have("TB", "token"):
        passed = final("TB") - final("token") >= 0.2
        rule(f"TB - token >= .2 at gamma {gamma:g}", passed, TB=final("TB"), token=final("token"))
        if 1.0 in gammas:
            passed = abs(final("token", 1.0) - final("TB")) <= 0.03
            text = f"token at gamma 1 within .03 of TB at {gamma:g}"
            rule(text, passed, TB=final("TB"), token_at_1=final("token", 1.0))
    if task.name == "delayed-credit" and have("TB", "token"):
        tb, token = (float(np.mean(at[n, gamma].mean)) for n in ("TB", "token"))
        rule("TB leads token in the mean over iterations", tb > token, TB=tb, token=token)
    return verdicts
