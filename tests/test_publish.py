"""Publication: whole or not at all, held to the base, and a probe that tells weights apart."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rollout import snapshots
from rollout.errors import SnapshotRefused, UserError
from tests.sglang_real import DENSE, dense_params
from trsi_jax.model import load_params
from trsi_jax.publish import make_probe, publish


def write(folder: Path, seed: int, version: int, **options):
    return publish(folder, version, DENSE, dense_params(seed), dtype="F32", **options)


def test_a_snapshot_holds_the_parameters_and_the_forwards_logprobs(tmp_path):
    snapshot = write(tmp_path, 0, 3)
    assert snapshot.path == tmp_path / "v000003" == snapshots.latest(tmp_path)
    back = load_params(snapshot.path, DENSE)
    jax.tree.map(np.testing.assert_array_equal, back, dense_params(0))
    opened, probe = snapshots.open_snapshot(snapshot.path)
    assert opened == snapshot
    assert probe == make_probe(DENSE, dense_params(0), tolerance=1e-4)
    other = make_probe(DENSE, dense_params(1), tolerance=1e-4)
    assert snapshots.mean_gap(other.logprobs, probe.logprobs) > 0.1


def test_digests_are_of_the_tensors_bytes_one_or_several_at_a_time(tmp_path):
    path = write(tmp_path, 0, 1).path
    # By another way round: the bytes of the tensors as safetensors reads them.
    arrays = load_file(path / "model.safetensors")
    groups = [(name,) for name in arrays] + [tuple(arrays)[1:4]]
    expected = [
        hashlib.sha256(b"".join(arrays[name].tobytes() for name in names)).hexdigest()
        for names in groups
    ]
    assert snapshots.digests(path, groups) == expected
    with pytest.raises(SnapshotRefused, match="other is missing"):
        snapshots.digests(path, [("other",)])


def test_the_last_three_stay_and_what_a_kill_left_goes(tmp_path):
    (tmp_path / ".v000000.partial").mkdir()
    for version in range(5):
        write(tmp_path, version % 2, version)
    assert [version for version, _ in snapshots.published(tmp_path)] == [2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("LATEST", "v000002", "v000003", "v000004"),
    ]


def test_a_version_is_published_once(tmp_path):
    write(tmp_path, 0, 1)
    with pytest.raises(UserError, match="exists already"):
        write(tmp_path, 1, 1)
    back = load_params(tmp_path / "v000001", DENSE)
    jax.tree.map(np.testing.assert_array_equal, back, dense_params(0))


def _without(tree, *path):
    return {
        key: (_without(value, *path[1:]) if key == path[0] and len(path) > 1 else value)
        for key, value in tree.items()
        if key != path[0] or len(path) > 1
    }


def _bad(what, params):
    kernel = params["lm_head"]["kernel"]
    if what == "missing":
        return _without(params, "lm_head", "kernel")
    if what == "extra":
        return params | {"other": kernel}
    wrong = kernel[:, :-1] if what == "shape" else kernel.at[1, 2].set(jnp.nan)
    return params | {"lm_head": {"kernel": wrong}}


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("missing", "lm_head/kernel is missing"),
        ("extra", "other is not one"),
        ("shape", "lm_head/kernel has shape"),
        ("not finite", "lm_head.weight"),
    ],
)
def test_bad_parameters_are_named_and_nothing_is_published(tmp_path, what, named):
    write(tmp_path, 0, 1)
    params = _bad(what, dense_params(0))
    with pytest.raises(UserError, match=named):
        publish(tmp_path, 2, DENSE, params, dtype="F32")
    assert [version for version, _ in snapshots.published(tmp_path)] == [1]
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is not one"),
        (lambda t: t.update(extra=np.ones(2, np.float32)), "extra is missing"),
        (lambda t: t.update({"model.norm.weight": np.ones(3, np.float32)}), "norm.weight has sh"),
        (lambda t: t.update({"model.norm.weight": np.ones(64, np.float16)}), "norm.weight has dt"),
    ],
    ids=["extra", "missing", "shape", "dtype"],
)
def test_an_export_that_differs_from_the_base_is_not_published(tmp_path, change, named):
    base = write(tmp_path / "base", 0, 1).path
    tensors = load_file(base / "model.safetensors")
    change(tensors)
    save_file(tensors, base / "model.safetensors")
    manifest = snapshots.read_manifest(base)
    with pytest.raises(SnapshotRefused, match=named):
        write(tmp_path / "weights", 0, 1, base_manifest=manifest)
    assert not snapshots.published(tmp_path / "weights")
    assert snapshots.latest(tmp_path / "weights") is None


def test_a_base_gives_its_files_names_and_dtypes(tmp_path):
    base = publish(tmp_path / "base", 1, DENSE, dense_params(0), dtype="BF16").path
    (base / "tokenizer.json").write_text("{}")
    snapshot = publish(tmp_path / "weights", 1, DENSE, dense_params(1), base=base)
    assert (snapshot.path / "tokenizer.json").read_text() == "{}"
    assert {spec.dtype for spec in snapshot.manifest.values()} == {"BF16"}
    # The base's own manifest was replaced, not copied.
    content = json.loads((snapshot.path / snapshots.MANIFEST).read_text())
    assert content["probe"]["logprobs"] == list(
        make_probe(DENSE, dense_params(1), tolerance=0.0).logprobs
    )


@pytest.mark.parametrize("at", [4, 40, -5])
def test_a_file_that_is_cut_off_is_refused(tmp_path, at):
    directory = write(tmp_path, 0, 1).path
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:at])
    with pytest.raises(SnapshotRefused, match=r"cut off|safetensors"):
        snapshots.read_manifest(directory)


def test_an_unreadable_manifest_is_no_snapshot(tmp_path):
    directory = write(tmp_path, 0, 1).path
    (directory / snapshots.MANIFEST).write_text("{")
    with pytest.raises(SnapshotRefused, match="no readable manifest"):
        snapshots.open_snapshot(directory)
