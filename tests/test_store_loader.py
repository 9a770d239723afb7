"""Loading: every token once, over processes, over interruptions, packed as if it were not."""

import dataclasses
import threading

import jax
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import StoreError
from rollout.store.compact import compact
from rollout.store.loader import Cursor, Loader
from rollout.store.plan import Bucketed, Packed, epoch_steps, fill
from rollout.store.segments import SegmentWriter
from tests.store_data import VOCAB, assert_same, make
from trsi_jax import losses, model
from trsi_jax.batch import PackedBatch, pack_rows, trajectory_example
from trsi_jax.steps.forward import token_logprobs

lengths_of = st.lists(st.integers(0, 24), max_size=40)
plans = st.one_of(
    st.builds(Packed, st.sampled_from([2, 4, 8]), st.integers(24, 60), st.integers(1, 50)),
    st.builds(Bucketed, st.sampled_from([2, 4, 8]), st.just((3, 9, 24))),
)


@settings(max_examples=120, deadline=None)
@given(plans, lengths_of, st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_every_trajectory_with_tokens_has_exactly_one_place(plan, lengths, seed, epoch) -> None:
    steps, dropped = epoch_steps(plan, lengths, seed=seed, epoch=epoch)
    placed = [i for step in steps for row in step.rows for i in row]
    assert sorted(placed) == [i for i, n in enumerate(lengths) if n]
    assert dropped == ()
    for step in steps:
        assert len(step.rows) == plan.rows
        assert any(step.rows)
        assert all(sum(lengths[i] for i in row) <= step.row_tokens for row in step.rows)
    assert (steps, dropped) == epoch_steps(plan, lengths, seed=seed, epoch=epoch)


def test_seed_and_epoch_decide_the_order() -> None:
    plan, lengths = Packed(2, 30), [1 + i % 20 for i in range(60)]
    orders = [epoch_steps(plan, lengths, seed=s, epoch=e)[0] for s in (0, 1) for e in (0, 1)]
    assert len({str(order) for order in orders}) == 4


def test_buckets_hold_what_is_alike() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 500).tolist()
    steps, _ = epoch_steps(Bucketed(4, (10, 30, 99)), lengths, seed=0, epoch=0)
    lower = {10: 0, 30: 10, 99: 30}
    for step in steps:
        sizes = [lengths[i] for row in step.rows for i in row]
        assert lower[step.row_tokens] < min(sizes) <= max(sizes) <= step.row_tokens


@pytest.mark.parametrize(("rows", "count"), [(16, 512), (32, 2048)])
def test_packed_rows_of_long_trajectories_are_at_least_92_percent_useful(rows, count) -> None:
    # Lengths as measured in terminal work: lognormal, median 23k, at most 73k; rows of 96k.
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(np.log(23_000), 0.6, count), 73_000).astype(int).tolist()
    for epoch in range(3):
        steps, _ = epoch_steps(Packed(rows, 96_000), lengths, seed=0, epoch=epoch)
        assert fill(steps, lengths) >= 0.92


def test_a_plan_says_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="trajectory 1 has 9 tokens, a row holds 8"):
        epoch_steps(Packed(2, 8), [3, 9], seed=0, epoch=0)
    steps, dropped = epoch_steps(Packed(2, 8), [3, 9, 2], seed=0, epoch=0, overlong="drop")
    assert dropped == (1,)
    assert sorted(i for row in steps[0].rows for i in row) == [0, 2]
    for plan in (Packed(0, 8), Packed(2, 0), Bucketed(2, ()), Bucketed(2, (9, 3))):
        with pytest.raises(ValueError, match="a plan needs"):
            epoch_steps(plan, [1], seed=0, epoch=0)
    with pytest.raises(ValueError, match="overlong"):
        epoch_steps(Packed(2, 8), [1], seed=0, epoch=0, overlong="cut")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    writer = SegmentWriter(folder, vocab_size=VOCAB)
    rng = np.random.default_rng(0)
    for s in range(6):
        batch = [make(f"{s}/{k}", int(n), 10 * s + k) for k, n in enumerate(rng.integers(1, 40, 7))]
        writer.write(f"rpr-1/{s}", batch)
        columns = [np.arange(t.token_ids.size, dtype=np.float32) + s for t in batch]
        writer.write_columns(f"rpr-1/{s}", "advantage_t", columns)
    writer.write("empty", [make("nothing", 0)])
    return folder


