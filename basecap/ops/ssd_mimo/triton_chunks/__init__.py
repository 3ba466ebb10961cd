"""The recurrence of several writes and reads in chunks of tokens, in Triton; see README.md."""

import torch
from torch import Tensor

from basecap.ops._dispatch import TRITON, unsupported_by_triton
from basecap.ops._launch import block_of
from basecap.ops._transforms import refuse_transforms
from basecap.ops.ssd_mimo.inputs import Heads, Strengths
from basecap.ops.ssd_mimo.triton_chunks import operators

RUNS, BACKEND = f"{TRITON} by chunks", "triton"

#: Rows of a chunk: writes, or reads, of its tokens.
BR = 64
#: Channels of queries and keys that a kernel has in its registers at once.
CHANNELS = 64
#: The most writes of a token: chunks have at least 8 tokens.
MOST = 8
#: Largest states K V of the kernels by the bytes of a number, and the most channels of a key.
LARGEST, WIDEST = {2: 128 * 128, 4: 128 * 64}, 128


def supports(v_BTRHV: Tensor, q_BTRGK: Tensor) -> str | None:
    """Return why the kernels cannot run, or None."""
    (B, T, R, _, V), K, itemsize = v_BTRHV.shape, q_BTRGK.shape[4], v_BTRHV.element_size()
    if LARGEST.get(itemsize, 0) < K * V or K > WIDEST:
        return f"there are none for {v_BTRHV.dtype} and states of {int(K)} x {int(V)}"
    if R > MOST:
        return f"they take at most {MOST} writes of a token"
    # The largest kernel holds rows of queries or keys and of values, pairs of rows, and a block of a state.
    shared = itemsize * (BR * CHANNELS + BR * block_of(V) + BR * BR + CHANNELS * block_of(V))
    return unsupported_by_triton(v_BTRHV, shared=shared, programs=max(B, -(-T // tokens_per_chunk(R))))


def untried(v_BTRHV: Tensor, q_BTRGK: Tensor) -> str | None:
    """Return why "auto" does not take these kernels, or None."""
    if v_BTRHV.shape[2] == 1:
        return "their speed with one write of a token has not been measured"
    return None


def tokens_per_chunk(R: int) -> int:
    """Return how many tokens fill the rows of a chunk, with R writes each."""
    return BR >> (R - 1).bit_length()


def ssd_mimo(
    q_BTRGK: Tensor,
    k_BTRGK: Tensor,
    v_BTRHV: Tensor,
    strengths: Strengths,
    heads: Heads | None,
    state_BHKV: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, R, H, V] and the final state in float32; products are taken in the dtype of v."""
    (B, T, R, H, V), K = v_BTRHV.shape, q_BTRGK.shape[4]
    state = v_BTRHV.new_zeros(B, H, K, V, dtype=torch.float32) if state_BHKV is None else state_BHKV
    if heads is None:
        none = v_BTRHV.new_zeros(H, R, K)
        heads = Heads(none, none, v_BTRHV.new_empty(B, T, H, 0))
    cos, sin = heads.angles.cos(), heads.angles.sin()
    tensors = [*strengths, heads.q_bias, heads.k_bias, cos, sin, state]
    refuse_transforms("ssd_mimo", q_BTRGK, k_BTRGK, v_BTRHV, *tensors)
    o, last = operators.scan(q_BTRGK, k_BTRGK, v_BTRHV, tensors, segments)
    return o, last
