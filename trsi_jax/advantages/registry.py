"""Estimators by name, so that a config can choose one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Kind = Literal["token", "group"]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """What is known of one estimator.

    Attributes:
      fn: "token": (reward_t, value_t, acted_t, turn_t, *, ...) -> (advantage_t, return_t), each
        [T]; "group": (score_g, valid_g, *, ...) -> advantage_g, each [G].
      kind: which of the two calls it has.
      critic: whether it reads the critic's values.
      study: true for a recursion that is known to be wrong and kept for comparison.
    """

    name: str
    fn: Callable[..., Any]
    kind: Kind
    critic: bool
    study: bool


_ENTRIES: dict[str, Entry] = {}


def register(
    name: str, *, kind: Kind = "token", critic: bool = True, study: bool = False
) -> Callable[[F], F]:
    """Decorator that files an estimator under `name`.

    Raises:
      ValueError: if the name is taken.
    """

    def add(fn: F) -> F:
        if name in _ENTRIES:
            taken = _ENTRIES[name].fn
            raise ValueError(
                f"estimator {name!r} is already registered by {taken.__module__}.{taken.__name__}"
            )
        _ENTRIES[name] = Entry(name, fn, kind, critic, study)
        return fn

    return add


def entry(name: str) -> Entry:
    """Everything known of the estimator `name`.

    Raises:
      ValueError: for an unknown name; the message lists the known ones.
    """
    if name not in _ENTRIES:
        raise ValueError(f"unknown advantage estimator {name!r}; known: {', '.join(names())}")
    return _ENTRIES[name]


def get(name: str) -> Callable[..., Any]:
    """The function of the estimator `name`. Raises ValueError that lists the known names."""
    return entry(name).fn


def names(*, kind: Kind | None = None, study: bool | None = None) -> tuple[str, ...]:
    """Names in alphabetical order, all or those of one kind or standing."""
    return tuple(
        sorted(
            e.name
            for e in _ENTRIES.values()
            if (kind is None or e.kind == kind) and (study is None or e.study == study)
        )
    )


def options(name: str) -> tuple[str, ...]:
    """Keyword settings that the estimator `name` takes."""
    parameters = inspect.signature(get(name)).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def bind(name: str, **settings: Any) -> Callable[..., Any]:
    """The estimator `name` with those of `settings` that it takes.

    One set of settings thus serves every arm of a comparison: `lam` reaches `tb_gae` and is
    nothing to `monte_carlo`.

    Raises:
      ValueError: for an unknown name, or a setting that no estimator takes.
    """
    known = {option for other in names() for option in options(other)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ValueError(
            f"no advantage estimator takes {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    taken = options(name)
    return functools.partial(get(name), **{k: v for k, v in settings.items() if k in taken})
