"""A jitted step that can be compiled ahead of its first call, in another thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import jax
import numpy as np


class CompiledStep:
    """`jax.jit` of a step, with an option to compile before it is needed.

    Compilation holds one core and not the interpreter, so another step can train meanwhile. A
    call that nothing was compiled ahead for behaves like the jitted function.
    """

    def __init__(
        self, function: Callable[..., Any], *, donate: bool, settings: tuple[str, ...] = ()
    ) -> None:
        """Wrap `function(*arrays, **settings)`.

        Args:
          function: pure.
          donate: whether the first argument's buffers are given away.
          settings: keyword arguments that are compiled in.
        """
        self._jitted = jax.jit(
            function, donate_argnums=(0,) if donate else (), static_argnames=settings
        )
        self._ahead: dict[tuple[tuple[str, Any], ...], Future[Any]] = {}

    def compile_ahead(self, executor: Executor, *like: Any, **settings: Any) -> None:
        """Start compiling for arguments of the shapes and dtypes of `like`."""
        key = tuple(sorted(settings.items()))
        if key in self._ahead:
            return
        shapes = jax.tree.map(_shape, like)
        self._ahead[key] = executor.submit(
            lambda: self._jitted.lower(*shapes, **settings).compile()
        )

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """The step; a Python number among the arguments becomes a float32 scalar."""
        arrays = jax.tree.map(_as_array, arguments)
        ahead = self._ahead.get(tuple(sorted(settings.items())))
        if ahead is None:
            return self._jitted(*arrays, **settings)
        return ahead.result()(*arrays)


def _as_array(leaf: Any) -> Any:
    return np.float32(leaf) if isinstance(leaf, float) else leaf


def _shape(leaf: Any) -> Any:
    array = _as_array(leaf)
    struct: Any = jax.ShapeDtypeStruct
    return struct(np.shape(array), array.dtype)
