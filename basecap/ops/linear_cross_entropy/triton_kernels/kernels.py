"""Triton kernel: the cross-entropy of rows of logits and its gradient."""

import triton
import triton.language as tl


@triton.jit
def rows_kernel(p_logits, p_target, p_count, p_loss, p_gradient, V, BLOCK: tl.constexpr):
    """Write a row's loss and the gradient of the mean loss; a row whose target is negative has neither.

    A target beyond the vocabulary makes the loss NaN: checking targets first would wait for the GPU.

    The row is read twice, the second time from the cache, where the hints keep it, and only the gradient is written.
    """
    row = tl.program_id(0).to(tl.int64)
    p_logits += row * V
    p_gradient += row * V
    target = tl.load(p_target + row)
    top = float("-inf")
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, V, BLOCK):
        o = at + tl.arange(0, BLOCK)
        x = tl.load(p_logits + o, o < V, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    mass = tl.sum(total, 0)
    logit = tl.load(p_logits + tl.maximum(target, 0), target < V, other=float("nan")).to(tl.float32)
    tl.store(p_loss + row, tl.where(target >= 0, tl.log(mass) + (top - logit), 0.0))
    weight = tl.where(target >= 0, 1.0 / tl.load(p_count).to(tl.float32), 0.0)
    share = weight / mass
    for at in range(0, V, BLOCK):
        o = at + tl.arange(0, BLOCK)
        x = tl.load(p_logits + o, o < V, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
        part = (tl.exp(x - top) * share).to(p_gradient.dtype.element_ty)
        tl.store(p_gradient + o, part, o < V, eviction_policy="evict_first")
    # The target's own, for which a comparison of every index would cost more than waiting for the row.
    tl.debug_barrier()
    own = tl.exp(logit - top) * share - weight
    tl.store(p_gradient + tl.maximum(target, 0), own.to(p_gradient.dtype.element_ty), (target >= 0) & (target < V))
