"""Demonstrations: formats, the dials of their mistakes, and what they never show."""

import re
from dataclasses import replace
from itertools import islice

import pytest

from rollout.errors import UserError
from rollout.tasks.pool.demonstrations import DONE, NEXT, Teaching, demonstrations
from rollout.tasks.pool.generate import generate
from rollout.tasks.pool.operations import OPERATIONS

FLAWLESS = Teaching(mistake=0, stepwise_mistake=0, skip=0, stop=0, random_argument=0)


def take(n, teaching=None, seed=0):
    stream = demonstrations(seed) if teaching is None else demonstrations(seed, teaching)
    return list(islice(stream, n))


def commands(document):
    return [t.command for t in document.turns if t.exit_code is not None]


def test_a_seed_decides_the_stream():
    assert take(50) == take(50)
    assert take(50) != take(50, seed=1)


def test_formats_come_in_their_shares_and_keep_their_conventions():
    documents = take(2000)
    for harness, share in (("general", 0.5), ("survey", 0.25), ("stepwise", 0.25)):
        part = [d for d in documents if d.harness == harness]
        # five standard deviations of a binomial share
        assert abs(len(part) / 2000 - share) < 5 * (share * (1 - share) / 2000) ** 0.5
        for document in part:
            words = [t.command for t in document.turns]
            if harness == "stepwise":
                assert words.count(NEXT) == len(document.steps)
                assert words[-1] == NEXT
                assert DONE not in words
            else:
                assert words.count(DONE) == 1
                assert words[-1] == DONE
                assert NEXT not in words
            assert document.instruction == ". ".join(document.steps)
            assert list(document.listing) == sorted({*document.files, *document.directories})
            assert 1 <= len(document.steps) <= 3


def test_a_flawless_teacher_never_fails_a_command():
    for document in take(500, FLAWLESS):
        assert all(t.exit_code in (0, None) for t in document.turns)
        assert len(commands(document)) >= len(document.steps)


def solution(document):
    """The reference commands, worked out from the sentences and the files alone."""
    script = []
    for step in document.steps:
        for operation in OPERATIONS.values():
            for template in operation.templates:
                pattern = re.sub(r"\\{(\w)\\}", r"(?P<\1>[a-z0-9]+)", re.escape(template))
                match = re.fullmatch(pattern, step)
                if match:
                    found, arguments = operation, match.groupdict()
        if found.observes:
            word = arguments["w"].encode()
            (arguments["f"],) = [f for f, data in document.files.items() if word in data]
        script += [command.format_map(arguments) for command in found.commands]
    return script


def test_a_flawless_teacher_follows_the_sentences():
    for document in take(500, FLAWLESS):
        assert commands(document) == solution(document)


@pytest.mark.parametrize(
    ("harness", "mistake", "skip"), [("general", 0.45, 0.15), ("stepwise", 0.27, 0)]
)
def test_the_usual_teacher_errs_as_often_as_it_is_told_to(harness, mistake, skip):
    documents = [d for d in take(4000, Teaching(max_sub_goals=1)) if d.harness == harness]
    n = len(documents)
    right = sum(commands(d) == solution(d) for d in documents)
    expected = (1 - mistake) * (1 - skip) * (1 - 0.03)
    # five standard deviations; a random name is the right one once in about a dozen
    assert abs(right / n - expected) < 5 * (expected * (1 - expected) / n) ** 0.5 + 0.003
    assert sum(not commands(d) for d in documents) / n == pytest.approx(skip, abs=0.05)


def test_early_stops_are_shown():
    teaching = replace(FLAWLESS, stop=1.0, stepwise=0)
    assert all(len(commands(d)) <= 2 for d in take(200, teaching))


def test_the_curriculum_shows_one_sub_goal_at_a_time():
    assert {len(d.steps) for d in take(300, Teaching(max_sub_goals=1))} == {1}


def test_excluded_families_are_never_shown():
    shown = take(800, replace(FLAWLESS, exclude_families=()))
    assert any(len(d.steps) == 1 and "grep -rl" in commands(d)[0] for d in shown)
    hidden = take(800, replace(FLAWLESS, exclude_families=("seek", "note")))
    for document in hidden:
        if len(document.steps) == 1:
            assert not commands(document)[0].startswith(("grep -rl", "echo"))
    # two sub-goals of the same operations are another composition, and stay
    assert any("grep -rl" in c for d in hidden for c in commands(d))


def test_no_document_asks_for_what_a_protected_task_asks_for():
    protected = {
        task.instruction for split in ("validation", "test") for task in generate(split, 300, 0)
    }
    assert not protected & {d.instruction for d in take(4000)}


def test_every_operation_is_shown():
    shown = {s.split()[0] for d in take(400) for s in d.steps}
    assert shown >= {o.templates[0].split()[0] for o in OPERATIONS.values()}


@pytest.mark.parametrize(
    "settings",
    [
        {"mistake": 1.5},
        {"skip": -0.1},
        {"general": -1.0},
        {"general": 0, "survey": 0, "stepwise": 0},
        {"max_sub_goals": 0},
        {"max_sub_goals": 4},
        {"exclude_families": ("nonesuch",)},
    ],
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(UserError, match="teaching"):
        Teaching(**settings)
