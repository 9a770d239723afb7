"""What a verifier leaves behind, read strictly: anything unexpected is a fault, never a reward.

Harbor 0.26 takes a boolean, a number out of range, the last of two equal keys, and whatever
Python's `float` takes; older ones took NaN. A reward trains a model here, so none of these passes.
"""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollout.errors import RewardInvalid, RewardMissing, UserError, VerifierFailed
from rollout.records import Check, CheckResult, Entry, FileTree, Verdict
from rollout.tasks.predicates import MANIFEST_SCHEMA, RESULTS_SCHEMA

MAX_TEXT_BYTES = 1024
MAX_JSON_BYTES = 64 * 1024
MAX_RESULTS_BYTES = 4 << 20

UNIT_RANGE = (0.0, 1.0)
REWARD_FILES = ("reward.json", "reward.txt")

_DECIMAL = re.compile(r"-?[0-9]{1,32}(\.[0-9]{1,32})?([eE][-+]?[0-9]{1,3})?")
_BLANKS = " \t\r\n"

Range = tuple[float, float]


# --- rewards ----------------------------------------------------------------------------------


def parse_reward_text(data: bytes, allowed: Range = UNIT_RANGE) -> float:
    """The number in a reward.txt: one ASCII decimal, blanks around it apart.

    Raises:
      RewardInvalid: for anything else, or a number that is not finite or out of range.
    """
    if len(data) > MAX_TEXT_BYTES:
        raise RewardInvalid(f"reward.txt has over {MAX_TEXT_BYTES} bytes")
    try:
        text = data.decode("ascii").strip(_BLANKS)
    except UnicodeDecodeError:
        raise RewardInvalid("reward.txt is not ASCII") from None
    if not text:
        raise RewardInvalid("reward.txt is empty")
    if not _DECIMAL.fullmatch(text):
        raise RewardInvalid(f"reward.txt holds {text[:40]!r}, not one decimal number")
    return _in_range("reward.txt", "reward", float(text), allowed)


def parse_reward_json(data: bytes, allowed: Range = UNIT_RANGE) -> dict[str, float]:
    """The numbers in a reward.json: an object of numbers with the key "reward".

    Raises:
      RewardInvalid: for anything else: another shape, a repeated key, a boolean, a number that is
        not finite or, for "reward", out of range.
    """
    if len(data) > MAX_JSON_BYTES:
        raise RewardInvalid(f"reward.json has over {MAX_JSON_BYTES} bytes")
    if not data.strip():
        raise RewardInvalid("reward.json is empty")
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise RewardInvalid(f"reward.json: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise RewardInvalid(f"reward.json holds {_kind(value)}, not an object with the key reward")
    numbers: dict[str, float] = {}
    for key, item in value.items():
        if isinstance(item, bool) or not isinstance(item, int | float):
            raise RewardInvalid(f"reward.json: {key[:40]!r} is {_kind(item)}, not a number")
        try:
            numbers[key] = float(item)
        except OverflowError:
            raise RewardInvalid(f"reward.json: {key[:40]!r} is not finite") from None
        if not math.isfinite(numbers[key]):
            raise RewardInvalid(f"reward.json: {key[:40]!r} is not finite")
    if "reward" not in numbers:
        raise RewardInvalid(f"reward.json has no key reward, only {', '.join(numbers) or 'none'}")
    _in_range("reward.json", "reward", numbers["reward"], allowed)
    return numbers


def read_rewards(results: FileTree, allowed: Range = UNIT_RANGE) -> dict[str, float]:
    """The rewards in a result directory; reward.json is preferred, as in Harbor.

    Raises:
      RewardMissing: there is neither file.
      RewardInvalid: one of them is malformed or no regular file, or they contradict each other.
    """
    text, structured = results.get("reward.txt"), results.get("reward.json")
    if text is None and structured is None:
        raise RewardMissing("the verifier left neither reward.json nor reward.txt")
    rewards = None
    if structured is not None:
        rewards = parse_reward_json(_regular("reward.json", structured), allowed)
    if text is not None:
        number = parse_reward_text(_regular("reward.txt", text), allowed)
        if rewards is not None and rewards["reward"] != number:
            raise RewardInvalid(f"reward.json says {rewards['reward']:g} and reward.txt {number:g}")
        rewards = rewards or {"reward": number}
    assert rewards is not None
    return rewards


def _regular(name: str, entry: Entry) -> bytes:
    if entry.kind != "file":
        raise RewardInvalid(f"{name} is a {entry.kind}, not a regular file")
    return entry.data


def _in_range(file: str, key: str, value: float, allowed: Range) -> float:
    low, high = allowed
    if not math.isfinite(value):
        raise RewardInvalid(f"{file}: {key} is not finite")
    if not low <= value <= high:
        raise RewardInvalid(f"{file}: {key} is {value:g}, allowed is [{low:g}, {high:g}]")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"a key occurs twice in {keys[:8]}")
    return dict(pairs)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")


# --- checks -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Manifest:
    """The checks of a task, fixed when it was made.

    Attributes:
      form: "checks" for results a check, "binary" for one number that stands for the only check.
    """

    form: Literal["checks", "binary"]
    checks: tuple[Check, ...]


