"""The train steps at the shape of every run: what they lower, and what they leave alone."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout.harness import shell_chat
from rollout.tasks.pool.lexicon import vocabulary
from tests.test_store import VOCAB, make
from trsi_jax import batch, config, model, optim, state, steps

TINY = config.load(Path(__file__).resolve().parent.parent / "configs" / "tiny.toml")
ROWS, LENGTH = TINY.packing.rows, TINY.packing.length
MODEL = model.preset("tiny", vocab_size=shell_chat(vocabulary()).tokenizer.vocab_size)
OPTIMIZER = optim.adamw(**TINY.adam.model_dump())
COMPILED = steps.compile_steps(MODEL, OPTIMIZER)
PPO = {"clip": 0.2, "temperature": 1.0}
SIZES = (100, 40, 61, 27, 90, 12, 128, 33, 70)

assert MODEL.vocab_size >= VOCAB


@pytest.fixture(scope="module")
def params():
    return model.init_params(MODEL, jax.random.key(3))


def fresh(params):
    """A state of its own buffers: the steps donate what they are given."""
    return state.create(jax.tree.map(jnp.copy, params), OPTIMIZER)


def examples(advantage: float = 0.0):
    """Sequences of several lengths with sampled tokens, returns and advantages."""
    rng = np.random.default_rng(1)
    found = []
    for number, size in enumerate(SIZES):
        trajectory = make(str(number), size, seed=number)
        columns = {
            "value_t": np.zeros(size, np.float32),
            "advantage_t": np.where(trajectory.acted_t, np.float32(advantage), 0),
            "return_t": np.where(trajectory.acted_t, rng.normal(size=size), 0).astype(np.float32),
        }
        found.append(batch.trajectory_example(trajectory, columns))
    return found


def packed(found, rows=ROWS):
    (one,) = batch.pack(found, rows=rows, length=LENGTH, seed=0).batches
    return one


def plain(rows):
    """Without the columns, as the log-likelihood and the critic's values are compiled."""
    return dataclasses.replace(rows, columns={})


def apart(found):
    """The same sequences, one a row."""
    rows = [packed([example], rows=1) for example in found]
    rows += [jax.tree.map(np.zeros_like, rows[0])] * (ROWS - len(rows))
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *rows)


def same(one, other) -> bool:
    return state.digest(one) == state.digest(other)


def test_the_supervised_step_lowers_its_loss(params) -> None:
    rows = plain(packed(examples()))
    current = fresh(params)
    losses = []
    for _ in range(8):
        current, metrics = COMPILED.sft(current, rows, 3e-3)
        losses.append(float(metrics["loss"]))
    # Nothing is known at first: the loss is about that of a uniform guess.
    assert losses[0] == pytest.approx(np.log(MODEL.vocab_size), rel=0.15)
    assert losses[-1] < 0.8 * losses[0]
    assert int(current.step) == 8


def test_packing_changes_no_loss(params) -> None:
    found = examples()
    together, alone = plain(packed(found)), plain(apart(found))
    # Otherwise the test would compare a batch with itself.
    assert int((together.segment_ids > 1).sum()) > 0
    assert not (alone.segment_ids > 1).any()
    _, one = COMPILED.sft(fresh(params), together, 1e-3)
    _, other = COMPILED.sft(fresh(params), alone, 1e-3)
    np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-6)
    np.testing.assert_allclose(one["grad_norm"], other["grad_norm"], rtol=1e-5)


def test_packing_changes_no_value(params) -> None:
    critic = model.init_value_params(MODEL, params)
    # The head starts at zero; values that tell tokens apart need another one.
    critic = jax.tree.map(lambda x: x + 0.02, critic)
    found = examples()
    packing = batch.pack(found, rows=ROWS, length=LENGTH, seed=0)
    together = packing.gather([COMPILED.values(critic, plain(b)) for b in packing.batches])
    alone = np.asarray(COMPILED.values(critic, plain(apart(found))))
    for i, (value_t, size) in enumerate(zip(together, SIZES, strict=True)):
        np.testing.assert_allclose(value_t, alone[i, :size], atol=1e-5, rtol=1e-5)
        assert value_t[0] == 0.0
        assert np.ptp(value_t[1:]) > 0
        assert not alone[i, size:].any()


def test_a_learning_rate_of_zero_changes_no_parameter(params) -> None:
    rows = plain(packed(examples()))
    after, metrics = COMPILED.sft(fresh(params), rows, 0.0)
    assert same(after.params, params)
    assert float(metrics["grad_norm"]) > 0


def test_the_critics_step_lowers_its_loss_and_leaves_the_actors_bytes(params) -> None:
    before = state.digest(params)
    rows = packed(examples())
    # Made as a stage makes it: the trunk is the actor's own.
    critic = fresh(model.init_value_params(MODEL, params))
    start = state.digest(critic.params)
    losses = []
    for _ in range(6):
        critic, metrics = COMPILED.critic(critic, rows, 5e-4)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert state.digest(critic.params) != start
    assert state.digest(params) == before


