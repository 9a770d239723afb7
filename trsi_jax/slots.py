"""A block of slots: its arrays on the device, what each slot holds, and one call of its loop.

Two ways to read a context. Without chunks every known token goes through the step that samples,
so a slot's numbers do not depend on how its context came, and a session reads only what is new.
With chunks of N tokens the context up to its last multiple of N is read by whole chunks from an
exact multiple, the rest by one shorter chunk; the recurrent state at the last multiple is kept, and
the next context that begins alike goes on from there, in this slot or another. What was sampled
behind it is read again by chunks, which costs little and leaves every number a function of the
context alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from rollout.protocols import SamplingSpec, VersionSpan
from trsi_jax.model.config import ModelConfig
from trsi_jax.model.decode import (
    Cache,
    Rows,
    Snapshot,
    advance,
    clear_slots,
    copy_slot,
    init_cache,
    load_rows,
    prefill_slots,
    rewind,
    save_slots,
    snapshot,
)
from trsi_jax.model.decoder import Params

MAX_STOP_IDS = 8
_FILLS = 8
"""Calls that read contexts between two that sample."""

_clear = jax.jit(clear_slots, donate_argnums=0)
_load = jax.jit(load_rows, donate_argnums=0)
_rewind = jax.jit(rewind, donate_argnums=0)
_save = jax.jit(save_slots, donate_argnums=1)
_copy = jax.jit(copy_slot, donate_argnums=(0, 1))
_fill = jax.jit(prefill_slots, static_argnums=0, donate_argnums=2)


@dataclass(eq=False, slots=True)
class Work:
    """One request as a slot sees it; outputs grow with every call.

    Attributes:
      prompt: its ids.
      sampling: how to sample.
      seed: of the request's key, 64 bits of it are used.
      cached: leading ids that were not read again; -1 before the first load.
    """

    prompt: tuple[int, ...]
    sampling: SamplingSpec
    seed: int
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    cached: int = -1

    @property
    def known(self) -> tuple[int, ...]:
        """Everything to be read before the next draw."""
        return (*self.prompt, *self.output)

    @property
    def stopped(self) -> bool:
        """Whether the last id ends the output."""
        spec = self.sampling
        return bool(self.output) and not spec.ignore_eos and self.output[-1] in spec.stop_token_ids

    @property
    def full(self) -> bool:
        """Whether as many tokens are there as were asked for."""
        return len(self.output) >= self.sampling.max_new_tokens

    def extend(self, output: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Take what was sampled under `version`."""
        if not output:
            return
        start = len(self.output)
        self.output += output
        self.logprobs += logprobs
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version, start, len(self.output)))


@dataclass(eq=False, slots=True)
class _Filling:
    """A context that is being read by chunks: `at` of `ids` are, the state is kept at `mark`."""

    work: Work
    ids: tuple[int, ...]
    at: int
    mark: int


