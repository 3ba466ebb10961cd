"""Launches the chunked Triton kernels of the delta rule by channel."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from basecap.ops._launch import block_of, three_tf32
from basecap.ops._recurrence.launch_chunks import BLOCK, Walked, columns, output, walk
from basecap.ops.channel_delta_rule.triton_chunks import kernels, kernels_backward

#: Key channels per step of a chunk's scores and of what the walk needs.
SCORES, PARTS = 16, 32
#: Key channels of a program that computes their gradients, in half precision and in float32.
BACKWARD = 32, 16


@dataclass(frozen=True)
class _Inputs:
    """Contiguous inputs, and what every kernel takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    erased: Tensor
    log_decay: Tensor
    starts: Tensor | None
    chunk: int

    @property
    def keys(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """What the kernels of a chunk take of single tokens."""
        return self.q, self.k, self.erased, self.log_decay, self.starts

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """T, H, K, V, M."""
        _, T, H, V = self.v.shape
        return T, H, self.q.shape[3], V, triton.cdiv(T, self.chunk)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Heads, chunks, rows."""
        _, H, _, _, M = self.sizes
        return H, M, len(self.v)

    @property
    def options(self) -> dict[str, Any]:
        """Compile-time options common to all kernels."""
        return {"PRECISION": "ieee" if self.exact else "tf32", "BT": self.chunk}

    @property
    def exact(self) -> bool:
        """Whether products and exponentials are those of float32, not of the hardware's fast ways."""
        return self.v.dtype == torch.float32

    @property
    def inverse(self) -> str:
        """The precision of the inverses: what comes out of TF32 is better than bfloat16, but not than float16."""
        return {torch.bfloat16: "tf32", torch.float16: three_tf32(), torch.float32: "ieee"}[self.v.dtype]

    @property
    def levels(self) -> int:
        """How often blocks that double in size are joined to a chunk."""
        return self.chunk.bit_length() - 1

    def channels(self, most: int) -> int:
        """Return the key channels that a kernel takes at once, at most so many."""
        return min(most, block_of(self.q.shape[3]))


@dataclass(frozen=True)
class _Chunks:
    """What is known of the chunks before their states; see README.md."""

    found: Tensor
    read: Tensor
    write: Tensor
    answer: Tensor
    across: Tensor
    value_pairs: Tensor


def _inputs(tensors: tuple[Tensor, ...], starts: Tensor | None, chunk: int) -> _Inputs:
    q, k, v, erased, log_decay = (x.contiguous() for x in tensors)
    return _Inputs(q, k, v, erased, log_decay, None if starts is None else starts.to(torch.int32).contiguous(), chunk)


def _prepare(inputs: _Inputs, matrices: Tensor) -> _Chunks:
    (H, M, B), (T, _, K, _, _) = inputs.grid, inputs.sizes
    found, read, write, answer = inputs.v.new_empty(4, *inputs.q.shape)
    across = inputs.v.new_empty(B, M, H, K, dtype=torch.float32)
    value_pairs = torch.empty_like(matrices[0])
    kernels.parts_fwd_kernel[inputs.grid](
        *inputs.keys, *matrices, found, read, write, answer, across, value_pairs, T, H, K, M,
        EXACT=inputs.exact, BK=inputs.channels(PARTS), num_stages=1, **inputs.options,
    )  # fmt: skip
    return _Chunks(found, read, write, answer, across, value_pairs)


def _walk(inputs: _Inputs, chunks: _Chunks, first: Tensor | None, last: Tensor | None) -> Tensor:
    """Return the states before each chunk, and write the final one."""
    through = Walked(chunks.found, chunks.answer, chunks.write, inputs.v, chunks.across)
    return walk(through, None if first is None else first.contiguous(), last, inputs.options, back=False)


def forward(
    tensors: tuple[Tensor, ...], state_BHKV: Tensor | None, starts: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, the final state in float32, and the chunks' matrices, which `backward` takes.

    Args:
        tensors: q, k, v, erased, log decays.
        state_BHKV: state before the first token, or None.
        starts: [B, T] or None.
        chunk: tokens per chunk.
    """
    inputs = _inputs(tensors, starts, chunk)
    (H, M, B), (T, _, K, V, _) = inputs.grid, inputs.sizes
    matrices = inputs.v.new_empty(2, B, M, H, chunk, chunk)
    kernels.scores_fwd_kernel[inputs.grid](
        *inputs.keys, *matrices, T, H, K, M,
        EXACT=inputs.exact, INVERSE=inputs.inverse, LEVELS=inputs.levels, BK=inputs.channels(SCORES), num_stages=1,
        **inputs.options,
    )  # fmt: skip
    chunks = _prepare(inputs, matrices)
    last = inputs.v.new_empty(B, H, K, V, dtype=torch.float32)
    states = _walk(inputs, chunks, state_BHKV, last)
    return output(chunks.read, chunks.value_pairs, inputs.v, states, inputs.options), last, matrices


def backward(
    grads: tuple[Tensor, Tensor | None],
    tensors: tuple[Tensor, ...],
    optional: tuple[Tensor | None, Tensor | None],
    matrices: Tensor,
) -> list[Tensor | None]:
    """Return the gradients of q, k, v, erased, the log decays and the first state.

    Args:
        grads: gradients of the outputs and of the final state.
        tensors: q, k, v, erased, log decays.
        optional: first state and starts.
        matrices: those of `forward`.
    """
    first, starts = optional
    inputs = _inputs(tensors, starts, matrices.shape[-1])
    (H, M, B), (_, _, K, V, _) = inputs.grid, inputs.sizes
    do, dlast = grads[0].contiguous(), None if grads[1] is None else grads[1].contiguous()
    dfirst = None if first is None else torch.empty_like(first, memory_format=torch.contiguous_format)
    chunks = _prepare(inputs, matrices)
    states = _walk(inputs, chunks, first, None)
    back = Walked(chunks.answer, chunks.found, chunks.read, do, chunks.across)
    later = walk(back, dlast, dfirst, inputs.options, back=True)
    written, dv = torch.empty_like(inputs.v), torch.empty_like(inputs.v)
    BV = columns(inputs.v, BLOCK)
    kernels_backward.values_bwd_kernel[(H * triton.cdiv(V, BV), M, B)](
        do, inputs.v, chunks.found, chunks.write, matrices[1], chunks.value_pairs, states, later, written, dv,
        *inputs.sizes, BK=block_of(K), BV=BV, num_stages=1, **inputs.options,
    )  # fmt: skip
    # Products of inputs and their gradients may be beyond float16.
    share = tl.bfloat16 if do.dtype == torch.bfloat16 else tl.float32
    dq, dk, derased, dlog = (torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.erased, inputs.log_decay))
    BK = inputs.channels(BACKWARD[inputs.exact])
    kernels_backward.keys_bwd_kernel[(H * triton.cdiv(K, BK), M, B)](
        do, *inputs.keys, written, dv, states, later, dq, dk, derased, dlog, *inputs.sizes,
        EXACT=inputs.exact, SHARE=share, LEVELS=inputs.levels, BK=BK, BV=BV, num_stages=1, **inputs.options,
    )  # fmt: skip
    return [dq, dk, dv, derased, dlog, dfirst]
