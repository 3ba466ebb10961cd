"""The benchmark's own parts: its ratios, what it refuses."""

import pytest
import torch

from basecap.bench import ops
from basecap.errors import ConfigError


def test_ratios_are_to_the_rivals_of_the_same_run():
    rows = [{"op": "flash-attention-2", "ms": 8.0}, {"op": "cudnn", "ms": 4.0}, {"op": "ours", "ms": 2.0}]
    assert [row["x flash-attention-2"] for row in ops._compare(rows, "ms")] == [1.0, 2.0, 4.0]
    assert rows[2]["x cudnn"] == 2.0


def test_a_cpu_is_refused():
    with pytest.raises(ConfigError, match="needs a CUDA GPU, not cpu"):
        ops.run(device=torch.device("cpu"))


def test_what_was_measured_before_an_interruption_is_kept(monkeypatch: pytest.MonkeyPatch):
    def measure(heads: int, width: int, length: int, repeats: int, device: torch.device) -> list[dict[str, float]]:
        if width == 128:
            raise KeyboardInterrupt
        return [{"ms": 1.0}]

    monkeypatch.setattr(ops, "TABLES", {"training": measure, "skew": measure})
    monkeypatch.setattr(ops, "describe", lambda device: {})
    kept = []
    save, only = lambda so_far: kept.append(len(so_far["skew"])), ["training", "skew"]
    found = ops.run(device=torch.device("cuda"), only=only, save=save)
    assert found["training"] == found["skew"] == [{"heads": 12, "head_dim": 64, "ms": 1.0}]
    assert kept == [0, 1]
    assert not found["complete"]
