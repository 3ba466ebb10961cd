"""The chunked kernels of the delta rule by channel as PyTorch custom operators, each one node of a compiled graph."""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import launch_of
from basecap.ops._recurrence.blocks import save_scan
from basecap.ops._transforms import no_second_derivatives, refuse_batched_gradients
from basecap.ops.operators import operator


def tokens_per_chunk(K: int) -> int:
    """Return 32 tokens, no more than channels, or else the keys would depend on each other, but at least 16.

    With 64 rows Triton multiplies by wgmma on Hopper, and its assembler made wrong code of that; see README.md.
    """
    return max(16, min(32, 1 << (K.bit_length() - 1)))


@operator("basecap::channel_delta_rule")
def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    erased: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [B, T, H, V], the final state [B, H, K, V] in float32; for backward the chunks' matrices.

    Args:
        q: [B, T, H, K], like k, erased and log_decay; all but the latter of the dtype of v, that of the products.
        k: what is written with.
        v: [B, T, H, V], times the writing strengths.
        erased: what the state is read with before it is written to.
        log_decay: at most 0, of any dtype.
        state: float32 [B, H, K, V], or None for zeros.
        starts: bool [B, T], where the state is emptied before the token.
    """
    return launch_of(__package__).forward((q, k, v, erased, log_decay), state, starts, tokens_per_chunk(q.shape[3]))


@operator("basecap::channel_delta_rule_backward")
def scan_backward(
    grads: list[Tensor | None], tensors: list[Tensor], optional: list[Tensor | None], matrices: Tensor
) -> list[Tensor]:
    """Return the gradients of q, k, v, erased, log_decay, and of the first state where it is given.

    Args:
        grads: gradients of the outputs and of the final state, None for zero.
        tensors: q, k, v, erased, log_decay.
        optional: first state and starts.
        matrices: those that `scan` returned.
    """
    do = torch.zeros_like(tensors[2]) if grads[0] is None else grads[0]
    found = launch_of(__package__).backward((do, grads[1]), tuple(tensors), tuple(optional), matrices)
    return [x for x in found if x is not None]


@scan.register_fake
def _(q, k, v, erased, log_decay, state, starts):
    (B, T, H, K), V = q.shape, v.shape[3]
    C = tokens_per_chunk(K)
    final = v.new_empty(B, H, K, V, dtype=torch.float32)
    return v.new_empty(v.shape), final, v.new_empty(2, B, -(-T // C), H, C, C)


@scan_backward.register_fake
def _(grads, tensors, optional, matrices):
    return [x.new_empty(x.shape) for x in (*tensors, optional[0]) if x is not None]


def _gradients(ctx: Any, do: Tensor | None, dfinal: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    refuse_batched_gradients("channel_delta_rule", do, dfinal)
    *tensors, state, starts, matrices = ctx.saved_tensors
    grads = scan_backward([do, dfinal], tensors, [state, starts], matrices)
    return *grads[:5], None if state is None else grads[5], None


scan.register_autograd(_gradients, setup_context=save_scan)
scan_backward.register_autograd(no_second_derivatives("channel_delta_rule"))
