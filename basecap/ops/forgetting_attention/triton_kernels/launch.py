"""Launches the Triton kernels of attention with forget gates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from basecap.ops._launch import block_of, dense, first_tokens
from basecap.ops.forgetting_attention.triton_kernels import kernels, kernels_backward, operators
from basecap.ops.known_bad import PIPELINES, known_bad_on

LOG2E = 1.4426950408889634

#: Tiles that a program reads at a time to find those that are open.
TILES_AT_ONCE = 128


@dataclass(frozen=True)
class _Plan:
    """Inputs with stride 1 in the last dimension, and how kernels are launched on them."""

    q: Tensor
    k: Tensor
    v: Tensor
    starts: Tensor | None
    scale: float

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, T, H."""
        B, T, H, _ = self.q.shape
        return B, T, H

    @property
    def heads(self) -> int:
        """Programs along the second axis."""
        return self.q.shape[0] * self.q.shape[2]

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of queries and of keys."""
        queries, keys = operators.tile_of(self.q, self.v)
        return triton.cdiv(self.q.shape[1], queries), triton.cdiv(self.q.shape[1], keys)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the inputs but the last."""
        return *self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3]

    @property
    def sizes(self) -> dict[str, Any]:
        """Compile-time options of all kernels with products."""
        queries, keys = operators.tile_of(self.q, self.v)
        K, V, half = self.q.shape[3], self.v.shape[3], operators.in_half(self.q)
        ahead = half and PIPELINES not in known_bad_on(self.q.device)
        return {
            "H": self.q.shape[2], "K": K, "V": V, "BQ": queries, "BS": keys, "BK": block_of(K), "BV": block_of(V),
            "PACKED": self.starts is not None, "DIRECT": not half, "PRECISION": "ieee",
            "num_warps": 8 if queries == 128 else 4, "num_stages": 2 if ahead else 1,
        }  # fmt: skip


def _plan(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, scale: float) -> _Plan:
    return _Plan(dense(q), dense(k), dense(v), first_tokens(segments), scale)


def forward(
    q: Tensor, k: Tensor, v: Tensor, total: Tensor, segments: Tensor | None, scale: float, skip: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, logsumexps, parts of the sums and ranges of tiles; see `operators.attend`."""
    plan = _plan(q, k, v, segments, scale)
    (B, T, H), (MQ, MS) = plan.shape, plan.tiles
    o = v.new_empty(v.shape)
    lse, parts = (v.new_empty(2, B, H, T, dtype=torch.float32) for _ in range(2))
    ranges = torch.empty(B, H, MQ + MS, dtype=torch.int32, device=v.device)
    if plan.heads:
        _find_open(plan, total.contiguous(), parts, ranges, skip)
        kernels.attend_fwd_kernel[MQ, plan.heads](
            plan.q, plan.k, plan.v, parts, plan.starts, ranges, o, lse, *plan.strides,
            T, B * H * T, MS, scale * LOG2E, **plan.sizes,
        )  # fmt: skip
    return o, lse, parts, ranges


def _find_open(plan: _Plan, total: Tensor, parts: Tensor, ranges: Tensor, skip: bool) -> None:
    """Write the parts of the sums, and the ranges of tiles that are open."""
    (B, T, H), (MQ, MS) = plan.shape, plan.tiles
    sizes = plan.sizes
    bounds = total.new_empty(5, B, H, MS)
    kernels.prepare_fwd_kernel[MS, plan.heads](
        plan.q, plan.k, total, parts, bounds, *plan.strides[:6], T, B * H * T, MS, plan.scale * LOG2E,
        **{name: sizes[name] for name in ("H", "K", "BS", "BK")},
    )  # fmt: skip
    first = ranges.new_empty(B, H, MQ)
    kernels.open_fwd_kernel[MQ, plan.heads](
        bounds, plan.starts, first, T, MS, plan.heads * MS, BM=TILES_AT_ONCE, SKIP=skip,
        **{name: sizes[name] for name in ("H", "BQ", "BS", "PACKED")},
    )  # fmt: skip
    kernels.range_fwd_kernel[MS, plan.heads](first, ranges, MQ, MS, R=sizes["BQ"] // sizes["BS"], BM=TILES_AT_ONCE)


def backward(
    do: Tensor, inputs: Sequence[Tensor], kept: Sequence[Tensor], segments: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the sums; see `operators.attend_backward`."""
    q, k, v = inputs
    lse, parts, ranges = kept
    plan = _plan(q, k, v, segments, scale)
    (B, T, H), (MQ, MS), do = plan.shape, plan.tiles, do.contiguous()
    dq, dk, dv = (x.new_empty(x.shape) for x in inputs)
    delta = torch.empty_like(lse[0])
    # In float32 the sums must not add to the errors of what they sum: most of it cancels.
    dtype = torch.float32 if operators.in_half(v) else torch.float64
    rows, columns = (torch.empty_like(delta, dtype=dtype) for _ in range(2))
    if plan.heads:
        numbers = scale, scale * LOG2E
        # Each launch reads what the one before it wrote.
        for means in (True, False):
            kernels_backward.queries_bwd_kernel[MQ, plan.heads](
                plan.q, plan.k, plan.v, parts, plan.starts, ranges, lse, do, dq, delta, rows, *plan.strides,
                T, B * H * T, MS, *numbers, MEANS=means, **plan.sizes,
            )  # fmt: skip
        kernels_backward.keys_bwd_kernel[MS, plan.heads](
            plan.q, plan.k, plan.v, parts, plan.starts, ranges, lse, do, delta, dk, dv, columns, *plan.strides,
            T, B * H * T, MQ, *numbers, **plan.sizes | {"num_warps": 4},
        )  # fmt: skip
    return dq, dk, dv, rows.double() - columns
