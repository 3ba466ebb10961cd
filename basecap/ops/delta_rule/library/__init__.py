"""The delta rule on flash-linear-attention's Triton kernels (the extra `gpu`), where they are installed and correct.

They take wider heads than the kernels of this package.
"""

from torch import Tensor

from basecap.ops import _library
from basecap.ops._transforms import refuse_transforms
from basecap.ops.delta_rule import chunks

RUNS, BACKEND = "flash-linear-attention's kernels", None

OP = "the delta rule"


def supports(v_BTHV: Tensor, q_BTHK: Tensor, segments: Tensor | None) -> str | None:
    """Return why these kernels cannot run, or None; heads that `chunks` takes are left to plain PyTorch."""
    reason = _library.unsupported(OP, v_BTHV, segments)
    K = int(q_BTHK.shape[3])
    if reason is None and not chunks.WIDEST < K <= 256:
        return f"they are used for heads of {chunks.WIDEST + 1} to 256 channels, not {K}"
    return reason


def delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay_BTH: Tensor | None,
    state_BHKV: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state in float32; `segments` are None."""
    from basecap.ops.delta_rule.library import untraced  # it imports PyTorch's compiler, which takes seconds

    refuse_transforms("delta_rule", q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH, state_BHKV)
    return untraced.delta_rule(q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH, state_BHKV)
