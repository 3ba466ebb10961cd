"""The delta rule by channel in chunks of tokens, in Triton, for any decay; see README.md."""

from torch import Tensor

from basecap.ops._dispatch import unsupported_by_triton
from basecap.ops._recurrence.blocks import starts
from basecap.ops._transforms import refuse_transforms
from basecap.ops.channel_delta_rule.triton_chunks import operators

RUNS, BACKEND = "Triton kernels by chunks", "triton"

#: The most channels per head, of keys and of values, and the shared memory that a program takes.
WIDEST, SHARED = 128, 64 * 1024


def supports(v_BTHV: Tensor, k_BTHK: Tensor) -> str | None:
    """Return why these kernels cannot run, or None.

    Rows of one chunk run by tokens, as those of `wkv7`, whose walk over the chunks this is.
    """
    (B, T, _, K), V = k_BTHK.shape, v_BTHV.shape[3]
    reason = unsupported_by_triton(v_BTHV, shared=SHARED)
    if reason is not None:
        return reason
    if max(K, V) > WIDEST:
        return f"they take heads of at most {WIDEST} channels"
    tokens = operators.tokens_per_chunk(K)
    if tokens >= T:
        return "the sequence is one chunk"
    return unsupported_by_triton(v_BTHV, programs=max(B, -(-T // tokens)))


def channel_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    erased_BTHK: Tensor,
    log_decay_BTHK: Tensor,
    state_BHKV: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state; products are taken in the dtype of v."""
    refuse_transforms("channel_delta_rule", q_BTHK, k_BTHK, v_BTHV, erased_BTHK, log_decay_BTHK, state_BHKV)
    q, k, erased = (x.to(v_BTHV.dtype) for x in (q_BTHK, k_BTHK, erased_BTHK))
    state = None if state_BHKV is None else state_BHKV.float()
    o, final, _ = operators.scan(q, k, v_BTHV, erased, log_decay_BTHK, state, starts(segments))
    return o, final
