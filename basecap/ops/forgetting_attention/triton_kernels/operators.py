"""The kernels as PyTorch custom operators, each one node of a compiled graph; O(T) memory."""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import launch_of
from basecap.ops._transforms import no_second_derivatives, refuse_batched_gradients
from basecap.ops.operators import operator

#: The most channels per head, of keys and of values.
WIDEST = 128

#: Bytes of a number -> largest head size -> queries and keys of a tile; queries are a multiple of keys.
TILES = {2: {64: (128, 64), 128: (64, 64)}, 4: {128: (32, 32)}}


def in_half(x: Tensor) -> bool:
    """Return whether products round to 16 bits, so that sums and decays need not repeat each other's last bits."""
    return x.element_size() == 2


def tile_of(q: Tensor, v: Tensor) -> tuple[int, int]:
    """Return how many queries and how many keys a tile has."""
    widest = max(q.shape[3], v.shape[3])
    return next(tile for width, tile in TILES[q.element_size()].items() if widest <= width)


@operator("basecap::forgetting_attention")
def attend(
    q: Tensor, k: Tensor, v: Tensor, total: Tensor, segments: Tensor | None, scale: float, skip: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs [B, T, H, V], and what the backward pass takes.

    Args:
        q: queries [B, T, H, K].
        k: keys.
        v: values [B, T, H, V].
        total: log decays summed from the start, float64 [B, H, T].
        segments: integers [B, T], or None.
        scale: factor of the scores.
        skip: whether closed tiles are left out; it changes no bit.

    Returns:
        Outputs; the logsumexps of the scores and the sums, both in base 2 and in two float32 parts [2, B, H, T]; ranges
        of tiles, int32 [B, H, tiles of queries and keys].
    """
    return launch_of(__package__).forward(q, k, v, total, segments, scale, skip)


@attend.register_fake
def _(q, k, v, total, segments, scale, skip):
    (B, T, H, _), (queries, keys) = q.shape, tile_of(q, v)
    lse, parts = (q.new_empty(2, B, H, T, dtype=torch.float32) for _ in range(2))
    tiles = -(-T // queries) + -(-T // keys)
    return v.new_empty(v.shape), lse, parts, q.new_empty(B, H, tiles, dtype=torch.int32)


@operator("basecap::forgetting_attention_backward")
def attend_backward(
    do: Tensor, inputs: list[Tensor], kept: list[Tensor], segments: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the sums.

    Args:
        do: gradient of the outputs.
        inputs: q, k and v.
        kept: all that `attend` returned but the outputs.
        segments: integers [B, T], or None.
        scale: factor of the scores.
    """
    return launch_of(__package__).backward(do, inputs, kept, segments, scale)


@attend_backward.register_fake
def _(do, inputs, kept, segments, scale):
    dq, dk, dv = (x.new_empty(x.shape) for x in inputs)
    return dq, dk, dv, do.new_empty(kept[0].shape[1:], dtype=torch.float64)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, segments, ctx.scale, _ = inputs
    ctx.save_for_backward(q, k, v, segments, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    refuse_batched_gradients("forgetting_attention", do)
    q, k, v, segments, *kept = ctx.saved_tensors
    return *attend_backward(do, [q, k, v], kept, segments, ctx.scale), None, None, None


attend.register_autograd(_backward, setup_context=_setup)
attend_backward.register_autograd(no_second_derivatives("forgetting_attention"))
