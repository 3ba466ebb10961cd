"""The recurrence of RWKV-7 by chunks of tokens, in Triton, for bounded decays; see README.md."""

import torch
from torch import Tensor

from basecap.ops._dispatch import unsupported_by_triton
from basecap.ops._transforms import refuse_transforms
from basecap.ops.wkv7.triton_chunks import operators

RUNS, BACKEND = "Triton kernels by chunks", "triton"

#: The most channels per head, of keys and of values.
WIDEST = 128


def supports(v_BTHV: Tensor, k_BTHK: Tensor) -> str | None:
    """Return why these kernels cannot run, or None.

    The kernels by tokens are more accurate in float32. For a single token in half precision these kernels read outside
    their memory on Hopper (Triton 3.6), so they do not run rows of one chunk, for which those by tokens are as fast.
    """
    B, T, _, K = k_BTHK.shape
    reason = unsupported_by_triton(v_BTHV)
    if reason is not None:
        return reason
    if v_BTHV.dtype not in (torch.bfloat16, torch.float16):
        return "the kernels by tokens are more accurate in float32"
    if max(K, v_BTHV.shape[3]) > WIDEST:
        return f"they take heads of at most {WIDEST} channels"
    tokens = operators.tokens_per_chunk(K, v_BTHV.dtype)
    if tokens >= T:
        return "the sequence is one chunk"
    return unsupported_by_triton(v_BTHV, programs=max(B, -(-T // tokens)))


def wkv7(
    r_BTHK: Tensor,
    log_decay_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    a_BTHK: Tensor,
    b_BTHK: Tensor,
    state_BHKV: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state; every log decay is at least `LOWEST` of this op."""
    inputs = r_BTHK, log_decay_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTHK
    refuse_transforms("wkv7", *inputs, state_BHKV)
    state = None if state_BHKV is None else state_BHKV.float()
    o, final, *_ = operators.scan(*inputs, state, segments)
    return o, final
