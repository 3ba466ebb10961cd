"""Tests that ask for poison get it, from every way to memory that nobody has written."""

import pytest
import torch


@pytest.mark.parametrize(
    "make",
    [
        lambda like: torch.empty(3, dtype=like.dtype),
        lambda like: torch.empty_like(like),
        lambda like: like.new_empty(3),
    ],
    ids=["empty", "empty_like", "new_empty"],
)
def test_unwritten_memory_is_poison(make, poisoned):
    assert make(torch.zeros(3)).isnan().all()
    assert (make(torch.zeros(3, dtype=torch.int32)) < -1000).all()
