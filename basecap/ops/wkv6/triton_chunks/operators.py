"""The chunked kernels of the RWKV-5 and 6 recurrence as PyTorch custom operators, each one node of a compiled graph."""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import launch_of
from basecap.ops._recurrence.blocks import save_scan
from basecap.ops._transforms import no_second_derivatives, refuse_batched_gradients
from basecap.ops.operators import operator


def tokens_per_chunk(dtype: torch.dtype) -> int:
    """Return the chunk of the kernels by chunks; exact products of float32 leave room for half as many."""
    return 32 if dtype == torch.float32 else 64


@operator("basecap::wkv6_chunks")
def scan(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return o [B, T, H, V], the final state [B, H, K, V] in float32; for backward the chunks' states and scores.

    Args:
        r: [B, T, G, K], like k and log_decay; r, k and v of one dtype, in which products are taken.
        k: what is written with.
        v: [B, T, H, V]; H / G neighbouring heads share r, k and log_decay.
        log_decay: at most 0, of any dtype and any strides.
        bonus: [G, K].
        state: float32 [B, H, K, V], or None for zeros.
        starts: bool [B, T], where the state is emptied before the token.
    """
    return launch_of(__package__).forward(r, k, v, log_decay, bonus, state, starts, tokens_per_chunk(v.dtype))


@operator("basecap::wkv6_chunks_backward")
def scan_backward(
    grads: list[Tensor | None], tensors: list[Tensor], optional: list[Tensor | None], kept: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of r, k, v, log_decay, bonus, and of the first state where it is given.

    Args:
        grads: gradients of the outputs and of the final state, None for zero.
        tensors: r, k, v, log_decay, bonus.
        optional: first state and starts.
        kept: the states and scores that `scan` returned.
    """
    do = torch.zeros_like(tensors[2]) if grads[0] is None else grads[0]
    chunk = tokens_per_chunk(tensors[2].dtype)
    found = launch_of(__package__).backward((do, grads[1]), tuple(tensors), tuple(optional), tuple(kept), chunk)
    return [x for x in found if x is not None]


@scan.register_fake
def _(r, k, v, log_decay, bonus, state, starts):
    (B, T, G, K), (H, V) = r.shape, v.shape[2:]
    C = tokens_per_chunk(v.dtype)
    M = -(-T // C)
    final = v.new_empty(B, H, K, V, dtype=torch.float32)
    return v.new_empty(v.shape), final, v.new_empty(B, M, H, K, V), v.new_empty(B, M, G, C, C)


@scan_backward.register_fake
def _(grads, tensors, optional, kept):
    return [x.new_empty(x.shape) for x in (*tensors, optional[0]) if x is not None]


def _gradients(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    refuse_batched_gradients("wkv6", do, dfinal)
    *tensors, state, starts, states, scores = ctx.saved_tensors
    grads = scan_backward([do, dfinal], tensors, [state, starts], [states, scores])
    return *grads[:5], None if state is None else grads[5], None


scan.register_autograd(_gradients, setup_context=save_scan)
scan_backward.register_autograd(no_second_derivatives("wkv6"))
