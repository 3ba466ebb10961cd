"""What activation checkpointing keeps."""

import pytest
import torch
from torch import Tensor

from basecap.ops import keep_choice, keep_products, top1_chunk, top1_element
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
