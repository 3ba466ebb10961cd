"""A model in parts trains as one in copies, and goes on in another number of processes."""

import math

import pytest
import torch
from safetensors import safe_open

from basecap.errors import CheckpointError, ConfigError
from basecap.records import RunRecords
from basecap.train import checkpoint
from basecap.train.distributed import Processes
from tests.forks import pair
from tests.train import sharded
from tests.train.conftest import config


def test_parts_train_as_copies_do_and_go_on_in_one_process_and_in_two(tmp_path):
    pair(sharded.main, tmp_path, output=tmp_path / "first", seconds=200)
    fewer = RunRecords(tmp_path / "fewer")
    path = checkpoint.latest(fewer.resume)
    shards = sorted(found.name for found in path.glob("*.safetensors"))
    assert shards == [f"shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2)]
    with safe_open(path / shards[1], "pt") as file:
        assert file.get_slice("model/embedding.weight").get_shape() == [15, 32]  # of 31 rows
    assert {found.suffix for found in path.iterdir()} == {".safetensors", ".json", ""}  # no pickle
    sharded.train(tmp_path / "fewer", Processes(), sharded.STOPS[1])
    assert (checkpoint.latest(fewer.resume) / "optimiser.safetensors").exists()
    printed = pair(sharded.again, tmp_path, output=tmp_path / "last", seconds=200)
    assert printed.count("sharded: resumed at step 6 of 10.") == 1
    copies = RunRecords(tmp_path / "ddp")
    for name in ("fsdp", "hybrid", "fewer"):
        found = RunRecords(tmp_path / name)
        assert [row["step"] for row in found.metrics()] == list(range(1, 11))
        for one, two in zip(copies.metrics(), found.metrics(), strict=True):
            assert math.isclose(one["train_loss"], two["train_loss"], rel_tol=1e-5)
            assert math.isclose(one["grad_norm"], two["grad_norm"], rel_tol=1e-4)
        evaluated = [(tmp_path / run / "evaluated").read_text().split() for run in ("ddp", name)]
        assert [float(loss) for loss in evaluated[1]] == pytest.approx([float(loss) for loss in evaluated[0]], rel=1e-5)
        one, two = (checkpoint.load_stored(checkpoint.latest(run.resume)) for run in (copies, found))
        for (parameter, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5, msg=parameter)
    damaged = next(checkpoint.latest(found.resume).glob("shard-00002*"))
    damaged.write_bytes(damaged.read_bytes()[:-8])
    assert checkpoint.truncated(damaged.parent) == [damaged.name]
    with pytest.raises(CheckpointError, match=r"shard-00002.* does not match SHA256SUMS"):
        checkpoint.load_stored(damaged.parent)


def test_a_mesh_divides_the_processes():
    options = config(parallel="fsdp", shard=4)
    assert options.mesh(8) == (2, 4) and options.mesh(1) == (1, 1) and config(parallel="fsdp").mesh(8) == (1, 8)
    assert config().mesh(8) == (8, 1)
    with pytest.raises(ConfigError, match=r"train\.shard = 4 is not a divisor of the 6 processes; choose one\."):
        options.mesh(6)
    with pytest.raises(ConfigError, match=r"train\.shard needs train\.parallel = fsdp"):
        config(shard=4)
