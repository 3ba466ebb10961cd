"""Random numbers are uniform, independent and, where they must be, without replacement."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from basecap.tasks._draws import ExampleDraws, first_of_each

#: Far below what uniform draws give in a lifetime of runs, and fixed, because the draws are.
LEAST = 1e-4


def draws(count: int, key: int = 7) -> ExampleDraws:
    return ExampleDraws(key, np.arange(count))


def assert_equally_frequent(found: np.ndarray, outcomes: list[tuple[int, ...]]) -> None:
    """Assert that rows of `found` are `outcomes`, all equally often up to chance."""
    numbers = {outcome: number for number, outcome in enumerate(outcomes)}
    counts = np.bincount([numbers[tuple(row)] for row in found.tolist()], minlength=len(outcomes))
    assert chisquare(counts).pvalue > LEAST


@pytest.mark.parametrize("size", [3, 7, 64, 1000])
def test_numbers_below_a_bound_are_uniform_and_independent(size):
    found = draws(40_000).below("one", 2, size)
    for column in (found[:, 0], found[:, 1], (found[:, 0] + found[:, 1]) % size, np.diff(found[:, 0]) % size):
        assert chisquare(np.bincount(column, minlength=size)).pvalue > LEAST


def test_streams_keys_and_places_are_independent():
    one, other = draws(20_000).uniform("one", 2), draws(20_000).uniform("other", 2)
    third = draws(20_000, key=8).uniform("one", 2)
    columns = np.concatenate([one, other, third], axis=1)
    assert np.abs(np.corrcoef(columns.T) - np.eye(6)).max() < 0.03
    assert min(kstest(column, "uniform").pvalue for column in columns.T) > LEAST


@pytest.mark.parametrize("size", [4, 5, 12, 13, 20])
def test_every_choice_without_replacement_is_equally_frequent(size):
    """Sizes on both sides of the bound between permuting the range and drawing again."""
    found = draws(30_000).distinct("keys", 3, size)
    assert_equally_frequent(found, list(permutations(range(size), 3)))


def test_words_are_distinct_and_equally_frequent():
    for size in (2, 5):  # 4 words are permuted, 25 are drawn again
        words = draws(20_000).distinct_words("words", 2, size, 2)
        codes = words[:, :, 0] * size + words[:, :, 1]
        assert_equally_frequent(codes, list(permutations(range(size * size), 2)))


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 60), spare=st.integers(0, 400), key=st.integers(0, 2**63))
def test_nothing_is_drawn_twice(count, spare, key):
    found = ExampleDraws(key, np.arange(20)).distinct("keys", count, count + spare)
    assert found.min() >= 0 and found.max() < count + spare
    assert all(len(set(row)) == count for row in found.tolist())


def test_a_draw_from_half_of_a_large_vocabulary_is_uniform():
    found = draws(4000).distinct("keys", 128, 10_000)
    assert chisquare(np.bincount(found.ravel(), minlength=10_000)).pvalue > LEAST
    assert np.abs(np.corrcoef(found[:, 0], found[:, 127])[0, 1]) < 0.06


def test_weighted_slots_follow_successive_draws():
    """The probability of an order is the product of the weights' shares among what is left."""
    weights = np.array([4.0, 2.0, 1.0, 1.0])
    found = draws(40_000).slots("gaps", 2, 4, weights)
    orders = list(permutations(range(4), 2))
    expected = [weights[a] / 8 * weights[b] / (8 - weights[a]) for a, b in orders]
    numbers = {order: number for number, order in enumerate(orders)}
    counts = np.bincount([numbers[tuple(row)] for row in found.tolist()], minlength=len(orders))
    assert chisquare(counts, np.array(expected) * 40_000).pvalue > LEAST


@pytest.mark.parametrize("avoided", [1, 15])
def test_filler_avoids_tokens_and_is_uniform_over_the_others(avoided):
    avoid = draws(2000).distinct("avoid", avoided, 16)
    found = draws(2000).tokens("filler", 20, 5, 25, avoid)
    assert not (found[:, :, None] == avoid[:, None]).any()
    shifted = np.where(found >= 16, found, -1)  # tokens that no row avoids
    counts = np.bincount(shifted[shifted >= 0] - 16, minlength=9)
    assert chisquare(counts).pvalue > LEAST and found.min() >= 5 and found.max() == 24


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=7, max_size=7), min_size=1, max_size=4))
def test_the_first_of_equal_codes_is_found(rows):
    expected = [[row.index(code) == place for place, code in enumerate(row)] for row in rows]
    assert first_of_each(np.array(rows)).tolist() == expected
