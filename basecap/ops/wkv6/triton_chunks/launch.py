"""Launches the chunked Triton kernels of the RWKV-5 and 6 recurrence."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from basecap.ops._launch import block_of, registers, three_tf32
from basecap.ops.wkv6.triton_chunks import kernels, kernels_backward

#: Key channels per step of a chunk's forward and backward, value channels per program of a walk.
FORWARD, BACKWARD, WALK = 32, 16, 64


@dataclass(frozen=True)
class _Inputs:
    """Contiguous inputs, and what every kernel takes."""

    r: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    bonus: Tensor
    starts: Tensor | None
    #: Tokens per chunk.
    chunk: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Strides of the log decays from row to row, token to token and head to head; T, H, K, V, M."""
        _, T, H, V = self.v.shape
        return *self.log_decay.stride()[:3], T, H, self.r.shape[3], V, triton.cdiv(T, self.chunk)

    @property
    def parts(self) -> int:
        """Heads of values for each head of keys."""
        return self.v.shape[2] // self.r.shape[2]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Heads of values, chunks, rows."""
        B, T, H, _ = self.v.shape
        return H, triton.cdiv(T, self.chunk), B

    def options(self, channels: int) -> dict[str, Any]:
        """Compile-time options of the kernels of a chunk that take so many key channels at once."""
        # One stage: in a pipelined loop Triton (3.7.1) keeps one buffer for a tile that goes into a product and
        # elsewhere, and on Hopper loads the next tile into it while the product still reads it.
        K, V = self.r.shape[3], self.v.shape[3]
        exact = self.v.dtype == torch.float32
        return {
            "PRECISION": "ieee" if exact else "tf32",
            "LEVELS": self.chunk.bit_length() - 1,
            "PARTS": self.parts,
            "BT": self.chunk,
            "BK": min(channels, block_of(K)),
            "BV": block_of(V),
            "num_stages": 1,
            "num_warps": 4,
            # Three programs per multiprocessor instead of two, for a few numbers more in the cache.
            **registers(None if exact else 168),
        }


def _inputs(tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], starts: Tensor | None, chunk: int) -> _Inputs:
    r, k, v, log_decay, bonus = tensors
    _, stride_t, stride_h, stride_k = log_decay.stride()
    # Within a chunk and across the heads the kernels' addresses have 32 bits.
    if stride_k != 1 or max(chunk * stride_t, log_decay.shape[2] * stride_h) >= 2**31:
        log_decay = log_decay.contiguous()
    flags = None if starts is None else starts.to(torch.int32).contiguous()
    return _Inputs(r.contiguous(), k.contiguous(), v.contiguous(), log_decay, bonus.contiguous(), flags, chunk)


def _walk(inputs: _Inputs, k: Tensor, v: Tensor, first: Tensor | None, last: Tensor | None, *, back: bool) -> Tensor:
    """Return the states before each chunk (after it, of their gradients, with `back`); write that beyond the end."""
    (H, M, B), (K, V) = inputs.grid, (k.shape[3], v.shape[3])
    states = v.new_empty(B, M, H, K, V)
    options = inputs.options(block_of(K)) | {"BV": min(WALK, block_of(V)), "num_warps": 4 if K <= 64 else 8}
    for name in ("LEVELS", *registers(None)):
        del options[name]
    # Two further TF32 products with the rests: the state is as exact as in float32 for inputs of any dtype.
    options["PRECISION"] = "ieee" if v.dtype == torch.float32 else three_tf32()
    kernels.walk_kernel[(triton.cdiv(V, options["BV"]), H, B)](
        k, v, inputs.log_decay, inputs.starts, first, states, last, *inputs.sizes, BACK=back, **options
    )
    return states


def forward(
    r_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTGK: Tensor,
    bonus_GK: Tensor,
    state_BHKV: Tensor | None,
    starts: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, the final state in float32, and the chunks' states and scores, which `backward` takes."""
    inputs = _inputs((r_BTGK, k_BTGK, v_BTHV, log_decay_BTGK, bonus_GK), starts, chunk)
    (H, M, B), (G, K), V = inputs.grid, r_BTGK.shape[2:], v_BTHV.shape[3]
    o = torch.empty_like(inputs.v)
    final = o.new_empty(B, H, K, V, dtype=torch.float32)
    scores = o.new_empty(B, M, G, inputs.chunk, inputs.chunk)
    first = None if state_BHKV is None else state_BHKV.contiguous()
    states = _walk(inputs, inputs.k, inputs.v, first, final, back=False)
    kernels.chunk_fwd_kernel[inputs.grid](
        inputs.r, inputs.k, inputs.v, inputs.log_decay, inputs.bonus, inputs.starts, states, o, scores,
        *inputs.sizes, **inputs.options(FORWARD),
    )  # fmt: skip
    return o, final, states, scores


def backward(
    grads: tuple[Tensor, Tensor | None],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    optional: tuple[Tensor | None, Tensor | None],
    kept: tuple[Tensor, Tensor],
    chunk: int,
) -> list[Tensor | None]:
    """Return the gradients of r, k, v, log_decay, bonus and the first state.

    Args:
        grads: gradients of the outputs and of the final state.
        tensors: r, k, v, log_decay, bonus.
        optional: first state and starts.
        kept: the states and scores of `forward`.
        chunk: its tokens per chunk.
    """
    (first, starts), (states, scores) = optional, kept
    inputs = _inputs(tensors, starts, chunk)
    do = grads[0].contiguous()
    dfinal = None if grads[1] is None else grads[1].contiguous()
    dfirst = None if first is None else first.new_empty(first.shape)
    later = _walk(inputs, inputs.r, do, dfinal, dfirst, back=True)
    # Heads that share keys write a part each.
    dr, dk, dlog = (x.new_empty(inputs.parts, *x.shape) for x in (inputs.r, inputs.k, tensors[3]))
    dv = torch.empty_like(inputs.v)
    H, M, B = inputs.grid
    dbonus = dr.new_empty(B, M, H, dr.shape[-1], dtype=torch.float32)
    # Products of inputs and their gradients may be beyond float16.
    share = tl.bfloat16 if do.dtype == torch.bfloat16 else tl.float32
    kernels_backward.chunk_bwd_kernel[inputs.grid](
        do, inputs.r, inputs.k, inputs.v, inputs.log_decay, inputs.bonus, inputs.starts, states, later, scores,
        dr, dk, dv, dlog, dbonus, *inputs.sizes, SHARE=share, **inputs.options(BACKWARD),
    )  # fmt: skip
    dr, dk, dlog = (x[0] if inputs.parts == 1 else x.sum(0) for x in (dr, dk, dlog))
    dbonus = dbonus.sum((0, 1)).unflatten(0, (-1, inputs.parts)).sum(1)
    return [dr, dk, dv, dlog, dbonus.to(tensors[4].dtype), dfirst]