class Block:
    """Slots that share one cache and one call of the loop. One thread at a time."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        width: int,
        context: int,
        steps: int,
        chunk: int = 0,
        fill_width: int = 4,
    ) -> None:
        """Nothing is allocated before the first call.

        Args:
          config: the model.
          width: slots.
          context: tokens a slot holds.
          steps: most tokens that a slot reads by steps in one call.
          chunk: tokens of a chunk; 0: contexts are read by steps.
          fill_width: contexts that are read by one call of chunks.
        """
        self.config = config
        self.width = width
        self.context = context
        self.steps = steps
        self.chunk = chunk
        self.fill_width = min(fill_width, width)
        self.reset()

    def reset(self) -> None:
        """Forget everything: what lived here has to be loaded anew."""
        self._cache: Cache | None = None
        self._saved: Snapshot | None = None
        self._rows: Rows | None = None
        self._active: dict[int, Work] = {}
        self._filling: dict[int, _Filling] = {}
        self._pending: dict[int, Work] = {}
        # Rows that the device still believes to be at work.
        self._left: set[int] = set()
        self._length = np.zeros(self.width, np.int32)
        self._held: list[tuple[int, ...]] = [()] * self.width

    @property
    def busy(self) -> bool:
        """Whether there is work."""
        return bool(self._active or self._filling or self._pending)

    def drop(self, row: int) -> None:
        """End the work in a slot as it is."""
        work = self._active.pop(row, None)
        if work is not None:
            self._left.add(row)
            self._retire(row, work)
        self._filling.pop(row, None)
        self._pending.pop(row, None)

    def restart(self) -> None:
        """Read every context again: the weights changed, and nothing of the caches holds."""
        filling = {row: fill.work for row, fill in self._filling.items()}
        self._pending = self._active | filling | self._pending
        self._left |= self._active.keys()
        self._active, self._filling = {}, {}
        self._held = [()] * self.width

    def reuse(self, ids: tuple[int, ...], row: int | None = None) -> tuple[int, int]:
        """The slot that holds the longest start of `ids`, and how many ids; (-1, 0) for none.

        The last id is never reused: it has to be read for its logits. Without chunks a state
        lives in its own slot only, and `row` says which counts.
        """
        best = (-1, 0)
        for slot, held in enumerate(self._held):
            if row is not None and not self.chunk and slot != row:
                continue
            n = len(held)
            better = n > best[1] or (n == best[1] > 0 and slot == row)
            if better and n < len(ids) and ids[:n] == held:
                best = (slot, n)
        return best

    def call(self, params: Params, version: int, loads: Mapping[int, Work]) -> dict[int, Work]:
        """Load work into free slots, read contexts, and sample for some tokens.

        Args:
          params: tree of `init_params`, the same since the last `restart`.
          version: of them.
          loads: slot -> new work.

        Returns:
          The work that ended, by slot; the others' outputs have grown.
        """
        self._pending |= loads
        cache, rows, saved = self._take()
        ended: dict[int, Work] = {}
        if self.chunk:
            assert saved is not None
            cache, saved = self._begin_fills(cache, saved, ended)
            calls = 0
            while self._filling and (calls < _FILLS or not self._active):
                cache, saved, ready = self._fill_some(params, cache, saved)
                rows = self._activate(rows, ready)
                calls += 1
        else:
            cache, rows = self._begin_steps(cache, rows, ended)
        if self._active:
            halt = np.zeros(self.width, bool)
            halt[list(self._left)] = True
            self._left.clear()
            truncate = any(
                w.sampling.top_p < 1 or w.sampling.top_k > 0 for w in self._active.values()
            )
            cache, rows = advance(
                self.config,
                params,
                cache,
                rows,
                jnp.asarray(halt),
                steps=self.steps,
                truncate=truncate,
            )
            ended |= self._collect(cache, rows, version)
        self._cache, self._rows, self._saved = cache, rows, saved
        return ended

    # --- loading ------------------------------------------------------------------------------

    def _take(self) -> tuple[Cache, Rows, Snapshot | None]:
        """The arrays, for calls that donate them: if one fails, nothing half-written is left."""
        cache, rows, saved = self._cache, self._rows, self._saved
        if cache is None:
            cache = init_cache(self.config, self.width, self.context)
        if rows is None:
            rows = self._new_rows({})
        if self.chunk and saved is None:
            saved = snapshot(cache)
        self._cache = self._rows = self._saved = None
        return cache, rows, saved

    def _begin_steps(self, cache: Cache, rows: Rows, ended: dict[int, Work]) -> tuple[Cache, Rows]:
        pending, self._pending = self._pending, {}
        clear = np.zeros(self.width, bool)
        ready: dict[int, Work] = {}
        for row, work in pending.items():
            if work.full:
                ended[row] = work
                work.cached = max(work.cached, 0)
                continue
            _, reused = self.reuse(work.known, row)
            clear[row] = reused == 0
            work.cached = reused if work.cached < 0 else work.cached
            ready[row] = work
        if clear.any():
            cache = _clear(cache, jnp.asarray(clear))
        return cache, self._activate(rows, ready)

    def _begin_fills(
        self, cache: Cache, saved: Snapshot, ended: dict[int, Work]
    ) -> tuple[Cache, Snapshot]:
        pending, self._pending = self._pending, {}
        clear, back = np.zeros(self.width, bool), np.zeros(self.width, bool)
        for row, work in pending.items():
            if work.full:
                ended[row] = work
                work.cached = max(work.cached, 0)
                continue
            ids = work.known
            source, reused = self.reuse(ids, row)
            if any(
                reused < f.mark < len(ids) and ids[: f.mark] == f.ids[: f.mark]
                for f in self._filling.values()
            ):
                # Another slot is about to hold more of this context.
                self._pending[row] = work
                continue
            if reused and source != row:
                cache, saved = _copy(cache, saved, np.int32(source), np.int32(row))
            back[row], clear[row] = reused > 0, reused == 0
            # What the slot held is overwritten from here on.
            self._held[row] = ids[:reused]
            work.cached = reused if work.cached < 0 else work.cached
            self._filling[row] = _Filling(
                work, ids, reused, (len(ids) - 1) // self.chunk * self.chunk
            )
        if back.any():
            cache = _rewind(cache, saved, jnp.asarray(back))
        if clear.any():
            cache = _clear(cache, jnp.asarray(clear))
        return cache, saved

    def _fill_some(
        self, params: Params, cache: Cache, saved: Snapshot
    ) -> tuple[Cache, Snapshot, dict[int, Work]]:
        """One call of chunks, for the contexts that came first; returns those that are read."""
        slots = np.full(self.fill_width, self.width, np.int32)
        tokens = np.zeros((self.fill_width, self.chunk), np.int32)
        lengths = np.zeros(self.fill_width, np.int32)
        fills = list(self._filling.items())[: self.fill_width]
        for lane, (row, fill) in enumerate(fills):
            end = fill.at + self.chunk if fill.at < fill.mark else len(fill.ids) - 1
            piece = fill.ids[fill.at : end]
            slots[lane], lengths[lane] = row, len(piece)
            tokens[lane, : len(piece)] = piece
            fill.at = end
        if lengths.any():
            cache = _fill(self.config, params, cache, slots, tokens, lengths)
        keep = np.zeros(self.width, bool)
        ready: dict[int, Work] = {}
        for row, fill in fills:
            if fill.at == fill.mark > len(self._held[row]):
                keep[row] = True
                self._held[row] = fill.ids[: fill.mark]
            if fill.at == len(fill.ids) - 1:
                del self._filling[row]
                ready[row] = fill.work
        if keep.any():
            saved = _save(cache, saved, jnp.asarray(keep))
        return cache, saved, ready

    def _activate(self, rows: Rows, ready: Mapping[int, Work]) -> Rows:
        if not ready:
            return rows
        self._left -= ready.keys()
        self._active |= ready
        slots = np.zeros(self.width, bool)
        slots[list(ready)] = True
        loaded: Rows = _load(rows, self._new_rows(ready), jnp.asarray(slots))
        return loaded

    def _new_rows(self, works: Mapping[int, Work]) -> Rows:
        width = self.width
        tokens = np.zeros((width, self.context), np.int32)
        logprobs = np.zeros((width, self.context), np.float32)
        known = np.ones(width, np.int32)
        limit = np.ones(width, np.int32)
        key_data = np.zeros((width, 2), np.uint32)
        temperature = np.ones(width, np.float32)
        top_p, top_k = np.ones(width, np.float32), np.full(width, -1, np.int32)
        stop = np.full((width, MAX_STOP_IDS), -1, np.int32)
        for row, work in works.items():
            ids, spec = work.known, work.sampling
            tokens[row, : len(ids)] = ids
            logprobs[row, len(work.prompt) : len(ids)] = work.logprobs
            known[row] = len(ids)
            limit[row] = len(work.prompt) + spec.max_new_tokens
            key_data[row] = (work.seed >> 32) & 0xFFFFFFFF, work.seed & 0xFFFFFFFF
            temperature[row] = spec.temperature
            top_p[row], top_k[row] = spec.top_p, spec.top_k
            if not spec.ignore_eos:
                stop[row, : len(spec.stop_token_ids)] = spec.stop_token_ids
        return Rows(
            tokens=jnp.asarray(tokens),
            logprobs=jnp.asarray(logprobs),
            known=jnp.asarray(known),
            limit=jnp.asarray(limit),
            done=jnp.asarray(known >= limit),
            key_data=jnp.asarray(key_data),
            temperature=jnp.asarray(temperature),
            top_p=jnp.asarray(top_p),
            top_k=jnp.asarray(top_k),
            stop=jnp.asarray(stop),
        )

    # --- results ------------------------------------------------------------------------------

    def _collect(self, cache: Cache, rows: Rows, version: int) -> dict[int, Work]:
        tokens, logprobs = np.asarray(rows.tokens), np.asarray(rows.logprobs)
        known, done = np.asarray(rows.known), np.asarray(rows.done)
        # A copy: the next call donates what the view would show.
        self._length = np.array(cache.length)
        ended: dict[int, Work] = {}
        for row, work in list(self._active.items()):
            start, end = len(work.prompt) + len(work.output), known[row]
            work.extend(tokens[row, start:end].tolist(), logprobs[row, start:end].tolist(), version)
            if done[row]:
                ended[row] = self._active.pop(row)
                self._retire(row, work)
        return ended

    def _retire(self, row: int, work: Work) -> None:
        """Without chunks a slot holds what it read last."""
        if not self.chunk:
            self._held[row] = work.known[: self._length[row]]