def test_the_critics_first_loss_is_half_the_mean_square_of_the_returns(params) -> None:
    rows = packed(examples())
    _, metrics = COMPILED.critic(fresh(model.init_value_params(MODEL, params)), rows, 0.0)
    # A new critic says 0 everywhere.
    target = rows.columns["return_t"][rows.acted]
    assert float(metrics["loss"]) == pytest.approx(0.5 * np.mean(target**2), rel=1e-5)
    assert float(metrics["explained_variance"]) == pytest.approx(0.0, abs=1e-5)


def test_a_sigmoid_critic_starts_from_the_middle_and_lowers_its_loss(params) -> None:
    rows = packed(examples())
    wanted = np.where(rows.acted, np.clip(rows.columns["return_t"], 0, 2), np.float32(0))
    rows = dataclasses.replace(rows, columns=rows.columns | {"return_t": wanted})
    critic = fresh(model.init_value_params(MODEL, params))
    losses = []
    for _ in range(6):
        critic, metrics = COMPILED.critic(critic, rows, 5e-4, value_high=2.0)
        losses.append(float(metrics["loss"]))
    # A new critic's logit is 0 everywhere, and the cross-entropy of one half is log 2.
    assert losses[0] == pytest.approx(np.log(2.0), rel=1e-5)
    assert losses[-1] < losses[0]


def test_a_frozen_mixer_keeps_its_bytes_and_the_rest_learns(params) -> None:
    """With weight decay, which would move what has no gradient."""
    decaying = optim.adamw(**{**TINY.adam.model_dump(), "weight_decay": 0.1})
    compiled = steps.compile_steps(MODEL, decaying)
    start = model.init_value_params(MODEL, params)
    critic = state.create(jax.tree.map(jnp.copy, start), decaying)
    for _ in range(2):
        critic, metrics = compiled.critic(critic, packed(examples()), 5e-4, frozen_attention=True)
    assert float(metrics["grad_norm"]) > 0
    moved = {
        jax.tree_util.keystr(path): not np.array_equal(a, b)
        for (path, a), b in zip(
            jax.tree_util.tree_flatten_with_path(critic.params)[0],
            jax.tree.leaves(start),
            strict=True,
        )
    }
    frozen = {path for path in moved if "'mixer'" in path}
    assert frozen
    assert not any(moved[path] for path in frozen)
    assert any("'mlp'" in path and moved[path] for path in moved)
    assert any("value_head" in path and moved[path] for path in moved)


@pytest.fixture(scope="module")
def on_policy(params):
    """The batch with the policy's own log-probs: every ratio is 1."""
    rows = packed(examples())
    logprob = jax.jit(partial(steps.token_logprobs, MODEL))(params, plain(rows), temperature=1.0)[0]
    return dataclasses.replace(rows, logprob=np.where(rows.acted, logprob, np.float32(0)))


def with_advantages(rows, of_row):
    advantage = np.where(rows.acted, of_row, np.float32(0)).astype(np.float32)
    return dataclasses.replace(rows, columns=rows.columns | {"advantage_t": advantage})


def test_without_advantages_the_actor_stays_bit_for_bit(params, on_policy) -> None:
    after, metrics = COMPILED.actor(
        fresh(params), with_advantages(on_policy, np.float32(0)), 1e-2, **PPO
    )
    assert float(metrics["loss"]) == 0.0
    assert float(metrics["grad_norm"]) == 0.0
    assert same(after.params, params)
    assert float(metrics["ratio"]) == pytest.approx(1.0, abs=1e-5)
    assert float(metrics["approx_kl"]) == pytest.approx(0.0, abs=1e-6)
    assert float(metrics["clip_fraction"]) == 0.0


def test_the_actors_step_moves_probability_to_what_earned(params, on_policy) -> None:
    # The first row did well and the second badly; the others say nothing.
    sign = np.zeros((ROWS, 1), np.float32)
    sign[0], sign[1] = 1.0, -1.0
    rows = with_advantages(on_policy, sign)
    actor, metrics = COMPILED.actor(fresh(params), rows, 1e-3, **PPO)
    # At ratio 1 the loss is minus the mean advantage.
    mean = rows.columns["advantage_t"].sum() / rows.acted.sum()
    assert float(metrics["loss"]) == pytest.approx(-mean, abs=1e-5)
    logprob, _ = jax.jit(partial(steps.token_logprobs, MODEL))(
        actor.params, plain(rows), temperature=1.0
    )
    change = np.where(rows.acted, np.asarray(logprob) - rows.logprob, 0).sum(axis=1)
    assert change[0] > 0 > change[1]


def test_a_ratio_beyond_the_clip_teaches_nothing_more(params, on_policy) -> None:
    # The behaviour's log-probs are lower by 1, so every ratio is e, beyond 1.2; what earned is
    # clipped there and has no gradient.
    far = dataclasses.replace(
        on_policy, logprob=np.where(on_policy.acted, on_policy.logprob - 1, 0)
    )
    after, metrics = COMPILED.actor(fresh(params), with_advantages(far, np.float32(1)), 1e-2, **PPO)
    assert float(metrics["loss"]) == pytest.approx(-1.2, rel=1e-5)
    assert float(metrics["clip_fraction"]) == 1.0
    assert float(metrics["grad_norm"]) == 0.0
    assert same(after.params, params)
