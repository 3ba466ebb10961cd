"""Ops with several families of kernels: these have the same functions and say what they cannot do."""

import importlib.util
import inspect
from types import SimpleNamespace

import pytest
import torch

from basecap.ops import attention, delta_rule, wkv6, wkv7
from basecap.ops._dispatch import functions_of
from basecap.ops.selective_scan import operators as scan_operators
from basecap.ops.top1_chunk import hopper
from basecap.ops.top1_chunk import operators as chunk_operators

#: The families of each op, and the functions that every one of them has.
OPS = {
    "attention": (attention.FAMILIES, ["attention"]),
    "delta_rule": (delta_rule.FAMILIES, ["delta_rule"]),
    "selective_scan": (scan_operators.FAMILIES, ["forward", "backward"]),
    "top1_chunk": (chunk_operators.FAMILIES, ["choose", "attend", "attend_backward"]),
    "wkv6": (wkv6.FAMILIES, ["wkv6"]),
    "wkv7": (wkv7.FAMILIES, ["wkv7"]),
}
#: Packages that the families import when they run.
NEEDS = {"hopper": "triton", "portable": "triton", "gpu": "triton", "cpu": "numba"}


@pytest.mark.parametrize("op", OPS)
def test_families_are_interchangeable(op: str):
    families, names = OPS[op]
    *_, last = families.values()
    assert last.BACKEND == "eager"
    assert len({family.RUNS for family in families.values()}) == len(families)
    for key, family in families.items():
        assert [*inspect.signature(family.supports).parameters] == [*inspect.signature(last.supports).parameters]
        if key in NEEDS and importlib.util.find_spec(NEEDS[key]) is None:
            continue
        run = functions_of(family) if names[0] not in vars(family) else family
        for name in names:
            found, expected = (inspect.signature(getattr(x, name)).parameters for x in (run, last))
            # Plain PyTorch may have options of its own, and names keep the suffixes of their layouts.
            assert [x.partition("_")[0] for x in found] == [x.partition("_")[0] for x in expected][: len(found)]


@pytest.mark.parametrize(
    ("capability", "triton", "chunk", "shape", "reason"),
    [
        ((9, 0), "3.6.1", 128, (1, 256, 2, 64), None),
        ((9, 0), "3.7.0", 128, (1, 256, 2, 128), None),
        ((8, 9), "3.7.0", 128, (1, 256, 2, 64), "the GPU is not a Hopper"),
        ((10, 0), "3.7.0", 128, (1, 256, 2, 64), "the GPU is not a Hopper"),
        ((9, 0), "3.5.1", 128, (1, 256, 2, 64), "Triton 3.5.1 is neither 3.6 nor 3.7"),
        ((9, 0), "3.8.0", 128, (1, 256, 2, 64), "Triton 3.8.0 is neither 3.6 nor 3.7"),
        ((9, 0), "3.7.0", 64, (1, 256, 2, 64), "they take chunks of 128"),
        ((9, 0), "3.7.0", 128, (1, 256, 2, 96), "heads of 64 or 128 channels"),
    ],
)
def test_what_the_gluon_kernels_need(capability, triton: str, chunk: int, shape, reason: str | None, monkeypatch):
    module = pytest.importorskip("triton")
    q = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), shape=shape, element_size=lambda: 2)
    monkeypatch.setattr(hopper.portable, "unsupported_by_triton", lambda x, **_: None)
    monkeypatch.setattr(hopper, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(module, "__version__", triton)
    found = hopper.supports(q, chunk)
    assert found is None if reason is None else reason in found
    q.element_size = lambda: 4
    assert "in 16 bits" in hopper.supports(q, chunk)
    monkeypatch.setattr(hopper.portable, "unsupported_by_triton", lambda x, **_: "a reason")
    assert hopper.supports(q, chunk) == "a reason"
