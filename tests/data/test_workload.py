"""Batches: split and shared among processes."""

import pytest
import torch

from basecap.data.workload import Batch, share_of
from basecap.errors import ConfigError


def test_a_batch_is_split_in_all_its_parts():
    batch = Batch(torch.arange(10).view(5, 2), -torch.arange(10).view(5, 2))
    parts = list(batch.to(torch.device("cpu")).split(2))
    assert [len(part) for part in parts] == [2, 2, 1]
    for index, whole in enumerate(batch.parts):
        assert torch.equal(torch.cat([part.parts[index] for part in parts]), whole)


def test_a_batch_that_does_not_divide_is_refused():
    assert share_of(6, 3) == 2
    with pytest.raises(ConfigError, match=r"train\.batch = 5 is not divisible by the 2 processes; change it"):
        share_of(5, 2)