def parse_manifest(path: str, data: bytes) -> Manifest:
    """The manifest in a `checks.json`.

    Raises:
      UserError: naming the file, the entry and what is wrong.
    """
    try:
        value = json.loads(data)
        if value["schema"] != MANIFEST_SCHEMA or value["form"] not in ("checks", "binary"):
            raise UserError(
                f"{path}: schema and form must be {MANIFEST_SCHEMA!r}, checks or binary"
            )
        checks = tuple(
            Check(
                id=str(c["id"]),
                kind=c["kind"],
                predicate=tuple(c.get("predicate", ())),
                weight=float(c.get("weight", 1.0)),
            )
            for c in value["checks"]
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not a manifest of checks ({error})") from None
    ids = [c.id for c in checks]
    effective = [c for c in checks if c.kind == "effective"]
    bad = [c.id for c in checks if c.kind not in ("effective", "guard") or not c.weight > 0]
    if len(set(ids)) < len(ids) or not effective or bad:
        raise UserError(
            f"{path}: needs checks of different ids, of kind effective or guard, at least one"
            f" effective, of positive weight; see {', '.join(bad or ids[:3]) or 'none'}"
        )
    if value["form"] == "binary" and len(checks) != 1:
        raise UserError(f"{path}: the form binary has one check, not {len(checks)}")
    return Manifest(value["form"], checks)


def read_statuses(results: FileTree) -> dict[str, list[bool]] | None:
    """What each reported check came to, by id; None where there is no report at all.

    Our own `checks.json` counts before CTRF, and that before JUnit's XML. Only a status "passed"
    counts: skipped, expected to fail, and passed against expectation do not.

    Raises:
      RewardInvalid: a report that is malformed or no regular file.
    """
    if "checks.json" in results:
        return _own(_report("checks.json", results))
    if "ctrf.json" in results:
        return _ctrf(_report("ctrf.json", results))
    for name in ("junit.xml", "results.xml", "report.xml"):
        if name in results:
            return _junit(name, _report(name, results))
    return None


def _report(name: str, results: FileTree) -> bytes:
    data = _regular(name, results[name])
    if len(data) > MAX_RESULTS_BYTES:
        raise RewardInvalid(f"{name} has over {MAX_RESULTS_BYTES >> 20} MiB")
    return data


def _entries(name: str, items: object, key: str, status: str) -> dict[str, list[bool]]:
    if not isinstance(items, list):
        raise RewardInvalid(f"{name}: has no list of results")
    found: dict[str, list[bool]] = {}
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get(key), str):
            raise RewardInvalid(f"{name}: a result has no {key}")
        raw = item.get("raw_status", item.get(status))
        passed = item.get(status) == "passed" and raw in ("passed", "call_passed")
        found.setdefault(item[key], []).append(passed)
    return found


def _json(name: str, data: bytes) -> Any:
    try:
        return json.loads(data, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RewardInvalid(f"{name}: {str(error)[:120]}") from None


def _own(data: bytes) -> dict[str, list[bool]]:
    value = _json("checks.json", data)
    if not isinstance(value, dict) or value.get("schema") != RESULTS_SCHEMA:
        raise RewardInvalid(f"checks.json: schema is not {RESULTS_SCHEMA!r}")
    return _entries("checks.json", value.get("results"), "id", "status")


def _ctrf(data: bytes) -> dict[str, list[bool]]:
    value = _json("ctrf.json", data)
    results = value.get("results") if isinstance(value, dict) else None
    tests = results.get("tests") if isinstance(results, dict) else None
    return _entries("ctrf.json", tests, "name", "status")


def _junit(name: str, data: bytes) -> dict[str, list[bool]]:
    try:
        # In an encoding of its own choice a document could hide what is looked for.
        text = data.decode("utf-8-sig")
        # No document type is needed, and without one there are no entities to blow up.
        if "<!DOCTYPE" in text or "<!ENTITY" in text:
            raise RewardInvalid(f"{name}: has a document type")
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        raise RewardInvalid(f"{name}: {error}") from None
    found: dict[str, list[bool]] = {}
    for case in root.iter("testcase"):
        passed = not any(case.find(t) is not None for t in ("failure", "error", "skipped"))
        found.setdefault(case.get("name", ""), []).append(passed)
    return found


def verdict_of(
    manifest: Manifest | None, rewards: Mapping[str, float], results: FileTree, allowed: Range
) -> Verdict:
    """The verdict that a reward and the reported checks amount to.

    The number of checks comes from the manifest: one that is not reported failed, one that the
    manifest doesn't have is nothing. Without a manifest the reward is the only check, passed at the
    top of its range.

    Raises:
      VerifierFailed: not a single check was reported: no tests were collected.
      RewardInvalid: reward and checks contradict each other.
    """
    statuses = read_statuses(results)
    success = rewards["reward"] == allowed[1]
    if statuses is not None and not statuses:
        raise VerifierFailed("no tests were collected")
    if manifest is None:
        if success and statuses is not None and not any(map(all, statuses.values())):
            raise RewardInvalid("the reward is full, and no reported test passed")
        return Verdict((CheckResult("reward", "effective", success),))
    if manifest.form == "binary":
        only = manifest.checks[0]
        return Verdict((CheckResult(only.id, only.kind, success, only.weight),))
    if statuses is None:
        raise VerifierFailed("the verifier reported no results of its checks")
    outcomes = [_outcome(check.id, statuses) for check in manifest.checks]
    if all(o is None for o in outcomes):
        raise VerifierFailed("none of the task's checks was reported")
    verdict = Verdict(
        tuple(
            CheckResult(c.id, c.kind, bool(o), c.weight)
            for c, o in zip(manifest.checks, outcomes, strict=True)
        )
    )
    if verdict.strict_success != success:
        raise RewardInvalid(
            f"the reward is {rewards['reward']:g}, and "
            f"{sum(r.passed for r in verdict.results)} of {len(verdict.results)} checks passed"
        )
    return verdict


def _outcome(check: str, statuses: Mapping[str, Sequence[bool]]) -> bool | None:
    """Whether every report on a check says passed; None without one.

    Test runners put the file's path before a test's name.
    """
    reports = [
        passed
        for name, passed in statuses.items()
        if name == check or name.endswith((f"::{check}", f".{check}"))
    ]
    return all(map(all, reports)) if reports else None
