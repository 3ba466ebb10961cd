"""Inverts a choice with Triton kernels: for each chunk (or block of keys) the queries that chose it."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._selection import kernels_index


@dataclass(frozen=True)
class Index:
    """For each chunk the pairs (query, choice) that chose it, in one int32 buffer.

    `pairs` [G, N * H / G * remote] holds the lists, `offset` [G, M + 1] where they start. Lists longer than `size` have
    extra shares, so that one program never has all the work: `share` [G, M + 1] numbers them, `chunk` is theirs.
    """

    buffer: Tensor
    groups: int
    pairs_per_group: int
    M: int
    size: int

    @property
    def extra(self) -> int:
        """The most extra shares a key head can have."""
        return self.pairs_per_group // self.size

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Offset, pairs, share and chunk, as the kernels take them."""
        # The lists come first, where vector loads find them aligned.
        widths = [self.pairs_per_group, self.M + 1, self.M + 1, self.extra]
        pairs, offset, share, chunk = self.buffer.split([self.groups * width for width in widths])
        return offset, pairs, share, chunk


#: Pairs of a key head times chunks up to which one kernel makes the whole index: its programs read all pairs.
AT_ONCE = 2**20


def new_index(choice: Tensor, M: int, groups: int, size: int) -> Index:
    """Return an index of `choice` with nothing written to it yet."""
    pairs = choice.numel() // groups
    length = groups * (pairs + 2 * (M + 1) + pairs // size)
    return Index(choice.new_empty(length), groups, pairs, M, size)


def invert(choice: Tensor, M: int, groups: int, size: int, keys: int = 1) -> Index:
    """Return the index of `choice` [N, H, remote], chunks 0..M-1 or -1, in shares of `size`.

    With `keys` above 1 the choice is of keys, and a chunk has so many.
    """
    _, H, remote = choice.shape
    if choice.numel() >= 2**31:
        raise ConfigError(f"{choice.numel()} choices are too many for 32-bit lists; use fewer tokens at a time.")
    index = new_index(choice, M, groups, size)
    pairs = index.pairs_per_group
    offset, lists, share, chunk = index.parts
    heads = {"H": H, "GROUP": H // groups, "REMOTE": remote, "KEYS": keys}
    if pairs * M <= AT_ONCE:
        bins = max(16, triton.next_power_of_2(M + 1))
        kernels_index.index_kernel[M, groups](
            choice, offset, lists, share, chunk, pairs, M, index.extra, **heads, SHARE=size, BINS=bins, BT=1024
        )
        return index
    index.buffer.zero_()  # entries that no list needs stay zero
    # Counts for every block and chunk take no more memory than the pairs.
    block = max(256, triton.next_power_of_2(M) // 2)
    blocks = triton.cdiv(pairs, block)
    count = choice.new_zeros(groups, blocks, M)
    rank = torch.empty_like(choice)
    total = choice.new_empty(groups, M)
    shape = {**heads, "BLOCK": block}
    kernels_index.count_kernel[blocks, groups](choice, count, rank, pairs, M, **shape, BT=32, num_warps=1)
    kernels_index.scan_kernel[triton.cdiv(M, 64), groups](count, total, blocks, M, BC=64, BB=32)
    kernels_index.offset_kernel[(groups,)](total, offset, share, chunk, M, SHARE=size, EXTRA=index.extra, BC=1024)
    kernels_index.scatter_kernel[triton.cdiv(pairs, 1024), groups](
        choice, rank, count, offset, lists, pairs, blocks, M, **shape, BT=1024
    )
    return index
