"""Writing: a segment is a batch of immutable trajectories, committed in one atomic transaction."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from rollout.errors import ContractViolation, StoreError
from rollout.records import Trajectory
from rollout.store import codec, layout
from rollout.store.commit import commit, commit_lock
from rollout.store.contract import column_violation, redacted, violations
from rollout.store.location import Location, open_base, open_database, store_errors
from rollout.store.reader import SegmentReader

_PROBE = "probe"


class SegmentWriter:
    """Implements `rollout.protocols.TrajectoryWriter` on an OCDBT database.

    Any number of writers, in any number of processes, may share a store: a commit writes keys of
    its own and shares no array with another. A commit is durable when `write` returns; a writer
    killed before leaves nothing that a reader can see.
    """

    def __init__(self, location: Location, *, vocab_size: int, context: Any = None) -> None:
        """A writer that touches nothing before its first write.

        Args:
          location: folder, URL or key-value store spec.
          vocab_size: number of token ids, for the contract.
          context: tensorstore context to share, for stores in memory.
        """
        self._location = location
        self._vocab_size = vocab_size
        self._context = context or ts.Context()
        self._database = open_database(location, create=True, context=self._context)
        self._reader = SegmentReader(location, context=self._context)
        self._probed = False

    def write(self, segment: str, trajectories: Sequence[Trajectory]) -> None:
        """Commit one segment atomically; a segment that exists already is left as it is.

        Args:
          segment: name of the segment; a resumed run that repeats one changes nothing.
          trajectories: the batch, whose ids occur in no other segment.

        Raises:
          ContractViolation: names the first offender; every offender goes to quarantine and
            nothing of the batch is written.
          StoreError: for an id stored in another segment, a full disk, a missing permission.
        """
        if self._reader.has(segment):
            return
        found = violations(trajectories, vocab_size=self._vocab_size)
        if found:
            for i, problem in found.items():
                kept = redacted(trajectories[i])
                arrays = {name: np.asarray(getattr(kept, name)) for name in layout.TOKEN_FIELDS}
                self._quarantine(segment, problem, layout.record_fields(kept), arrays)
            i, problem = next(iter(found.items()))
            raise ContractViolation(str(trajectories[i].id), problem)
        records = [layout.encode_record(t) for t in trajectories]
        header = layout.Header(
            ids=tuple(t.id for t in trajectories),
            lengths=tuple(t.token_ids.size for t in trajectories),
            record_bytes=tuple(len(r) for r in records),
        )
        keys = {layout.header_key(segment): layout.encode_header(header)}
        for i, (trajectory, record) in enumerate(zip(trajectories, records, strict=True)):
            arrays = {field: getattr(trajectory, field) for field in layout.TOKEN_FIELDS}
            keys[layout.trajectory_key(segment, i)] = codec.encode(record, arrays)
        for i, name in enumerate(header.ids):
            keys[layout.id_key(name)] = f"{i}:{segment}".encode()

        def settled() -> bool:
            if self._reader.has(segment):
                return True
            for name in header.ids:
                other = self._reader.find(name)
                if other is not None and not self._reader.has(segment):
                    raise StoreError(
                        f"writing segment {segment}: trajectory {name} is stored already, in "
                        f"segment {other[0]}; an id must be unique in a run"
                    )
            return self._reader.has(segment)

        self._commit(f"writing segment {segment}", keys, settled)

    def write_columns(
        self, segment: str, name: str, columns: Sequence[npt.NDArray[np.float32]]
    ) -> None:
        """Write one column beside a segment; a column that exists already is left as it is.

        Args:
          segment: a committed segment.
          name: the column, for example "value_t", "advantage_t", "reward_t".
          columns: [T_i] float32 for each trajectory, in the segment's order.

        Raises:
          ContractViolation: for a wrong dtype or length, a value that is not finite, or a reward
            where nothing was sampled; the column goes to quarantine, nothing is written.
          StoreError: for an unknown segment, a wrong count, a full disk, a missing permission.
        """
        path = layout.column_path(segment, name)
        header = self._reader.header(segment)
        if len(columns) != len(header.ids):
            raise StoreError(
                f"column {name} of segment {segment}: got {len(columns)} arrays for "
                f"{len(header.ids)} trajectories"
            )
        if name in self._reader.columns(segment):
            return
        acted = self._reader.read_tokens(segment, "acted_t")
        for trajectory_id, column_t, acted_t in zip(header.ids, columns, acted, strict=True):
            problem = column_violation(name, np.asarray(column_t), acted_t)
            if problem is not None:
                refused = {"id": trajectory_id, "column": name}
                self._quarantine(segment, problem, refused, {name: np.asarray(column_t)})
                raise ContractViolation(trajectory_id, problem)
        self._commit(
            f"writing column {name} of segment {segment}",
            layout.encode_arrays({path: _joined(columns)}),
            lambda: name in self._reader.columns(segment),
        )

    def _commit(self, action: str, keys: dict[str, bytes], settled: Callable[[], bool]) -> None:
        """Write new keys in one transaction, or nothing.

        Args:
          action: what is being done, for errors.
          keys: keys that must not exist, and their values.
          settled: asked after a collision; whether somebody else wrote the same thing.
        """
        with store_errors(self._location, action):
            self._probe()
            absent = self._absent_generation()

        def stage(staged: Any) -> None:
            for pending in [staged.write(k, v, if_equal=absent) for k, v in keys.items()]:
                pending.result()

        commit(self._location, self._database, stage, action=action, settled=settled)

    def _probe(self) -> None:
        """See that a new store can be written at all.

        A transaction on a bucket that is missing or closed may end the process with a fault of
        tensorstore (seen with 0.1.86); a plain write fails as an error.
        """
        if not self._probed and self._reader.version is None:
            base = open_base(self._location, context=self._context)
            with commit_lock(self._location):
                base.write(_PROBE, b"x").result()
                base.write(_PROBE, None).result()
        self._probed = True

    def _absent_generation(self) -> bytes:
        """What tensorstore calls the generation of a key that has no value."""
        generation: bytes = self._database.read("absent").result().stamp.generation
        return generation

    def _quarantine(
        self,
        segment: str,
        problem: str,
        fields: dict[str, Any],
        arrays: dict[str, npt.NDArray[Any]],
    ) -> None:
        """Keep aside what the door refused; `fields` has the trajectory's id."""
        record = json.dumps(
            {"segment": segment, "problem": problem, "record": fields}, default=repr
        ).encode()
        kept = {"record": np.frombuffer(record, np.uint8)}
        for name, array in arrays.items():
            kept[name] = np.asarray(repr(array)) if array.dtype.hasobject else array
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **kept)  # type: ignore[arg-type]
        digest = hashlib.sha256(record).hexdigest()[:16]
        key = layout.quarantine_key(str(fields["id"]), digest)
        action = f"putting trajectory {fields['id']} into quarantine"
        with store_errors(self._location, action):
            self._probe()
            with commit_lock(self._location):
                self._database.write(key, buffer.getvalue()).result()


def _joined(columns: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    return np.concatenate([np.zeros(0, np.float32), *columns], dtype=np.float32)
