"""Launches the Triton kernels of the delta rule."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from basecap.ops._launch import block_of, three_tf32
from basecap.ops.delta_rule.triton_kernels import kernels, kernels_backward

#: Channels per step of the products that sum over channels.
BLOCK = 64


@dataclass(frozen=True)
class _Inputs:
    """Contiguous inputs, and what every kernel takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor | None
    ids: Tensor | None
    chunk: int

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
    def options(self) -> dict[str, object]:
        """Compile-time options common to all kernels."""
        # One stage: in a pipelined loop Triton (3.7.1) keeps one buffer for a tile that goes into a product and
        # elsewhere, and on Hopper loads the next tile into it while the product still reads it.
        precision = "ieee" if self.q.dtype == torch.float32 else "tf32"
        return {"PRECISION": precision, "BT": self.chunk, "num_stages": 1}

    @property
    def exact(self) -> str:
        """The precision of the inverses: what comes out of TF32 is better than bfloat16, but not than float16."""
        return {torch.bfloat16: "tf32", torch.float16: three_tf32(), torch.float32: "ieee"}[self.q.dtype]

    @property
    def blocks(self) -> dict[str, int]:
        """Channels per step of the kernels of a chunk."""
        return {"BK": min(BLOCK, block_of(self.sizes[2])), "BV": min(BLOCK, block_of(self.sizes[3]))}

    @property
    def columns(self) -> dict[str, int]:
        """The whole keys and the columns of a state that one program of a walk keeps in registers."""
        return {"BK": block_of(self.sizes[2]), "BV": min(64, block_of(self.sizes[3]))}

    def walk_grid(self) -> tuple[int, int, int]:
        """Blocks of columns, heads, rows."""
        _, H, _, V, _ = self.sizes
        return triton.cdiv(V, self.columns["BV"]), H, len(self.v)


def _inputs(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, ids: Tensor | None, chunk: int):
    log_decay, ids = (None if x is None else x.contiguous() for x in (log_decay, ids))
    return _Inputs(q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous(), log_decay, ids, chunk)


def _prepare(inputs: _Inputs) -> tuple[Tensor, Tensor]:
    """Return inverses and scores [2, B, M, H, C, C] and the decays from a chunk's start and to its end [2, B, H, T]."""
    (T, H, K, _, M), B, C = inputs.sizes, len(inputs.v), inputs.chunk
    matrices = inputs.q.new_empty(2, B, M, H, C, C)
    decays = inputs.q.new_empty(2, B, H, T, dtype=torch.float32)
    kernels.chunk_fwd_kernel[inputs.grid](
        inputs.q, inputs.k, inputs.beta, inputs.log_decay, inputs.ids, *matrices, *decays, T, H, K, M,
        EXACT=inputs.exact, BK=inputs.blocks["BK"], LEVELS=C.bit_length() - 1,
        **inputs.options,
    )  # fmt: skip
    return matrices, decays


def forward(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay_BTH: Tensor | None,
    state_BHKV: Tensor | None,
    segments: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, the final state in float32, and the chunks' matrices and decays, which `backward` takes."""
    inputs = _inputs(q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH, segments, chunk)
    (_, H, K, V, _), B = inputs.sizes, len(v_BTHV)
    matrices, decays = _prepare(inputs)
    o = torch.empty_like(inputs.v)
    last = o.new_empty(B, H, K, V, dtype=torch.float32)
    first = None if state_BHKV is None else state_BHKV.contiguous()
    kernels.walk_fwd_kernel[inputs.walk_grid()](
        inputs.q, inputs.k, inputs.v, inputs.beta, *matrices, *decays, first, o, None, None, last, *inputs.sizes,
        **inputs.options, **inputs.columns,
    )  # fmt: skip
    return o, last, matrices, decays


def backward(
    grads: tuple[Tensor, Tensor | None],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    optional: tuple[Tensor | None, Tensor | None, Tensor | None],
    kept: tuple[Tensor, Tensor],
    chunk: int,
) -> list[Tensor | None]:
    """Return the gradients of q, k, v, beta, the log decays and the first state.

    Args:
        grads: gradients of the outputs and of the final state.
        tensors: q, k, v, beta.
        optional: log decays, first state and segments.
        kept: the matrices and decays of `forward`.
        chunk: tokens per chunk.
    """
    log_decay, first, ids = optional
    inputs = _inputs(*tensors, log_decay, ids, chunk)
    (_, H, K, V, M), B = inputs.sizes, len(inputs.v)
    (inverse, scores), decays = kept[0], kept[1]
    do = grads[0].contiguous()
    dlast = None if grads[1] is None else grads[1].contiguous()
    first = None if first is None else first.contiguous()
    # In float32: how much passes through a chunk, which the log decays need, is their product.
    states, later = inputs.v.new_empty(2, B, M, H, K, V, dtype=torch.float32)
    u, dright, dv = (torch.empty_like(inputs.v) for _ in range(3))
    dfirst = None if first is None else torch.empty_like(first)
    kernels.walk_fwd_kernel[inputs.walk_grid()](
        inputs.q, inputs.k, inputs.v, inputs.beta, inverse, scores, *decays, first, None, u, states, None,
        *inputs.sizes, **inputs.options, **inputs.columns,
    )  # fmt: skip
    kernels_backward.walk_bwd_kernel[inputs.walk_grid()](
        do, dlast, inputs.q, inputs.k, inputs.beta, inverse, scores, *decays, dright, later, dfirst, *inputs.sizes,
        **inputs.options, **inputs.columns,
    )  # fmt: skip
    dscores, dsystem = torch.empty_like(kept[0])
    dbeta_pairs, dlog_pairs = torch.empty_like(decays)
    kernels_backward.pairs_bwd_kernel[inputs.grid](
        do, inputs.q, inputs.k, inputs.v, inputs.beta, inputs.log_decay, inputs.ids, u, dright, dscores, dsystem, dv,
        dbeta_pairs, dlog_pairs, *inputs.sizes, **inputs.options, **inputs.blocks,
    )  # fmt: skip
    dq, dk, dbeta = (torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.beta))
    dlog = None if inputs.log_decay is None else torch.empty_like(inputs.log_decay)
    kernels_backward.scan_bwd_kernel[inputs.grid](
        do, inputs.q, inputs.k, inputs.beta, u, dright, dscores, dsystem, *decays, states, later, dq, dk,
        dbeta_pairs, dlog_pairs, dbeta, dlog, *inputs.sizes, **inputs.options, **inputs.blocks,
    )  # fmt: skip
    return [dq, dk, dv, dbeta, dlog, dfirst]
