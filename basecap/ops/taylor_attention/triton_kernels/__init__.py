"""Taylor attention in Triton; see README.md."""

from torch import Tensor

from basecap.ops._dispatch import TRITON, unsupported_by_triton
from basecap.ops._transforms import refuse_transforms
from basecap.ops.taylor_attention.triton_kernels import operators

RUNS, BACKEND = TRITON, "triton"


def supports(v_BTHV: Tensor, q_BTHK: Tensor, state_BHFX: Tensor | None, segments: Tensor | None) -> str | None:
    """Return why the kernels cannot run, or None."""
    B, _, H, V = v_BTHV.shape
    if state_BHFX is not None or segments is not None or q_BTHK.shape[3] > 31 or V > 128:
        return "they take no state, no segments and at most 31 features of 128 values"
    return unsupported_by_triton(v_BTHV, programs=B * H)


def taylor_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    state_BHFX: Tensor | None,
    segments: Tensor | None,
    eps: float,
) -> Tensor:
    """Return outputs [B, T, H, V]; state and segments are None."""
    q, k = q_BTHK.to(v_BTHV.dtype), k_BTHK.to(v_BTHV.dtype)
    refuse_transforms("taylor_attention", q, k, v_BTHV)
    o_BTHV: Tensor = operators.attend(q, k, v_BTHV, eps, operators.CHUNK)[0]
    return o_BTHV
