"""A checkpoint comes back bit for bit, and a half-written one is no checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trsi_jax import checkpoint, optim, state

ADAM = {"b1": 0.9, "b2": 0.98, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}


def awkward() -> dict:
    """Values that a detour over text or another dtype would lose."""
    bits = np.array([0x80000000, 1, 0x7F800000, 0xFF800000, 0x7FC00001, 0x3EAAAAAB], np.uint32)
    return {
        "f32": jnp.asarray(bits.view(np.float32)),
        "bf16": jnp.asarray([1 / 3, -0.0, 1e-40], jnp.bfloat16),
        "i32": jnp.asarray([-(2**31), 2**31 - 1], jnp.int32),
        "bool": jnp.asarray([True, False]),
        "scalar": jnp.float32(np.pi),
    }


def same_bits(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(
        np.asarray(a).dtype == np.asarray(b).dtype
        and np.asarray(a).shape == np.asarray(b).shape
        and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in pairs
    )


@pytest.mark.parametrize("concrete", [True, False], ids=["arrays", "shapes"])
def test_a_tree_comes_back_bit_for_bit(tmp_path: Path, concrete: bool) -> None:
    tree = awkward()
    like = jax.tree.map(jnp.zeros_like, tree) if concrete else jax.eval_shape(lambda: tree)
    path = checkpoint.save(tmp_path / "stage", 7, tree)
    assert path == tmp_path / "stage" / "000007"
    restored = checkpoint.restore(tmp_path / "stage", 7, like)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    assert same_bits(restored, tree)


def test_a_train_state_goes_on_as_if_never_stored(tmp_path: Path) -> None:
    optimizer = optim.adamw(**ADAM)

    def update(before, seed):
        gradient = {"w": jax.random.normal(jax.random.key(seed), (4, 3))}
        return state.apply_gradients(before, gradient, optimizer=optimizer, learning_rate=0.1)

    first = update(state.create({"w": jnp.ones((4, 3))}, optimizer), 0)
    checkpoint.save(tmp_path, 1, {"actor": first})
    like = {"actor": state.create({"w": jnp.zeros((4, 3))}, optimizer)}
    restored = checkpoint.restore(tmp_path, 1, like)["actor"]
    assert same_bits(update(restored, 1), update(first, 1))


@pytest.mark.parametrize("committed", [True, False])
def test_a_step_compiled_before_serves_what_was_restored(tmp_path: Path, committed: bool) -> None:
    made = jnp.ones(3)
    if committed:
        made = jax.device_put(made, jax.devices()[0])
    checkpoint.save(tmp_path, 0, {"x": made})
    restored = checkpoint.restore(tmp_path, 0, {"x": made})["x"]
    assert restored.committed == made.committed == committed
    compiled = jax.jit(lambda x: 2 * x)
    compiled(made)
    compiled(restored)
    assert compiled._cache_size() == 1


def test_the_newest_step_stays_and_the_older_ones_go(tmp_path: Path) -> None:
    for step in (3, 10):
        checkpoint.save(tmp_path, step, {"x": jnp.full(2, step)})
    assert checkpoint.latest(tmp_path) == 10
    assert [p.name for p in tmp_path.iterdir()] == ["000010"]
    restored = checkpoint.restore(tmp_path, 10, {"x": jnp.zeros(2, jnp.int32)})
    assert restored["x"].tolist() == [10, 10]


def test_a_step_that_is_there_already_is_left_as_it_is(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 0, {"x": jnp.ones(2)})
    checkpoint.save(tmp_path, 0, {"x": jnp.zeros(2)})
    restored = checkpoint.restore(tmp_path, 0, {"x": jnp.zeros(2)})
    assert restored["x"].tolist() == [1.0, 1.0]


def test_a_half_written_step_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"x": jnp.ones(2)})
    # Names under which Orbax writes before it renames.
    for name in ("000002.orbax-checkpoint-tmp", "000003.orbax-checkpoint-tmp-17", "2", "notes"):
        (tmp_path / name).mkdir()
    assert checkpoint.latest(tmp_path) == 1


def test_nothing_saved_is_no_step(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None


WRITER = """
import sys
from pathlib import Path
import jax.numpy as jnp
from trsi_jax import checkpoint
print("ready", flush=True)
for step in range(1, 10_000):
    checkpoint.save(Path(sys.argv[1]), step, {"x": jnp.full(200_000, step)})
    print(step, flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
    )
    assert writer.stdout is not None
    seen = 0
    while seen < 3:
        line = writer.stdout.readline().strip()
        assert line, "the writer died"
        seen = int(line) if line.isdigit() else 0
    time.sleep(float(np.random.default_rng().uniform(0, 0.3)))
    writer.send_signal(signal.SIGKILL)
    rest = writer.communicate()[0].split()
    told = int(rest[-1]) if rest else seen
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert newest in (told, told + 1)
    restored = checkpoint.restore(tmp_path, newest, {"x": jnp.zeros(200_000, jnp.int32)})
    assert set(np.asarray(restored["x"]).tolist()) == {newest}
