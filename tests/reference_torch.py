"""The `transformers` side of the parity tests; needs torch.

`transformers` computes norms, softmax and the delta rule in float32 whatever the model's dtype, so
a float64 comparison runs its own source with float32 read as float64. Nothing else is changed.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import reference

_WIDER = (
    ("torch.float32", "torch.float64"),
    ("dtype=torch.float)", "dtype=torch.float64)"),
    (".float()", ".double()"),
)
_MODULES = {
    "hybrid": ("transformers.models.qwen3_5.modeling_qwen3_5", "Qwen3_5ForCausalLM"),
    "dense": ("transformers.models.qwen3.modeling_qwen3", "Qwen3ForCausalLM"),
}


def double_class(case: str) -> Any:
    """The model class of a case, computing in float64 throughout."""
    name, model = _MODULES[case]
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text("utf-8")
    for narrow, wide in _WIDER:
        assert narrow in source, f"{name} no longer says {narrow}"
        source = source.replace(narrow, wide)
    module = types.ModuleType(f"{name}_double")
    module.__package__ = spec.parent
    module.__file__ = spec.origin
    sys.modules[module.__name__] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return getattr(module, model)


def model(case: str, dtype: str, tensors: dict[str, np.ndarray]) -> Any:
    """An eager model of a case that holds `tensors`."""
    torch.set_num_threads(1)
    config = reference.description(case)
    config._attn_implementation = "eager"
    wide = getattr(torch, dtype)
    if dtype == "float64":
        built = double_class(case)(config)
    else:
        from transformers import Qwen3_5ForCausalLM, Qwen3ForCausalLM

        built = (Qwen3_5ForCausalLM if case == "hybrid" else Qwen3ForCausalLM)(config)
    built = built.to(wide).eval()
    state = {name: torch.from_numpy(tensor).to(wide) for name, tensor in tensors.items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    built.load_state_dict(state, strict=True)
    return built


def state_shapes(config: Any, build: Callable[[Any], Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's state without memory for it."""
    with torch.device("meta"):
        state = build(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def logits(built: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits of whole rows."""
    with torch.no_grad():
        out = built(input_ids=torch.from_numpy(tokens.astype(np.int64)), use_cache=False)
    return np.asarray(out.logits.numpy())


def logits_and_gradients(
    built: Any, tokens: np.ndarray
) -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
    """Logits, mean next-token negative log-likelihood, and its gradient by parameter."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    logits = built(input_ids=ids, use_cache=False).logits
    logprob = torch.log_softmax(logits[:, :-1], dim=-1)
    loss = -logprob.gather(-1, ids[:, 1:, None]).mean()
    loss.backward()
    gradients = {n: p.grad.numpy() for n, p in built.named_parameters() if p.grad is not None}
    return logits.detach().numpy(), float(loss.detach()), gradients


def greedy(built: Any, prompt: np.ndarray, new_tokens: int) -> np.ndarray:
    """The tokens behind a prompt that `generate` picks, without a stop."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    built.generation_config.eos_token_id = None
    out = built.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return np.asarray(out[0, len(prompt) :].numpy())
