"""Batches: a pure function of their arguments that visits every token once an epoch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from basecap.data.stream import ROUNDS, TrainStream, _bounds, permuted
from basecap.errors import ConfigError, DataError


def arrays(*sizes: int, start: int = 0) -> list[np.ndarray]:
    """Return arrays of consecutive numbers, cut into pieces."""
    return np.split(np.arange(start, start + sum(sizes), dtype=np.uint16), np.cumsum(sizes)[:-1])


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 500), key=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3))
def test_permuted_is_a_permutation(size: int, key: list[int]):
    assert sorted(permuted(index, size, *key) for index in range(size)) == list(range(size))


def test_permuted_depends_on_its_key_and_looks_random():
    places = np.array([[permuted(index, 1000, key) for index in range(1000)] for key in range(8)])
    assert len(np.unique(places, axis=0)) == 8
    correlation = np.corrcoef(np.vstack([places, np.arange(1000)]))
    assert np.abs(correlation - np.eye(9)).max() < 0.15


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 8),
    seq_len=st.integers(1, 8),
    seed=st.integers(-5, 5),
)
def test_an_epoch_predicts_every_token_once(sizes: list[int], seq_len: int, seed: int):
    stream = TrainStream({"a": arrays(*sizes)})
    windows = sum(sizes) // seq_len
    for epoch in range(2):
        rows = torch.cat([stream.batch(seed, epoch * windows + step, 1, seq_len) for step in range(windows)])
        assert rows.shape == (windows, seq_len + 1) and rows.dtype == torch.int64
        assert torch.equal((rows[:, 1:] - rows[:, :-1]) % sum(sizes), torch.ones(windows, seq_len, dtype=torch.int64))
        targets = rows[:, 1:].flatten().tolist()
        assert len(set(targets)) == windows * seq_len


def test_epochs_and_seeds_differ():
    stream = TrainStream({"a": arrays(400)})
    epochs = [stream.batch(0, epoch, 50, 8) for epoch in range(3)] + [stream.batch(1, 0, 50, 8)]
    assert len({tuple(rows.flatten().tolist()) for rows in epochs}) == 4
    assert not torch.equal(*(rows.sort(dim=0).values for rows in epochs[:2]))
    jumps = [tuple((rows[1:, 0] - rows[:-1, 0]).remainder(400).tolist()) for rows in epochs]
    assert len(set(jumps)) == 4 and max(jump.count(8) for jump in jumps) < 10  # windows are read in random order


@pytest.mark.parametrize("weights", [None, {"a": 3.0, "b": 1.0}])
@pytest.mark.parametrize(("rows", "seq_len"), [(57, 7), (56, 7), (4, 100), (1, 400), (2, 250)])
def test_the_opening_has_the_first_rows(rows: int, seq_len: int, weights: dict[str, float] | None):
    stream = TrainStream({"a": arrays(130, 120), "b": arrays(150, start=250)}, weights if seq_len <= 150 else None)
    found, expected = (
        sorted(map(tuple, x.tolist())) for x in (stream.opening(rows, seq_len), stream.batch(0, 0, rows, seq_len))
    )
    assert found == expected


@settings(max_examples=25, deadline=None)
@given(world=st.sampled_from([1, 2, 3, 6]), step=st.integers(0, 400), weighted=st.booleans())
def test_ranks_share_the_batch_of_one_process(world: int, step: int, weighted: bool):
    domains = {"a": arrays(100), "b": arrays(300, start=100)}
    stream = TrainStream(domains, {"a": 3.0, "b": 1.0} if weighted else None)
    whole = stream.batch(7, step, 6, 10)
    parts = [stream.batch(7, step, 6, 10, rank=rank, world=world) for rank in range(world)]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(whole, TrainStream(domains, {"a": 3.0, "b": 1.0} if weighted else None).batch(7, step, 6, 10))


def test_weights_are_shares_of_rows_and_each_domain_keeps_its_epochs():
    stream = TrainStream({"a": arrays(100), "b": arrays(400, start=100)}, {"a": 1.0, "b": 4.0})
    rows = torch.cat([stream.batch(0, step, 100, 10) for step in range(ROUNDS[0] // 100)])
    from_a = (rows < 100).all(dim=1)
    assert from_a.sum() == ROUNDS[0] / 5
    counts = torch.bincount(rows[from_a][:, 1:].flatten(), minlength=100)
    assert counts.min() >= 19 and counts.max() <= 22


@pytest.mark.parametrize("share", [0.25, 0.02, 1.5e-3, 1e-4, 1.234e-5])
def test_a_small_share_is_honoured(share: float):
    bounds = _bounds([share, 0.3 - share, 0.7])
    assert np.diff(bounds) / bounds[-1] == pytest.approx([share, 0.3 - share, 0.7], rel=0.01)
    assert (bounds[-1] == ROUNDS[0]) == (share in (0.25, 0.02))


def test_a_share_too_small_to_be_honoured_is_refused():
    with pytest.raises(DataError, match=r"the smallest of data\.weights is 1e-12 of their sum.*; raise it\.$"):
        TrainStream({"a": arrays(100), "b": arrays(100)}, {"a": 1e-12, "b": 1.0})


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"train\.batch"):
        TrainStream({"a": arrays(100)}).batch(0, 0, 5, 10, world=2)


def test_a_sequence_longer_than_the_text_is_refused():
    with pytest.raises(DataError, match=r"lower data\.seq_len"):
        TrainStream({"a": arrays(10)}).batch(0, 0, 1, 11)
