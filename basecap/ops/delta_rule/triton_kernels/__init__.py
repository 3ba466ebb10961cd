"""The delta rule by chunks of tokens, in Triton; see README.md."""

from torch import Tensor

from basecap.ops._dispatch import TRITON, unsupported_by_triton
from basecap.ops._transforms import refuse_transforms
from basecap.ops.delta_rule.triton_kernels import operators

RUNS, BACKEND = TRITON, "triton"

#: The most channels per head of queries and keys.
WIDEST = 128


def supports(v_BTHV: Tensor, q_BTHK: Tensor, segments: Tensor | None) -> str | None:
    """Return why these kernels cannot run, or None."""
    (B, T), K = v_BTHV.shape[:2], int(q_BTHK.shape[3])
    chunks = -(-T // operators.tokens_per_chunk(K, v_BTHV.dtype))
    reason = unsupported_by_triton(v_BTHV, programs=max(B, chunks))
    if reason is None and K > WIDEST:
        return f"the kernels take heads of at most {WIDEST} channels, not {K}"
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
    """Return outputs [B, T, H, V] and the final state in float32."""
    q, k = (x.to(v_BTHV.dtype) for x in (q_BTHK, k_BTHK))
    beta, log_decay, state = (None if x is None else x.float() for x in (beta_BTH, log_decay_BTH, state_BHKV))
    refuse_transforms("delta_rule", q, k, v_BTHV, beta, log_decay, state)
    o, final, *_ = operators.scan(q, k, v_BTHV, beta, log_decay, state, segments)
    return o, final
