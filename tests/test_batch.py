"""Packing and the action layout: every token once, nothing crosses, everything comes back."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.records import Fault
from tests.test_store import make
from trsi_jax.batch import (
    action_tokens,
    check_rewards,
    pack,
    text_example,
    to_predictor,
    to_token,
    token_rewards,
    trajectory_example,
)


def example(n: int, number: int = 0):
    """A sequence whose every token is told apart: ids are 1000 * number + place."""
    trajectory = make(
        str(number), n, seed=number, token_ids=(1000 * number + np.arange(n)).astype(np.int32)
    )
    rng = np.random.default_rng(number)
    column = rng.normal(size=n).astype(np.float32)
    return trajectory_example(trajectory, {"advantage_t": column, "return_t": column + 1})


sizes = st.lists(st.integers(1, 24), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_every_token_lies_in_exactly_one_place(lengths, rows, seed) -> None:
    examples = [example(n, i) for i, n in enumerate(lengths)]
    packing = pack(examples, rows=rows, length=24, seed=seed)
    assert packing.dropped == ()
    np.testing.assert_array_equal(packing.kept, np.arange(len(examples)))
    found = np.concatenate([b.token_ids[b.segment_ids > 0] for b in packing.batches])
    expected = np.concatenate([e.token_ids for e in examples])
    np.testing.assert_array_equal(np.sort(found), np.sort(expected))
    assert packing.fill == expected.size / (len(packing.batches) * rows * 24)


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_segments_are_whole_and_positions_restart(lengths, rows, seed) -> None:
    examples = [example(n, i) for i, n in enumerate(lengths)]
    packing = pack(examples, rows=rows, length=24, seed=seed)
    for batch in packing.batches:
        assert batch.token_ids.shape == (rows, 24)
        for ids, segments, positions in zip(
            batch.token_ids, batch.segment_ids, batch.position_ids, strict=True
        ):
            used = int((segments > 0).sum())
            # Padding only at the end; segments 1, 2, ... without a gap.
            assert not segments[used:].any()
            assert not positions[used:].any()
            assert set(segments[:used]) == set(range(1, int(segments.max()) + 1))
            assert np.isin(np.diff(segments[:used]), (0, 1)).all()
            for k in range(1, int(segments.max()) + 1):
                inside = segments == k
                of = examples[ids[inside][0] // 1000]
                np.testing.assert_array_equal(ids[inside], of.token_ids)
                np.testing.assert_array_equal(positions[inside], np.arange(of.token_ids.size))


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_gather_is_the_inverse_of_packing_for_every_field(lengths, rows, seed) -> None:
    examples = [example(n, i) for i, n in enumerate(lengths)]
    packing = pack(examples, rows=rows, length=24, seed=seed)
    for packed, field in (
        ("token_ids", "token_ids"),
        ("acted", "acted_t"),
        ("logprob", "logprob_t"),
        ("turn_ids", "turn_t"),
        ("loss_weight", "loss_weight_t"),
    ):
        back = packing.gather([getattr(b, packed) for b in packing.batches])
        for a, e in zip(back, examples, strict=True):
            np.testing.assert_array_equal(a, getattr(e, field), strict=True)
    for name in ("advantage_t", "return_t"):
        back = packing.gather([b.columns[name] for b in packing.batches])
        for a, e in zip(back, examples, strict=True):
            np.testing.assert_array_equal(a, e.columns[name], strict=True)


def test_the_seed_decides_the_packing() -> None:
    examples = [example(n, i) for i, n in enumerate([5, 9, 3, 7, 8, 2, 6, 4])]
    a, b, c = (pack(examples, rows=2, length=12, seed=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(a.row, b.row)
    np.testing.assert_array_equal(a.offset, b.offset)
    assert a.row.tolist() != c.row.tolist() or a.offset.tolist() != c.offset.tolist()


def test_rows_are_dealt_into_the_fewest_batches_or_the_number_asked_for() -> None:
    # Ten sequences of 12 in rows of 12: ten rows, three batches of four.
    examples = [example(12, i) for i in range(10)]
    packing = pack(examples, rows=4, length=12, seed=0)
    assert sorted(int((b.segment_ids[:, 0] > 0).sum()) for b in packing.batches) == [3, 3, 4]
    packing = pack(examples, rows=4, length=12, seed=0, batches=5)
    assert [int((b.segment_ids[:, 0] > 0).sum()) for b in packing.batches] == [2] * 5
    with pytest.raises(ValueError, match="need 3 batches of 4 x 12, got batches=2"):
        pack(examples, rows=4, length=12, seed=0, batches=2)
    assert len(pack([], rows=2, length=4, seed=0).batches) == 1


def test_batches_weigh_about_alike() -> None:
    rng = np.random.default_rng(0)
    examples = [example(int(n), i) for i, n in enumerate(rng.integers(20, 60, 200))]
    packing = pack(examples, rows=40, length=72, seed=0, batches=4)
    tokens = np.array([int((b.segment_ids > 0).sum()) for b in packing.batches])
    # In snake order two batches differ by less than one row.
    assert np.ptp(tokens) < 72


def test_a_sequence_longer_than_a_row_is_an_error_or_dropped_and_counted() -> None:
    examples = [example(4, 0), example(9, 1), example(5, 2)]
    with pytest.raises(ValueError, match="sequence 1 has 9 tokens, a row holds 8"):
        pack(examples, rows=2, length=8, seed=0)
    packing = pack(examples, rows=2, length=8, seed=0, overlong="drop")
    assert packing.dropped == (1,)
    assert packing.kept.tolist() == [0, 2]
    back = packing.gather([b.token_ids for b in packing.batches])
    assert [a.tolist() for a in back] == [[0, 1, 2, 3], [2000, 2001, 2002, 2003, 2004]]
    with pytest.raises(ValueError, match="overlong"):
        pack(examples, rows=2, length=8, seed=0, overlong="truncate")


def test_targets_are_the_next_tokens_and_values_come_from_the_token_before() -> None:
    examples = [example(5, 1), example(4, 2), example(6, 3)]
    packing = pack(examples, rows=2, length=10, seed=0)
    (batch,) = packing.batches
    targets = np.asarray(to_predictor(batch.token_ids, batch.segment_ids))
    # A critic whose output at position p is 100 * segment + p within the segment.
    hidden = jnp.asarray(100 * batch.segment_ids + batch.position_ids, jnp.float32)
    value = np.asarray(to_token(hidden, batch.segment_ids))
    for row in range(2):
        for p in range(10):
            segment, place = batch.segment_ids[row, p], batch.position_ids[row, p]
            last = p == 9 or batch.segment_ids[row, p + 1] != segment
            expected = 0 if segment == 0 or last else batch.token_ids[row, p + 1]
            assert targets[row, p] == expected
            # The value before token j is read at token j - 1; before token 0 there is none.
            assert value[row, p] == (100 * segment + place - 1 if segment and place else 0)


def test_predictor_and_token_alignment_undo_each_other_on_predicted_tokens() -> None:
    examples = [example(n, i) for i, n in enumerate([3, 5, 1, 4, 7])]
    (batch,) = pack(examples, rows=3, length=8, seed=0).batches
    x = np.where(batch.position_ids > 0, batch.columns["advantage_t"], 0)
    moved = to_predictor(x, batch.segment_ids)
    np.testing.assert_array_equal(to_token(moved, batch.segment_ids), x)
    # The mask moves with the tokens: as many targets as tokens that have a predecessor.
    weight = to_predictor(batch.segment_ids > 0, batch.segment_ids)
    assert int(weight.sum()) == sum(e.token_ids.size - 1 for e in examples)


def test_packed_loss_is_the_unpacked_loss() -> None:
    # A bigram "model": the log-likelihood of a token depends on the one before it alone, so the
    # two losses differ exactly if a segment edge leaks into the packed one.
    vocab = 64
    logits = np.random.default_rng(0).normal(size=(vocab, vocab)).astype(np.float32)
    logp = np.asarray(jax.nn.log_softmax(logits))
    examples = [
        dataclasses.replace(e, token_ids=e.token_ids % vocab)
        for e in (example(n, i) for i, n in enumerate([9, 20, 1, 13, 24, 6, 17]))
    ]
    total = count = 0.0
    for e in examples:
        for t in range(1, e.token_ids.size):
            total -= e.loss_weight_t[t] * logp[e.token_ids[t - 1], e.token_ids[t]]
            count += e.loss_weight_t[t]
    packing = pack(examples, rows=2, length=24, seed=3)
    packed_total = packed_count = 0.0
    for batch in packing.batches:
        target = to_predictor(batch.token_ids, batch.segment_ids)
        weight = to_predictor(batch.loss_weight, batch.segment_ids)
        packed_total -= float((weight * logp[batch.token_ids, target]).sum())
        packed_count += float(weight.sum())
    assert packed_count == count > 0
    assert packed_total == pytest.approx(total, rel=1e-6)


def test_a_first_token_carries_no_loss_and_must_not_be_acted() -> None:
    text = text_example([7, 8, 9], [1.0, 1.0, 0.1])
    (batch,) = pack([text, text], rows=1, length=8, seed=0).batches
    np.testing.assert_array_equal(
        batch.loss_weight[0], np.array([0, 1, 0.1, 0, 1, 0.1, 0, 0], np.float32)
    )
    acted = dataclasses.replace(text, acted_t=np.ones(3, bool))
    with pytest.raises(ValueError, match="first token of sequence 1 is acted"):
        pack([text, acted], rows=1, length=8, seed=0)


def test_a_packed_batch_is_a_pytree_that_jit_takes() -> None:
    (batch,) = pack([example(5, 1)], rows=1, length=8, seed=0).batches
    total = jax.jit(lambda b: b.columns["return_t"].sum() + b.token_ids.sum())(batch)
    assert float(total) == pytest.approx(
        batch.columns["return_t"].sum() + batch.token_ids.sum(), rel=1e-6
    )
    doubled = jax.tree.map(lambda x: x * 2, batch)
    np.testing.assert_array_equal(doubled.token_ids, batch.token_ids * 2)


def test_a_trajectory_with_a_fault_is_masked_everywhere() -> None:
    faulty = make("a", verdict=None, fault=Fault("sandbox-dead", ""), finish="fault")
    assert faulty.acted_t.any()
    masked = trajectory_example(faulty)
    assert not masked.acted_t.any()
    assert not masked.loss_weight_t.any()
    assert not masked.logprob_t.any()
    with pytest.raises(ValueError, match=r"trajectory a has a fault \(sandbox-dead\)"):
        token_rewards(faulty, 0.0)


def test_the_terminal_reward_sits_on_the_last_acted_token() -> None:
    trajectory = make("a")  # acts at 5, 6, 9, 10; token 11 is an observation
    # Fractions survive: an integer array would make 0.5 a 0 (facts/peers.md 3.2, case 5).
    for reward in (0.5, 0.25, 1.7, 0, 1):
        reward_t = token_rewards(trajectory, reward)
        assert reward_t.dtype == np.float32
        assert np.flatnonzero(reward_t).tolist() == ([10] if reward else [])
        assert reward_t[10] == np.float32(reward)
    with pytest.raises(ValueError, match="reward nan must be finite"):
        token_rewards(trajectory, float("nan"))
    silent = make("b", acted_t=np.zeros(12, bool))
    assert not token_rewards(silent, 0.0).any()
    with pytest.raises(ValueError, match="no token was sampled"):
        token_rewards(silent, 1.0)


ACTED = np.array([0, 1, 1, 0, 0, 1, 0], bool)
TURN = np.array([0, 0, 0, 0, 0, 1, 1], np.int32)
REWARD = np.array([0, 0, 0, 0, 0, 0.5, 0], np.float32)
BAD_REWARDS = {
    "off the mask": (np.roll(REWARD, 1), TURN, "is 0.5 at token 6, which was not sampled"),
    "integer": (np.ones(7, np.int64), TURN, "dtype int64, must be floating"),
    "NaN": (REWARD * np.float32(np.nan), TURN, "is nan at token 0, must be finite"),
    "turns backwards": (REWARD, TURN[::-1].copy(), "turn 0 at token 2.* goes back from 1"),
    "length": (REWARD[1:], TURN, r"shape \(6,\), must be \(7,\)"),
}


@pytest.mark.parametrize("case", BAD_REWARDS)
def test_a_reward_that_would_be_lost_is_refused_at_every_door(case) -> None:
    reward, turn, problem = BAD_REWARDS[case]
    with pytest.raises(ValueError, match=problem):
        check_rewards(reward, ACTED, turn)
    with pytest.raises(ValueError, match=problem):
        action_tokens([ACTED], [turn], {"reward_t": [reward]})
    bad = dataclasses.replace(
        text_example(np.arange(7), np.ones(7), turn_t=turn),
        acted_t=ACTED,
        columns={"reward_t": reward},
    )
    with pytest.raises(ValueError, match=problem):
        pack([bad], rows=1, length=8, seed=0)
    check_rewards(REWARD, ACTED, TURN)


def test_action_tokens_are_the_acted_ones_in_order_time_major() -> None:
    other = np.array([0, 1, 0], bool)
    values = [np.arange(7, dtype=np.float32), 10 + np.arange(3, dtype=np.float32)]
    tokens, index = action_tokens(
        [ACTED, other], [TURN, np.zeros(3, np.int32)], {"value_t": values}, length=4, width=3
    )
    np.testing.assert_array_equal(tokens.acted_t[:, 0], [True, True, True, False])
    np.testing.assert_array_equal(tokens.turn_t[:, 0], [0, 0, 1, 1])
    np.testing.assert_array_equal(tokens.columns["value_t"][:, 0], [1, 2, 5, 0])
    np.testing.assert_array_equal(tokens.columns["value_t"][:, 1], [11, 0, 0, 0])
    assert not tokens.acted_t[:, 2].any()
    back = index.scatter(tokens.columns["value_t"] + 1)
    np.testing.assert_array_equal(back[0], [0, 2, 3, 0, 0, 6, 0])
    np.testing.assert_array_equal(back[1], [0, 12, 0])
    with pytest.raises(ValueError, match="length 2 is too small, the sequences need 3"):
        action_tokens([ACTED], [TURN], {}, length=2)
    assert int(jax.jit(lambda t: t.acted_t.sum())(tokens)) == 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(0, 2**32 - 1))
def test_scatter_is_the_inverse_of_the_action_layout(lengths, seed) -> None:
    rng = np.random.default_rng(seed)
    acted = [rng.random(n) < 0.4 for n in lengths]
    turns = [np.cumsum(rng.integers(0, 2, n), dtype=np.int32) for n in lengths]
    values = [rng.normal(size=n).astype(np.float32) for n in lengths]
    tokens, index = action_tokens(acted, turns, {"value_t": values})
    assert tokens.acted_t.sum() == sum(a.sum() for a in acted)
    for a, v, back in zip(acted, values, index.scatter(tokens.columns["value_t"]), strict=True):
        np.testing.assert_array_equal(back, np.where(a, v, np.float32(0)))
    assert (np.diff(tokens.turn_t, axis=0) >= 0).all()


def test_the_time_of_packing_grows_with_the_number_of_sequences_not_with_its_square() -> None:
    def cpu_s(n: int) -> float:
        """Seconds of this thread alone: XLA's own threads may be busy with earlier tests."""
        examples = [example(20 + i % 45, i) for i in range(n)]
        times = []
        for _ in range(5):
            began = time.thread_time()
            pack(examples, rows=40, length=72, seed=0)
            times.append(time.thread_time() - began)
        return min(times)

    cpu_s(10)
    # Eight times as many sequences take 9 times as long here; 64 times if every row were tried.
    assert cpu_s(4000) < 24 * cpu_s(500)


def test_packing_two_thousand_sequences_leaves_few_places_empty() -> None:
    packing = pack([example(20 + i % 45, i) for i in range(2000)], rows=40, length=72, seed=0)
    assert packing.fill > 0.85
