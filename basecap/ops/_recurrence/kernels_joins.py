"""Shared by the kernels by chunks for any decay: blocks of tokens that double in size.

A chunk's scores come from joining neighbouring blocks of tokens. Log decays from a block's start to its tokens and from
these to its end are only ever added up: nothing overflows, and -inf is a decay as any other.
"""

import triton
import triton.language as tl


@triton.jit
def spread(b_x, level: tl.constexpr):
    """What two neighbouring blocks of 2^level tokens hold, at the same places in their blocks, summed up in both."""
    b_pairs = tl.reshape(b_x, [b_x.shape[0] >> (level + 1), 2, 1 << level, b_x.shape[1]])
    b_sums = tl.sum(b_pairs, 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(b_sums, b_pairs.shape), b_x.shape)


@triton.jit
def join(b_from, b_to, b_all, level: tl.constexpr):
    """The log decays of blocks of 2^(level + 1) tokens from those of their halves: sums, nothing is subtracted."""
    right = in_right(tl.arange(0, b_all.shape[0]), level)[:, None]
    b_left = spread(tl.where(right, 0.0, b_all), level)
    b_right = spread(tl.where(right, b_all, 0.0), level)
    return tl.where(right, b_from + b_left, b_from), tl.where(right, b_to, b_to + b_right), b_left + b_right


@triton.jit
def in_right(o_t, level: tl.constexpr):
    """Whether a token is in the right one of the two blocks of 2^level tokens that are joined."""
    return (o_t >> level) & 1 == 1


@triton.jit
def joined(o_t, level: tl.constexpr):
    """[t, s]: whether two tokens are in two different blocks of 2^level tokens that are joined."""
    return (o_t >> level)[:, None] ^ 1 == (o_t >> level)[None, :]
