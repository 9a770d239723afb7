"""`transformers` and this model on the same weights, live. `bash .ci/parity.sh` runs it.

Tolerances: logits 1e-9 absolute and gradients 1e-6 relative in fp64, logits 2e-3 in fp32, tokens
of greedy decoding equal. All norm weights are off their neutral values (tests/reference.py).
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import parity, reference
from trsi_jax.model import ModelConfig, save_params
from trsi_jax.model.hf import names

pytestmark = pytest.mark.parity


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    return {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}


@pytest.mark.parametrize("case", reference.CASES)
def test_logits_and_gradients_equal_in_fp64(case: str, tmp_path: Path) -> None:
    from tests import reference_torch as theirs

    with jax.enable_x64(True):
        folder = parity.directory(case, tmp_path, "float64")
        config, params = parity.load(folder)
        ours, loss, gradients = parity.logits_and_gradients(config, params, reference.TOKENS)
        model = theirs.model(case, "float64", _tensors(folder))
        expected, their_loss, their_gradients = theirs.logits_and_gradients(model, reference.TOKENS)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-9)
        assert abs(float(loss) - their_loss) < 1e-9
        found = parity.by_tensor(config, gradients)
        assert found.keys() == their_gradients.keys()
        worst = {n: parity.relative(found[n], g) for n, g in their_gradients.items()}
        print(f"{case}: logits {np.abs(ours - expected).max():.1e}, gradients", end=" ")
        print(f"{max(worst.values()):.1e} ({max(worst, key=lambda n: worst[n])})")
        assert max(worst.values()) < 1e-6, worst


@pytest.mark.parametrize("case", reference.CASES)
def test_logits_equal_in_fp32_and_greedy_tokens_are_the_same(case: str, tmp_path: Path) -> None:
    from tests import reference_torch as theirs

    folder = parity.directory(case, tmp_path, "float32")
    config, params = parity.load(folder)
    ours = parity.scores(config, params, reference.TOKENS)
    model = theirs.model(case, "float32", _tensors(folder))
    expected = theirs.logits(model, reference.TOKENS)
    print(f"{case}: fp32 logits {np.abs(ours - expected).max():.1e}")
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-3)
    tokens = parity.greedy(config, params, reference.PROMPT, reference.NEW_TOKENS)
    their_tokens = theirs.greedy(model, reference.PROMPT, reference.NEW_TOKENS)
    assert len(set(tokens.tolist())) > 5
    np.testing.assert_array_equal(tokens, their_tokens)


@pytest.mark.parametrize("with_base", [True, False], ids=["base", "fresh"])
@pytest.mark.parametrize("case", reference.CASES)
def test_transformers_loads_an_export_and_computes_the_same(
    case: str, with_base: bool, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tests import reference_torch as theirs

    folder = parity.directory(case, tmp_path / "base", "float32")
    config, params = parity.load(folder)
    params = jax.tree.map(lambda leaf: leaf * 1.01, params)
    ours = parity.scores(config, params, reference.TOKENS)
    out = save_params(
        tmp_path / "out", config, params, base=folder if with_base else None, dtype="F32"
    )
    model, report = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    expected = theirs.logits(model, reference.TOKENS)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-3)


def test_what_transformers_saves_is_read_back(tmp_path: Path) -> None:
    from tests import reference_torch as theirs

    folder = parity.directory("hybrid", tmp_path / "base", "float32")
    theirs.model("hybrid", "float32", _tensors(folder)).save_pretrained(tmp_path / "saved")
    _, params = parity.load(tmp_path / "saved")
    _, expected = parity.load(folder)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_names_and_shapes_are_those_of_the_published_model(tmp_path: Path) -> None:
    from transformers import Qwen3_5ForConditionalGeneration

    from tests import reference_torch as theirs

    description = reference.published_description()
    description.save_pretrained(str(tmp_path))
    config = ModelConfig.from_hf(tmp_path)
    text = {n: t.shape for n, t in names.text_tensors(config, names.VLM_PREFIX).items()}
    copied = names.untrained_tensors(description)
    seen = {n: shape for n, shape in copied.items() if not n.startswith("mtp.")}
    assert text | seen == theirs.state_shapes(description, Qwen3_5ForConditionalGeneration)
