"""Turn loops between an engine and a sandbox."""

from rollout.harness.base import Harness, PublicTask, Reply, public_view
from rollout.harness.general import General
from rollout.harness.loop import (
    HARNESS_WORDS,
    Episode,
    Limits,
    Rendered,
    observe,
    render,
    run_episode,
    shell_chat,
)
from rollout.harness.stepwise import Stepwise
from rollout.harness.survey import Survey

HARNESSES: dict[str, Harness] = {h.name: h for h in (General(), Survey(), Stepwise())}
"""The harnesses by name; `general` is the one that counts."""

__all__ = [
    "HARNESSES",
    "HARNESS_WORDS",
    "Episode",
    "General",
    "Harness",
    "Limits",
    "PublicTask",
    "Rendered",
    "Reply",
    "Stepwise",
    "Survey",
    "observe",
    "public_view",
    "render",
    "run_episode",
    "shell_chat",
]
