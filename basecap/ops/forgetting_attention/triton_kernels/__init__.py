"""Attention with forget gates in Triton, which reads no tiles of keys that the gates have closed; see README.md."""

from torch import Tensor

from basecap.ops._dispatch import TRITON, unsupported_by_triton, without_autocast
from basecap.ops._transforms import refuse_transforms
from basecap.ops.forgetting_attention import eager
from basecap.ops.forgetting_attention.triton_kernels import operators

RUNS, BACKEND = TRITON, "triton"


def supports(q_BTHK: Tensor, v_BTHV: Tensor) -> str | None:
    """Return why the kernels cannot run, or None."""
    B, _, H, V = v_BTHV.shape
    reason = unsupported_by_triton(q_BTHK, widest=operators.WIDEST, programs=B * H)
    if reason is None and not 1 <= V <= operators.WIDEST:
        return f"the kernels take values of 1 to {operators.WIDEST} channels, not {int(V)}"
    return reason


def attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    scale: float,
    segments: Tensor | None,
) -> Tensor:
    """Return [B, T, H, V]; memory O(T) besides the inputs."""
    with without_autocast(q_BTHK.device):
        total = eager.totals(log_decay_BTH)
        refuse_transforms("forgetting_attention", q_BTHK, k_BTHK, v_BTHV, total)
        o_BTHV: Tensor = operators.attend(q_BTHK, k_BTHK, v_BTHV, total, segments, scale, True)[0]
    return o_BTHV
