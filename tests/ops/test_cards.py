"""Which kernels a GPU gets by its compute capability and shared memory, with made-up GPUs."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES
from basecap.ops import _dispatch, ssd, wkv6
from basecap.ops.top1_chunk import gluon_kernels, operators
from basecap.testing import check_all
from basecap.testing import check_op as checks
from basecap.testing.check_op import OPS, check_op, first_look, unknown_card
from tests.ops.kernels_on_cards import table, wrong

GPU = torch.device("cuda", 0)
PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
RESULTS = Path(__file__).parents[2] / "results" / "kernels"


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


def test_every_kernel_was_compiled_for_every_card_and_has_room_there():
    found = json.loads((RESULTS / "cards.json").read_text())
    assert (RESULTS / "cards.md").read_text() == table(found)
    cards = {"A100", "RTX 4090", "H200", "B200", "RTX 5090", "MI300X"}
    assert set(found["cards"]) == cards == {row["card"] for row in found["kernels"]}
    assert wrong(found) == []
    found["cards"]["A100"]["program"] = 1024
    assert any(line.endswith(" bytes") and " on A100: " in line for line in wrong(found))


def test_a_gpu_that_no_kernel_was_tuned_on_is_described(monkeypatch: pytest.MonkeyPatch):
    runs = {"a": "Triton kernels", "b": "plain PyTorch: they need more", "c": "Triton kernels"}
    rows = [{"op": op, "path": path} for op, path in runs.items()]
    on_card(monkeypatch, (8, 9), 100)
    card = "no kernel was tuned on Some GPU (compute capability 8.9, 100 KB of shared memory in a multiprocessor)"
    assert unknown_card(GPU, lambda device: rows) == (
        f"{card}; in bfloat16 its ops run Triton kernels (a, c); plain PyTorch (b)"
    )
    assert unknown_card(GPU, lambda device: []) == card
    on_card(monkeypatch, (9, 0), 228)
    assert unknown_card(GPU) is None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert unknown_card(GPU, lambda device: []) is not None
    assert unknown_card(torch.device("cpu")) is None


def test_the_first_look_says_what_each_op_runs_and_what_fails(monkeypatch: pytest.MonkeyPatch):
    def refuse(*tensors: torch.Tensor):
        raise ConfigError("ssd cannot run its Triton kernels: the kernels need 99 KB; use backend='auto' or 'eager'.")

    def break_(*tensors: torch.Tensor):
        raise RuntimeError("out of resource: shared memory\nRequired: 999")

    monkeypatch.setattr(checks, "_without_kernels", lambda case, x: None)
    changed = {name: replace(OPS[name], kernels=kernels) for name, kernels in {"ssd": refuse, "wkv6": break_}.items()}
    monkeypatch.setattr(checks, "OPS", changed)
    found = {row["op"]: row["path"] for row in first_look(torch.device("cpu"))}
    error = "RuntimeError: out of resource: shared memory"
    assert found == {"ssd": "plain PyTorch", "wkv6": f"kernels that fail ({error})"}
    assert {row["path"] for row in check_op("ssd", torch.device("cpu"))} == {"plain PyTorch: the kernels need 99 KB"}
    rows: list[dict] = []
    monkeypatch.setattr(check_all, "OPS", {"wkv6": changed["wkv6"]})
    monkeypatch.setattr(ARCHITECTURES, "names", list)
    check_all.check_all([], torch.device("cpu"), on_rows=rows.extend, longest=0, tasks=())
    assert rows[-1]["result"] == f"{error}." and rows[-1]["subject"] == "wkv6"
