"""The recurrence of RWKV-5 and 6 by chunks of tokens, in Triton; see README.md."""

from torch import Tensor

from basecap.ops._dispatch import unsupported_by_triton
from basecap.ops._recurrence.blocks import starts
from basecap.ops._transforms import refuse_transforms
from basecap.ops.wkv6.triton_chunks import operators

RUNS, BACKEND = "Triton kernels by chunks", "triton"

#: The most channels per head of keys and of values, and the shared memory that a block takes. With 8 warps, which wider
#: values need, Triton 3.6 compiles the kernels of a chunk to wrong results on Hopper.
WIDEST_KEYS, WIDEST_VALUES, SHARED = 128, 64, 144 * 1024


def supports(v_BTHV: Tensor, r_BTHK: Tensor) -> str | None:
    """Return why these kernels cannot run, or None."""
    B, T = v_BTHV.shape[:2]
    chunks = -(-T // operators.tokens_per_chunk(v_BTHV.dtype))
    values = unsupported_by_triton(v_BTHV, widest=WIDEST_VALUES, shared=SHARED, programs=max(B, chunks))
    keys = unsupported_by_triton(r_BTHK, widest=WIDEST_KEYS, shared=SHARED)
    return values or keys or (None if T > 1 else "a single token is no chunk")


def wkv6(
    r_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    bonus_HK: Tensor,
    state_BHKV: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state; products are taken in the dtype of v."""
    refuse_transforms("wkv6", r_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, bonus_HK, state_BHKV)
    r, k = (x.to(v_BTHV.dtype) for x in (r_BTHK, k_BTHK))
    log_decay = log_decay_BTHK.expand(r_BTHK.shape)
    first = None if state_BHKV is None else state_BHKV.float()
    o, final, *_ = operators.scan(r, k, v_BTHV, log_decay, bonus_HK, first, starts(segments))
    return o, final
