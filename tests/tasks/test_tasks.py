"""What holds for every task: examples are a function of (seed, index), answers follow from the input, cells fit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basecap.errors import ConfigError
from basecap.tasks import NOTHING, TASKS, Instances, Task, asked, build_task

NAMES = [*TASKS.names(), "mqar-k3v1-shuffle"]
MODES = ("clean", "paper")


def equal(first: Instances, second: Instances) -> bool:
    """Whether all arrays are equal."""
    pairs = zip(vars(first).values(), vars(second).values(), strict=True)
    return all(one is other is None or np.array_equal(one, other) for one, other in pairs)


def rows(instances: Instances, chosen: list[int]) -> Instances:
    """Return some examples."""
    return Instances(**{name: None if array is None else array[chosen] for name, array in vars(instances).items()})


def answers(task: Task, instances: Instances, row: int) -> list[frozenset[int]]:
    """Return what the solver finds for the scored targets of an example, in their order."""
    found = task.solve(instances.inputs[row], asked(instances, row))
    return [found[int(place)] for place in asked(instances, row)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**70), chosen=st.lists(st.integers(0, 11), min_size=1, max_size=5), start=st.integers(0, 9))
def test_examples_do_not_depend_on_the_batch_they_are_in(name, mode, seed, chosen, start):
    task = build_task(name, {"mode": mode})
    first = start * 10**9
    whole = task.instances(seed, range(first, first + 12))
    assert equal(task.instances(seed, [first + number for number in chosen]), rows(whole, chosen))


@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_ends_where_it_may(name, monkeypatch):
    task = build_task(name)
    whole = task.instances(0, range(7))
    monkeypatch.setattr("basecap.tasks._contract._CHUNK", 2 * task.length)
    assert equal(whole, task.instances(0, range(7)))


@pytest.mark.parametrize("name", NAMES)
def test_examples_differ_by_number_seed_and_options(name):
    task, other = build_task(name), build_task(name, {"mode": "paper"})
    first = task.instances(0, range(40)).inputs
    assert len(np.unique(first, axis=0)) == 40
    for another in (task.instances(1, range(40)), other.instances(0, range(40))):
        assert not any((row == first).all(axis=1).any() for row in another.inputs)
    assert task.identity != other.identity == build_task(name, {"mode": "paper"}).identity


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_arrays_are_what_the_contract_says(name, mode):
    task = build_task(name, {"mode": mode})
    found = task.instances(3, range(64))
    assert found.inputs.shape == (64, task.length) and len(found) == 64
    assert {array.shape for array in (found.targets, found.roles, found.pairs, found.groups)} == {found.inputs.shape}
    assert found.inputs.dtype == found.targets.dtype == np.int64
    assert found.inputs.min() >= 0 and found.inputs.max() < task.vocabulary
    assert found.targets.min() >= NOTHING and found.targets.max() < task.vocabulary
    assert (found.targets[found.groups != NOTHING] != NOTHING).all()
    assert (found.groups != NOTHING).any(axis=1).all()
    assert found.groups.min() == NOTHING or task.readout == "last"  # no position answers before it has read
    right, wanted = found.score(found.targets)
    assert (right == wanted).all() and (wanted > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_clean_examples_have_one_right_answer(name):
    task = build_task(name)
    for cell in task.grid():
        found = task.at(cell).instances(5, range(2))
        for row in range(2):
            solved = answers(task.at(cell), found, row)
            places = asked(found, row)
            choices = found.targets[row, :, None] if found.choices is None else found.choices[row, found.groups[row]]
            assert solved == [set(choices[place].tolist()) for place in places], cell
            assert {len(one) for one in solved} == {choices.shape[-1]}


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_of_the_authors_is_among_the_right_ones(name):
    task = build_task(name, {"mode": "paper"})
    task = task.at(task.grid()[-1])
    found = task.instances(5, range(4))
    for row in range(4):
        for place, right in zip(asked(found, row), answers(task, found, row), strict=True):
            assert int(found.targets[row, place]) in right


@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_token_makes_one_value_wrong(name):
    task = build_task(name)
    found = task.instances(8, range(20))
    predictions = found.targets.copy()
    for row in range(20):
        place = asked(found, row)[row % len(asked(found, row))]
        wrong = set(range(task.vocabulary)) - answers(task, found, row)[list(asked(found, row)).index(place)]
        predictions[row, place] = min(wrong)
    right, wanted = found.score(predictions)
    assert (right == wanted - 1).all()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mqar", {"pairs": 17}, "a length of 64 has room for 16 of 17 pairs; lower pairs or raise length."),
        ("mqar-last", {"pairs": 9, "length": 35}, "a length of 35 has room for 8 of 9 pairs;"),
        ("mqar-k4v8", {"pairs": 5}, "a length of 128 has room for 4 of 5 pairs;"),
        ("mqar-position-robustness", {"pairs": 5}, "a length of 64 has room for 4 of 5 pairs;"),
        ("mqar", {"vocab": 8}, "a vocabulary of 8 has 3 of the 4 keys needed; raise vocab or lower pairs."),
        ("mqar-k1v1", {"vocab": 6}, "a vocabulary of 6 has 3 of the 4 keys needed;"),
        ("mqar-position-robustness", {"vocab": 30}, "a vocabulary of 30 has 15 of the 16 values needed;"),
        ("mqar-k2v2-last", {}, "task 'mqar-k2v2' has no variant 'mqar-k2v2-last': did you mean 'mqar-k2v2-"),
        ("mqar-k3v3-shufle", {}, "has no variant 'mqar-k3v3-shufle': did you mean 'mqar-k3v3-shuffle'?"),
        ("mqar-lst", {}, "did you mean 'mqar-last'?"),
        ("mqar", {"pair": 4}, "unknown option 'pair' of task 'mqar': did you mean 'pairs'?"),
        ("mqar", {"pairs": "4"}, "option 'pairs' of task 'mqar' cannot be '4': it should be a whole number."),
        (
            "mqar",
            {"positions": "front"},
            "option 'positions' of task 'mqar' cannot be 'front': it should be 'standard', 'last'",
        ),
        ("mqar-k1v3-robustness", {}, "shared keys need at least two tokens; set key_tokens to 2 or more."),
        ("mqar-k2v2-robustness", {"positions": "shuffle"}, "shared keys need pairs at the start;"),
        (
            "zoology-forgetting",
            {"updates": 5},
            "5 updates need at least as many pairs, not 4; lower updates or raise pairs.",
        ),
        ("zoology-compositional", {"pairs": 5}, "5 pairs are not a square number; set pairs to 4 or 9."),
        ("zoology-compositional", {"vocab": 8}, "a vocabulary of 8 has 1 of the 2 first parts of keys needed;"),
        (
            "mad-fuzzy-recall",
            {"vocab": 9, "value_tokens": 5},
            "a vocabulary of 9 is too small for values of 5 tokens: it has 4; raise vocab.",
        ),
        ("zoology-mqar", {"passes": 16}, "a length of 64 has room for 1 of 4 pairs;"),
        ("hops", {"nodes": 40}, "a question do not fit into length 64; set length to 82 or more."),
        ("hops", {"vocab": 16}, "no tokens for 16 nodes and a mark; set vocab to 17 or more."),
        ("modular-arithmetic", {"operations": 40}, "do not fit into length 64; set length to 82 or more."),
        ("capo", {"people": 3}, "5 people fit into length 64 and there are 3; raise people."),
        ("parity", {"group": "S4"}, "cannot be 'S4': it should be 'parity', 'Z60', 'A5' or 'S5'"),
    ],
)
def test_what_does_not_fit_is_one_sentence(name, options, words):
    with pytest.raises(ConfigError) as error:
        build_task(name, options)
    assert words in str(error.value) and str(error.value).count(".") - str(error.value).count("`") <= 2


def test_numbers_below_zero_are_refused():
    with pytest.raises(ConfigError, match="must be 0 or more"):
        build_task("mqar").instances(0, [-1])
    with pytest.raises(ConfigError, match="must be 0 or more"):
        build_task("mqar").instances(-1, [0])
