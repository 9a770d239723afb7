"""The arms of a comparison: every estimator, called alike on a batch of simulated episodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trsi_jax import advantages


class Rows(NamedTuple):
    """A batch as the estimators see it, [B, T] each, and the score [B] of every row."""

    reward: jax.Array
    value: jax.Array
    acted: jax.Array
    turn: jax.Array
    score: jax.Array


class Estimate(NamedTuple):
    """[B, T] each: advantages, critic targets, and where the critic is fitted to them."""

    advantage: jax.Array
    target: jax.Array
    fitted: jax.Array


Run = Callable[[Rows, jax.Array, jax.Array], Estimate]


@dataclass(frozen=True)
class Arm:
    """One estimator in a study.

    Attributes:
      name: what tables call it.
      estimator: its name in the registry.
      settings: keyword settings other than gamma and lam.
      inside: whether gamma and lam are also those inside a turn.
      actor_first: whether the critic's targets are weighted by the ratio of the updated policy to
        the one that sampled, as PACT does.
    """

    name: str
    estimator: str
    settings: tuple[tuple[str, Any], ...] = ()
    inside: bool = False
    actor_first: bool = False

    @property
    def discounts(self) -> bool:
        """Whether gamma changes anything."""
        return "gamma" in advantages.options(self.estimator)

    @property
    def critic(self) -> bool:
        """Whether it reads a critic's values; else none is trained for it."""
        return advantages.entry(self.estimator).critic

    def build(self, group: int) -> Run:
        """The arm as a function of (rows, gamma, lam), for groups of `group` rows."""
        entry = advantages.entry(self.estimator)
        taken = advantages.options(self.estimator)
        settings = dict(self.settings)

        def token(rows: Rows, gamma: jax.Array, lam: jax.Array) -> Estimate:
            given = {k: v for k, v in {"gamma": gamma, "lam": lam}.items() if k in taken}
            if self.inside:
                given |= {"gamma_in": gamma, "lam_in": lam}

            def one(
                reward_t: jax.Array, value_t: jax.Array, acted_t: jax.Array, turn_t: jax.Array
            ) -> tuple[jax.Array, jax.Array]:
                result: tuple[jax.Array, jax.Array] = entry.fn(
                    reward_t, value_t, acted_t, turn_t, **given, **settings
                )
                return result

            advantage, target = jax.vmap(one)(rows.reward, rows.value, rows.acted, rows.turn)
            fitted = rows.acted
            if self.estimator == "turn_gae":
                # It reads values at the first token of a turn only, and is fitted there.
                fitted = _turn_starts(rows)
            return Estimate(advantage, target, fitted)

        def grouped(rows: Rows, gamma: jax.Array, lam: jax.Array) -> Estimate:
            del gamma, lam
            score = rows.score.reshape(-1, group)
            valid = jnp.ones(score.shape, bool)
            advantage = jax.vmap(lambda s, v: entry.fn(s, v, **settings))(score, valid)
            laid = jax.vmap(advantages.spread)(advantage.reshape(-1), rows.acted)
            target = jnp.where(rows.acted, rows.score[:, None], 0.0)
            return Estimate(laid, target, rows.acted)

        return grouped if entry.kind == "group" else token


def _turn_starts(rows: Rows) -> jax.Array:
    """[B, T] bool: the first action token of each turn; a turn's actions come before its log."""
    before = jnp.pad(rows.turn[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return rows.acted & (rows.turn != before)


STANDARD: tuple[Arm, ...] = (
    Arm("TB", "tb_gae"),
    Arm("TB, lam_in .95", "tb_gae", (("lam_in", 0.95),)),
    Arm("token", "gae"),
    Arm("length-adaptive", "length_adaptive_gae", (("alpha", 1.5),)),
    Arm("macro", "turn_gae"),
    Arm("bi-level", "bilevel_gae"),
    Arm("bi-level, same inside", "bilevel_gae", inside=True),
    Arm("MC", "monte_carlo"),
    Arm("PACT", "pact", actor_first=True),
    Arm("REINFORCE++", "reinforce_pp"),
    Arm("RLOO", "rloo"),
    Arm("GRPO", "grpo"),
    Arm("Dr. GRPO", "dr_grpo"),
    Arm("gap", "gae_gap"),
    Arm("unmasked", "gae_unmasked"),
    Arm("zeroed", "gae_zeroed"),
)
"""The arms of the default study; the last three are wrong on purpose. `cross_segment_gae` is no arm
of its own: a rollout that was never compacted has one segment, on which it is `gae`."""
