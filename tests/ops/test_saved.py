"""What activation checkpointing keeps."""

import pytest
import torch
from torch import Tensor

from basecap.ops import _saved, keep_choice, keep_products, recomputed, top1_chunk, top1_element
from basecap.ops.top1_chunk import eager as chunk_eager
from basecap.ops.top1_element import eager as element_eager


@pytest.mark.parametrize("kept", [keep_choice, keep_products])
@pytest.mark.parametrize(("op", "eager"), [(top1_chunk, chunk_eager), (top1_element, element_eager)])
def test_checkpointing_never_chooses_twice(op, eager, kept, monkeypatch):
    q, k, v, do = torch.randn(4, 1, 50, 2, 32).unbind()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    calls = []
    choose = eager.choose
    monkeypatch.setattr(eager, "choose", lambda *a: calls.append("choose") or choose(*a))

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append("layer")
        return op(q, k, v, backend="eager").sin()

    o = torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=False, context_fn=kept)
    found = torch.autograd.grad(o, leaves, do, allow_unused=True)
    assert calls == ["layer", "choose", "layer"]
    for x, y in zip(found, torch.autograd.grad(layer(*leaves), leaves, do, allow_unused=True), strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


def test_a_compiled_layer_that_is_recomputed_keeps_its_choice(monkeypatch):
    q, k, v, do = torch.randn(4, 1, 50, 2, 32, generator=torch.Generator().manual_seed(0)).unbind()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    calls = []
    choose = chunk_eager.choose
    monkeypatch.setattr(chunk_eager, "choose", lambda *a: calls.append("choose") or choose(*a))
    layer = torch.compile(lambda q, k, v: top1_chunk(q, k, v, backend="eager").sin(), backend="aot_eager")
    o = torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=False, context_fn=keep_choice)
    found = torch.autograd.grad(o, leaves, do)
    assert calls == ["choose"]
    plain = torch.autograd.grad(top1_chunk(*leaves, backend="eager").sin(), leaves, do)
    for x, y in zip(found, plain, strict=True):
        torch.testing.assert_close(x, y)


def test_what_is_recomputed_on_a_gpu_is_not_kept(monkeypatch):
    x, w = (
        torch.randn(2, 3, 4, dtype=torch.float64).requires_grad_(),
        torch.randn(50, 1, 1, 1).double().requires_grad_(),
    )
    kept, calls = [], []

    def function() -> Tensor:
        calls.append(1)
        return (w * x).exp().sum(0).sin()

    def run() -> tuple[Tensor, ...]:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y.numel()) or y, lambda y: y):
            y = recomputed(function, x.device)
        return y.detach(), *torch.autograd.grad(y.sum(), (x, w))

    plain, elements = run(), sum(kept)
    assert len(calls) == 1
    assert elements > 50 * x.numel()
    monkeypatch.setattr(_saved, "RECOMPUTED", ("cpu",))
    found = run()
    assert not kept
    assert len(calls) == 3
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        recomputed(function, x.device)
    assert len(calls) == 4
    slope = torch.func.grad(lambda x: recomputed(lambda: x.exp().sum(), x.device))(x)
    torch.testing.assert_close(slope, x.exp())
