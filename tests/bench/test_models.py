"""The benchmark of whole models counts what it ran."""

import pytest
import torch

from basecap.bench.models import run


def test_rows_agree_with_their_setting():
    names = ["transformer++", "transformer++ window"]
    found = run(names, device=torch.device("cpu"), hidden=32, vocab=64, length=16, batch=2, steps=3)
    assert [row["architecture"] for row in found["rows"]] == names
    for row in found["rows"]:
        assert row["tokens_per_s"] == pytest.approx(2 * 16 * 1e3 / row["ms_per_step"])
        assert row["tflops"] > 0 and row["mfu"] is None
    assert found["rows"][0]["relative to transformer++"] == 1.0
    assert found["setting"]["length"] == 16 and found["environment"]["packages"]["torch"]
