"""From trajectories to arrays of fixed shape: packed rows, and action tokens in time order.

Alignment, which everything downstream relies on. A packed batch is *token-aligned*: what stands
at position p belongs to token p (its id, its behaviour log-prob, its advantage). A causal model
is *predictor-aligned*: its output at position p says something of token p + 1 (the logits that
predict it, the value of the state before it). `to_predictor` and `to_token` move between the two
and never cross the edge of a segment. Token 0 of a segment has no predictor: it is never acted
and carries no loss.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from rollout.records import Trajectory
from rollout.tasks.splits import Purpose, check_access

Overlong = Literal["error", "drop"]

_INT_FIELDS = ("token_ids", "turn_t")
_FLOAT_FIELDS = ("loss_weight_t", "logprob_t")


@dataclass(frozen=True)
class Example:
    """One sequence to learn from.

    Attributes:
      token_ids: [T] int32.
      acted_t: [T] bool, true exactly where the policy sampled the token.
      loss_weight_t: [T] float32, weight of the token in a log-likelihood loss.
      logprob_t: [T] float32, behaviour log-prob; 0 where not acted.
      turn_t: [T] int32, non-decreasing index of the action turn.
      columns: name -> [T] float32, for example "advantage_t", "return_t", "old_value_t".
    """

    token_ids: npt.NDArray[np.int32]
    acted_t: npt.NDArray[np.bool_]
    loss_weight_t: npt.NDArray[np.float32]
    logprob_t: npt.NDArray[np.float32]
    turn_t: npt.NDArray[np.int32]
    columns: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedBatch:
    """R rows of L tokens that hold several sequences each, token-aligned; a pytree.

    Attributes:
      token_ids: [R, L] int32; 0 in the padding.
      segment_ids: [R, L] int32, 1, 2, ... along a row; 0 in the padding.
      position_ids: [R, L] int32, from 0 in every segment; 0 in the padding.
      turn_ids: [R, L] int32, the sequence's own; 0 in the padding.
      acted: [R, L] bool; false in the padding.
      loss_weight: [R, L] float32; 0 in the padding and at the first token of a segment.
      logprob: [R, L] float32, behaviour log-prob; 0 in the padding.
      columns: name -> [R, L] float32; 0 in the padding.
    """

    token_ids: Any
    segment_ids: Any
    position_ids: Any
    turn_ids: Any
    acted: Any
    loss_weight: Any
    logprob: Any
    columns: dict[str, Any]


@dataclass(frozen=True)
class Packing:
    """Batches of one shape, and where each sequence lies in them.

    Attributes:
      batches: one or more, of R rows of L tokens each; rows may be empty.
      kept: [K] int64, which of the sequences given are packed, ascending.
      batch: [K] int64, batch of each.
      row: [K] int64, row of each within its batch.
      offset: [K] int64, position of its first token.
      length: [K] int64, its tokens.
      dropped: sequences left out because they are longer than a row, by index.
    """

    batches: tuple[PackedBatch, ...]
    kept: npt.NDArray[np.int64]
    batch: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    dropped: tuple[int, ...]

    @property
    def fill(self) -> float:
        """Share of all positions that hold a token."""
        size = sum(b.token_ids.size for b in self.batches)
        return float(self.length.sum()) / size if size else 0.0

    def gather(self, results: Sequence[npt.ArrayLike]) -> list[npt.NDArray[Any]]:
        """Bring token-aligned results back to the sequences.

        Args:
          results: [R, L] of any dtype, one for each batch.

        Returns:
          [T] for each packed sequence, in the order of `kept`.

        Raises:
          ValueError: for another number of results or another shape.
        """
        if len(results) != len(self.batches):
            raise ValueError(f"got {len(results)} results for {len(self.batches)} batches")
        arrays = [np.asarray(r) for r in results]
        for array, of in zip(arrays, self.batches, strict=True):
            if array.shape != of.token_ids.shape:
                raise ValueError(f"a result has shape {array.shape}, not {of.token_ids.shape}")
        places = zip(
            *(a.tolist() for a in (self.batch, self.row, self.offset, self.length)), strict=True
        )
        return [arrays[b][r, o : o + n] for b, r, o, n in places]


def text_example(
    token_ids: npt.ArrayLike, loss_weight_t: npt.ArrayLike, *, turn_t: npt.ArrayLike | None = None
) -> Example:
    """A sequence that nobody sampled: demonstrations, pre-training documents.

    Args:
      token_ids: [T] integers.
      loss_weight_t: [T] weight of each token in the loss.
      turn_t: [T] turn of each token; None is one turn.

    Returns:
      The example; nothing is acted.
    """
    ids = np.asarray(token_ids, np.int32)
    return Example(
        token_ids=ids,
        acted_t=np.zeros(ids.shape, np.bool_),
        loss_weight_t=np.asarray(loss_weight_t, np.float32),
        logprob_t=np.zeros(ids.shape, np.float32),
        turn_t=np.zeros(ids.shape, np.int32) if turn_t is None else np.asarray(turn_t, np.int32),
    )


def trajectory_example(
    trajectory: Trajectory,
    columns: Mapping[str, npt.NDArray[np.float32]] | None = None,
    *,
    purpose: Purpose = "train",
) -> Example:
    """A stored trajectory; the loss weighs its acted tokens alike.

    A trajectory with a fault is masked everywhere: nothing of it is acted.

    Args:
      trajectory: as the store gives it.
      columns: name -> [T] float32.
      purpose: what the example is for; by default to be trained on.

    Returns:
      The example.

    Raises:
      ProtectedSplit: a trajectory on a task that the purpose may not see.
    """
    check_access(trajectory.split, purpose)
    acted_t = trajectory.acted_t
    if trajectory.fault is not None:
        acted_t = np.zeros_like(acted_t)
    return Example(
        token_ids=trajectory.token_ids,
        acted_t=acted_t,
        loss_weight_t=acted_t.astype(np.float32),
        logprob_t=np.where(acted_t, trajectory.logprob_t, np.float32(0)),
        turn_t=trajectory.turn_t,
        columns=dict(columns or {}),
    )


def token_rewards(trajectory: Trajectory, reward: float) -> npt.NDArray[np.float32]:
    """Place a terminal reward on the last acted token.

    r_t = reward if t = max{s : acted_s} else 0

    Args:
      trajectory: an ended episode without a fault.
      reward: finite scalar.

    Returns:
      [T] float32.

    Raises:
      ValueError: for a reward that is not finite, for a trajectory with a fault (it is masked and
        has no reward), and for a reward other than 0 where nothing was sampled.
    """
    if not math.isfinite(reward):
        raise ValueError(f"trajectory {trajectory.id}: reward {reward} must be finite")
    if trajectory.fault is not None:
        raise ValueError(
            f"trajectory {trajectory.id} has a fault ({trajectory.fault.kind}): it is masked and "
            "gets no reward"
        )
    reward_t = np.zeros(trajectory.acted_t.shape, np.float32)
    acted = np.flatnonzero(trajectory.acted_t)
    if acted.size:
        reward_t[acted[-1]] = reward
    elif reward != 0:
        raise ValueError(
            f"trajectory {trajectory.id}: reward {reward}, but no token was sampled to carry it"
        )
    return reward_t


def check_rewards(
    reward_t: npt.NDArray[Any], acted_t: npt.NDArray[np.bool_], turn_t: npt.NDArray[Any]
) -> None:
    """Refuse rewards that an estimator would lose, truncate or spread.

    Args:
      reward_t: [T] floating, finite, 0 wherever not acted.
      acted_t: [T] bool.
      turn_t: [T] integers, non-decreasing.

    Raises:
      ValueError: that shows the offending value and its place.
    """
    if acted_t.dtype != np.bool_ or acted_t.ndim != 1:
        raise ValueError(
            f"acted_t has dtype {acted_t.dtype} and shape {acted_t.shape}, must be bool [T]"
        )
    _check_shape("reward_t", reward_t, acted_t)
    _check_shape("turn_t", turn_t, acted_t)
    _check_column("reward_t", reward_t, acted_t, "")
    _check_turns(turn_t, "")


def pack(
    examples: Sequence[Example],
    *,
    rows: int,
    length: int,
    seed: int,
    batches: int | None = None,
    overlong: Overlong = "error",
) -> Packing:
    """Pack sequences into as few batches of fixed shape as best-fit in a shuffled order needs.

    Every token of every kept sequence lies in exactly one place; no sequence is cut.

    Args:
      examples: sequences of at least one token, all with the same columns.
      rows: R, rows of a batch.
      length: L, tokens of a row.
      seed: of the order in which sequences are placed.
      batches: number of batches to deal the rows into; None takes the fewest.
      overlong: what to do with a sequence longer than a row: "error", or "drop" it, which
        `Packing.dropped` records.

    Returns:
      The batches, filled alike, and where each sequence lies.

    Raises:
      ValueError: for an empty sequence, unequal lengths or columns, a first token that was acted,
        turns that go backwards, rewards that `check_rewards` refuses, a sequence longer than a
        row under "error", and more sequences than `batches` hold.
    """
    if rows < 1 or length < 1 or (batches is not None and batches < 1):
        raise ValueError(
            f"rows, length and batches must be at least 1, got {rows}, {length} and {batches}"
        )
    if overlong not in ("error", "drop"):
        raise ValueError(f'overlong must be "error" or "drop", got {overlong!r}')
    names = tuple(examples[0].columns) if examples else ()
    for i, example in enumerate(examples):
        _check_example(i, example, names)
    sizes = np.array([e.token_ids.size for e in examples], np.int64)
    too_long = np.flatnonzero(sizes > length)
    if too_long.size and overlong == "error":
        raise ValueError(
            f"sequence {too_long[0]} has {sizes[too_long[0]]} tokens, a row holds {length}; "
            'make rows longer or choose overlong="drop"'
        )
    kept = np.flatnonzero(sizes <= length)
    bins = _best_fit(sizes, np.random.default_rng(seed).permutation(kept), length)
    needed = max(1, -(-len(bins) // rows))
    if batches is not None and needed > batches:
        raise ValueError(
            f"{kept.size} sequences of {sizes[kept].sum()} tokens need {needed} batches of "
            f"{rows} x {length}, got batches={batches}"
        )
    count = needed if batches is None else batches
    place = np.zeros((4, len(examples)), np.int64)  # batch, row, offset, segment id
    for number, (batch, row) in enumerate(_deal([int(sizes[b].sum()) for b in bins], count)):
        members = bins[number]
        place[0, members] = batch
        place[1, members] = row
        place[2, members] = np.cumsum(sizes[members]) - sizes[members]
        place[3, members] = np.arange(1, len(members) + 1)
    place = place[:, kept]
    return Packing(
        batches=_scatter([examples[i] for i in kept.tolist()], names, place, (count, rows, length)),
        kept=kept,
        batch=place[0],
        row=place[1],
        offset=place[2],
        length=sizes[kept],
        dropped=tuple(too_long.tolist()),
    )


def pack_rows(rows: Sequence[Sequence[Example]], *, length: int) -> PackedBatch:
    """Lay sequences out in the rows that a loader chose.

    Args:
      rows: for each row, its sequences in order; a row may be empty.
      length: L, tokens of a row.

    Returns:
      One batch of len(rows) rows of L tokens.

    Raises:
      ValueError: for a row that holds more than L tokens, and for what `pack` refuses.
    """
    examples = [example for row in rows for example in row]
    names = tuple(examples[0].columns) if examples else ()
    place = np.zeros((4, len(examples)), np.int64)  # batch, row, offset, segment id
    number = 0
    for r, row in enumerate(rows):
        offset = 0
        for segment, example in enumerate(row, 1):
            _check_example(number, example, names)
            place[1:, number] = r, offset, segment
            offset += example.token_ids.size
            number += 1
        if offset > length:
            raise ValueError(f"row {r} has {offset} tokens, a row holds {length}")
    (batch,) = _scatter(examples, names, place, (1, len(rows), length))
    return batch


def to_predictor(x: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Move a token-aligned array to the positions that predict the tokens.

    y[r, p] = x[r, p + 1] if p and p + 1 lie in one segment else 0

    Args:
      x: [R, L] of any dtype, token-aligned.
      segment_ids: [R, L] integers, 0 in the padding.

    Returns:
      [R, L], predictor-aligned: `to_predictor(token_ids, ...)` are the targets of the logits.
    """
    same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
    return jnp.pad(jnp.where(same, x[:, 1:], jnp.zeros_like(x[:, 1:])), ((0, 0), (0, 1)))


