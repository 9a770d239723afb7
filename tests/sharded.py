"""The sharded steps against the single-device ones, on eight devices that a CPU is split into.

    python -m tests.sharded                    # every mesh of MESHES
    python -m tests.sharded --mesh fsdp=4,tensor=2 --step sft
    python -m tests.sharded --float64          # the same function, to 1e-9
    python -m tests.sharded --norm-eps 1e-6    # float32, the models' own eps
    python -m tests.sharded --processes 2      # the devices in two processes, over gloo

Every mesh gets the same packed rows (segments of several lengths, padding on the right). Two whole
rows, which are one shard of eight, hold nothing but padding, and so do the last of eight parts of
every row. Loss, metrics and the state after one update must equal the single-device step's to 1e-5
in float32, and so must the gradient, which is read from Adam's first moment: (1 - b1) times the
clipped gradient, whose norm is at most one. No array of tokens by vocabulary may be in the program,
and no all-to-all.

The gradient is compared twice: by its elements, like everything else, and by |g - g'| / |g'|. The
second asks for more where the norm of a gated output enlarges rounding: with the models' own eps
of 1e-6 the single-device gradient itself is 2e-5 off in float32. So it is held to the limit in
float64, and in float32 with an eps of 1e-3, the default; `--norm-eps 1e-6` holds the elements only.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

DEVICES = 8
TOLERANCE = {"float32": 1e-5, "float64": 1e-9}
NORM_EPS = {"float32": 1e-3, "float64": 1e-6}
ROWS, LENGTH, VOCAB, CHUNK, BLOCK, COLUMNS = 16, 48, 72, 4, 12, 8
EMPTY_ROWS = (2, 3)
RATE, B1 = 1e-2, 0.9
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


def model_config(dtype: str, norm_eps: float) -> Any:
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
        # The first token of a segment reads beta (q . k) v of the delta rule, and the norm on it
        # enlarges rounding by up to eps^-1/2.
        norm_eps=norm_eps,
        tie_embeddings=False,
        max_position=512,
        gdn_key_heads=8,
        gdn_value_heads=16,
        gdn_key_dim=8,
        gdn_value_dim=8,
        gdn_chunk=8,
        gdn_solver="ladder",
        init=model.InitConfig(embed_std=0.3),
        compute_dtype=dtype,
        accum_dtype=dtype,
        param_dtype=dtype,
    )


def packed_rows(dtype: str) -> Any:
    """[16, 48] packed rows; those of `EMPTY_ROWS` are all padding, and so are the last 6 tokens."""
    import numpy as np

    from trsi_jax.batch import PackedBatch

    rng = np.random.default_rng(0)
    shape = (ROWS, LENGTH)
    segment, position = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row in set(range(ROWS)) - set(EMPTY_ROWS):
        end = LENGTH - LENGTH // 8 - row % 5
        cuts = np.sort(rng.choice(np.arange(1, end), 3, replace=False))
        for number, (a, b) in enumerate(zip([0, *cuts], [*cuts, end], strict=True), 1):
            segment[row, a:b] = number
            position[row, a:b] = np.arange(b - a)
    acted = (position > 0) & (rng.random(shape) < 0.6)

    def column() -> Any:
        return np.where(acted, rng.normal(size=shape), 0).astype(dtype)

    return PackedBatch(
        token_ids=np.where(segment > 0, rng.integers(0, VOCAB, shape), 0).astype(np.int32),
        segment_ids=segment,
        position_ids=position,
        turn_ids=np.zeros(shape, np.int32),
        acted=acted,
        loss_weight=np.where(position > 0, rng.random(shape), 0).astype(dtype),
        # About the policy's own, so that some ratios are inside the clip and some outside.
        logprob=np.where(acted, -np.log(VOCAB) + rng.normal(size=shape) / 4, 0).astype(dtype),
        columns={"advantage_t": column(), "return_t": column(), "value_t": column()},
    )


def optimizer() -> Any:
    """Adam whose eps is not small beside gradients: else a first step is their sign alone."""
    from trsi_jax import optim

    return optim.adamw(b1=B1, b2=0.98, eps=1e-2, weight_decay=0.01, max_grad_norm=1.0)


def initial_states(dtype: str, norm_eps: float) -> tuple[Any, Any]:
    """(actor, critic) on the host."""
    import jax
    import numpy as np

    from trsi_jax import model, state

    config = model_config(dtype, norm_eps)
    params = model.init_params(config, jax.random.key(1))
    critic = model.init_value_params(config, params)
    draw = jax.random.normal(jax.random.key(2), (config.hidden_size,))
    critic["value_head"] = {"kernel": 0.2 * draw.astype(dtype), "bias": np.zeros((), dtype)}
    made = state.create(params, optimizer()), state.create(critic, optimizer())
    host: tuple[Any, Any] = jax.tree.map(np.asarray, made)
    return host


@functools.cache
def single_device(step: str, dtype: str, norm_eps: float) -> tuple[Any, dict[str, Any]]:
    """What the single-device step makes of it: (states, metrics)."""
    import jax
    import numpy as np

    from trsi_jax import steps

    if step == "ppo":
        (actor, of_actor), (critic, of_critic) = (
            single_device(name, dtype, norm_eps) for name in ("actor", "critic")
        )
        metrics = {f"actor/{name}": value for name, value in of_actor.items()}
        metrics |= {f"critic/{name}": value for name, value in of_critic.items()}
        return (*actor, *critic), metrics
    actor, critic = initial_states(dtype, norm_eps)
    common = {"config": model_config(dtype, norm_eps), "optimizer": optimizer()}
    function, state = {
        "sft": (functools.partial(steps.sft_step, **common), actor),
        "actor": (
            functools.partial(steps.actor_step, **common, clip=0.2, temperature=0.9),
            actor,
        ),
        "critic": (functools.partial(steps.critic_step, **common, value_clip=0.5), critic),
    }[step]
    new, metrics = jax.jit(function)(state, packed_rows(dtype), np.dtype(dtype).type(RATE))
    return jax.tree.map(np.asarray, ((new,), dict(metrics)))


def compare(
    axes: Mapping[str, int],
    micro_batches: int,
    wanted: Sequence[str],
    dtype: str,
    norm_eps: float,
    offload: bool,
) -> list[tuple[str, float]]:
    """(step and mesh, largest difference) of the steps on one mesh."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from sharding.hlo import logit_arrays, summarize
    from sharding.mesh import make_mesh
    from sharding.rules import place
    from trsi_jax.steps.sharded import ShardedSteps
    from trsi_jax.steps.sharded_forward import ShardedModel

    batch = packed_rows(dtype)
    actor, critic = initial_states(dtype, norm_eps)
    made = ShardedSteps(
        ShardedModel(model_config(dtype, norm_eps), make_mesh(axes), CHUNK, BLOCK, COLUMNS),
        optimizer(),
        micro_batches=micro_batches,
        clip=0.2,
        temperature=0.9,
        value_clip=0.5,
        offload=offload,
    )
    networks = {"sft": (actor,), "actor": (actor,), "critic": (critic,), "ppo": (actor, critic)}
    found = []
    for step in wanted:
        states = networks[step]
        placed = [place(s, made.state_shardings(s)) for s in states]
        rows = place(batch, made.batch_shardings(batch))
        whole = NamedSharding(made.sharded.mesh, PartitionSpec())
        rates = [place(np.dtype(dtype).type(RATE), whole)] * len(states)
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
        states_then, metrics_then = single_device(step, dtype, norm_eps)
        off = {
            "update": _difference(tuple(new), states_then),
            "metrics": _difference(dict(metrics), metrics_then),
        }
        pairs = zip(new, states_then, strict=True)
        off["elements"], relative = map(max, zip(*(_gradient_off(*p) for p in pairs), strict=True))
        if dtype == "float64" or norm_eps >= NORM_EPS["float32"]:
            off["gradient"] = relative
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves([s.params for s in placed]))
        name = f"{step} on {' x '.join(f'{a} {n}' for a, n in axes.items())}"
        shown = ", ".join(f"{what} {number:.1e}" for what, number in off.items())
        print(f"{name}, {micro_batches} micro-batches: {shown}", flush=True)
        found.append((name, max(off.values())))
    return found


