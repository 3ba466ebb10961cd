"""Two processes with half of the batch each train as one does."""

import json
import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from basecap.records import RunRecords
from basecap.system.environment import choose_device, fix_cublas_buffers
from basecap.train import checkpoint
from basecap.train.distributed import COLLECTIVE_TIMEOUT, Processes, processes
from basecap.train.loop import DevicePlacement, Trainer
from tests._architectures import distinct_names, one_of_each_kind
from tests.forks import pair
from tests.train import two_processes
from tests.train.conftest import UnevenStream, config


def test_two_processes_with_uneven_rows_and_an_interruption_train_as_one(model, tmp_path):
    printed = pair(two_processes.main, tmp_path / "two", output=tmp_path / "output", seconds=200)
    assert printed.count("two: resumed at step 7 of 20.") == 1
    placement = DevicePlacement.choose(torch.device("cpu"), Processes(), "fp32")
    one = RunRecords(tmp_path / "one")
    Trainer(model, config(), 0, workload=UnevenStream(), records=one, placement=placement).run(
        "one", lambda model, step, tokens: None
    )
    two = RunRecords(tmp_path / "two")
    assert len(two.metrics()) == len(one.metrics()) == 20
    for a, b in zip(one.metrics(), two.metrics(), strict=True):
        assert math.isclose(a["train_loss"], b["train_loss"], rel_tol=1e-4)
        assert math.isclose(a["grad_norm"], b["grad_norm"], rel_tol=1e-3)
    trained = checkpoint.load_stored(checkpoint.latest(two.resume))
    for (name, p), q in zip(model.named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=name)


def test_every_architecture_gets_the_same_bits_from_one_process_and_from_two(tmp_path):
    one, two = by_one_and_by_two(one_of_each_kind(), "cpu", tmp_path)
    assert len(one) > 20 and all(len(found) == 2 for found in one.values())
    assert {name: found for name, found in two.items() if found != one[name]} == {}


def on_gpus(count: int) -> list:
    """Return the names of all architectures, for tests that need so many GPUs; `-n 8` compiles their kernels sooner."""
    marks = [
        pytest.mark.gpu,
        pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs GPUs: {count}"),
        pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),  # of PyTorch's compiler
    ]
    return [pytest.param(name, marks=marks) for name in distinct_names()]


@pytest.mark.parametrize("name", on_gpus(1))
def test_every_architecture_gets_the_same_bits_twice_on_a_gpu(name: str):
    fix_cublas_buffers()
    once, again = (two_processes.bits([name], Processes(), choose_device("cuda")) for _ in range(2))
    assert again == once


@pytest.mark.parametrize("name", on_gpus(2))
def test_every_architecture_gets_the_same_bits_from_one_gpu_and_from_two(name: str, tmp_path):
    fix_cublas_buffers()
    one, two = by_one_and_by_two([name], "cuda", tmp_path)
    assert two == one


def by_one_and_by_two(names, device, path):
    """Return the bits from one process with four micro-batches, and from two with two in each."""
    pair(two_processes.train_each, names, path / "two.json", device, output=path / "output", seconds=200)
    two = json.loads((path / "two.json").read_text())
    return json.loads(json.dumps(two_processes.bits(names, Processes(), choose_device(device)))), two


def test_processes_wait_for_a_leader_that_works_alone_for_hours(monkeypatch):
    asked = {}
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: asked.update(options))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with processes(torch.device("cpu")) as group:
        assert (group.rank, group.world) == (1, 2)
    assert asked == {"timeout": COLLECTIVE_TIMEOUT} and timedelta(days=1) <= COLLECTIVE_TIMEOUT
