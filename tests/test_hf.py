"""Hugging Face directories in and out: exact bytes, named mistakes, shards, memory, kills.

The mapping itself is checked against `transformers`' numbers (tests/test_golden.py); here files
are written by `safetensors` and `transformers`' configuration classes, never by the code under
test.
"""

from __future__ import annotations

import dataclasses
import errno
import filecmp
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file, save_file

from rollout.errors import UserError
from tests import reference
from trsi_jax.model import ModelConfig, init_params, load_params, preset, save_params
from trsi_jax.model.hf import load, names, save

ROOT = Path(__file__).resolve().parent.parent


def vlm_directory(folder: Path, *, files: int = 3) -> Path:
    """A vision-language checkpoint of the real 1,199 names in tiny sizes, as 3.5 and 3.8 store it.

    Everything is bfloat16 but the decay and the gated norm, which Qwen3.5 keeps in float32.
    """
    description = reference.published_description(small=True)
    description.save_pretrained(str(folder))
    config = ModelConfig.from_hf(folder)
    shapes = {n: t.shape for n, t in names.text_tensors(config, names.VLM_PREFIX).items()}
    shapes |= names.untrained_tensors(description)
    tensors = {}
    for name, array in reference.weights(shapes, offset_norms=True).items():
        single = name.endswith(("A_log", "linear_attn.norm.weight"))
        tensors[name] = jnp.asarray(array, jnp.float32 if single else jnp.bfloat16)
    return write(folder, tensors, files=files)


def write(folder: Path, tensors: dict[str, Any], *, files: int = 2) -> Path:
    """Safetensors files and their index, replacing what is there."""
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    order, where = sorted(tensors), {}
    for index in range(files):
        file = f"model-{index + 1:05d}-of-{files:05d}.safetensors"
        part = order[index::files]
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def read(folder: Path) -> dict[str, Any]:
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def small_directory(folder: Path, case: str = "hybrid", dtype: Any = jnp.float32) -> Path:
    """The reference checkpoint of a case."""
    description = reference.description(case)
    description.save_pretrained(str(folder))
    tensors = names.text_tensors(ModelConfig.from_hf(folder))
    arrays = reference.weights({n: t.shape for n, t in tensors.items()}, offset_norms=True)
    return write(folder, {n: jnp.asarray(a, dtype) for n, a in arrays.items()})


