"""Which kernels a GPU gets by its compute capability and shared memory, with made-up GPUs."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from basecap.ops import _dispatch, ssd, wkv6
from basecap.ops.top1_chunk import gluon_kernels, operators
from basecap.testing.check_op import unknown_card

GPU = torch.device("cuda", 0)
PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def on_card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kilobytes: int) -> None:
    card = SimpleNamespace(shared_memory_per_multiprocessor=kilobytes * 1024, name="Some GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for module in (_dispatch, gluon_kernels):
        monkeypatch.setattr(module, "interpreted", lambda: False)


def tensor(*shape: int) -> SimpleNamespace:
    """Return what a decision sees of a tensor in bfloat16 on a GPU."""
    return SimpleNamespace(is_cuda=True, device=GPU, dtype=torch.bfloat16, shape=shape, element_size=lambda: 2)


def test_the_page_has_what_the_code_chooses(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    head = next(line for line in lines if line[0] == "op")
    cards = [re.search(r"\((\d+)\.(\d), (\d+) KB\)", cell).groups() for cell in head[1:]]
    heads = tensor(2, 256, 4, 64)
    ops = {
        "Top-1 chunk, chunks of 128, heads of 64": (operators.FAMILIES, (heads, 128)),
        "`ssd`, states of 128 x 64": (ssd.FAMILIES, (heads, tensor(2, 256, 1, 128))),
        "`wkv6`": (wkv6.FAMILIES, (heads, heads)),
    }
    for name, (families, given) in ops.items():
        found = []
        for major, minor, kilobytes in cards:
            on_card(monkeypatch, (int(major), int(minor)), int(kilobytes))
            with _dispatch.recorded():
                found.append(families[_dispatch.choose("op", "auto", families, *given)].RUNS)
        assert next(line for line in lines if line[0] == name)[1:] == found


def test_a_gpu_that_no_kernel_was_tuned_on_is_described(monkeypatch: pytest.MonkeyPatch):
    runs = {"a": "Triton kernels", "b": "plain PyTorch: they need more", "c": "Triton kernels"}
    rows = [{"op": op, "dtype": "torch.bfloat16", "path": path} for op, path in runs.items()]
    on_card(monkeypatch, (8, 9), 100)
    card = "no kernel was tuned on Some GPU (compute capability 8.9, 100 KB of shared memory in a multiprocessor)"
    assert unknown_card(GPU, rows) == f"{card}; in bfloat16 its ops run Triton kernels (a, c); plain PyTorch (b)"
    assert unknown_card(GPU, []) == card
    on_card(monkeypatch, (9, 0), 228)
    assert unknown_card(GPU, rows) is None
    assert unknown_card(torch.device("cpu"), rows) is None
