"""Triton kernel: the cross-entropy of rows of logits and its gradient."""

import triton
import triton.language as tl


@triton.jit
def rows_kernel(p_logits, p_target, p_count, p_loss, p_gradient, V, BLOCK: tl.constexpr):
    """Write a row's loss and the gradient of the mean loss; a row whose target is negative has neither.

    The row is read twice, the second time from the cache, and only the gradient is written.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(p_target + row)
    top = float("-inf")
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, V, BLOCK):
        o = at + tl.arange(0, BLOCK)
        x = tl.load(p_logits + row * V + o, o < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    mass = tl.sum(total, 0)
    wanted = tl.load(p_logits + row * V + tl.maximum(target, 0)).to(tl.float32)
    tl.store(p_loss + row, tl.where(target >= 0, tl.log(mass) + (top - wanted), 0.0))
    weight = tl.where(target >= 0, 1.0 / tl.load(p_count).to(tl.float32), 0.0)
    share = weight / mass
    for at in range(0, V, BLOCK):
        o = at + tl.arange(0, BLOCK)
        x = tl.load(p_logits + row * V + o, o < V, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - top) * share - tl.where(o == target, weight, 0.0)
        tl.store(p_gradient + row * V + o, gradient.to(p_gradient.dtype.element_ty), o < V)
