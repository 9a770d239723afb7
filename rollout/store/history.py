"""What the versions of a store hold: since when each key, and which data files they stand on.

An OCDBT database keeps every version as a tree whose nodes never change: a commit writes the nodes
that it changes into a file of its own, beside the values that it brings. tensorstore shows the
nodes (`tensorstore.ocdbt.dump`); nothing here reads a value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorstore as ts

from rollout.store.location import Location, read_manifest, store_errors

COMPACTION_KEY = "compaction"


@dataclass(frozen=True, slots=True)
class Compaction:
    """What compactions did to the store; one key of the database.

    Attributes:
      at: versions below it are read from the newest one, as far as what they see was born by then,
        for the files that they stood on may be gone; versions from it on are read as they are.
      born: first version of each segment (by its header's key) and column (by its path) that was
        committed before `at` and is not sealed.
      started: version up to which a compaction that has not ended sealed; None if all ended.
      garbage: data files that versions below `at` needed and no later one does.
    """

    at: int = 0
    born: Mapping[str, int] = field(default_factory=dict)
    started: int | None = None
    garbage: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """The record as JSON."""
        return json.dumps(
            {
                "at": self.at,
                "born": dict(self.born),
                "started": self.started,
                "garbage": list(self.garbage),
            }
        ).encode()


def decode_compaction(data: bytes | None) -> Compaction:
    """Inverse of `Compaction.encode`; without a record nothing was compacted yet."""
    if data is None:
        return Compaction()
    fields = json.loads(data)
    return Compaction(fields["at"], fields["born"], fields["started"], tuple(fields["garbage"]))


@dataclass(slots=True)
class Walk:
    """Trees of several versions, walked oldest first; what two of them share is walked once.

    Attributes:
      born: key -> first of the versions walked that holds it.
      files: data files that the versions stand on.
    """

    location: Location
    base: Any
    born: dict[str, int] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    _seen: set[str] = field(default_factory=set)

    def versions(self, start: int, stop: int) -> None:
        """Walk the versions with start <= generation number <= stop."""
        manifest = read_manifest(self.location, self.base)
        for entry in sorted(self._roots(manifest or {}, start), key=_generation):
            if start <= _generation(entry) <= stop and "location" in entry["root"]:
                self._visit(entry["root"]["location"], "", _generation(entry))

    def _visit(self, location: str, prefix: str, version: int) -> None:
        if location in self._seen:
            return
        self._seen.add(location)
        self.files.add(_file(location))
        for entry in self._entries(location):
            name = prefix + entry["key"].decode()
            if "location" in entry:
                inner = prefix + entry["subtree_common_prefix"].decode()
                self._visit(entry["location"], inner, version)
                continue
            self.born.setdefault(name, version)
            if "indirect_value" in entry:
                self.files.add(_file(entry["indirect_value"]))

    def _roots(self, manifest: Mapping[str, Any], start: int) -> Iterator[dict[str, Any]]:
        """Entries of all versions from `start` on, nodes of the version tree followed."""
        yield from manifest.get("versions", ())
        nodes = list(manifest.get("version_tree_nodes", ()))
        while nodes:
            node = nodes.pop()
            if _generation(node) < start:
                continue
            for entry in self._entries(node["location"]):
                if "root" in entry:
                    yield entry
                else:
                    nodes.append(entry)

    def _entries(self, location: str) -> list[dict[str, Any]]:
        with store_errors(self.location, "reading the store's history"):
            entries: list[dict[str, Any]] = ts.ocdbt.dump(self.base, location).result()["entries"]
        return entries


def version_files(location: Location, base: Any) -> set[str]:
    """Data files that hold the list of versions, as far as the next commits will read it."""
    manifest = read_manifest(location, base) or {}
    return {_file(node["location"]) for node in manifest.get("version_tree_nodes", ())}


def holders(location: Location, base: Any) -> dict[str, list[str]]:
    """What the newest version stands on.

    Returns:
      Data file -> keys that must be written anew for the version to do without the file.
    """
    manifest = read_manifest(location, base) or {}
    found: dict[str, list[str]] = {}
    walk = Walk(location, base)

    def visit(node: str, prefix: str) -> str:
        """The first key below a node: writing it anew moves the node."""
        first = ""
        for entry in walk._entries(node):
            key = prefix + entry["key"].decode()
            if "location" in entry:
                key = visit(entry["location"], prefix + entry["subtree_common_prefix"].decode())
            elif "indirect_value" in entry:
                found.setdefault(_file(entry["indirect_value"]), []).append(key)
            first = first or key
        found.setdefault(_file(node), []).append(first)
        return first

    root = manifest["versions"][-1]["root"] if manifest else {}
    if "location" in root:
        visit(root["location"], "")
    return found


def _generation(entry: Mapping[str, Any]) -> int:
    return int(entry["generation_number"])


def _file(location: str) -> str:
    """Name of the data file in a location such as "value::d/0af3:0:351"."""
    return location.split("::", 1)[1].rsplit(":", 2)[0]
