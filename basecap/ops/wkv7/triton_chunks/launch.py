"""Launches the Triton kernels of RWKV-7's recurrence by chunks."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from basecap.ops._launch import block_of, three_tf32
from basecap.ops._recurrence.launch_chunks import BLOCK, Walked, output, walk
from basecap.ops.wkv7.triton_chunks import kernels, kernels_backward


@dataclass(frozen=True)
class _Inputs:
    """Contiguous inputs, and what every kernel takes."""

    r: Tensor
    log_decay: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    ids: Tensor | None
    chunk: int

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """B, T, H, K, V, M."""
        B, T, H, V = self.v.shape
        return B, T, H, self.r.shape[3], V, triton.cdiv(T, self.chunk)

    @property
    def blocks(self) -> tuple[int, int]:
        """Channels of keys and of values, up to the next power of two."""
        return block_of(self.shape[3]), block_of(self.shape[4])

    @property
    def options(self) -> dict[str, Any]:
        """Compile-time options common to all kernels."""
        # For half precision's few products of float32, TF32 alone is too coarse: it cuts off what float16 would round.
        return {"PRECISION": "ieee" if self.v.dtype == torch.float32 else three_tf32(), "BT": self.chunk}

    @property
    def wide(self) -> dict[str, tl.dtype]:
        """What log decays are summed in, and what holds decays from a chunk's middle: not float16."""
        return {
            "SUM": tl.float64 if self.v.dtype == torch.float32 else tl.float32,
            "WIDE": tl.bfloat16 if self.v.dtype == torch.bfloat16 else tl.float32,
        }

    def matrices(self, number: int) -> Tensor:
        """Return empty matrices between the tokens of a chunk [number, B, M, H, C, C]."""
        B, _, H, _, _, M = self.shape
        return self.v.new_empty(number, B, M, H, self.chunk, self.chunk)


@dataclass(frozen=True)
class _Chunks:
    """What is known of the chunks before their states; the last three only for the backward. See README.md."""

    recall: Tensor
    read: Tensor
    write: Tensor
    answer: Tensor
    across: Tensor
    read_pairs: Tensor
    adjoint: Tensor | None
    recall_pairs: Tensor | None
    adjoint_pairs: Tensor | None


def _inputs(tensors: tuple[Tensor, ...], segments: Tensor | None, chunk: int) -> _Inputs:
    r, log_decay, k, v, a, b = (x.contiguous() for x in tensors)
    return _Inputs(r, log_decay, k, v, a, b, None if segments is None else segments.contiguous(), chunk)


def _prepare(inputs: _Inputs, inverse: Tensor, back: bool) -> _Chunks:
    (B, _, H, K, _, M), C = inputs.shape, inputs.chunk
    tokens = inputs.v.new_empty(4 + back, *inputs.r.shape)
    across = inputs.v.new_empty(B, M, H, K, dtype=torch.float32)
    pairs = inputs.matrices(3 if back else 1)
    recall, read, write, answer = tokens[:4]
    adjoint, recall_pairs, adjoint_pairs = (tokens[4], pairs[1], pairs[2]) if back else (None, None, None)
    found = _Chunks(recall, read, write, answer, across, pairs[0], adjoint, recall_pairs, adjoint_pairs)
    kernels.chunk_fwd_kernel[(H, M, B)](
        inputs.r, inputs.log_decay, inputs.k, inputs.a, inputs.b, inputs.ids, inverse, recall, read, write,
        answer, across, pairs[0], adjoint, recall_pairs, adjoint_pairs, *inputs.shape[1:4], M,
        BACK=back, **inputs.wide, BK=min(BLOCK, inputs.blocks[0]), LEVELS=C.bit_length() - 1,
        num_stages=1, **inputs.options,
    )  # fmt: skip
    return found


def _walk(inputs: _Inputs, chunks: _Chunks, v: Tensor, first: Tensor | None, last: Tensor | None, back: bool) -> Tensor:
    """Return the states before each chunk (after it, of their gradients, with `back`), and write the one beyond."""
    left, right, write = chunks.recall, chunks.answer, chunks.write
    if back:
        left, right, write = chunks.answer, chunks.recall, chunks.read
    return walk(Walked(left, right, write, v, chunks.across), first, last, inputs.options, back=back)


def forward(
    tensors: tuple[Tensor, ...], state_BHKV: Tensor | None, segments: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, the final state in float32, and the chunks' inverses and states, which `backward` takes.

    Args:
        tensors: r, log decays, k, v, a, b.
        state_BHKV: state before the first token, or None.
        segments: [B, T] or None.
        chunk: tokens per chunk.
    """
    inputs = _inputs(tensors, segments, chunk)
    B, _, H, K, V, _ = inputs.shape
    inverse = inputs.matrices(1)[0]
    chunks = _prepare(inputs, inverse, back=False)
    first = None if state_BHKV is None else state_BHKV.contiguous()
    last = inputs.v.new_empty(B, H, K, V, dtype=torch.float32)
    states = _walk(inputs, chunks, inputs.v, first, last, back=False)
    return output(chunks.read, chunks.read_pairs, inputs.v, states, inputs.options), last, inverse, states


def backward(
    grads: tuple[Tensor, Tensor | None],
    tensors: tuple[Tensor, ...],
    optional: tuple[Tensor | None, Tensor | None],
    kept: tuple[Tensor, Tensor],
    chunk: int,
) -> list[Tensor | None]:
    """Return the gradients of r, the log decays, k, v, a, b and the first state.

    Args:
        grads: gradients of the outputs and of the final state.
        tensors: r, log decays, k, v, a, b.
        optional: first state and segments.
        kept: the inverses and states of `forward`.
        chunk: tokens per chunk.
    """
    (first, ids), (inverse, states) = optional, kept
    inputs = _inputs(tensors, ids, chunk)
    B, _, H, K, V, M = inputs.shape
    BK, BV = inputs.blocks
    do, dlast = grads[0].contiguous(), None if grads[1] is None else grads[1].contiguous()
    dfirst = None if first is None else torch.empty_like(first, memory_format=torch.contiguous_format)
    chunks = _prepare(inputs, inverse, back=True)
    later = _walk(inputs, chunks, do, dlast, dfirst, back=True)
    recalled, drecalled, dv = (torch.empty_like(inputs.v) for _ in range(3))
    columns = min(BLOCK, BV)
    kernels_backward.values_bwd_kernel[(H * triton.cdiv(V, columns), M, B)](
        do, inputs.v, chunks.recall, chunks.adjoint, chunks.write, chunks.recall_pairs, chunks.adjoint_pairs,
        chunks.read_pairs, states, later, recalled, drecalled, dv, *inputs.shape[1:],
        BK=BK, BV=columns, num_stages=1, **inputs.options,
    )  # fmt: skip
    dr, dlog, dk, da, db = (torch.empty_like(x) for x in (inputs.r, inputs.log_decay, inputs.k, inputs.a, inputs.b))
    channels = min(BLOCK, BK)
    kernels_backward.keys_bwd_kernel[(H * triton.cdiv(K, channels), M, B)](
        do, inputs.r, inputs.log_decay, inputs.k, inputs.v, inputs.a, inputs.b, inputs.ids, recalled, drecalled,
        states, later, chunks.across, dr, dlog, dk, da, db, *inputs.shape[1:],
        **inputs.wide, BK=channels, BV=columns, num_stages=1, num_warps=8, **inputs.options,
    )  # fmt: skip
    return [dr, dlog, dk, dv, da, db, dfirst]
