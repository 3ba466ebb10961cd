"""The RWKV-7 recurrence on flash-linear-attention's Triton kernels (the extra `gpu`)."""

import torch
from torch import Tensor


@torch.compiler.disable
def wkv7(
    r_BTHK: Tensor,
    log_decay_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    a_BTHK: Tensor,
    b_BTHK: Tensor,
    state_BHKV: Tensor | None,
    lowest: float,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state [B, H, K, V] in float32; see `wkv7` of this package.

    Products are taken in the dtype of v: the state, and the gradient of the log decay, are no better than that,
    whatever their dtype. Compiled code leaves its graph here: the library's functions are not traceable.

    Args:
        r_BTHK: see `wkv7`, like all tensors.
        log_decay_BTHK: at least `lowest`: within a chunk the library divides decays by each other.
        k_BTHK: keys.
        v_BTHV: values.
        a_BTHK: what the state is asked for.
        b_BTHK: where the answer is added.
        state_BHKV: state before the first token, or None.
        lowest: from it the library chooses chunks in which the quotients of decays stay finite.
    """
    from fla.ops.rwkv7 import chunk_rwkv7

    r, k, a, b = (x.to(v_BTHV.dtype) for x in (r_BTHK, k_BTHK, a_BTHK, b_BTHK))
    return chunk_rwkv7(
        r, log_decay_BTHK.float(), k, v_BTHV, a, b,
        scale=1.0, initial_state=state_BHKV, output_final_state=True, lower_bound=lowest,
    )  # fmt: skip
