"""The recurrence of RWKV-7 token by token in Triton, exact for any decay, with the state in registers."""

from torch import Tensor

from basecap.ops._dispatch import unsupported_by_triton
from basecap.ops._recurrence.blocks import empty_state, starts
from basecap.ops._recurrence.operators import recur
from basecap.ops._transforms import refuse_transforms

RUNS, BACKEND = "Triton kernels by tokens", "triton"


def supports(v_BTHV: Tensor, k_BTHK: Tensor) -> str | None:
    """Return why these kernels cannot run, or None."""
    return unsupported_by_triton(v_BTHV, programs=v_BTHV.shape[0] * v_BTHV.shape[2])


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
    """Return outputs [B, T, H, V] and the final state; computed in float32."""
    inputs = r_BTHK, log_decay_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTHK
    refuse_transforms("wkv7", *inputs, state_BHKV)
    state = empty_state(r_BTHK, v_BTHV) if state_BHKV is None else state_BHKV.float()
    o, final, _ = recur(*inputs, state, starts(segments))
    return o.to(v_BTHV.dtype), final
