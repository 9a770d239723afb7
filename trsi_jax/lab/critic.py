"""The simulator's critic: two layers on what an observer of the transcript could know."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trsi_jax.lab.simulator import TOKENS, Episodes, World

UNITS = 48
"""Width of the hidden layer."""

Critic = dict[str, jax.Array]


class Features(NamedTuple):
    """What the critic reads.

    Attributes:
      action: [B, K, m, F] float32, before each action token.
      log: [B, K, F] float32, on the log after each turn; all of its tokens look alike.
    """

    action: jax.Array
    log: jax.Array


def features(world: World, episodes: Episodes) -> Features:
    """Turn and index as fractions, cues and decisions so far, the token before, whether a log.

    Returns:
      `Features` with F = (1 + TOKENS) (K + 1) + 3.
    """
    k, m = world.turns, world.tokens
    batch = episodes.cue.shape[0]
    turn = jnp.arange(k)
    index = jnp.arange(m + 1)
    # One slot more a turn than there are tokens: the log after it.
    shape = (batch, k, m + 1)
    seen = turn[None, :] <= turn[:, None]
    cue = jnp.where(seen[None], (2.0 * episodes.cue - 1.0)[:, None, :], 0.0)
    decision = episodes.token[:, :, world.decision]
    known = (turn[None, None, :] < turn[:, None, None]) | (
        (turn[None, None, :] == turn[:, None, None]) & (index[None, :, None] > world.decision)
    )
    taken = [
        jnp.where(known[None], (decision == c)[:, None, None, :], False) for c in range(TOKENS)
    ]
    before = jnp.pad(episodes.token[:, :, :-1], ((0, 0), (0, 0), (1, 1)), constant_values=TOKENS)
    parts = [
        jnp.broadcast_to((turn / k)[None, :, None, None], (*shape, 1)),
        jnp.broadcast_to((index / m)[None, None, :, None], (*shape, 1)),
        jnp.broadcast_to(cue[:, :, None, :], (*shape, k)),
        *(jnp.broadcast_to(x, (*shape, k)).astype(jnp.float32) for x in taken),
        jax.nn.one_hot(before, TOKENS + 1),
        jnp.broadcast_to((index == m)[None, None, :, None], (*shape, 1)).astype(jnp.float32),
    ]
    x = jnp.concatenate(parts, axis=-1)
    return Features(x[:, :, :m], x[:, :, m])


def initial_critic(world: World, key: jax.Array) -> Critic:
    """Weights scaled by fan-in, and a head of zeros: the first value is 0 everywhere."""
    width = (1 + TOKENS) * (world.turns + 1) + 3
    return {
        "w1": jax.random.normal(key, (width, UNITS)) / jnp.sqrt(width),
        "b1": jnp.zeros(UNITS),
        "w2": jnp.zeros(UNITS),
        "b2": jnp.zeros(()),
    }


def value_of(critic: Critic, x: jax.Array) -> jax.Array:
    """Values [...] of features [..., F]: w2 tanh(w1 x + b1) + b2."""
    # As one matrix: with more axes, XLA's CPU compiler takes twice as long for a step.
    hidden = jnp.tanh(x.reshape(-1, x.shape[-1]) @ critic["w1"] + critic["b1"])
    return (hidden @ critic["w2"] + critic["b2"]).reshape(x.shape[:-1])