def ids(steps) -> list[list[list[str]]]:
    return [[[x.trajectory.id for x in row] for row in step.rows] for step in steps]


def loader(store, **options) -> Loader:
    options = {"plan": Packed(4, 48, 16)} | options
    if "cursor" not in options:
        options = {"seed": 3} | options
    return Loader(store, **options)


def test_what_is_loaded_is_what_is_stored(store) -> None:
    with loader(store, columns=["advantage_t"], segments=lambda n: n != "empty") as load:
        steps = list(load.epochs(1))
        assert load.fill() > 0.8
    found = [x for step in steps for row in step.rows for x in row]
    assert len(found) == 42
    for x in found:
        s, k = map(int, x.trajectory.id.split("/"))
        assert_same(make(x.trajectory.id, x.trajectory.token_ids.size, 10 * s + k), x.trajectory)
        expected = np.arange(x.trajectory.token_ids.size, dtype=np.float32) + s
        np.testing.assert_array_equal(x.columns["advantage_t"], expected, strict=True)


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("plan", [Packed(4, 48, 16), Bucketed(4, (10, 20, 40))])
def test_processes_share_an_epoch_without_overlap_or_loss(store, processes, plan) -> None:
    shards = []
    for process in range(processes):
        with loader(store, plan=plan, process=process, processes=processes) as load:
            shards.append(ids(load.epochs(2)))
    with loader(store, plan=plan) as load:
        whole = ids(load.epochs(2))
    assert len({len(shard) for shard in shards}) == 1, "every process takes as many steps"
    for n, step in enumerate(whole):
        dealt = [shards[r % processes][n][r // processes] for r in range(4)]
        assert dealt == step
    once = sorted(i for step in whole for row in step for i in row)
    assert once == sorted(2 * [f"{s}/{k}" for s in range(6) for k in range(7)])


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_cursor_goes_on_as_if_nothing_had_happened(store, data) -> None:
    with loader(store) as load:
        whole = list(load.epochs(3))
    stop = data.draw(st.integers(0, len(whole) - 1))
    with loader(store, cursor=whole[stop].after) as load:
        assert ids(load.epochs(3)) == ids(whole[stop + 1 :])
    # Over another number of processes: the cursor counts steps, not rows.
    with loader(store, cursor=whole[stop].after, process=1, processes=2) as load:
        assert ids(load.epochs(3)) == [s[1::2] for s in ids(whole[stop + 1 :])]


def test_an_epoch_does_not_change_when_the_store_grows_and_is_compacted() -> None:
    context = ts.Context()
    writer = SegmentWriter("memory://s/", vocab_size=VOCAB, context=context)
    for s in range(4):
        writer.write(f"s/{s}", [make(f"{s}/{k}", 9 + k) for k in range(5)])
    with loader("memory://s/", context=context) as load:
        first = list(load.epochs(1))
        writer.write("t", [make("late")])
        compact("memory://s/", context=context)
        assert ids(load.epochs(1)) == ids(first)
    cursor = Cursor(first[0].after.version, 3)
    with loader("memory://s/", cursor=cursor, context=context) as load:
        assert ids(load.epochs(1)) == ids(first)


def test_reading_ahead_is_bounded_and_ends(store) -> None:
    before = threading.active_count()
    load = loader(store, ahead=2)
    submitted = []
    submit = load._thread.submit
    load._thread.submit = lambda *a: submitted.append(a) or submit(*a)
    steps = load.epochs(9)
    for taken in range(1, 4):
        next(steps)
        assert len(submitted) == taken + 2
    steps.close()
    load.close()
    load.close()
    assert threading.active_count() == before


def test_a_loader_says_what_it_cannot_do(store, tmp_path) -> None:
    for options, problem in (
        ({"cursor": Cursor(1, 0), "seed": 1}, "either a cursor or a seed"),
        ({"processes": 3}, "must divide the rows"),
        ({"process": 2, "processes": 2}, "process 2 of 2"),
        ({"ahead": 0}, "ahead must be at least 1"),
    ):
        with pytest.raises(ValueError, match=problem):
            loader(store, **options)
    with pytest.raises(StoreError, match="no trajectory store"):
        loader(tmp_path / "none")
    with loader(store, columns=["value_t"]) as load, pytest.raises(StoreError, match="no column"):
        next(load.epochs(1))
    with loader(store) as load:
        version = load.cursor.version
    beyond = loader(store, cursor=Cursor(version, 3, 0, 999))
    with beyond as load, pytest.raises(StoreError, match="the cursor stands at step 999"):
        next(load.epochs(1))
    with loader(store, plan=Packed(4, 20), overlong="drop") as load:
        dropped = set(load.dropped())
        seen = {i for step in ids(load.epochs(1)) for row in step for i in row}
    assert dropped
    assert dropped.isdisjoint(seen)
    assert len(dropped | seen) == 42


MODEL = dataclasses.replace(
    model.preset("tiny", vocab_size=VOCAB),
    num_layers=2,
    layer_pattern=("linear", "full"),
    hidden_size=32,
    intermediate_size=48,
    head_dim=8,
    rotary_dim=4,
    gdn_key_dim=8,
    gdn_value_dim=8,
    gdn_chunk=8,
)


@jax.jit
def summed_loss(params, batch: PackedBatch) -> jax.Array:
    """The supervised loss of the real model, summed over the batch's weighted tokens."""
    weight = batch.loss_weight
    logprob, _ = token_logprobs(MODEL, params, batch, temperature=1.0)
    return losses.sft_nll(logprob, weight > 0, n_tokens=1.0, weight_t=weight)


def test_the_model_gives_packed_rows_the_loss_of_the_trajectories_alone(store) -> None:
    params = model.init_params(MODEL, jax.random.key(0))
    packed = alone = leaked = 0.0
    weights = tokens = 0
    examples = []
    with loader(store, columns=["advantage_t"]) as load:
        for step in load.epochs(1):
            rows = [[trajectory_example(x.trajectory, x.columns) for x in row] for row in step.rows]
            examples += [example for row in rows for example in row]
            batch = pack_rows(rows, length=step.row_tokens)
            model.check_rows(batch.segment_ids)
            packed += float(summed_loss(params, batch))
            weights += float(batch.loss_weight.sum())
            tokens += int((batch.segment_ids > 0).sum())
            one = np.minimum(batch.segment_ids, 1)
            leaked += float(summed_loss(params, dataclasses.replace(batch, segment_ids=one)))
    assert tokens == sum(e.token_ids.size for e in examples)
    assert weights == sum(e.loss_weight_t[1:].sum() for e in examples) > 0
    # A row each, in batches of the same shape.
    examples += [None] * (-len(examples) % len(batch.token_ids))
    for start in range(0, len(examples), len(batch.token_ids)):
        rows = [[e] if e else [] for e in examples[start : start + len(batch.token_ids)]]
        alone += float(summed_loss(params, pack_rows(rows, length=step.row_tokens)))
    assert packed == pytest.approx(alone, rel=1e-6)
    # A model that saw across the edges would be found out.
    assert abs(leaked - alone) > 1e-3 * alone


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 8), max_size=3), min_size=1, max_size=5))
def test_rows_are_laid_out_as_given(sizes) -> None:
    number = 0
    rows = []
    for row in sizes:
        rows.append([])
        for n in row:
            number += 1
            ids_t = (100 * number + np.arange(n)).astype(np.int32)
            rows[-1].append(trajectory_example(make("x", n, token_ids=ids_t)))
    batch = pack_rows(rows, length=24)
    for r, row in enumerate(rows):
        flat = np.concatenate([np.zeros(0, np.int32), *(e.token_ids for e in row)])
        np.testing.assert_array_equal(batch.token_ids[r, : flat.size], flat)
        assert not batch.token_ids[r, flat.size :].any()
        segments = np.repeat(np.arange(1, len(row) + 1), [e.token_ids.size for e in row])
        np.testing.assert_array_equal(batch.segment_ids[r, : flat.size], segments)
        starts = batch.position_ids[r, : flat.size] == 0
        assert starts.sum() == len(row)
        # The edge of a segment carries no loss.
        assert not batch.loss_weight[r, : flat.size][starts].any()
    with pytest.raises(ValueError, match="row 0 has 30 tokens, a row holds 24"):
        pack_rows([[trajectory_example(make("x", 30))]], length=24)