def to_token(y: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Move a predictor-aligned array to the tokens that are predicted.

    x[r, p] = y[r, p - 1] if p - 1 and p lie in one segment else 0

    Args:
      y: [R, L] of any dtype, predictor-aligned, for example the critic's value at each position.
      segment_ids: [R, L] integers, 0 in the padding.

    Returns:
      [R, L], token-aligned: of values, the value *before* each token.
    """
    same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
    return jnp.pad(jnp.where(same, y[:, :-1], jnp.zeros_like(y[:, :-1])), ((0, 0), (1, 0)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ActionTokens:
    """The acted tokens of N sequences, time-major; a pytree.

    Attributes:
      acted_t: [Ta, N] bool, true on a token, false in the padding below it.
      turn_t: [Ta, N] int32; the padding repeats the last turn.
      columns: name -> [Ta, N] float32; 0 in the padding.
    """

    acted_t: Any
    turn_t: Any
    columns: dict[str, Any]


@dataclass(frozen=True)
class ActionIndex:
    """Where each action token came from.

    Attributes:
      places: for each sequence, the indices of its acted tokens.
      lengths: tokens of each sequence.
    """

    places: tuple[npt.NDArray[np.int64], ...]
    lengths: tuple[int, ...]

    def scatter(self, x_t: npt.ArrayLike) -> list[npt.NDArray[np.float32]]:
        """Bring results on action tokens back to the sequences.

        Args:
          x_t: [Ta, N], as `action_tokens` laid the tokens.

        Returns:
          [T] float32 for each sequence, 0 where not acted.
        """
        array = np.asarray(x_t)
        if array.ndim != 2 or array.shape[1] < len(self.places):
            raise ValueError(
                f"got shape {array.shape}, must be [Ta, N] with N >= {len(self.places)}"
            )
        found = []
        for n, (places, length) in enumerate(zip(self.places, self.lengths, strict=True)):
            out = np.zeros(length, np.float32)
            out[places] = array[: places.size, n]
            found.append(out)
        return found


def action_tokens(
    acted: Sequence[npt.NDArray[np.bool_]],
    turns: Sequence[npt.NDArray[np.int32]],
    columns: Mapping[str, Sequence[npt.NDArray[np.float32]]],
    *,
    length: int | None = None,
    width: int | None = None,
) -> tuple[ActionTokens, ActionIndex]:
    """Gather the acted tokens of each sequence, in time-major order.

    The positions of an advantage recursion are the acted tokens alone, so that prompts and
    observations neither cost time nor can change its result; time-major is the layout in which a
    scan over them is fastest.

    Args:
      acted: [T_n] bool for each of N sequences.
      turns: [T_n] int32 for each.
      columns: name -> [T_n] float32 for each, token-aligned, for example "reward_t", "value_t".
      length: Ta; None takes the longest sequence. A fixed one keeps compiled shapes few.
      width: N of the result, padded with empty sequences; None takes the number given.

    Returns:
      The tokens, and the index that scatters results back.

    Raises:
      ValueError: for unequal shapes, turns that go backwards, a column that is not floating or
        not finite, a column whose name begins with "reward" that is not 0 off the mask, and
        more acted tokens or sequences than `length` and `width` hold.
    """
    count = len(acted)
    for name, column in (("turns", turns), *columns.items()):
        if len(column) != count:
            raise ValueError(f"{name} has {len(column)} sequences, acted has {count}")
    places = tuple(np.flatnonzero(a) for a in acted)
    longest = max((p.size for p in places), default=0)
    for asked, needed, name in ((length, longest, "length"), (width, count, "width")):
        if asked is not None and asked < needed:
            raise ValueError(f"{name} {asked} is too small, the sequences need {needed}")
    shape = (longest if length is None else length, count if width is None else width)
    acted_t = np.zeros(shape, np.bool_)
    turn_t = np.zeros(shape, np.int32)
    gathered = {name: np.zeros(shape, np.float32) for name in columns}
    for n, place in enumerate(places):
        of = f" of sequence {n}"
        if acted[n].dtype != np.bool_ or acted[n].ndim != 1:
            raise ValueError(
                f"acted{of} has dtype {acted[n].dtype} and rank {acted[n].ndim}, must be bool, 1"
            )
        _check_shape("turns" + of, turns[n], acted[n])
        _check_turns(turns[n], of)
        acted_t[: place.size, n] = True
        if place.size:
            turn_t[: place.size, n] = turns[n][place]
            turn_t[place.size :, n] = turns[n][place[-1]]
        for name, column in columns.items():
            _check_shape(name + of, column[n], acted[n])
            _check_column(name, column[n], acted[n], of)
            gathered[name][: place.size, n] = column[n][place]
    tokens = ActionTokens(acted_t=acted_t, turn_t=turn_t, columns=gathered)
    return tokens, ActionIndex(places=places, lengths=tuple(a.size for a in acted))


def _best_fit(
    sizes: npt.NDArray[np.int64], order: npt.NDArray[np.int64], length: int
) -> list[list[int]]:
    """Put each sequence into the fullest row that still holds it."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for i, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        at = bisect_left(free, (size, 0))
        if at == len(free):
            bins.append([i])
            insort(free, (length - size, len(bins) - 1))
        else:
            left, number = free.pop(at)
            bins[number].append(i)
            insort(free, (left - size, number))
    return bins


def _deal(fills: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Deal rows into batches in snake order of their fill, so that batches weigh about alike."""
    places = [(0, 0)] * len(fills)
    order = sorted(range(len(fills)), key=lambda number: -fills[number])
    for rank, number in enumerate(order):
        row, turn = divmod(rank, count)
        places[number] = (turn if row % 2 == 0 else count - 1 - turn, row)
    return places


def _scatter(
    examples: Sequence[Example],
    names: Sequence[str],
    place: npt.NDArray[np.int64],
    shape: tuple[int, int, int],
) -> tuple[PackedBatch, ...]:
    """Write all tokens at once at their flat positions."""
    count, rows, length = shape
    batch, row, offset, segment = place
    sizes = np.array([e.token_ids.size for e in examples], np.int64)
    ends = np.cumsum(sizes)
    position = np.arange(ends[-1] if sizes.size else 0) - np.repeat(ends - sizes, sizes)
    where = np.repeat((batch * rows + row) * length + offset, sizes) + position

    def spread(values: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        flat = np.zeros(count * rows * length, dtype)
        flat[where] = values
        return flat.reshape(shape)

    def joined(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return spread(np.concatenate(arrays) if arrays else 0, dtype)

    ints = {f: joined([getattr(e, f) for e in examples], np.int32) for f in _INT_FIELDS}
    floats = {f: joined([getattr(e, f) for e in examples], np.float32) for f in _FLOAT_FIELDS}
    acted = joined([e.acted_t for e in examples], np.bool_)
    segments = spread(np.repeat(segment, sizes), np.int32)
    positions = spread(position, np.int32)
    columns = {n: joined([e.columns[n] for e in examples], np.float32) for n in names}
    weight = np.where(positions > 0, floats["loss_weight_t"], np.float32(0))
    return tuple(
        PackedBatch(
            token_ids=ints["token_ids"][b],
            segment_ids=segments[b],
            position_ids=positions[b],
            turn_ids=ints["turn_t"][b],
            acted=acted[b],
            loss_weight=weight[b],
            logprob=floats["logprob_t"][b],
            columns={n: column[b] for n, column in columns.items()},
        )
        for b in range(count)
    )


def _check_example(i: int, example: Example, names: Sequence[str]) -> None:
    of = f" of sequence {i}"
    if example.token_ids.ndim != 1 or not example.token_ids.size:
        raise ValueError(
            f"token_ids{of} have shape {example.token_ids.shape}, must be [T] with T >= 1"
        )
    for name in ("acted_t", "loss_weight_t", "logprob_t", "turn_t"):
        _check_shape(name + of, getattr(example, name), example.token_ids)
    if example.acted_t[0]:
        raise ValueError(f"the first token{of} is acted, but nothing before it predicts it")
    _check_turns(example.turn_t, of)
    if tuple(example.columns) != tuple(names):
        raise ValueError(f"columns{of} are {tuple(example.columns)}, of sequence 0 {tuple(names)}")
    for name, column in example.columns.items():
        _check_shape(name + of, column, example.token_ids)
        _check_column(name, column, example.acted_t, of)


def _check_shape(what: str, array: npt.NDArray[Any], like: npt.NDArray[Any]) -> None:
    if array.shape != like.shape:
        raise ValueError(f"{what} has shape {array.shape}, must be {like.shape}")


def _check_column(
    name: str, column_t: npt.NDArray[Any], acted_t: npt.NDArray[np.bool_], of: str
) -> None:
    if column_t.dtype.kind != "f":
        raise ValueError(f"{name}{of} has dtype {column_t.dtype}, must be floating")
    finite = np.isfinite(column_t)
    if not finite.all():
        t = int(np.argmin(finite))
        raise ValueError(f"{name}{of} is {column_t[t]} at token {t}, must be finite")
    if name.startswith("reward"):
        stray = (column_t != 0) & ~acted_t
        if stray.any():
            t = int(np.argmax(stray))
            raise ValueError(
                f"{name}{of} is {column_t[t]} at token {t}, which was not sampled; a reward must "
                "sit on an acted token"
            )


def _check_turns(turn_t: npt.NDArray[Any], of: str) -> None:
    back = turn_t[1:] < turn_t[:-1]
    if back.any():
        t = int(np.argmax(back)) + 1
        raise ValueError(f"turn {turn_t[t]} at token {t}{of} goes back from {turn_t[t - 1]}")
