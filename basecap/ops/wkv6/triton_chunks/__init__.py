"""The recurrence of RWKV-5 and 6 by chunks of tokens, in Triton; see README.md."""

from torch import Tensor

from basecap.ops._dispatch import unsupported_by_triton
from basecap.ops._recurrence.blocks import starts
from basecap.ops._transforms import refuse_transforms
from basecap.ops.wkv6.triton_chunks import operators

RUNS, BACKEND = "Triton kernels by chunks", "triton"

#: The most channels per head of keys, the most of values that a program takes, and the shared memory of a block. With 8
#: warps, which wider values need, Triton 3.6 compiles the kernels of a chunk to wrong results on Hopper.
WIDEST_KEYS, VALUES, SHARED = 128, 64, 144 * 1024


def supports(v_BTHV: Tensor, r_BTHK: Tensor) -> str | None:
    """Return why these kernels cannot run, or None."""
    B, T, _, V = v_BTHV.shape
    chunks = -(-T // operators.tokens_per_chunk(v_BTHV.dtype))
    reason = unsupported_by_triton(v_BTHV, shared=SHARED, programs=max(B, chunks))
    reason = reason or unsupported_by_triton(r_BTHK, widest=WIDEST_KEYS, shared=SHARED)
    if reason is None and V % _parts(V):
        return f"{int(V)} channels of values have no {_parts(V)} equal parts of at most {VALUES}"
    return reason or (None if T > 1 else "a single token is no chunk")


def _parts(V: int) -> int:
    """Return over how many programs the values of a head are spread: channels of values need nothing of each other."""
    return -(-V // VALUES)


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
    (H, V), first = v_BTHV.shape[2:], None if state_BHKV is None else state_BHKV.float()
    parts = _parts(V)
    if parts == 1:
        o, final, *_ = operators.scan(r, k, v_BTHV, log_decay, bonus_HK, first, starts(segments))
        return o, final
    v = v_BTHV.unflatten(-1, (parts, -1)).flatten(2, 3)
    if first is not None:
        first = first.unflatten(-1, (parts, -1)).transpose(2, 3).flatten(1, 2)
    o, final, *_ = operators.scan(r, k, v, log_decay, bonus_HK, first, starts(segments))
    return o.unflatten(2, (H, parts)).flatten(-2), final.unflatten(1, (H, parts)).transpose(2, 3).flatten(-2)
