"""Makes the golden arrays from `transformers` (torch on a CPU): what `make test` compares with.

    python -m tests.golden.make    # in an environment with torch, as .ci/parity.sh sets one up

`<case>.safetensors` holds, of the reference checkpoint of tests/reference.py in float64: logits,
loss, of every gradient its norm and a random projection, the small gradients whole, and the
tokens of greedy decoding in float32. `published.json` holds the inventory of Qwen3.8-27B.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests import parity, reference
from tests import reference_torch as theirs

HERE = Path(__file__).resolve().parent


def make(case: str) -> dict[str, np.ndarray]:
    """The arrays of one case."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = parity.directory(case, Path(scratch), "float64")
        tensors = {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}
    model = theirs.model(case, "float64", tensors)
    logits, loss, gradients = theirs.logits_and_gradients(model, reference.TOKENS)
    single = theirs.model(case, "float32", tensors)
    greedy = theirs.greedy(single, reference.PROMPT, reference.NEW_TOKENS)
    whole = np.concatenate([reference.PROMPT, greedy])[None]
    best = np.sort(theirs.logits(model, whole)[0, len(reference.PROMPT) - 1 : -1], axis=-1)
    if (best[:, -1] - best[:, -2]).min() < 2e-3:
        raise SystemExit(f"{case}: two tokens tie within the tolerance of float32")
    found = {
        "logits": logits,
        "loss": np.asarray([loss]),
        "greedy": greedy.astype(np.int32),
    }
    for name, gradient in gradients.items():
        found[f"summary/{name}"] = reference.summary(gradient, name)
        if gradient.ndim == 1:
            found[f"gradient/{name}"] = gradient
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


def main() -> None:
    """Write every file."""
    from transformers import Qwen3_5ForConditionalGeneration

    for case in reference.CASES:
        save_file(make(case), HERE / f"{case}.safetensors")
    shapes = theirs.state_shapes(reference.published_description(), Qwen3_5ForConditionalGeneration)
    inventory = {"tensors": len(shapes), "sha256": reference.inventory(shapes)}
    (HERE / "published.json").write_text(json.dumps(inventory, indent=2) + "\n")


if __name__ == "__main__":
    main()
