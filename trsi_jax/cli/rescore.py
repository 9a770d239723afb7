"""`trsi rescore STORE`: the same stored trajectories under several rewards, and their audit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from rollout.records import Trajectory
    from trsi_jax.config import Config, RewardSection
    from trsi_jax.rewards.audit import Audit
    from trsi_jax.rewards.rescore import Group, Kind, Scores

_ROWS = (
    ("failed share of reward, %", "failed_share", 100.0, "{:.2f}"),
    ("failed with reward >= 1", "failed_at_least_one", 1, "{:d}"),
    ("std over families", "std_families", 1.0, "{:.2f}"),
    ("std over trajectories", "std_trajectories", 1.0, "{:.2f}"),
)


def rescore(
    store: Annotated[
        Path, typer.Argument(metavar="STORE", help="The folder of a run, or of its store.")
    ],
    stage: Annotated[str | None, typer.Option(help="Only trajectories of this stage.")] = None,
    success_reward: Annotated[
        float | None, typer.Option(help="SPR's reward of a success [default: the run's, or 1].")
    ] = None,
    beta: Annotated[
        float | None, typer.Option(help="SPR's share for failures [default: the run's].")
    ] = None,
    cap: Annotated[
        float | None, typer.Option(help="SPR's most for a failure [default: the run's].")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="For rescore.json and the plots [default: rescore beside the store]."),
    ] = None,
) -> None:
    """Score stored trajectories under strict success, progress, FDR and SPR; print the audit."""
    from trsi_jax.cli.console import console
    from trsi_jax.rewards.rescore import KEYS, published
    from trsi_jax.rewards.rescore import rescore as score

    screen = console()
    trajectories, config = _read(_store(store), stage)
    medians, whence = _medians(trajectories, config)
    known = _reward(config)
    options = {
        "success_reward": known.success if success_reward is None else success_reward,
        "beta": known.beta if beta is None else beta,
        "cap": known.cap if cap is None else cap,
    }
    try:
        scores = score(trajectories, medians, **options)
    except ValueError as error:
        raise UserError(f"{store}: {error}") from None
    screen.print(
        f"{len(scores.ids)} graded trajectories, {scores.masked} masked by faults;"
        f" |E| of families from {whence};"
        f" SPR with R {options['success_reward']:g}, beta {options['beta']:g},"
        f" cap {options['cap']:g}",
        markup=False,
    )
    screen.print(audit_table(published(), scores.audits()))
    for key in KEYS:
        screen.print(group_table(key, scores.groups(key)))
    folder = _store(store).parent / "rescore" if out is None else out
    for path in write(folder, scores, options):
        screen.print(f"wrote {path}", markup=False, soft_wrap=True)


def _store(path: Path) -> Path:
    """The store at a path, or that of the run there."""
    return path / "store" if (path / "store").is_dir() else path


def _read(folder: Path, stage: str | None) -> tuple[list[Trajectory], Config | None]:
    """Trajectories of a store, and the config of its run if there is one."""
    from rollout.store.reader import SegmentReader
    from trsi_jax import config

    reader = SegmentReader(folder)
    if not folder.is_dir() or reader.version is None:
        raise UserError(f"no trajectory store at {folder}; STORE is a run's folder or its store")
    found = list(reader.pinned())
    stages = list(dict.fromkeys(t.stage for t in found))
    if stage is not None and stage not in stages:
        raise UserError(f"--stage {stage}: {folder} has {', '.join(stages) or 'none'}")
    run = folder.parent / "config.toml"
    chosen = [t for t in found if stage in (None, t.stage)]
    return chosen, config.load(run) if run.is_file() else None


def _medians(
    trajectories: Sequence[Trajectory], config: Config | None
) -> tuple[Mapping[str, float], str]:
    """Median |E| of each family: of the run's pool, or of what is stored."""
    from trsi_jax.rewards.fdr import family_medians
    from trsi_jax.rewards.rescore import stored_medians

    stored = stored_medians(trajectories)
    if config is not None:
        from rollout.tasks.pool.source import PoolSource

        pool = PoolSource(config.seed, counts={"train": config.train_tasks}).tasks("train")
        medians = family_medians(pool)
        if stored.keys() <= medians.keys():
            return medians, "the run's training pool"
    return stored, "the tasks stored"


def _reward(config: Config | None) -> RewardSection:
    from trsi_jax.config import RewardSection

    stages = [] if config is None else [s for s in config.stages if s.kind == "rpr"]
    return stages[0].reward if stages else RewardSection()


def audit_table(paper: Mapping[Kind, Audit], ours: Mapping[Kind, Audit]) -> Table:
    """The published four rows beside those of the stored trajectories."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title="Reward audit", title_justify="left")
    table.add_column("")
    columns = [(f"paper {kind}", a) for kind, a in paper.items()] + list(ours.items())
    for name, _ in columns:
        table.add_column(name, justify="right")
    for label, field, scale, form in _ROWS:
        cells = [form.format(scale * getattr(a, field)) for _, a in columns]
        table.add_row(label, *cells)
    for label, field in (("trajectories", "trajectories"), ("families", "families")):
        table.add_row(label, *(str(getattr(a, field)) for _, a in columns))
    return table


def group_table(key: str, groups: Mapping[str, Group]) -> Table:
    """Means and failed shares by family, stage or tier."""
    from rich.table import Table

    from rollout.records import TIERS

    table = Table(box=None, pad_edge=False)
    table.add_column(key)
    heads = ("n", "success %", "progress", "fdr", "spr", "failed % fdr", "failed % spr")
    for head in heads:
        table.add_column(head, justify="right")
    order = [t for t in TIERS if t in groups] if key == "tier" else list(groups)
    for name in sorted(groups) if key == "family" else order:
        g = groups[name]
        table.add_row(
            name,
            str(g.trajectories),
            f"{100 * g.success:.1f}",
            *(f"{g.mean[kind]:.3f}" for kind in ("progress", "fdr", "spr")),
            *(f"{100 * g.failed_share[kind]:.1f}" for kind in ("fdr", "spr")),
        )
    return table


def write(folder: Path, scores: Scores, options: Mapping[str, float]) -> list[Path]:
    """Write rescore.json and the plots; returns their paths."""
    import json
    from dataclasses import asdict

    from trsi_jax.report import charts
    from trsi_jax.rewards.rescore import KEYS, published

    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "spr": dict(options),
        "masked": scores.masked,
        "published": {kind: asdict(a) for kind, a in published().items()},
        "audit": {kind: asdict(a) for kind, a in scores.audits().items()},
        **{f"by_{k}": {n: asdict(g) for n, g in scores.groups(k).items()} for k in KEYS},
        "trajectories": [
            {
                "id": i,
                "success": bool(s),
                **{kind: float(r[n]) for kind, r in scores.rewards.items()},
            }
            for n, (i, s) in enumerate(zip(scores.ids, scores.success, strict=True))
        ],
    }
    dense = {kind.upper(): scores.rewards[kind] for kind in ("fdr", "spr")}
    families = scores.groups("family")
    means = {
        name: {kind.upper(): families[name].mean[kind] for kind in ("fdr", "spr")}
        for name in sorted(families, key=lambda n: families[n].success)
    }
    texts = {
        "rescore.json": json.dumps(content, indent=1) + "\n",
        "spread.svg": charts.reward_spread(scores.success, dense) + "\n",
        "families.svg": charts.reward_by_group(means) + "\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]
