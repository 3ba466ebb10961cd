"""State-space duality over chunks of tokens, in Triton; see README.md."""

from torch import Tensor

from basecap.ops._dispatch import TRITON, unsupported_by_triton
from basecap.ops._launch import block_of
from basecap.ops._transforms import refuse_transforms
from basecap.ops.ssd.triton_kernels import operators

RUNS, BACKEND = TRITON, "triton"

#: Tokens per chunk.
BT = 64
#: Largest states K V of the kernels by the bytes of a number: a chunk's inputs and a whole state stay on the chip.
LARGEST = {2: 256 * 128, 4: 128 * 64}


def supports(v_BTHV: Tensor, q_BTGK: Tensor) -> str | None:
    """Return why the kernels cannot run, or None."""
    K, V, itemsize = q_BTGK.shape[3], v_BTHV.shape[3], v_BTHV.element_size()
    if LARGEST.get(itemsize, 0) < K * V:
        return f"there are none for {v_BTHV.dtype} and states of {int(K)} x {int(V)}"
    # What the largest kernel holds of one chunk and head, from above: its tokens, a state, and pairs of tokens.
    BK, BV = block_of(K), block_of(V)
    (B, T), shared = v_BTHV.shape[:2], itemsize * (64 * BK + 192 * BV + BK * BV + 8192)
    return unsupported_by_triton(v_BTHV, shared=shared, programs=max(B, -(-T // BT)))


def slower(v_BTHV: Tensor) -> str | None:
    """Return why plain PyTorch is faster than the kernels, or None."""
    return "exact products of float32 are faster in PyTorch" if v_BTHV.element_size() > 2 else None


def ssd(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    state_BHKV: Tensor | None,
    segments: Tensor | None,
    final: bool,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state in float32, also without `final`."""
    refuse_transforms("ssd", q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, state_BHKV)
    o, last = operators.scan(q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, state_BHKV, segments)
    return o, last
