"""The recurrence of RWKV-5 and 6 token by token in Triton, exact for any decay, with the state in registers."""

from torch import Tensor

from basecap.ops._dispatch import unsupported_by_triton
from basecap.ops._recurrence.blocks import empty_state, starts
from basecap.ops._recurrence.operators import recur
from basecap.ops._transforms import refuse_transforms

RUNS, BACKEND = "Triton kernels by tokens", "triton"


def supports(v_BTHV: Tensor, r_BTHK: Tensor) -> str | None:
    """Return why these kernels cannot run, or None."""
    return unsupported_by_triton(v_BTHV, programs=v_BTHV.shape[0] * v_BTHV.shape[2])


def wkv6(
    r_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    bonus_HK: Tensor,
    state_BHKV: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state; computed in float32."""
    refuse_transforms("wkv6", r_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, bonus_HK, state_BHKV)
    log_decay = log_decay_BTHK.expand(r_BTHK.shape)
    state = empty_state(r_BTHK, v_BTHV) if state_BHKV is None else state_BHKV.float()
    o, final, _ = recur(r_BTHK, log_decay, k_BTHK, v_BTHV, None, None, state, starts(segments))
    own = (r_BTHK.float() * k_BTHK * bonus_HK).sum(-1, keepdim=True) * v_BTHV
    return (o + own).to(v_BTHV.dtype), final
