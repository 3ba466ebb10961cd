"""The kernels of the delta rule as PyTorch custom operators, each one node of a compiled graph."""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import launch_of
from basecap.ops._recurrence.blocks import save_scan
from basecap.ops._transforms import no_second_derivatives, refuse_batched_gradients
from basecap.ops.operators import operator


def tokens_per_chunk(K: int, dtype: torch.dtype) -> int:
    """Return the kernels' chunk: no more tokens than channels, whose keys would depend on each other; see README.md.

    Exact products of float32 leave room for half as many.
    """
    most = 32 if dtype == torch.float32 else 64
    return max(16, min(most, 1 << (K.bit_length() - 1)))


@operator("basecap::delta_rule")
def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return o [B, T, H, V], the final state [B, H, K, V] in float32; for backward the chunks' matrices and decays."""
    chunk = tokens_per_chunk(q.shape[3], q.dtype)
    return launch_of(__package__).forward(q, k, v, beta, log_decay, state, segments, chunk)


@operator("basecap::delta_rule_backward")
def scan_backward(
    grads: list[Tensor | None], tensors: list[Tensor], optional: list[Tensor | None], kept: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of q, k, v, beta, and of the log decays and the first state where these are given.

    Args:
        grads: gradients of the outputs and of the final state, None for zero.
        tensors: q, k, v, beta.
        optional: log decays, first state and segments.
        kept: the matrices and decays that `scan` returned.
    """
    do = torch.zeros_like(tensors[2]) if grads[0] is None else grads[0]
    chunk = kept[0].shape[-1]
    found = launch_of(__package__).backward((do, grads[1]), tuple(tensors), tuple(optional), tuple(kept), chunk)
    return [x for x in found if x is not None]


@scan.register_fake
def _(q, k, v, beta, log_decay, state, segments):
    (B, T, H, K), V = q.shape, v.shape[3]
    C = tokens_per_chunk(K, q.dtype)
    matrices = q.new_empty(2, B, -(-T // C), H, C, C)
    decays = q.new_empty(2, B, H, T, dtype=torch.float32)
    return v.new_empty(v.shape), v.new_empty(B, H, K, V, dtype=torch.float32), matrices, decays


@scan_backward.register_fake
def _(grads, tensors, optional, kept):
    return [x.new_empty(x.shape) for x in (*tensors, *optional[:2]) if x is not None]


def _gradients(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    refuse_batched_gradients("delta_rule", do, dfinal)
    q, k, v, beta, log_decay, state, segments, *kept = ctx.saved_tensors
    grads = scan_backward([do, dfinal], [q, k, v, beta], [log_decay, state, segments], kept)
    dlog = None if log_decay is None else grads[4]
    dstate = None if state is None else grads[-1]
    return *grads[:4], dlog, dstate, None


scan.register_autograd(_gradients, setup_context=save_scan)
scan_backward.register_autograd(no_second_derivatives("delta_rule"))
