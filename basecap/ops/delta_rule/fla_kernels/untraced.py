"""Calls the library, outside of compiled graphs."""

import torch
from torch import Tensor


@torch.compiler.disable
def delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay_BTH: Tensor | None,
    state_BHKV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state [B, H, K, V] in float32; see `delta_rule` of this package.

    Compiled code leaves its graph here: the library's functions are not traceable.
    """
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, beta = (x.to(v_BTHV.dtype) for x in (q_BTHK, k_BTHK, beta_BTH))
    if log_decay_BTH is None:
        return chunk_delta_rule(
            q, k, v_BTHV, beta, scale=1.0, initial_state=state_BHKV, output_final_state=True
        )  # fmt: skip
    return chunk_gated_delta_rule(
        q, k, v_BTHV, log_decay_BTH.float(), beta, scale=1.0, initial_state=state_BHKV, output_final_state=True
    )
