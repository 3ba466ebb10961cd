"""Training on a task: what a step holds, how often each example is seen, which cells there are."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from basecap.data.task_config import TaskSection
from basecap.data.task_data import TaskData
from basecap.errors import ConfigError
from basecap.tasks import build_task

CELLS = [{"length": 16, "pairs": 1}, {"length": 16, "pairs": 2}, {"length": 24, "pairs": 2}, {"length": 64, "pairs": 4}]


def section(**changes) -> TaskSection:
    content = {"train": ["mqar"], "options": {"vocab": 64}, "cells": CELLS, "examples": 30, "held_out": 5}
    return TaskSection.model_validate(content | changes)


def epoch(data: TaskData, number: int, batch: int) -> list[torch.Tensor]:
    first, last = (
        data.tokens(epochs, batch) // (batch * data.length) if epochs else 0 for epochs in (number, number + 1)
    )
    return [data.batch(0, step, batch).inputs for step in range(first, last)]


def seen(steps: list[torch.Tensor]) -> Counter:
    return Counter(tuple(row) for rows in steps for row in rows.tolist())


def test_every_example_of_every_cell_is_seen_once_an_epoch():
    data = TaskData(section(examples=32), "mqar")
    expected = Counter(tuple(row) for cell in data.cells for row in cell.instances(3 * 42, range(32)).inputs.tolist())
    epochs = [epoch(data, number, 2) for number in range(2)]
    assert seen(epochs[0]) == seen(epochs[1]) == expected
    assert [rows.shape for rows in epochs[0]] != [rows.shape for rows in epochs[1]]
    assert all(rows.shape in [(8, 16), (4, 24), (2, 64)] for rows in epochs[0])
    assert data.shares == pytest.approx({16: 8 / 32, 24: 8 / 32, 64: 16 / 32})


@settings(max_examples=10, deadline=None)
@given(examples=st.integers(1, 40), batch=st.integers(1, 12))
def test_cells_stay_within_a_step_of_each_other_where_examples_do_not_fill_steps(examples: int, batch: int):
    data = TaskData(section(cells=CELLS[1:], examples=examples), "mqar")
    counts: Counter = Counter()
    for step in range(3 * data.tokens(1, 1) // 64):
        length, before = data._place(step, batch)
        assert before == counts[length]
        counts[length] += batch * (64 // length)
    epochs = {length: count / examples for length, count in counts.items()}
    slack = max(batch * (64 // length) for length in (16, 24, 64)) / examples
    assert max(epochs.values()) - min(epochs.get(length, 0) for length in (16, 24, 64)) <= 2 * slack + 1


@settings(max_examples=15, deadline=None)
@given(world=st.sampled_from([1, 2, 3]), step=st.integers(0, 200))
def test_ranks_share_the_batch_of_one_process_and_seeds_do_not_matter(world: int, step: int):
    data = TaskData(section(), "mqar")
    whole = data.batch(7, step, 6)
    parts = [data.batch(8, step, 6, rank, world) for rank in range(world)]
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    assert whole.inputs.numel() <= 6 * 64 and ((whole.targets >= 0).sum(1) > 0).all()


def test_splits_have_examples_of_their_own_and_targets_without_a_group_stay():
    data = TaskData(
        section(train=["mqar-k2v2"], options={"vocab": 4000, "closing": True}, cells=CELLS[3:]), "mqar-k2v2"
    )
    (cell,) = data.cells
    rows = [
        cell.instances(3 * 42, range(30)).inputs,
        *(data.held_out(split, cell).inputs for split in ("validation", "test")),
    ]
    every = {tuple(row) for part in rows for row in part.tolist()}
    assert [len(part) for part in rows] == [30, 5, 5] and len(every) == 40
    assert ((data.batch(0, 0, 1).targets >= 0).sum(1) == 4 * 3).all()  # two tokens of a value and the separator


def test_the_hash_follows_what_is_trained_and_not_what_is_tested():
    hashes = {
        TaskData(section(**changes), "mqar").manifest_hash
        for changes in ({}, {"examples": 31}, {"seed": 1}, {"cells": CELLS[1:]}, {"options": {"vocab": 66}})
    }
    assert len(hashes) == 5
    assert TaskData(section(test=["mqar-last"], held_out=9), "mqar").manifest_hash in hashes


def test_a_cell_is_left_out_for_a_task_that_cannot_hold_it():
    cells = [{"length": 32, "pairs": 8}, {"length": 64, "pairs": 4}]
    data = TaskData(section(test=["mqar", "mqar-k2v2"], cells=cells), "mqar")
    assert [len(data.tests[name]) for name in ("mqar", "mqar-k2v2")] == [2, 1]
    assert len(section(cells=None).training("mqar")) == 20  # of the published 26, those with at most 31 pairs
    long = TaskData(section(test_cells=[{"length": 128, "pairs": 2}]), "mqar")
    assert (long.length, long.longest_test) == (64, 128)


def test_a_task_can_have_options_of_its_own():
    options = {"vocab": 64, "mode": "paper", "mqar-k2v2": {"vocab": 6}, "mqar-k1v1": {"vocab": 8}}
    data = TaskData(section(test=["mqar", "mqar-k2v2"], options=options), "mqar")
    assert {(cell.config.vocab, cell.config.mode) for cell in data.cells} == {(64, "paper")}
    assert {(cell.config.vocab, cell.config.mode) for cell in data.tests["mqar-k2v2"]} == {(6, "paper")}
    assert data.vocabulary == 84


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": ["mqarr"]}, "unknown task 'mqarr': did you mean 'mqar'"),
        ({"train": ["mqar-k2v2-last"]}, "has no variant"),
        ({"train": ["mqar", "mqar"]}, "a task is named twice"),
        (
            {"test": ["mad-compression"], "cells": None},
            "'mad-compression' is decoded from the last position, but 'mqar' is answered at each position, and no",
        ),
        (
            {"train": ["mad-compression", "mqar"], "cells": None},
            "'mad-compression' is decoded from the last position, but 'mqar' is answered at each position, and no",
        ),
        ({"shifts": {"mqar": ["mqar-shufle"]}}, "unknown task 'mqar-shufle': did you mean 'mqar-shuffle'"),
        ({"options": {"vocba": 64}}, "unknown option 'vocba' of the tasks: did you mean 'vocab'"),
        ({"options": {"mqar-last": {"vocba": 64}}}, "unknown option 'vocba' of task 'mqar-last': did you mean 'vocab'"),
        ({"options": {"mqar-lsat": {"vocab": 64}}}, "unknown task 'mqar-lsat': did you mean 'mqar-last'"),
        ({"options": {"mqar": {"vocab": "many"}}}, "'vocab' of task 'mqar' cannot be 'many'"),
        (
            {"cells": [*CELLS, {"length": 16, "pairs": 9}]},
            "the cell length 16, pairs 9 fits no task of this study: a length of 16 has room for ",
        ),
        (
            {"options": {"mode": "nope"}, "cells": CELLS},
            "^option 'mode' of task 'mqar' cannot be 'nope': it should be 'clean' or 'paper'",
        ),
        ({"options": {"vocab": 8}, "cells": CELLS[3:]}, "a vocabulary of 8 has 3 of the 4 keys needed"),
        (
            {"options": {"pairs": 2}, "cells": CELLS},
            "task.options: pairs is set by every cell; change task.cells instead",
        ),
        ({"cells": [{"length": "long"}]}, "should be a number"),
        ({"cells": CELLS[:1] * 2}, "has the cell length 16, pairs 1 twice"),
        ({"test": ["mqar-k4v8"], "cells": CELLS[:1]}, "no cell fits task 'mqar-k4v8'"),
        (
            {"train": ["mqar", "parity"], "cells": CELLS},
            r"option that task 'parity' lacks, such as 'pairs'; set task.cells to cells .* \[\{length: 64\}\], or",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(changes, words):
    with pytest.raises((ConfigError, ValidationError), match=words):
        section(**changes)


def test_examples_are_those_of_the_task():
    data = TaskData(section(cells=CELLS[3:], options={"vocab": 64, "mode": "paper"}), "mqar")
    task = build_task("mqar", {"vocab": 64, "mode": "paper", "length": 64, "pairs": 4})
    made = task.instances(3 * 42, range(30))
    batch = data.batch(0, 0, 30)
    order = [made.inputs.tolist().index(row) for row in batch.inputs.tolist()]
    assert sorted(order) == list(range(30)) != order
    assert np.array_equal(batch.targets.numpy(), made.targets[order])
