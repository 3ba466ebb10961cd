"""How many runs share a GPU: what a step takes, and what follows from it."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import yaml

from basecap.plan.runs import plan_runs
from basecap.run import sharing
from basecap.run.sharing import CONTEXT, Footprint, choose
from basecap.study.config import load_study

GIB = 2**30


def first_run(study, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(study))
    return plan_runs(load_study(str(path)), 257)[0]


@pytest.mark.gpu
def test_a_step_is_measured_on_a_gpu(study, tmp_path):
    run, device = first_run(study, tmp_path), torch.device("cuda", 0)
    torch.cuda.set_device(device)
    found = sharing.measure(run, device)
    assert 0 < found.memory < found.free and 0 < found.share < 1
    assert torch.cuda.memory_allocated(device) < found.memory


@pytest.mark.parametrize(("graphs", "memory"), [(False, 3 * GIB), ("auto", 5 * GIB)])
def test_the_second_step_is_timed_and_graphs_keep_its_memory(graphs, memory, study, tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(sharing, "training_step", lambda *arguments: steps.append(arguments))
    monkeypatch.setattr(sharing, "matrix_rate", lambda device: 1e12)
    monkeypatch.setattr(sharing.time, "perf_counter", iter([0.0, 50.0, 50.0, 50.5]).__next__)
    held = {
        "max_memory_allocated": 3 * GIB,
        "memory_allocated": GIB,
        "memory_reserved": GIB,
        "mem_get_info": (79 * GIB, 140 * GIB),
    }
    for name, value in held.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    run = first_run(study | {"train": study["train"] | {"cuda_graphs": graphs}}, tmp_path)
    monkeypatch.setattr(
        sharing, "costs", lambda runs: [SimpleNamespace(flops=3e11 * run.timetable.steps, steps=run.timetable.steps)]
    )
    found = sharing.measure(run, torch.device("cpu"))
    assert len(steps) == 2 and (found.memory, found.free) == (memory, 80 * GIB)
    assert found.share == pytest.approx(0.6)  # 3e11 operations in half a second of 1e12 a second


@pytest.mark.parametrize("compiles", [True, False])
def test_a_step_that_does_not_fit_is_measured_as_it_trains(compiles, study, tmp_path, monkeypatch):
    found = Footprint(memory=60 * GIB, share=0.5, free=80 * GIB)

    def measured(run, device, compiled):
        if not compiled:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return found

    monkeypatch.setattr(sharing, "_measure", measured)
    run = first_run(study | {"train": study["train"] | {"compile": compiles}}, tmp_path)
    with contextlib.nullcontext() if compiles else pytest.raises(torch.OutOfMemoryError):
        assert sharing.measure(run, torch.device("cpu")) == found


@pytest.mark.parametrize(
    ("memory", "share", "runs", "gpus", "expected"),
    [
        (3 * GIB, 0.25, 99, 2, 4),  # the rate is what limits
        (3 * GIB, 0.24, 99, 2, 5),  # and is rounded up
        (30 * GIB, 0.1, 99, 1, 2),  # the memory
        (300 * GIB, 0.1, 99, 1, 1),  # at least one
        (GIB, 0.01, 99, 1, sharing.MOST),
        (GIB, 0.01, 5, 2, 3),  # the runs
    ],
)
def test_what_is_scarce_decides(memory, share, runs, gpus, expected):
    small = Footprint(memory=0, share=share, free=80 * GIB)
    found = [small, Footprint(memory=memory, share=share, free=80 * GIB)]
    count, why = choose(found, runs, gpus)
    assert count == expected
    shared = f"{count} runs share each GPU" if count > 1 else "one run at a time on each GPU"
    assert why.startswith(f"{shared} (--per-device auto): in a trial step one reaches {100 * share:.0f} % of the rate")
    assert why.endswith(f"takes at most {memory / GIB:.1f} of 80 GiB that are free.")
    assert count == 1 or count * (memory + CONTEXT) < 80 * GIB
