"""The sharded steps against the single-device ones, on eight devices that a CPU is split into.

    python -m tests.sharded                    # every mesh of MESHES
    python -m tests.sharded --mesh fsdp=4,tensor=2 --step sft
    python -m tests.sharded --processes 2      # the devices in two processes, over gloo

Every mesh gets the same packed rows (segments of several lengths, padding on the right), of which
those of one whole shard hold nothing but padding. Loss, metrics and the state after one update must
equal the single-device step's to 1e-5 in float32; the gradients show in Adam's first moment, which
is (1 - b1) times the clipped gradient. No array of tokens by vocabulary may be in the program.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

DEVICES = 8
TOLERANCE = 1e-5
ROWS, LENGTH, VOCAB, CHUNK = 16, 48, 72, 8
EMPTY_ROWS = (2, 3)
RATE = 1e-2
STEPS = ("sft", "critic", "actor", "ppo")

# (8), (4, 2) and (2, 2, 2), with each axis in turn; micro-batches alternate.
MESHES: tuple[tuple[Mapping[str, int], int], ...] = (
    ({"data": 8}, 1),
    ({"fsdp": 8}, 2),
    ({"tensor": 8}, 1),
    ({"sequence": 8}, 2),
    ({"fsdp": 4, "tensor": 2}, 2),
    ({"data": 4, "sequence": 2}, 1),
    ({"tensor": 4, "sequence": 2}, 1),
    ({"data": 2, "fsdp": 2, "tensor": 2}, 1),
    ({"fsdp": 2, "tensor": 2, "sequence": 2}, 2),
)


def model_config() -> Any:
    """Two groups, with more query than key heads and more value than key heads."""
    from trsi_jax import model

    return model.ModelConfig(
        name="sharded",
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=4,
        intermediate_size=48,
        layer_pattern=("linear", "full"),
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        rotary_dim=4,
        rope_theta=1e4,
        gated_attention=True,
        norm_offset=1.0,
        tie_embeddings=False,
        max_position=512,
        gdn_key_heads=8,
        gdn_value_heads=16,
        gdn_key_dim=8,
        gdn_value_dim=8,
        gdn_chunk=8,
        gdn_solver="ladder",
        init=model.InitConfig(embed_std=0.3),
    )


def packed_rows() -> Any:
    """[16, 48] packed rows; the rows of `EMPTY_ROWS` are one shard of eight and all padding."""
    import numpy as np

    from trsi_jax.batch import PackedBatch

    rng = np.random.default_rng(0)
    shape = (ROWS, LENGTH)
    segment, position = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row in set(range(ROWS)) - set(EMPTY_ROWS):
        end = LENGTH - row % 5
        cuts = np.sort(rng.choice(np.arange(1, end), 3, replace=False))
        for number, (a, b) in enumerate(zip([0, *cuts], [*cuts, end], strict=True), 1):
            segment[row, a:b] = number
            position[row, a:b] = np.arange(b - a)
    acted = (position > 0) & (rng.random(shape) < 0.6)

    def column() -> Any:
        return np.where(acted, rng.normal(size=shape), 0).astype(np.float32)

    return PackedBatch(
        token_ids=np.where(segment > 0, rng.integers(0, VOCAB, shape), 0).astype(np.int32),
        segment_ids=segment,
        position_ids=position,
        turn_ids=np.zeros(shape, np.int32),
        acted=acted,
        loss_weight=np.where(position > 0, rng.random(shape), 0).astype(np.float32),
        # About the policy's own, so that some ratios are inside the clip and some outside.
        logprob=np.where(acted, -np.log(VOCAB) + rng.normal(size=shape) / 4, 0).astype(np.float32),
        columns={"advantage_t": column(), "return_t": column(), "value_t": column()},
    )


def optimizer() -> Any:
    """Adam whose eps is not small beside gradients: else a first step is their sign alone."""
    from trsi_jax import optim

    return optim.adamw(b1=0.9, b2=0.98, eps=1e-2, weight_decay=0.01, max_grad_norm=1.0)


def initial_states() -> tuple[Any, Any]:
    """(actor, critic) on the host."""
    import jax
    import numpy as np

    from trsi_jax import model, state

    config = model_config()
    params = model.init_params(config, jax.random.key(1))
    critic = model.init_value_params(config, params)
    draw = jax.random.normal(jax.random.key(2), (config.hidden_size,))
    critic["value_head"]["kernel"] = 0.2 * draw
    made = state.create(params, optimizer()), state.create(critic, optimizer())
    host: tuple[Any, Any] = jax.tree.map(np.asarray, made)
    return host


def single_device(wanted: Sequence[str], actor: Any, critic: Any, batch: Any) -> dict[str, Any]:
    """What the single-device steps make of it: step -> (state, metrics)."""
    from functools import partial

    import jax
    import jax.numpy as jnp
    import numpy as np

    from trsi_jax import steps

    common = {"config": model_config(), "optimizer": optimizer()}
    functions = {
        "sft": (partial(steps.sft_step, **common), actor),
        "actor": (partial(steps.actor_step, **common, clip=0.2, temperature=0.9), actor),
        "critic": (partial(steps.critic_step, **common, value_clip=0.5), critic),
    }
    needed = {
        part for step in wanted for part in (("actor", "critic") if step == "ppo" else (step,))
    }
    found = {}
    for name in sorted(needed):
        function, state = functions[name]
        result = jax.jit(function)(state, batch, jnp.float32(RATE))
        found[name] = jax.tree.map(np.asarray, result)
    if "ppo" in wanted:
        metrics = {f"{n}/{k}": v for n in ("actor", "critic") for k, v in found[n][1].items()}
        found["ppo"] = ((found["actor"][0], found["critic"][0]), metrics)
    return found


def compare(axes: Mapping[str, int], micro_batches: int, wanted: Sequence[str]) -> float:
    """Largest difference of the steps on one mesh; raises AssertionError where one is too large."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from sharding.hlo import logit_arrays, summarize
    from sharding.mesh import make_mesh
    from sharding.rules import place
    from trsi_jax.steps.sharded import ShardedSteps
    from trsi_jax.steps.sharded_forward import ShardedModel

    batch = packed_rows()
    actor, critic = initial_states()
    expected = single_device(wanted, actor, critic, batch)
    made = ShardedSteps(
        ShardedModel(model_config(), make_mesh(axes), CHUNK),
        optimizer(),
        micro_batches=micro_batches,
        clip=0.2,
        temperature=0.9,
        value_clip=0.5,
    )
    networks = {"sft": (actor,), "actor": (actor,), "critic": (critic,), "ppo": (actor, critic)}
    worst = 0.0
    for step in wanted:
        states = networks[step]
        placed = [place(s, made.state_shardings(s)) for s in states]
        rows = place(batch, made.batch_shardings(batch))
        whole = NamedSharding(made.sharded.mesh, PartitionSpec())
        rates = [place(np.float32(RATE), whole)] * len(states)
        compiled = made.jitted(step, states, batch).lower(*placed, rows, *rates).compile()
        text = compiled.as_text()
        tensor = dict(made.sharded.sizes)["tensor"]
        parts = {LENGTH, LENGTH // made.sharded.sizes["sequence"], ROWS * LENGTH}
        tokens = {n for n in parts if n > CHUNK}
        # The hidden size is 32 and never a count of tokens here, so the head is not among them.
        logits = logit_arrays(text, tokens=tokens, vocabulary={VOCAB, VOCAB // tensor})
        assert not logits, f"{step} on {dict(axes)}: {logits}"
        assert "all-to-all" not in summarize(text).collectives, f"{step} on {dict(axes)}"
        *new, metrics = compiled(*placed, rows, *rates)
        state, expected_metrics = expected[step]
        difference = max(
            _difference(tuple(new), state if step == "ppo" else (state,)),
            _difference(dict(metrics), expected_metrics),
        )
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves([s.params for s in placed]))
        print(f"{dict(axes)} x {micro_batches} {step}: {difference:.1e}", flush=True)
        assert difference <= TOLERANCE, f"{step} on {dict(axes)}: off by {difference}"
        worst = max(worst, difference)
    return worst


def _difference(got: Any, expected: Any) -> float:
    """Largest difference over the parts of arrays that this process has.

    Relative for numbers above one: a gradient's norm of 80 has steps of 8e-6 in float32.
    """
    import jax
    import numpy as np

    assert jax.tree.structure(got) == jax.tree.structure(expected)
    worst = 0.0
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert mine.shape == theirs.shape
        for shard in mine.addressable_shards:
            wanted = np.asarray(theirs, np.float64)[shard.index]
            error = np.abs(np.asarray(shard.data, np.float64) - wanted)
            error /= np.maximum(np.abs(wanted), 1)
            assert np.all(np.isfinite(error))
            worst = max(worst, float(np.max(error, initial=0)))
    return worst


def _use_cpu(devices: int) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def _parse_mesh(text: str) -> dict[str, int]:
    if not re.fullmatch(r"\w+=\d+(,\w+=\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form fsdp=4,tensor=2")
    return {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}


def _spread(arguments: Sequence[str], processes: int) -> int:
    """Run this module in several processes that form one cluster; the largest exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sharded", *arguments],
            env={**os.environ, "SHARDED_RANK": f"{rank}/{processes}@{address}"},
        )
        for rank in range(processes)
    ]
    return max(abs(child.wait()) for child in children)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", type=_parse_mesh, action="append")
    parser.add_argument("--step", choices=STEPS, action="append")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    rank = os.environ.get("SHARDED_RANK")
    if options.processes > 1 and rank is None:
        return _spread(arguments, options.processes)
    _use_cpu(DEVICES // options.processes)
    if rank is not None:
        import jax

        number, _, address = rank.partition("@")
        index, _, count = number.partition("/")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, int(count), int(index))
        assert jax.process_count() == options.processes
    chosen = MESHES
    if options.mesh:
        known = [micro for axes, micro in MESHES if axes == options.mesh[0]]
        chosen = tuple((axes, known[0] if known else 1) for axes in options.mesh)
    worst = max(compare(axes, micro, options.step or STEPS) for axes, micro in chosen)
    print(f"sharded: {len(chosen)} meshes, largest difference {worst:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
