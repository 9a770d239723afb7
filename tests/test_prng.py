"""Keys are functions of seed and purpose: apart for every purpose, the same for ever."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trsi_jax import prng

parts = st.one_of(st.text(min_size=1, max_size=8), st.integers(0, 2**31))
paths = st.lists(parts, min_size=1, max_size=3).map(tuple)
seeds = st.integers(0, 2**32 - 1)


def words(seed: int, *path: str | int) -> tuple[int, int]:
    first, second = np.asarray(jax.random.key_data(prng.stream(seed, *path))).tolist()
    return first, second


def test_keys_keep_their_values() -> None:
    # Recorded once: a change here changes every run that anyone has made.
    assert words(0, "base", "init") == (3633052206, 363038714)
    assert words(2**32 - 1, "rpr-1", "minibatch", 3) == (3463641661, 2096629257)
    assert prng.integer(0, "tasks", "rsr-1") == 644134108
    assert prng.integer(7, "rpr-1", "minibatch", 3, 1) == 1274195601
    assert prng.generator(0, "tasks", "rsr-1").permutation(8).tolist() == [7, 2, 1, 5, 3, 0, 6, 4]


def test_every_purpose_of_a_run_has_a_key_of_its_own() -> None:
    names = ("base", "rsr-1", "rpr-1", "rsr-2", "rpr-2")
    purposes = [
        (name, purpose, count)
        for name in names
        for purpose in ("init", "tasks", "minibatch", "sft", "warm-up")
        for count in range(4)
    ]
    asked = [(seed, *path) for seed in (0, 1) for path in purposes]
    assert len({words(*ask) for ask in asked}) == len(asked)
    assert len({prng.integer(*ask) for ask in asked}) == len(asked)


@settings(max_examples=20, deadline=None)
@given(seeds, paths, paths)
def test_two_paths_share_a_key_only_if_they_are_equal(seed, one, other) -> None:
    assert (words(seed, *one) == words(seed, *other)) == (one == other)


def test_the_order_and_the_depth_of_a_path_matter() -> None:
    assert words(0, "a", "b") != words(0, "b", "a")
    assert words(0, "a", 1, 2) != words(0, "a", 2, 1)
    assert words(0, "a") != words(0, "a", 0)
    assert prng.integer(0, "a", "b") != prng.integer(0, "b", "a")


@given(seeds, paths)
def test_host_seeds_fit_in_31_bits_and_repeat(seed, path) -> None:
    value = prng.integer(seed, *path)
    assert 0 <= value < 2**31
    assert value == prng.integer(seed, *path)


def test_generators_of_a_purpose_start_alike() -> None:
    one, other = (prng.generator(5, "pack", 2) for _ in range(2))
    np.testing.assert_array_equal(one.integers(0, 2**31, 64), other.integers(0, 2**31, 64))


@pytest.mark.parametrize("make", [prng.stream, prng.integer, prng.generator])
def test_a_negative_counter_is_refused(make) -> None:
    with pytest.raises(ValueError, match="negative, got -1"):
        make(0, "minibatch", -1)


def test_a_key_without_a_purpose_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one name"):
        prng.stream(0)
