"""A multi-turn token process whose success probability and gradient are known exactly.

In each of K turns a cue in {0, 1} is shown and the policy emits up to m tokens out of four. The
token at one index is the decision, right iff it equals the cue; the others are filler without
effect. After each turn but the last a log is printed, n tokens that nobody chose. Success is drawn
once, at the end, from the decisions alone, so what an estimator makes of logs, of filler and of
commands of unequal length is its own doing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

TOKENS = 4
"""Size of the vocabulary."""

Outcome = Literal["early", "chain", "soft"]
Trap = Literal["none", "quiet", "long-command"]


@dataclass(frozen=True)
class World:
    """One simulated task family.

    Attributes:
      turns: K, number of turns.
      tokens: m, action tokens a turn.
      log: L, mean log length; a log has L x U(0.5, 1.5) tokens.
      outcome: success probability: "early" .1 + .8 right_1, "chain" prod_k right_k,
        "soft" .1 + .8 mean_k right_k.
      trap: "quiet": after a wrong decision the log is ten times shorter. "long-command": a wrong
        decision ends its turn after that token, a right one takes all m. Neither changes success.
      decision: index of the deciding token in its turn.
      start: probability of a right decision under the initial policy.
      group: rollouts that share their cues, as those of one task do.
    """

    turns: int = 6
    tokens: int = 6
    log: int = 100
    outcome: Outcome = "chain"
    trap: Trap = "none"
    decision: int = 0
    start: float = 0.765
    group: int = 8

    def __post_init__(self) -> None:
        if min(self.turns, self.tokens, self.group) < 1 or self.log < 0:
            raise ValueError(f"sizes must be positive, got {self}")
        if not 0 <= self.decision < self.tokens:
            raise ValueError(f"decision must lie in [0, {self.tokens}), got {self.decision}")
        if not 0.0 < self.start < 1.0:
            raise ValueError(f"start must lie in (0, 1), got {self.start}")
        if self.trap == "long-command" and self.decision != 0:
            raise ValueError("a wrong decision ends its turn, so it must be the first token")

    @property
    def longest_log(self) -> int:
        """Largest number of log tokens after one turn."""
        return int(1.5 * self.log)

    @property
    def length(self) -> int:
        """T, slots that hold the longest episode."""
        return self.turns * self.tokens + (self.turns - 1) * self.longest_log

    def with_log(self, log: int) -> World:
        """The same family with logs of another mean length."""
        return dataclasses.replace(self, log=log)


class Episodes(NamedTuple):
    """B episodes; K turns, m tokens a turn.

    Attributes:
      cue: [B, K] int32, the cue of each turn.
      token: [B, K, m] int32, what the policy emitted.
      emitted: [B, K, m] bool, false where a trap ended the turn before.
      log: [B, K] int32, log tokens after each turn; 0 after the last.
      right: [B, K] bool, whether the decision equals the cue.
      success: [B] bool.
    """

    cue: jax.Array
    token: jax.Array
    emitted: jax.Array
    log: jax.Array
    right: jax.Array
    success: jax.Array


def initial_policy(world: World) -> jax.Array:
    """Logits [K, m, 2, 4] by turn, index and cue: P(right) = `start` at decisions, else uniform."""
    edge = jnp.log(3.0 * world.start / (1.0 - world.start))
    logits = jnp.zeros((world.turns, world.tokens, 2, TOKENS))
    for cue in (0, 1):
        logits = logits.at[:, world.decision, cue, cue].set(edge)
    return logits


def success_of(world: World, right: jax.Array) -> jax.Array:
    """Success probability of [..., K] independent decisions, each of which may be a probability.

    Returns:
      [...] float.
    """
    right = right.astype(jnp.float32)
    if world.outcome == "early":
        return 0.1 + 0.8 * right[..., 0]
    if world.outcome == "chain":
        return jnp.prod(right, axis=-1)
    return 0.1 + 0.8 * jnp.mean(right, axis=-1)


def exact_success(world: World, policy: jax.Array) -> jax.Array:
    """Success probability of a policy, exactly; its gradient is the true policy gradient.

    Cues are uniform and independent, and each outcome is linear in every turn's decision, so the
    expectation is `success_of` the mean probabilities of being right.
    """
    p = jax.nn.softmax(policy[:, world.decision], axis=-1)
    right_k = 0.5 * (p[:, 0, 0] + p[:, 1, 1])
    return success_of(world, right_k)


def sample(world: World, policy: jax.Array, key: jax.Array, episodes: int) -> Episodes:
    """Draw episodes; those of a group of `world.group` share their cues.

    Args:
      world: the task family.
      policy: [K, m, 2, 4] float, logits.
      key: PRNG key.
      episodes: number of episodes, a multiple of `world.group`.

    Raises:
      ValueError: if `episodes` is no multiple of the group.
    """
    if episodes % world.group:
        raise ValueError(f"{episodes} episodes do not make groups of {world.group}")
    k_cue, k_token, k_log, k_success = jax.random.split(key, 4)
    cue = jax.random.bernoulli(k_cue, 0.5, (episodes // world.group, world.turns))
    cue = jnp.repeat(cue.astype(jnp.int32), world.group, axis=0)
    token = jax.random.categorical(k_token, logits_of(policy, cue))
    right = token[:, :, world.decision] == cue
    emitted = jnp.ones(token.shape, bool)
    if world.trap == "long-command":
        emitted = emitted.at[:, :, 1:].set(right[:, :, None])
    log = world.log * jax.random.uniform(k_log, right.shape, minval=0.5, maxval=1.5)
    if world.trap == "quiet":
        log = jnp.where(right, log, log / 10)
    log = jnp.minimum(log.astype(jnp.int32), world.longest_log).at[:, -1].set(0)
    success = jax.random.bernoulli(k_success, success_of(world, right))
    return Episodes(cue, token, emitted, log, right, success)


def logits_of(policy: jax.Array, cue: jax.Array) -> jax.Array:
    """Logits [B, K, m, 4] that a policy has under cues [B, K]."""
    turns = jnp.arange(policy.shape[0])
    return policy[turns[None, :], :, cue]


def logprob_of(policy: jax.Array, episodes: Episodes) -> jax.Array:
    """Log-probs [B, K, m] of the tokens emitted; 0 where none was."""
    log_p = jax.nn.log_softmax(logits_of(policy, episodes.cue))
    taken = jnp.take_along_axis(log_p, episodes.token[..., None], axis=-1)[..., 0]
    return jnp.where(episodes.emitted, taken, 0.0)


# --- as sequences -----------------------------------------------------------------------------


class Layout(NamedTuple):
    """Where the tokens of B episodes lie in rows of T slots, action tokens and logs in order.

    Attributes:
      position: [B, K, m] int32, slot of each action token; T where none was emitted.
      acted: [B, T] bool, true at action tokens.
      turn: [B, T] int32, turn of each slot, a log having that of the turn before it.
      logged: [B, T] bool, true at log tokens. What is neither follows the end.
    """

    position: jax.Array
    acted: jax.Array
    turn: jax.Array
    logged: jax.Array


def lay(world: World, episodes: Episodes) -> Layout:
    """Lay episodes out as sequences of `world.length` slots."""
    width = world.length
    count = jnp.sum(episodes.emitted, axis=2)
    span = count + episodes.log
    start = jnp.cumsum(span, axis=1) - span
    position = start[:, :, None] + jnp.arange(world.tokens)
    position = jnp.where(episodes.emitted, position, width)
    slots = jnp.arange(width)
    # Turn of a slot: how many turns have begun up to it.
    begun = jnp.sum(start[:, None, :] <= slots[None, :, None], axis=2)
    inside = slots[None, :] < jnp.sum(span, axis=1, keepdims=True)
    acted = scatter(jnp.ones(position.shape, bool), position, width)
    return Layout(position, acted, begun.astype(jnp.int32) - 1, inside & ~acted)


def scatter(x: jax.Array, position: jax.Array, width: int) -> jax.Array:
    """[B, K, m] action-token values to rows [B, width], 0 elsewhere."""
    rows = jnp.arange(x.shape[0])[:, None, None]
    return jnp.zeros((x.shape[0], width), x.dtype).at[rows, position].set(x, mode="drop")


def gather(x_bt: jax.Array, position: jax.Array) -> jax.Array:
    """Rows [B, T] at the action tokens, [B, K, m]; 0 where none was emitted."""
    rows = jnp.arange(x_bt.shape[0])[:, None, None]
    return x_bt.at[rows, position].get(mode="fill", fill_value=0)


def terminal_reward(world: World, episodes: Episodes, layout: Layout) -> jax.Array:
    """[B, T] float32: 1 on the last action token of a success."""
    last = jnp.max(jnp.where(episodes.emitted, layout.position, -1), axis=(1, 2))
    slots = jnp.arange(world.length)
    return ((slots == last[:, None]) & episodes.success[:, None]).astype(jnp.float32)
