"""What a config needs of a topology: bytes of a device, and the compiled step's work."""

from __future__ import annotations

import importlib.util
import math
import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from sharding import hlo
from sharding.layouts import LAYOUTS, layout
from sharding.mesh import AXES, GIB, Topology, make_mesh, mesh_shape, topology
from sharding.rules import device_bytes
from trsi_jax import model, optim
from trsi_jax.config import Config, RprStage
from trsi_jax.state import TrainState
from trsi_jax.steps.sharded import NETWORKS, Network, ShardedSteps, Step
from trsi_jax.steps.sharded_forward import ShardedModel

SPARE = 0.1
"""Share of the memory that a verdict wants left."""

_VOCABULARY_OF_TESTS = 256
"""Vocabulary of a preset that has none of its own, such as "tiny"."""


@dataclass(frozen=True)
class Budget:
    """Bytes of one device that follow from shapes alone.

    Attributes:
      actor: its parameters and optimizer state, between steps; 0 if the step has none.
      critic: the same.
      host: bytes of the optimizer states that lie in host memory instead, a device's share.
      batch: of the packed batch.
      gradients: of the network in training, float32.
      layer_inputs: residual stream at every layer, kept for the backward pass.
    """

    actor: int
    critic: int
    host: int
    batch: int
    gradients: int
    layer_inputs: int

    @property
    def total(self) -> int:
        """All of the device's; what a layer needs while it runs comes on top."""
        return self.actor + self.critic + self.batch + self.gradients + self.layer_inputs


@dataclass(frozen=True)
class Compiled:
    """The step, compiled for the topology.

    Attributes:
      arguments, outputs, aliased, temporaries, code: bytes of a device, as XLA assigned them.
      host_arguments: bytes of arguments in host memory.
      work: collectives and matmuls of one device.
      logits: arrays of tokens by vocabulary in the program; must be none.
      trace_seconds, compile_seconds: wall time here.
      compile_cpu_seconds: processor time of tracing and compiling.
      host_peak_bytes: largest resident size of this process.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    host_arguments: int
    work: hlo.Summary
    logits: list[str]
    trace_seconds: float
    compile_seconds: float
    compile_cpu_seconds: float
    host_peak_bytes: int

    @property
    def peak(self) -> int:
        """Arguments, outputs that are not arguments' buffers, temporaries and code."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclass(frozen=True)
