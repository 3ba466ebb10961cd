"""The RWKV-5 and RWKV-6 recurrence on flash-linear-attention's Triton kernels (the extra `gpu`)."""

import torch
from torch import Tensor

from basecap.ops import _library

#: Channels per head, of keys and of values, with which the library's kernels are tested here.
SIZE = 64

#: A decay of e^-30 leaves less than a float32 sum can hold. The library adds up to 64 log decays in float32 and takes
#: differences of the sums: one of -1e5 would take the digits of all others in its chunk.
LOWEST = -30.0


def use_library(op: str, k_BTHK: Tensor, v_BTHV: Tensor, segments: Tensor | None) -> bool:
    """Return whether the library's kernels run `op`, wkv6 or wkv7, on such tensors; what runs is logged once.

    A single token, or an empty batch, is left to the caller's own path without a word.
    """
    if k_BTHK.shape[1] == 1 or k_BTHK.shape[0] == 0:
        return False
    reason = _library.unsupported(op, v_BTHV, segments)
    sizes = k_BTHK.shape[3], v_BTHV.shape[3]
    if reason is None and sizes != (SIZE, SIZE):
        reason = f"the library is tested with heads of {SIZE} channels, not of {sizes[0]} and {sizes[1]}"
    return _library.use_library(op, "auto", reason)


@torch.compiler.disable
def wkv6(
    r_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    bonus_HK: Tensor,
    state_BHKV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state [B, H, K, V] in float32; see `wkv6` of this package.

    Products are taken in the dtype of v: the state, and the gradients of log decay and bonus, are no better than that,
    whatever their dtype. Compiled code leaves its graph here: the library's functions are not traceable.
    """
    from fla.ops.rwkv6 import chunk_rwkv6

    r, k = (x.to(v_BTHV.dtype) for x in (r_BTHK, k_BTHK))
    log_decay = log_decay_BTHK.float().clamp(min=LOWEST).expand(r.shape)
    return chunk_rwkv6(
        r, k, v_BTHV, log_decay, bonus_HK.float(), scale=1.0, initial_state=state_BHKV, output_final_state=True
    )
