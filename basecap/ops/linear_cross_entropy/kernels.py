"""Triton kernel: the cross-entropy of rows of logits and its gradient."""

import triton
import triton.language as tl


@triton.jit
def rows_kernel(p_logits, p_target, p_count, p_loss, p_gradient, V, BLOCK: tl.constexpr):
    """Write a row's loss and the gradient of the mean loss; a row whose target is negative has neither.

    The row is read twice, the second time from the cache. Exponentials are of base 2, their factors in the exponent.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    p_logits += row * V
    p_gradient += row * V
    target = tl.load(p_target + row)
    top = float("-inf")
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, V, BLOCK):
        o = at + tl.arange(0, BLOCK)
        x = tl.load(p_logits + o, o < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0) * LOG2E)
        total = total * tl.exp2(top - higher) + tl.exp2(x * LOG2E - higher)
        top = higher
    top += tl.log2(tl.sum(total, 0))
    logit = tl.load(p_logits + tl.maximum(target, 0)).to(tl.float32) * LOG2E
    tl.store(p_loss + row, tl.where(target >= 0, (top - logit) / LOG2E, 0.0))
    count = tl.load(p_count).to(tl.float32)
    shift = tl.where(target >= 0, -tl.log2(count) - top, float("-inf"))
    for at in range(0, V, BLOCK):
        o = at + tl.arange(0, BLOCK)
        x = tl.load(p_logits + o, o < V, other=float("-inf")).to(tl.float32)
        tl.store(p_gradient + o, tl.exp2(x * LOG2E + shift).to(p_gradient.dtype.element_ty), o < V)
    # The target's own, for which a comparison of every index would cost more than waiting for the row.
    tl.debug_barrier()
    own = (tl.exp2(logit - top) - 1.0) / count
    tl.store(p_gradient + tl.maximum(target, 0), own.to(p_gradient.dtype.element_ty), target >= 0)