def _parts(got: Any, expected: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of arrays that this process has, beside the same parts of the expected ones."""
    import jax
    import numpy as np

    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert mine.shape == theirs.shape
        for shard in mine.addressable_shards:
            yield (
                np.asarray(shard.data, np.float64),
                np.asarray(theirs, np.float64)[shard.index],
            )


def _difference(got: Any, expected: Any) -> float:
    """Largest difference, relative for numbers above one."""
    import numpy as np

    worst = 0.0
    for mine, theirs in _parts(got, expected):
        error = np.abs(mine - theirs) / np.maximum(np.abs(theirs), 1)
        assert np.all(np.isfinite(error))
        worst = max(worst, float(np.max(error, initial=0)))
    return worst


def _gradient_off(got: Any, expected: Any) -> tuple[float, float]:
    """Largest |g_i - g'_i|, and |g - g'| / |g'| over all parameters, by Adam's first moments."""
    import numpy as np
    import optax

    pair = (optax.tree_utils.tree_get(state.opt_state, "mu") for state in (got, expected))
    parts = list(_parts(*pair))
    largest = max(float(np.max(np.abs(mine - theirs), initial=0)) for mine, theirs in parts)
    error = sum(float(np.sum((mine - theirs) ** 2)) for mine, theirs in parts)
    size = sum(float(np.sum(theirs**2)) for _, theirs in parts)
    return largest / (1 - B1), math.sqrt(error / size)


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
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--norm-eps", type=float, help="of all norms")
    parser.add_argument("--offload", action="store_true", help="moments in host memory")
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
        chosen = tuple(
            (axes, next((micro for known, micro in MESHES if known == axes), 1))
            for axes in options.mesh
        )
    dtype = "float64" if options.float64 else "float32"
    if options.float64:
        import jax

        jax.config.update("jax_enable_x64", True)
    norm_eps = options.norm_eps or NORM_EPS[dtype]
    found = [
        pair
        for axes, micro in chosen
        for pair in compare(axes, micro, options.step or STEPS, dtype, norm_eps, options.offload)
    ]
    worst, limit = max(off for _, off in found), TOLERANCE[dtype]
    print(f"sharded: {len(chosen)} meshes, {dtype}, largest difference {worst:.1e}, limit {limit}")
    for name, off in found:
        if not off <= limit:
            print(f"sharded: {name}: off by {off:.1e}", file=sys.stderr)
    return int(not worst <= limit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
