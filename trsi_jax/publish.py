"""Weights for servers: export, check, probe and publish, in that order.

The one place where a trainer's parameters become a directory that a fleet loads.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from rollout import snapshots
from rollout.protocols import TensorSpec, WeightSnapshot
from trsi_jax.model.config import ModelConfig
from trsi_jax.model.decoder import Params, hidden_states, logits
from trsi_jax.model.hf.save import check_params, save_params

PROBE_TOKENS = 32
TOLERANCES = {"F32": 1e-4, "F64": 1e-4, "F16": 0.02, "BF16": 0.05}
"""Largest mean absolute difference of the probe's log-probs, by the dtype that is served."""


def publish(
    folder: Path,
    version: int,
    config: ModelConfig,
    params: Params,
    *,
    base: Path | None = None,
    base_manifest: Mapping[str, TensorSpec] | None = None,
    dtype: str = "BF16",
    keep: int = 3,
    tolerance: float | None = None,
    again: bool = False,
) -> WeightSnapshot:
    """Write parameters as a published snapshot, complete or not at all.

    What is on disk is held to the base before its name is known: every tensor there and no
    other, of the base's shape and dtype, and finite. Beside it lies a manifest, and what the
    trainer's own forward says of a fixed sequence, which servers must agree with.

    Args:
      folder: of snapshots; made if needed.
      version: of the parameters, >= 0; published once.
      config: the model.
      params: tree of `init_params`, on any devices.
      base: directory that the parameters descend from: its files, names and dtypes.
      base_manifest: what to hold the result to; None takes the base's, or of the first snapshot
        in `folder` where there is no base.
      dtype: without a base, storage dtype of every tensor.
      keep: snapshots that stay, this one included.
      tolerance: of the probe; None takes the largest of `TOLERANCES` of its dtypes.
      again: a run that goes on: this version, and later ones, were published by what was lost.

    Returns:
      The snapshot, with its manifest.

    Raises:
      UserError, SnapshotRefused: names the tensor or parameter that is missing, extra, of another
        shape or dtype, or not finite; nothing is published then.
      ValueError: for a negative version or keep < 1.
    """
    if version < 0 or keep < 1:
        raise ValueError(f"need version >= 0 and keep >= 1, got {version} and {keep}")
    folder.mkdir(parents=True, exist_ok=True)
    if base_manifest is None:
        base_manifest = _manifest_of(folder, base)
    directory = folder / snapshots.snapshot_name(version)
    partial_directory = folder / f".{directory.name}.partial"
    if jax.process_index() == 0:
        shutil.rmtree(partial_directory, ignore_errors=True)
    check_params(config, params)
    ids = probe_ids(config.vocab_size, min(PROBE_TOKENS, config.max_position))
    # Computed while the files are written.
    said = _logprobs(config, params, jnp.asarray(ids)[None])
    save_params(partial_directory, config, params, base=base, dtype=dtype)
    snapshot = WeightSnapshot(version, directory)
    if jax.process_index() != 0:
        return snapshot
    try:
        # As the files themselves say it; the exporter has looked at every number.
        tensors = snapshots.read_manifest(partial_directory)
        snapshots.compare(tensors, base_manifest or tensors, directory.name)
        if tolerance is None:
            tolerance = max(TOLERANCES.get(spec.dtype, 0.0) for spec in tensors.values())
        snapshots.write_manifest(partial_directory, version, tensors, _probe(ids, said, tolerance))
        if again:
            snapshots.forget(folder, version)
        snapshots.reveal(partial_directory, directory)
    finally:
        shutil.rmtree(partial_directory, ignore_errors=True)
    snapshots.prune(folder, keep)
    return replace(snapshot, manifest=tensors)


def _manifest_of(folder: Path, base: Path | None) -> Mapping[str, TensorSpec] | None:
    if base is not None:
        return snapshots.read_manifest(base)
    there = snapshots.published(folder)
    return snapshots.read_manifest(there[0][1]) if there else None


def make_probe(config: ModelConfig, params: Params, *, tolerance: float) -> snapshots.Probe:
    """Log-probs of a fixed pseudo-random sequence at temperature 1, by the training forward.

    log pi(id_t | id_0..t-1) = log_softmax(logits_t-1)[id_t], t = 1..N-1, N = `PROBE_TOKENS`.

    Args:
      config: the model.
      params: tree of `init_params`.
      tolerance: put into the result.
    """
    check_params(config, params)
    ids = probe_ids(config.vocab_size, min(PROBE_TOKENS, config.max_position))
    return _probe(ids, _logprobs(config, params, jnp.asarray(ids)[None]), tolerance)


def _probe(ids: npt.NDArray[np.int32], said: jax.Array, tolerance: float) -> snapshots.Probe:
    numbers = map(float, np.asarray(said))
    return snapshots.Probe(tuple(map(int, ids)), tuple(numbers), tolerance)


def probe_ids(vocab_size: int, length: int) -> npt.NDArray[np.int32]:
    """The probe's ids: the same for every model of a vocabulary. [length] int32."""
    return np.random.default_rng(vocab_size).integers(vocab_size, size=length, dtype=np.int32)


@partial(jax.jit, static_argnums=0)
def _logprobs(config: ModelConfig, params: Params, token_ids: jax.Array) -> jax.Array:
    """[1, N] ids -> [N - 1] log-probs of ids[1:]."""
    n = token_ids.shape[1]
    segments = jnp.ones((1, n), jnp.int32)
    hidden = hidden_states(config, params, token_ids, segments, jnp.arange(n)[None])
    scores = logits(config, params, hidden[0, :-1]).astype(jnp.float32)
    logprob = jax.nn.log_softmax(scores)
    return jnp.take_along_axis(logprob, token_ids[0, 1:, None], axis=-1)[:, 0]
