"""The strict parser of results, on the cases measured on Harbor's own parser.

A comment beside a case says what harbor 0.26.0 does with it where that differs.
"""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import RewardInvalid, RewardMissing, UserError, VerifierFailed
from rollout.records import Entry
from rollout.tasks.harbor.reward import (
    UNIT_RANGE,
    Manifest,
    parse_manifest,
    parse_reward_json,
    parse_reward_text,
    read_rewards,
    read_statuses,
    verdict_of,
)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"1", 1.0),
        (b"1\n", 1.0),
        (b"1\r\n", 1.0),
        (b" 0.5 ", 0.5),
        (b"0", 0.0),
        (b"-0", 0.0),
        (b"5e-1", 0.5),
        (b"0.000", 0.0),
    ],
)
def test_a_decimal_number_is_a_reward(data, value):
    assert parse_reward_text(data) == value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"abc",
        b"0.5 extra",
        b"0\n1",
        b"0,5",
        b"50%",
        b"\xff1",
        b"\xef\xbb\xbf1",
        b"nan",
        b"inf",
        b"1e400",
        b"-1",  # accepted
        b"2",  # accepted
        b"1_0e-1",  # accepted: 1.0
        b"+1",  # accepted
        b".5",  # accepted
        b"1.",  # accepted
        "\u0661".encode(),  # accepted: an Arabic-Indic one
        b"0x1",
        b"True",
        b"1\x00",
        b"1" * 2000,  # accepted as inf or number
        b"0." + b"1" * 2000,  # accepted
    ],
)
def test_anything_else_is_a_fault(data):
    with pytest.raises(RewardInvalid):
        parse_reward_text(data)


def test_a_json_object_with_the_key_reward_is_a_reward():
    assert parse_reward_json(b'{"reward": 1}\n\n') == {"reward": 1.0}
    assert parse_reward_json(b'{"reward": 0.25, "style": 7}') == {"reward": 0.25, "style": 7.0}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" \n",
        b"\xff",
        b'{"reward": 1}{"reward": 0}',
        b"null",
        b"[]",
        b"[1]",
        b"1",
        b"0.5",
        b'{"reward": [1]}',
        b'{"reward": {"value": 1}}',
        b'{"reward": "1"}',
        b'{"reward": null}',
        b'{"reward": true}',  # accepted: 1.0
        b'{"reward": NaN}',
        b'{"reward": Infinity}',
        b'{"reward": 1e309}',
        b'{"reward": -1}',  # accepted
        b'{"reward": 2}',  # accepted
        b'{"reward": 0, "reward": 1}',  # the last one wins
        b"{}",  # accepted: no reward
        b'{"a": 1, "b": 0.25}',  # accepted: two rewards
        b'{"reward": 1, "style": "good"}',
        b'{"reward": 1, "style": 1e309}',
        b'{"reward": ' + b"1" * 5000 + b"}",
        b"[" * 100_000,
        b'{"reward": 1' + b" " * 100_000 + b"}",
    ],
)
def test_any_other_json_is_a_fault(data):
    with pytest.raises(RewardInvalid):
        parse_reward_json(data)


@given(st.binary(max_size=40))
def test_no_bytes_get_past_the_text_parser_but_numbers_in_range(data):
    try:
        value = parse_reward_text(data)
    except RewardInvalid:
        return
    assert 0.0 <= value <= 1.0
    assert value == float(data)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_no_json_gets_past_but_an_object_of_finite_numbers(value):
    for document in (value, {"reward": value}, {"reward": 1, "x": value}):
        try:
            found = parse_reward_json(json.dumps(document).encode())
        except RewardInvalid:
            continue
        assert all(math.isfinite(x) for x in found.values())
        assert 0.0 <= found["reward"] <= 1.0
        assert not isinstance(document["reward"], bool)


def test_a_task_may_state_another_range():
    assert parse_reward_text(b"-2", (-3.0, 3.0)) == -2.0
    with pytest.raises(RewardInvalid, match=r"is 4, allowed is \[-3, 3\]"):
        parse_reward_text(b"4", (-3.0, 3.0))


def file(text: str) -> Entry:
    return Entry("file", 0o644, text.encode())


def test_both_formats_must_agree_and_be_regular_files():
    both = {"reward.json": file('{"reward": 0.5}'), "reward.txt": file("0.5")}
    assert read_rewards(both) == {"reward": 0.5}
    with pytest.raises(RewardInvalid, match=r"reward.json says 0.5 and reward.txt 1"):
        read_rewards(both | {"reward.txt": file("1")})
    with pytest.raises(RewardInvalid, match="is empty"):
        read_rewards(both | {"reward.txt": file("")})
    with pytest.raises(RewardInvalid, match=r"reward.txt is a symlink"):
        read_rewards({"reward.txt": Entry("symlink", 0o777, b"/etc/passwd")})
    with pytest.raises(RewardMissing):
        read_rewards({"log": file("1")})


