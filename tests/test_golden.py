"""The model against arrays that `transformers` computed in float64 (tests/golden/make.py).

The comparison with `transformers` itself is tests/test_parity.py. Tolerances: 1e-9 on logits,
1e-6 relative on gradients, equal greedy tokens in float32.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import parity, reference
from trsi_jax.model import ModelConfig
from trsi_jax.model.hf import names

GOLDEN = Path(__file__).resolve().parent / "golden"


@pytest.mark.slow
@pytest.mark.parametrize("case", reference.CASES)
def test_logits_and_gradients_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    golden = load_file(GOLDEN / f"{case}.safetensors")
    with jax.enable_x64(True):
        config, params = parity.load(parity.directory(case, tmp_path, "float64"))
        logits, loss, gradients = parity.logits_and_gradients(config, params, reference.TOKENS)
        np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-9)
        np.testing.assert_allclose(loss, golden["loss"][0], rtol=0, atol=1e-9)
        found = parity.by_tensor(config, gradients)
    for name, gradient in found.items():
        expected = golden[f"summary/{name}"]
        # A random projection of a difference is about as large as the difference.
        error = np.abs(reference.summary(gradient, name) - expected).max() / expected[0]
        assert error < 1e-6, name
        if gradient.ndim == 1:
            assert parity.relative(gradient, golden[f"gradient/{name}"]) < 1e-6, name
    assert len(golden) == 3 + len(found) + sum(g.ndim == 1 for g in found.values())


@pytest.mark.parametrize("case", reference.CASES)
def test_sixty_greedy_tokens_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    golden = load_file(GOLDEN / f"{case}.safetensors")["greedy"]
    config, params = parity.load(parity.directory(case, tmp_path, "float32"))
    tokens = parity.greedy(config, params, reference.PROMPT, reference.NEW_TOKENS)
    assert len(golden) == reference.NEW_TOKENS == 60
    assert len(set(golden.tolist())) > 5
    np.testing.assert_array_equal(tokens, golden)


def test_the_27b_inventory_is_the_published_one(tmp_path: Path) -> None:
    # 26,895,998,464 text parameters in 851 tensors and 27,781,427,952 in 1,199 with what is only
    # passed on: the published checkpoint's figures. The names are those of `transformers`, which
    # leaves out the 15 tensors of the prediction block.
    description = reference.published_description()
    description.save_pretrained(str(tmp_path))
    config = ModelConfig.from_hf(tmp_path)
    text = {n: t.shape for n, t in names.text_tensors(config, names.VLM_PREFIX).items()}
    copied = names.untrained_tensors(description)
    assert len(text) == 851
    assert sum(int(np.prod(shape)) for shape in text.values()) == 26_895_998_464
    assert text.keys().isdisjoint(copied)
    whole = text | copied
    assert len(whole) == 1_199
    assert sum(int(np.prod(shape)) for shape in whole.values()) == 27_781_427_952
    golden = json.loads((GOLDEN / "published.json").read_text())
    without_mtp = {n: s for n, s in whole.items() if not n.startswith("mtp.")}
    assert len(without_mtp) == golden["tensors"] == 1_184
    assert reference.inventory(without_mtp) == golden["sha256"]