def same_files(left: Path, right: Path) -> bool:
    listed = sorted(path.name for path in left.iterdir())
    if listed != sorted(path.name for path in right.iterdir()):
        return False
    return filecmp.cmpfiles(left, right, listed, shallow=False)[1:] == ([], [])


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_a_round_trip_of_the_1199_tensors_is_byte_identical(
    param_dtype: str, tmp_path: Path
) -> None:
    base = vlm_directory(tmp_path / "base")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    stored = read(base)
    assert len(stored) == 1_199
    config = dataclasses.replace(ModelConfig.from_hf(base), param_dtype=param_dtype)
    params = load_params(base, config)
    mixer = params["groups"]["gdn"]["mixer"]
    assert mixer["A_log"].dtype == mixer["norm"].dtype == jnp.float32
    assert mixer["q_proj"]["kernel"].dtype == param_dtype
    jax.tree.map(
        lambda leaf, abstract: np.testing.assert_equal(leaf.dtype, abstract.dtype),
        params,
        jax.eval_shape(lambda: init_params(config, jax.random.key(0))),
    )
    out = save_params(tmp_path / "deep" / "out", config, params, base=base)
    assert same_files(base, out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_an_update_changes_the_trained_tensors_and_no_other_byte(tmp_path: Path) -> None:
    base = vlm_directory(tmp_path / "base", files=1)
    config = ModelConfig.from_hf(base)
    params = jax.tree.map(lambda leaf: 2 * leaf, load_params(base, config))
    out = save_params(tmp_path / "out", config, params, base=base)
    before, after = read(base), read(out)
    assert list(before) == list(after)
    trained = names.text_tensors(config, names.VLM_PREFIX)
    for name, tensor in before.items():
        factor = 2 if name in trained else 1
        assert after[name].dtype == tensor.dtype
        np.testing.assert_array_equal(after[name], factor * tensor, err_msg=name)
    assert filecmp.cmp(base / "config.json", out / "config.json", shallow=False)


@pytest.mark.parametrize("dtype", ["F16", "F32", "F64", "BF16"])
def test_every_storage_dtype_is_read_and_written(dtype: str, tmp_path: Path) -> None:
    config = ModelConfig.from_hf(small_directory(tmp_path / "base", "dense"))
    # Quarters, so that each dtype holds them exactly.
    params = jax.tree.map(
        lambda leaf: jnp.round(leaf * 4) / 4, load_params(tmp_path / "base", config)
    )
    out = save_params(tmp_path / "out", config, params, dtype=dtype, shard_bytes=20_000)
    assert len(list(out.glob("*.safetensors"))) > 1
    again = load_params(out, dataclasses.replace(config, param_dtype="float32"))
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert ModelConfig.from_hf(out).tie_embeddings


def test_a_model_from_scratch_is_described_and_read_back(tmp_path: Path) -> None:
    config = dataclasses.replace(preset("tiny", vocab_size=31), remat=True)
    params = init_params(config, jax.random.key(0))
    out = save_params(tmp_path / "tiny", config, params, dtype="F32")
    described = dataclasses.replace(
        ModelConfig.from_hf(out),
        init=config.init,
        gdn_chunk=config.gdn_chunk,
        gdn_solver=config.gdn_solver,
    )
    assert described == config
    jax.tree.map(np.testing.assert_array_equal, load_params(out, described), params)


@pytest.mark.parametrize(
    ("window", "job", "ahead"), [(1, 1, 1), (1, 1 << 30, 0), (20_000, 64, 512)]
)
def test_how_an_import_is_cut_does_not_change_it(
    window: int, job: int, ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = small_directory(tmp_path / "base")
    config = ModelConfig.from_hf(base)
    expected = load_params(base, config)
    count: list[int] = []
    monkeypatch.setattr(load, "_WINDOW", window)
    monkeypatch.setattr(load, "_JOB", job)
    monkeypatch.setattr(load, "_AHEAD", ahead)
    again = load_params(base, config, on_read=count.append)
    jax.tree.map(np.testing.assert_array_equal, again, expected)
    assert sum(count) == sum(leaf.nbytes for leaf in jax.tree.leaves(expected))


def test_a_file_that_shrinks_during_an_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A mapping of it alone would end the process by a bus error.
    base = small_directory(tmp_path / "base")
    config = ModelConfig.from_hf(base)
    begin = load._ReadAhead.begin

    def shrink(self: Any, piece: Any) -> None:
        os.truncate(piece.path, piece.start)
        begin(self, piece)

    monkeypatch.setattr(load._ReadAhead, "add", lambda *_: None)
    monkeypatch.setattr(load._ReadAhead, "begin", shrink)
    with pytest.raises(UserError, match=r"model.*safetensors: cut off in tensor"):
        load_params(base, config)


def test_a_tied_model_may_hold_its_embedding_twice(tmp_path: Path) -> None:
    # Published Qwen3 checkpoints with tied embeddings list lm_head.weight all the same.
    base = small_directory(tmp_path / "base", "dense")
    tensors = read(base)
    write(base, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    config = ModelConfig.from_hf(base)
    params = load_params(base, config)
    assert "lm_head" not in params
    assert same_files(base, save_params(tmp_path / "out", config, params, base=base))
    write(base, tensors | {"lm_head.weight": 2 * tensors["model.embed_tokens.weight"]})
    with pytest.raises(UserError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load_params(base, config)


NORM = "model.layers.3.self_attn.k_norm.weight"
SEVENTH = "model.layers.6.linear_attn.in_proj_qkv.weight"
QKV = "model.layers.1.linear_attn.in_proj_qkv.weight"


def _without(tensors: dict[str, Any]) -> dict[str, Any]:
    return {n: t for n, t in tensors.items() if n != QKV}


MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "missing": (_without, f"{QKV} is missing"),
    "extra": (lambda t: t | {"model.layers.8.mlp.x": t[NORM]}, "model.layers.8.mlp.x is not one"),
    "shape": (lambda t: t | {QKV: t[QKV].T}, f"{QKV} has shape [40, 104], the model needs"),
    "dtype": (lambda t: t | {NORM: t[NORM].astype(jnp.int32)}, f"{NORM} has dtype I32; allowed"),
    "nan": (lambda t: t | {QKV: t[QKV].at[70, 3].set(jnp.nan)}, f"{QKV} holds numbers that"),
    "inf": (lambda t: t | {NORM: t[NORM].at[-1].set(-jnp.inf)}, f"{NORM} holds numbers that"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_tensor_of_a_checkpoint_is_named(mistake: str, tmp_path: Path) -> None:
    base = small_directory(tmp_path / "base")
    config = ModelConfig.from_hf(base)
    good = load_params(base, config)
    change, message = MISTAKES[mistake]
    write(base, change(read(base)))
    with pytest.raises(UserError) as caught:
        load_params(base, config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    if mistake not in ("nan", "inf"):  # Those numbers are replaced in an export.
        with pytest.raises(UserError) as caught:
            save_params(tmp_path / "out", config, good, base=base)
        assert message in str(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("name", ["mtp.fc.weight", "model.visual.blocks.26.norm2.bias"])
def test_half_of_what_is_only_passed_on_is_refused(name: str, tmp_path: Path) -> None:
    base = vlm_directory(tmp_path / "base")
    config, tensors = ModelConfig.from_hf(base), read(base)
    write(base, {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(UserError, match=f"tensor {name} is missing"):
        load_params(base, config)
    # `transformers` drops the whole prediction block when it saves; that is a checkpoint too.
    part = name[: name.index(".") + 1] if name.startswith("mtp.") else "model.visual."
    write(base, {n: t for n, t in tensors.items() if not n.startswith(part)})
    params = load_params(base, config)
    assert same_files(base, save_params(tmp_path / "out", config, params, base=base))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    base = small_directory(tmp_path / "base")
    config = ModelConfig.from_hf(base)
    first, second = sorted(base.glob("*.safetensors"))
    whole, index = first.read_bytes(), (base / "model.safetensors.index.json").read_text()
    for cut, message in (
        (4, "not a safetensors file, or cut off in its header"),
        (200, "not a safetensors file, or cut off in its header"),
        (len(whole) - 1, "cut off in tensor"),
    ):
        first.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=f"{first.name}: {message}"):
            load_params(base, config)
    first.write_bytes(whole + b"x")
    with pytest.raises(UserError, match="1 bytes behind the last tensor"):
        load_params(base, config)
    first.write_bytes(whole)
    second.rename(tmp_path / "away")
    with pytest.raises(UserError, match=f"shard {second.name}.* is missing"):
        load_params(base, config)
    (tmp_path / "away").rename(second)
    edited = json.loads(index)
    del edited["weight_map"][NORM]
    (base / "model.safetensors.index.json").write_text(json.dumps(edited))
    with pytest.raises(UserError, match=f"tensor {NORM} is not listed"):
        load_params(base, config)
    (base / "model.safetensors.index.json").write_text("{")
    with pytest.raises(UserError, match="no readable weight_map"):
        load_params(base, config)
    with pytest.raises(UserError, match="no directory"):
        load_params(tmp_path / "nowhere", config)


def test_wrong_parameters_are_named_and_nothing_is_published(tmp_path: Path) -> None:
    base = small_directory(tmp_path / "base")
    config = ModelConfig.from_hf(base)
    params = load_params(base, config)

    def changed(edit: Callable[[Any], None]) -> Any:
        copy = jax.tree.map(lambda leaf: leaf, params)
        edit(copy)
        return copy

    def spoil(tree: Any) -> None:
        kernel = tree["groups"]["gdn"]["mixer"]["v_proj"]["kernel"]
        tree["groups"]["gdn"]["mixer"]["v_proj"]["kernel"] = kernel.at[1, 2, 0, 0, 0].set(jnp.nan)

    def reshape(tree: Any) -> None:
        tree["final_norm"]["scale"] = jnp.zeros(39)

    wrong = {
        "parameter lm_head/kernel is missing": changed(lambda t: t.pop("lm_head")),
        "parameter value_head/bias is not one": changed(
            lambda t: t.update(value_head={"bias": jnp.zeros(())})
        ),
        "parameter final_norm/scale has shape [39], the model needs [40]": changed(reshape),
        # Group 1, layer 2 of it: the seventh layer.
        f"{SEVENTH} (parameter groups/gdn/mixer/v_proj/": changed(spoil),
    }
    for message, tree in wrong.items():
        with pytest.raises(UserError) as caught:
            save_params(tmp_path / "out", config, tree, base=base)
        assert message in str(caught.value)
    # Too large for the storage dtype is not finite either.
    large = changed(lambda t: t["final_norm"].update(scale=jnp.full(40, 1e6)))
    with pytest.raises(UserError, match=r"model\.norm\.weight .*not finite in F16"):
        save_params(tmp_path / "out", config, large, dtype="F16")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    with pytest.raises(UserError, match="exists already"):
        save_params(base, config, params, base=base)


KILLED = """
import resource, signal, sys
from pathlib import Path
import jax
from trsi_jax.model import ModelConfig, load_params, save_params
base, out, limit = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
config = ModelConfig.from_hf(base)
params = load_params(base, config)
# The kernel ends a process that writes a file beyond this, in the middle of a tensor.
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
save_params(out, config, params, base=base)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_export_publishes_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    base = small_directory(tmp_path / "base")
    out = tmp_path / "out"
    limit = max(path.stat().st_size for path in base.glob("*.safetensors")) * 2 // 3

    command = [sys.executable, "-c", KILLED, str(base), str(out), str(limit)]
    killed = subprocess.run(command, cwd=ROOT, env=_environment(), check=False)
    assert killed.returncode == -signal.SIGXFSZ
    assert not out.exists()
    partial = tmp_path / ".out.partial"
    assert 0 < sum(path.stat().st_size for path in partial.iterdir()) <= 2 * limit
    config = ModelConfig.from_hf(base)
    save_params(out, config, load_params(base, config), base=base)
    assert same_files(base, out)
    assert not partial.exists()


def _environment(devices: int = 1) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}


SHARDED = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from trsi_jax.model import ModelConfig, abstract_params, load_params, save_params
base, out = Path(sys.argv[1]), Path(sys.argv[2])
jax.distributed.initialize(f"127.0.0.1:{sys.argv[4]}", 2, int(sys.argv[3]))
config = ModelConfig.from_hf(base)
mesh = jax.make_mesh((2, 2), ("fsdp", "tp"))


def spec(path, leaf):
    # Matrices over both axes of the mesh where the sizes divide, heads and channels over tp.
    axes = [None] * leaf.ndim
    free = [i for i in range(leaf.ndim - 1, -1, -1) if leaf.shape[i] % 2 == 0]
    for name, axis in zip(("tp", "fsdp"), free):
        axes[axis] = name
    return NamedSharding(mesh, P(*axes))


abstract = abstract_params(config)
shardings = jax.tree_util.tree_map_with_path(spec, abstract)
count = []
params = load_params(base, config, shardings=shardings, on_read=count.append)
jax.tree.map(lambda leaf, like: np.testing.assert_equal(leaf.sharding, like), params, shardings)
save_params(out, config, params, base=base)
print("READ", sum(count))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_of_two_processes_reads_only_its_shards(tmp_path: Path) -> None:
    processes = 2
    base = small_directory(tmp_path / "base")
    weights = sum(tensor.nbytes for tensor in read(base).values())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", SHARDED, str(base), str(tmp_path / "out")]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(port)],
            cwd=ROOT,
            env=_environment(4 // processes),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    outputs = [process.communicate(timeout=250)[0] for process in running]
    assert [process.returncode for process in running] == [0] * processes
    # An export of the shards is the base again: every number came to its place.
    assert same_files(base, tmp_path / "out")
    for output in outputs:
        got = int(output.split("READ ")[1])
        # What no axis divides evenly is held, and read, by each; that is little.
        assert weights / processes <= got < 1.05 * weights / processes


@pytest.mark.parametrize("failing", [0, 1])
def test_an_export_whose_disk_fails_is_not_published(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(preset("tiny", vocab_size=31), remat=True)
    params = init_params(config, jax.random.key(0))
    fsync, calls = os.fsync, []

    def told_once(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == failing + 1:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(save, "_SYNC_BYTES", 1000)
    monkeypatch.setattr(os, "fsync", told_once)
    with pytest.raises(OSError, match="Input/output"):
        save_params(tmp_path / "out", config, params, dtype="F32")
    assert len(calls) > failing
    assert not list(tmp_path.iterdir())


MEMORY = """
import sys, threading, time
from pathlib import Path
import jax, numpy as np
from trsi_jax.model import ModelConfig, abstract_params, load_params
base = Path(sys.argv[1])
config = ModelConfig.from_hf(base)
shards = sum(l.size * l.dtype.itemsize for l in jax.tree.leaves(abstract_params(config)))
jax.block_until_ready(jax.device_put(np.ones(8)))


def private():
    line = next(x for x in open("/proc/self/status") if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


load_params(Path(sys.argv[2]), ModelConfig.from_hf(Path(sys.argv[2])))
peak, going, before = 0, True, private()


def watch():
    global peak
    while going:
        peak = max(peak, private())
        time.sleep(0.003)


watcher = threading.Thread(target=watch)
watcher.start()
params = load_params(base, config)
going = False
watcher.join()
print("PEAK", peak - before, "SHARDS", shards)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_host_memory_stays_below_the_shards_and_one_tensor(tmp_path: Path) -> None:
    description = reference.description("dense")
    for key, value in (("hidden_size", 256), ("intermediate_size", 4096), ("vocab_size", 20_000)):
        setattr(description, key, value)
    base, warm = tmp_path / "base", small_directory(tmp_path / "warm", "dense")
    description.save_pretrained(str(base))
    tensors = names.text_tensors(ModelConfig.from_hf(base))
    arrays = {n: jnp.full(t.shape, 0.5, jnp.bfloat16) for n, t in tensors.items()}
    write(base, arrays)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(base), str(warm)],
        cwd=ROOT,
        env=_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    _, peak, _, shards = done.stdout.split()
    largest = max(array.nbytes for array in arrays.values())
    assert int(shards) > 50e6
    assert int(peak) > 0.9 * int(shards)  # The sampling saw the load.
    assert int(peak) <= int(shards) + largest


def test_the_configuration_of_the_published_model_is_the_preset(tmp_path: Path) -> None:
    reference.published_description().save_pretrained(str(tmp_path / "qwen3.8-27b"))
    assert ModelConfig.from_hf(tmp_path / "qwen3.8-27b") == preset("qwen3.8-27b")


def test_an_older_spelling_of_a_dense_configuration_is_the_preset(tmp_path: Path) -> None:
    # As published with Qwen3-0.6B: rope_theta at the top level, torch_dtype, window switched off.
    folder = tmp_path / "qwen3-0.6b"
    folder.mkdir()
    description = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    (folder / "config.json").write_text(json.dumps(description))
    assert ModelConfig.from_hf(folder) == preset("qwen3-0.6b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not one of qwen3_5"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"attention_bias": True}, "attention_bias is True; only False"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0}},
            "rope_type is 'yarn'",
        ),
        (
            {"layer_types": ["full_attention", "linear_attention"] * 4},
            "only repetitions of one group",
        ),
        ({"layer_types": ["linear_attention"] * 7 + ["sliding_attention"]}, "'sliding_attention'"),
        ({"num_key_value_heads": 4}, "num_heads 6 is no multiple of num_kv_heads 4"),
    ],
)
def test_a_configuration_that_is_not_ours_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    reference.description("hybrid").save_pretrained(str(tmp_path))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError) as caught:
        ModelConfig.from_hf(tmp_path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_readable_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json in"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: "):
        ModelConfig.from_hf(tmp_path)