class Plan:
    """A config on a topology.

    Attributes:
      config: its name.
      step: "sft", "critic" (warm-up), "actor" or "ppo" (actor, then critic).
      topology: the topology.
      mesh: axis -> size.
      rows, length, micro_batches: of one step.
      parameters: of actor and of critic, 0 if the step does not train it.
      budget: from shapes.
      model_flops: 6 x parameters x tokens of what is trained, a device's share of one step.
      attention_flops: 6 T^2 x heads x dim of causal attention, forward and backward, likewise; not
        part of `model_flops`.
      compiled: None if nothing was compiled.
      left_out: what was not found out, and why; empty if all was.
    """

    config: str
    step: Step
    topology: Topology
    mesh: dict[str, int]
    rows: int
    length: int
    micro_batches: int
    parameters: tuple[int, int]
    budget: Budget
    model_flops: float
    attention_flops: float
    compiled: Compiled | None
    left_out: str

    @property
    def needed(self) -> int:
        """Bytes of one device: as compiled, or of the budget."""
        return self.budget.total if self.compiled is None else self.compiled.peak

    @property
    def spare(self) -> float | None:
        """Share of a device's memory that is left; None for host memory."""
        hbm = self.topology.generation.hbm_bytes
        return None if hbm is None else 1 - self.needed / hbm

    @property
    def fits(self) -> bool | None:
        """Whether `SPARE` of the memory is left; None for host memory."""
        return None if self.spare is None else self.spare >= SPARE

    @property
    def knob(self) -> str:
        """What to turn if it does not fit; empty if it does."""
        hbm = self.topology.generation.hbm_bytes
        if hbm is None or self.fits:
            return ""
        states = self.budget.actor + self.budget.critic + self.budget.gradients
        if states > 0.6 * hbm:
            return (
                "states and gradients alone take most of the memory: more devices on"
                " sharding.fsdp, sharding.moments = 'bfloat16', or sharding.offload = true"
            )
        per_device = self.rows // self.micro_batches // (self.mesh["data"] * self.mesh["fsdp"])
        if per_device > 1:
            return (
                f"activations: a device takes {per_device} rows at a time; raise"
                f" sharding.micro_batches to {self.micro_batches * per_device}"
            )
        return (
            "activations: a device takes one row at a time; cut rows over more devices"
            f" (sharding.sequence, now {self.mesh['sequence']}, or sharding.tensor, now"
            f" {self.mesh['tensor']}) or shorten packing.length (now {self.length})"
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        budget = {**vars(self.budget), "total": self.budget.total}
        compiled: dict[str, Any] | None = None
        if self.compiled is not None:
            compiled = {
                **{k: v for k, v in vars(self.compiled).items() if k != "work"},
                "peak": self.compiled.peak,
                "collectives": {k: vars(c) for k, c in self.compiled.work.collectives.items()},
                "matmul_flops": self.compiled.work.matmul_flops,
                "unknown_loops": self.compiled.work.unknown_loops,
                "matmul_over_model_flops": self.compiled.work.matmul_flops / self.model_flops,
            }
        return {
            "config": self.config,
            "step": self.step,
            "topology": self.topology.name,
            "devices": self.topology.devices,
            "hbm_bytes": self.topology.generation.hbm_bytes,
            "mesh": self.mesh,
            "rows": self.rows,
            "length": self.length,
            "micro_batches": self.micro_batches,
            "parameters": {"actor": self.parameters[0], "critic": self.parameters[1]},
            "budget": budget,
            "model_flops": self.model_flops,
            "attention_flops": self.attention_flops,
            "compiled": compiled,
            "needed_bytes": self.needed,
            "spare": self.spare,
            "fits": self.fits,
            "knob": self.knob,
            "left_out": self.left_out,
        }


def plan(
    config: Config,
    name: str | None = None,
    *,
    step: Step = "ppo",
    compile_step: bool = True,
    compiling: Callable[[], None] = lambda: None,
) -> Plan:
    """Byte budget of a config on a topology, and one of its steps compiled for it.

    Args:
      config: with a sharding section, or of a model that one device holds.
      name: of the topology; that of the config's layout if None.
      step: which one.
      compile_step: compile if this machine can; else only the budget.
      compiling: called when all is checked and compilation begins.

    Returns:
      The plan.

    Raises:
      ValueError: an unknown layout or topology, no topology at all, a mesh of another size than
        the topology, or a dimension that the mesh does not divide.
    """
    section = config.sharding
    if name is None:
        if section.layout is None:
            raise ValueError("sharding.layout is not set: name a topology, such as v5p:4x4x4")
        name = layout(section.layout).topology
    target = topology(name)
    mesh = _mesh_on(config, target)
    left_out = _cannot(target, compile_step)
    # First of all: host devices are counted when JAX starts.
    devices = [] if left_out else _devices(target)
    sharded = ShardedModel(
        _model(config), AbstractMesh(tuple(mesh[a] for a in AXES), AXES), section.head_chunk
    )
    steps = _steps(config, sharded)
    rows, length = config.packing.rows, config.packing.length
    states = {network: steps.abstract_state(network) for network in NETWORKS[step]}
    batch = steps.abstract_batch(rows, length)
    # Every mistake of a person is found before minutes of compilation.
    steps.jitted(step, tuple(states.values()), batch)
    parameters = {network: _count(state.params) for network, state in states.items()}
    tokens = rows * length / target.devices
    c = sharded.config
    causal = 6 * length * c.num_heads * c.head_dim * c.num_groups * tokens
    compiled = None
    if not left_out:
        compiling()
        compiled = _compile(config, step, devices, mesh)
    return Plan(
        config=config.name,
        step=step,
        topology=target,
        mesh=mesh,
        rows=rows,
        length=length,
        micro_batches=section.micro_batches,
        parameters=(parameters.get("actor", 0), parameters.get("critic", 0)),
        budget=_budget(steps, states, batch),
        model_flops=6.0 * sum(parameters.values()) * tokens,
        attention_flops=float(len(states) * causal),
        compiled=compiled,
        left_out=left_out,
    )


def _mesh_on(config: Config, target: Topology) -> dict[str, int]:
    """The config's mesh, or that of a layout made for the topology, or rows over everything."""
    section = config.sharding
    asked = {axis: getattr(section, axis) for axis in AXES if getattr(section, axis) is not None}
    base: dict[str, int] = {}
    if section.layout is not None:
        base = dict(layout(section.layout).mesh)
    mesh = mesh_shape({**base, **asked})
    if math.prod(mesh.values()) == target.devices:
        return mesh
    for candidate in LAYOUTS.values():
        if candidate.topology == target.name and not asked:
            return dict(candidate.mesh)
    if section.layout is None and not asked:
        return mesh_shape({"fsdp": target.devices})
    shown = ", ".join(f"sharding.{axis} = {size}" for axis, size in mesh.items())
    raise ValueError(
        f"mesh of {math.prod(mesh.values())} devices ({shown}) on {target.name} with"
        f" {target.devices} devices"
    )


def _model(config: Config) -> model.ModelConfig:
    size = _VOCABULARY_OF_TESTS if config.model.preset == "tiny" else None
    return model.preset(config.model.preset, vocab_size=size)


def _steps(config: Config, sharded: ShardedModel) -> ShardedSteps:
    optimizer = optim.adamw(**config.adam.model_dump())
    if config.sharding.moments != "float32":
        optimizer = optim.stored_as(optimizer, config.sharding.moments)
    steps = ShardedSteps(
        sharded,
        optimizer,
        micro_batches=config.sharding.micro_batches,
        offload=config.sharding.offload,
    )
    for stage in config.stages:
        if isinstance(stage, RprStage):
            return replace(
                steps,
                clip=stage.clip,
                temperature=stage.temperature,
                value_clip=stage.value_clip,
            )
    return steps


def _count(params: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _budget(steps: ShardedSteps, states: Mapping[Network, TrainState], batch: Any) -> Budget:
    sharded, sizes = steps.sharded, steps.sharded.sizes

    def held(tree: Any) -> int:
        return device_bytes(tree, sharded.specs(tree), sizes)

    host = sum(held(state.opt_state) for state in states.values()) if steps.offload else 0
    networks = {
        network: held(state.params) + (0 if steps.offload else held(state.opt_state))
        for network, state in states.items()
    }
    rows, length = batch.token_ids.shape
    tokens = rows * length // (sizes["data"] * sizes["fsdp"] * sizes["sequence"])
    per_token = sum(np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(batch))
    c = sharded.config
    width = c.hidden_size * jnp.dtype(c.compute_dtype).itemsize
    return Budget(
        actor=networks.get("actor", 0),
        critic=networks.get("critic", 0),
        host=host,
        batch=tokens * per_token,
        gradients=max(held(state.params) for state in states.values()),
        layer_inputs=tokens // steps.micro_batches // sizes["tensor"] * width * c.num_layers,
    )


def _cannot(target: Topology, compile_step: bool) -> str:
    """Why nothing will be compiled; empty if it will."""
    lost = (
        "temporaries inside a layer, collectives and the program's own FLOPs are left out"
        " (budget from shapes only)"
    )
    if not compile_step:
        return f"{lost}: --no-compile"
    if not target.generation.compilable:
        return f"{lost}: a program for {target.name} can be compiled only where one is"
    if target.generation.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        return f"{lost}: the TPU compiler is not installed (pip install 'trsi-jax[aot]')"
    return ""


def _devices(target: Topology) -> list[Any]:
    if target.generation.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", target.devices)
        return jax.devices("cpu")[: target.devices]
    from jax.experimental import topologies

    # No metadata server to ask, and another process may have the library open: nothing is run.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # A program for absent devices goes into JAX's cache, tens of megabytes, and is never read back.
    jax.config.update("jax_enable_compilation_cache", False)
    found = topologies.get_topology_desc(platform="tpu", topology_name=target.name)
    return list(found.devices)


def _compile(config: Config, step: Step, devices: list[Any], shape: dict[str, int]) -> Compiled:
    rows, length = config.packing.rows, config.packing.length
    mesh: Mesh = make_mesh(shape, devices)
    sharded = ShardedModel(_model(config), mesh, config.sharding.head_chunk)
    steps = _steps(config, sharded)
    states = tuple(steps.abstract_state(network) for network in NETWORKS[step])
    batch = steps.abstract_batch(rows, length)
    rate = jax.ShapeDtypeStruct((), jnp.float32)
    began, cpu = time.perf_counter(), time.process_time()
    rates = [rate] * len(states)
    lowered = steps.jitted(step, states, batch).lower(*states, batch, *rates)
    traced = time.perf_counter()
    program = lowered.compile()
    compiled = time.perf_counter()
    cpu = time.process_time() - cpu
    memory = program.memory_analysis()
    text = program.as_text()
    per_device = rows // config.sharding.micro_batches // (shape["data"] * shape["fsdp"])
    part = length // shape["sequence"]
    many = {n for n in (length, part, per_device * part, rows * length) if n > sharded.chunk}
    vocabulary = sharded.config.vocab_size
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        host_arguments=memory.host_argument_size_in_bytes,
        work=hlo.summarize(text),
        logits=hlo.logit_arrays(
            text, tokens=many, vocabulary={vocabulary, vocabulary // shape["tensor"]}
        ),
        trace_seconds=traced - began,
        compile_seconds=compiled - traced,
        compile_cpu_seconds=cpu,
        host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def gib(n: float) -> str:
    """Bytes as GiB; as MiB where that would be all zeros."""
    return f"{n / GIB:.2f} GiB" if n >= GIB / 100 else f"{n / 2**20:.2f} MiB"
