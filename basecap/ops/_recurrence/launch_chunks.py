"""Launches the Triton kernels that recurrences by chunks share: the walk over the chunks, and the outputs."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from basecap.ops._launch import block_of
from basecap.ops._recurrence import kernels_chunks
from basecap.ops.known_bad import PIPELINES, known_bad_on

#: Channels per step of the products that sum over channels, and value channels per program of a walk.
BLOCK, WALK = 64, 32


class Walked(NamedTuple):
    """What a walk does to the state [K, V] with each chunk: S = across S + right^T (left S) + write^T v.

    Attributes:
        left, right, write: [B, T, H, K].
        v: [B, T, H, V].
        across: [B, M, H, K] float32.
    """

    left: Tensor
    right: Tensor
    write: Tensor
    v: Tensor
    across: Tensor


def walk(through: Walked, first: Tensor | None, last: Tensor | None, options: dict[str, Any], *, back: bool) -> Tensor:
    """Return the states [B, M, H, K, V] before each chunk, with `back` after it from the end; write that beyond.

    Args:
        through: what happens to the state.
        first: float32 [B, H, K, V], where the walk begins, or None for zeros.
        last: the same, to be written, or None.
        options: the compile-time options "BT", tokens per chunk, and "PRECISION".
        back: from the last chunk to the first.
    """
    v, (B, T, H, V), K = through.v, through.v.shape, through.left.shape[3]
    BK, BV = block_of(K), columns(v, WALK)
    M = triton.cdiv(T, options["BT"])
    states = v.new_empty(B, M, H, K, V)
    kernels_chunks.walk_fwd_kernel[(triton.cdiv(V, BV), H, B)](
        through.left, through.right, through.write, v, through.across, first, states, last, T, H, K, V, M,
        BACK=back, STAGES=_stages(v, options["BT"], BK, BV), BK=BK, BV=BV, **options,
    )  # fmt: skip
    return states


def output(read: Tensor, read_pairs: Tensor, v: Tensor, states: Tensor, options: dict[str, Any]) -> Tensor:
    """Return what the tokens read from the states before their chunks and from the chunks' values, [B, T, H, V].

    Args:
        read: [B, T, H, K].
        read_pairs: [B, M, H, C, C].
        v: [B, T, H, V].
        states: of `walk`.
        options: as for `walk`.
    """
    (B, T, H, V), (M, K) = v.shape, (states.shape[1], read.shape[3])
    o, BV = torch.empty_like(v), columns(v, BLOCK)
    kernels_chunks.output_fwd_kernel[(H * triton.cdiv(V, BV), M, B)](
        read, read_pairs, v, states, o, T, H, K, V, M, BK=block_of(K), BV=BV, num_stages=1, **options
    )
    return o


def columns(v: Tensor, most: int) -> int:
    """Return the value channels per program beside all channels of the keys; exact products of float32 leave 16."""
    return min(16 if v.dtype == torch.float32 else most, block_of(v.shape[3]))


def _stages(v: Tensor, chunk: int, BK: int, BV: int) -> int:
    """Return 2, for walks to load one chunk ahead, where there is room for two chunks' tiles; else 1."""
    if v.dtype == torch.float32 or not v.is_cuda or PIPELINES in known_bad_on(v.device):
        return 1
    room = torch.cuda.get_device_properties(v.device).shared_memory_per_multiprocessor
    numbers = 2 * chunk * (3 * BK + BV) + 2 * BK * BV
    return 2 if v.element_size() * numbers + 1024 <= room else 1
