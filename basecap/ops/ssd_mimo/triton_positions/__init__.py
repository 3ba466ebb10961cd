"""The state space of several writes and reads as `ssd` over R positions for each token, with the kernels of `ssd`."""

from torch import Tensor

from basecap.ops._dispatch import TRITON
from basecap.ops.ssd import triton_kernels
from basecap.ops.ssd_mimo import eager
from basecap.ops.ssd_mimo.inputs import Heads, Strengths

RUNS, BACKEND = f"{TRITON} by positions", "triton"


def supports(v_BTRHV: Tensor, q_BTRGK: Tensor) -> str | None:
    """Return why the kernels of `ssd` cannot run, or None."""
    return triton_kernels.supports(v_BTRHV.flatten(1, 2), q_BTRGK.flatten(1, 2))


def ssd_mimo(
    q_BTRGK: Tensor,
    k_BTRGK: Tensor,
    v_BTRHV: Tensor,
    strengths: Strengths,
    heads: Heads | None,
    state_BHKV: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, R, H, V] and the final state in float32."""
    return eager.ssd_mimo(q_BTRGK, k_BTRGK, v_BTRHV, strengths, heads, state_BHKV, segments, "triton")