# --- reports on checks ------------------------------------------------------------------------


def manifest(*ids: str) -> Manifest:
    checks = [{"id": i, "kind": "effective"} for i in ids]
    document = {"schema": "trsi.checks/1", "form": "checks", "checks": checks}
    return parse_manifest("checks.json", json.dumps(document).encode())


JUNIT = """<testsuites><testsuite>
<testcase name="test_a"/>
<testcase name="test_b"><failure>no</failure></testcase>
<testcase name="test_c"><skipped/></testcase>
<testcase name="test_d"><error/></testcase>
</testsuite></testsuites>"""


def test_only_passed_counts_in_every_format():
    assert read_statuses({"junit.xml": file(JUNIT)}) == {
        "test_a": [True],
        "test_b": [False],
        "test_c": [False],
        "test_d": [False],
    }
    statuses = ("passed", "failed", "skipped", "pending", "other", "PASSED", "")
    tests = [{"name": f"t{i}", "status": s} for i, s in enumerate(statuses)]
    report = {"ctrf.json": file(json.dumps({"results": {"tests": tests}}))}
    assert list(read_statuses(report).values()) == [[True]] + [[False]] * 6


@pytest.mark.parametrize(
    "results",
    [
        {"ctrf.json": file("[]")},
        {"ctrf.json": file('{"results": {"tests": [{"status": "passed"}]}}')},
        {"ctrf.json": file('{"results": {"tests": [1]}}')},
        {"checks.json": file('{"schema": "other", "results": []}')},
        {"checks.json": Entry("symlink", 0o777, b"x")},
        {"junit.xml": file("<a")},
        {"junit.xml": file('<!DOCTYPE x [<!ENTITY a "b">]><testsuite/>')},
        {"junit.xml": Entry("file", 0o644, "<!DOCTYPE x><testsuite/>".encode("utf-16"))},
    ],
)
def test_a_malformed_report_is_a_fault(results):
    with pytest.raises(RewardInvalid):
        read_statuses(results)


def ctrf(**statuses: str) -> dict[str, Entry]:
    tests = [{"name": f"tests/x.py::{k}", "status": s} for k, s in statuses.items()]
    return {"ctrf.json": file(json.dumps({"results": {"tests": tests}}))}


def test_the_number_of_checks_comes_from_the_manifest():
    """Unreported checks failed, reported ones that the manifest doesn't have are nothing."""
    verdict = verdict_of(
        manifest("a", "b", "c", "d"),
        {"reward": 0.5},
        ctrf(a="passed", b="failed", extra="passed", more="passed"),
        UNIT_RANGE,
    )
    assert [r.passed for r in verdict.results] == [True, False, False, False]
    assert verdict.progress == 0.25


def test_a_check_reported_twice_passed_only_if_both_did():
    tests = [{"name": "a", "status": s} for s in ("passed", "failed")]
    results = {"ctrf.json": file(json.dumps({"results": {"tests": tests}}))}
    verdict = verdict_of(manifest("a", "b"), {"reward": 0.0}, results, UNIT_RANGE)
    assert not any(r.passed for r in verdict.results)


def test_a_reward_without_tests_behind_it_is_a_fault():
    with pytest.raises(VerifierFailed, match="no tests were collected"):
        verdict_of(None, {"reward": 1.0}, ctrf(), UNIT_RANGE)
    with pytest.raises(RewardInvalid, match="no reported test passed"):
        verdict_of(None, {"reward": 1.0}, ctrf(a="failed"), UNIT_RANGE)
    with pytest.raises(RewardInvalid, match="the reward is 0, and 1 of 1 checks passed"):
        verdict_of(manifest("a"), {"reward": 0.0}, ctrf(a="passed"), UNIT_RANGE)
    assert verdict_of(None, {"reward": 1.0}, {}, UNIT_RANGE).strict_success
    assert not verdict_of(None, {"reward": 0.9}, {}, UNIT_RANGE).strict_success


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "other"},
        {"form": "other"},
        {"checks": []},
        {"checks": [{"id": "a", "kind": "guard"}]},
        {"checks": [{"id": "a", "kind": "effective"}] * 2},
        {"checks": [{"id": "a", "kind": "bonus"}]},
        {"checks": [{"id": "a", "kind": "effective", "weight": 0}]},
        {"checks": [{"kind": "effective"}]},
        {"form": "binary", "checks": [{"id": i, "kind": "effective"} for i in "ab"]},
    ],
)
def test_a_bad_manifest_names_its_file(change):
    good = {
        "schema": "trsi.checks/1",
        "form": "checks",
        "checks": [{"id": "a", "kind": "effective"}],
    }
    parse_manifest("x/checks.json", json.dumps(good).encode())
    with pytest.raises(UserError, match=r"^x/checks.json: "):
        parse_manifest("x/checks.json", json.dumps(good | change).encode())
