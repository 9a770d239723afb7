"""`trsi plan CONFIG`: whether the train step of a config fits a topology, without having it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rollout.errors import UserError

if TYPE_CHECKING:
    from trsi_jax.steps.plan import Plan


def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file.")],
    topology: Annotated[
        str | None,
        typer.Option(
            help="v5e:AxB, v6e:AxB, v5p:AxBxC, tpu7x:AxBxC, h200:N or cpu:N"
            " [default: the layout's].",
        ),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--override", "-o", metavar="KEY=VALUE", help="Change a key of the config."),
    ] = None,
    step: Annotated[
        Literal["sft", "critic", "actor", "ppo"],
        typer.Option(help="Which step: critic is its warm-up, ppo is actor and critic."),
    ] = "ppo",
    compile_step: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile", help="Compile the step (minutes), or only add up bytes."
        ),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Bytes, collectives and FLOPs of a train step on a named topology, without the hardware."""
    import json

    from trsi_jax.cli import configs
    from trsi_jax.steps import plan as planner

    chosen = configs.load(config, override or [], None)

    def compiling() -> None:
        print("trsi plan: compiling can take minutes; --no-compile only adds up", file=sys.stderr)

    try:
        found = planner.plan(
            chosen, topology, step=step, compile_step=compile_step, compiling=compiling
        )
    except ValueError as error:
        raise UserError(f"{config}: {error}") from None
    print(json.dumps(found.as_json(), indent=1) if as_json else "\n".join(lines(found)))


def lines(found: Plan) -> list[str]:
    """The plan for a person."""
    from trsi_jax.steps.plan import SPARE, gib

    hbm = found.topology.generation.hbm_bytes
    budget, compiled = found.budget, found.compiled
    mesh = " x ".join(f"{axis} {size}" for axis, size in found.mesh.items())
    trained = [
        f"{network} ({parameters:,} parameters)"
        for network, parameters in zip(("actor", "critic"), found.parameters, strict=True)
        if parameters
    ]
    shown = [
        f"{found.config} on {found.topology.name}, {found.topology.devices} devices, mesh {mesh}",
        f"{found.step} step of {' and '.join(trained)}: {found.rows} rows of {found.length}"
        f" tokens, {found.micro_batches} micro-batches",
        "",
        "bytes of one device, from shapes",
        f"  actor, with optimizer     {gib(budget.actor):>12}",
        f"  critic, with optimizer    {gib(budget.critic):>12}",
        f"  batch                     {gib(budget.batch):>12}",
        f"  gradients, one network    {gib(budget.gradients):>12}",
        f"  inputs of layers          {gib(budget.layer_inputs):>12}",
        f"  sum                       {gib(budget.total):>12}",
    ]
    if budget.host:
        shown.append(f"  in host memory            {gib(budget.host):>12}")
    if compiled is not None:
        shown += [
            "",
            "bytes of one device, as compiled",
            f"  arguments                 {gib(compiled.arguments):>12}",
            f"  outputs not in place      {gib(compiled.outputs - compiled.aliased):>12}",
            f"  temporaries               {gib(compiled.temporaries):>12}",
            f"  program                   {gib(compiled.code):>12}",
            f"  peak                      {gib(compiled.peak):>12}",
            "",
            f"{'collectives of one device':<27} {'in text':>8} {'calls':>9} {'bytes':>13}",
        ]
        shown += [
            f"  {kind:<25} {c.instructions:>8} {c.calls:>9} {gib(c.bytes):>13}"
            for kind, c in compiled.work.collectives.items()
        ]
        flops = compiled.work.matmul_flops
        shown += [
            "",
            f"matmul FLOPs of one device by loop trips: {flops:.3e}, that is"
            f" {flops / found.model_flops:.2f} x 6ND",
            f"arrays of tokens x vocabulary: {', '.join(compiled.logits) or 'none'}",
            f"traced in {compiled.trace_seconds:.0f} s, compiled in"
            f" {compiled.compile_seconds:.0f} s ({compiled.compile_cpu_seconds:.0f} s of processor"
            f" time), this process at most {gib(compiled.host_peak_bytes)}",
        ]
    shown += [
        "",
        f"6ND of one device: {found.model_flops:.3e}; causal attention on top:"
        f" {found.attention_flops:.3e}",
    ]
    if found.left_out:
        shown.append(found.left_out)
    if hbm is None or found.spare is None:
        shown.append("host memory has no fixed limit here, so there is no verdict")
    elif found.fits and found.compiled is None:
        shown.append(f"the sum leaves {100 * found.spare:.0f} % of {gib(hbm)}; compile to be sure")
    elif found.fits:
        shown.append(f"fits: {100 * found.spare:.0f} % of {gib(hbm)} to spare")
    else:
        shown.append(
            f"does not fit: {gib(found.needed)} of {gib(hbm)} leaves {100 * found.spare:.0f} %,"
            f" less than {100 * SPARE:.0f} %; {found.knob}"
        )
    return shown
