"""The kernels of RWKV-7's recurrence by chunks as PyTorch custom operators, each one node of a compiled graph."""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import launch_of
from basecap.ops._recurrence.blocks import save_scan
from basecap.ops._transforms import no_second_derivatives, refuse_batched_gradients
from basecap.ops.operators import operator

#: The most tokens per chunk; float32 is only for the tests, see `wkv7_bounded`.
#: The exponents of half a chunk's decays, 19.5 for 64 tokens, are within the range of
#: bfloat16 and TF32; float32 keeps more of its digits with smaller ones.
CHUNKS = {torch.bfloat16: 64, torch.float16: 32, torch.float32: 16}


def tokens_per_chunk(K: int, dtype: torch.dtype) -> int:
    """Return no more tokens than channels, or else the removal keys would depend on each other, but at least 16."""
    return max(16, min(CHUNKS[dtype], 1 << (K.bit_length() - 1)))


@operator("basecap::wkv7_chunks")
def scan(
    r: Tensor,
    log_decay: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return o [B, T, H, V], the final state [B, H, K, V] in float32; for backward the chunks' inverses and states."""
    return launch_of(__package__).forward(
        (r, log_decay, k, v, a, b), state, segments, tokens_per_chunk(r.shape[3], v.dtype)
    )


@operator("basecap::wkv7_chunks_backward")
def scan_backward(
    grads: list[Tensor | None], tensors: list[Tensor], optional: list[Tensor | None], kept: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of r, log decays, k, v, a, b, and of the first state where it is given.

    Args:
        grads: gradients of the outputs and of the final state, None for zero.
        tensors: r, log decays, k, v, a, b.
        optional: first state and segments.
        kept: the inverses and states that `scan` returned.
    """
    do = torch.zeros_like(tensors[3]) if grads[0] is None else grads[0]
    chunk = kept[0].shape[-1]
    found = launch_of(__package__).backward((do, grads[1]), tuple(tensors), tuple(optional), tuple(kept), chunk)
    return [x for x in found if x is not None]


@scan.register_fake
def _(r, log_decay, k, v, a, b, state, segments):
    (B, T, H, K), V = r.shape, v.shape[3]
    C = tokens_per_chunk(K, v.dtype)
    M = -(-T // C)
    inverse, states = v.new_empty(B, M, H, C, C), v.new_empty(B, M, H, K, V)
    return v.new_empty(v.shape), v.new_empty(B, H, K, V, dtype=torch.float32), inverse, states


@scan_backward.register_fake
def _(grads, tensors, optional, kept):
    return [x.new_empty(x.shape) for x in (*tensors, optional[0]) if x is not None]


def _gradients(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    refuse_batched_gradients("wkv7", do, dfinal)
    *tensors, state, segments, inverse, states = ctx.saved_tensors
    grads = scan_backward([do, dfinal], tensors, [state, segments], [inverse, states])
    return *grads[:6], None if state is None else grads[6], None


scan.register_autograd(_gradients, setup_context=save_scan)
scan_backward.register_autograd(no_second_derivatives("wkv7"))
