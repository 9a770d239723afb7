"""Start SGLang's own server on a machine without a GPU; run it with the server's interpreter.

sglang 0.5.23 imports two native pieces that have no CPU build in the package index: `sgl_kernel`
(CUDA only) and torchvision's operators (linked to CUDA torch). The dense Qwen3 path on a CPU calls
neither. Here the imports succeed, with stand-ins that raise when called, and then sglang's own
launcher runs unchanged: scheduler, radix cache, model, sampler and HTTP layer are the real ones.

Of sglang's 250 modules of models only those of dense Qwen3 are read, which is most of its start.

A script and not a module to import: child processes run its top level again, and need it.
"""

import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

_TORCHVISION_OPERATORS = torch.library.Library("torchvision", "DEF")
for _operator in ("nms", "qnms"):
    _TORCHVISION_OPERATORS.define(
        _operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )


class _Missing:
    """A function that is there for imports and raises when called."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Missing(f"{self.__name__}.{attribute}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} has no CPU build")


class _MissingModule(types.ModuleType):
    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Missing(f"{self.__name__}.{attribute}")


for _suffix in ("", ".kvcacheio", ".utils", ".scalar_type", ".flash_attn", ".quantization"):
    _name = "sgl_kernel" + _suffix
    _module = _MissingModule(_name)
    _module.__path__ = []
    _module.__spec__ = importlib.machinery.ModuleSpec(_name, None, is_package=True)
    _module.__dict__["__version__"] = "0.4.10"
    sys.modules[_name] = _module

_sglang = importlib.util.find_spec("sglang")
for _folder in (_sglang and _sglang.submodule_search_locations) or ():
    _models = {_path.stem for _path in Path(_folder, "srt", "models").glob("*.py")}
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(sorted(_models - {"qwen3"})))

if __name__ == "__main__":
    import runpy

    runpy.run_module("sglang.launch_server", run_name="__main__")
