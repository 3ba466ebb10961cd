"""Triton kernels that invert the choice by counting: for each chunk, the queries that chose it, in their order.

A pair is a query and one of its choices, numbered (t * H + h) * remote + j. The pairs of a key head are cut into
blocks; each block counts, in order, so that two runs give the same lists bit for bit.
"""

import triton
import triton.language as tl


@triton.jit
def pair_of(i, g, H: tl.constexpr, GROUP: tl.constexpr, REMOTE: tl.constexpr):
    """Return the number of the i-th pair of key head g."""
    width: tl.constexpr = GROUP * REMOTE
    return i // width * (H * REMOTE) + g * width + i % width


@triton.jit
def chunk_of(c, KEYS: tl.constexpr):
    """Return the chunk of a choice: the number of a chunk, or, where chunks are of KEYS keys, of one of its keys."""
    if KEYS > 1:
        c = tl.where(c >= 0, c // KEYS, -1)
    return c


@triton.jit(
    do_not_specialize=["pairs", "M", "EXTRA", "SHARE"],
    do_not_specialize_on_alignment=["p_offset", "p_share", "p_chunk"],
)
def index_kernel(
    p_choice,
    p_offset,
    p_list,
    p_share,
    p_chunk,
    pairs,
    M,
    EXTRA,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    REMOTE: tl.constexpr,
    KEYS: tl.constexpr,
    SHARE,
    BINS: tl.constexpr,
    BT: tl.constexpr,
):
    """Write the whole index, one program for each chunk's list: for few pairs, where launches take the time.

    Every program counts all pairs. What no list needs is zero. BINS is a power of two above M, and its last bin counts
    the pairs without a chunk.
    """
    m = tl.program_id(0)
    g = tl.program_id(1).to(tl.int64)
    p_list += g * pairs
    p_chunk += g * EXTRA
    bins = tl.arange(0, BINS)
    count = tl.zeros([BINS], tl.int32)
    for at in range(0, pairs, BT):
        i = at + tl.arange(0, BT)
        c = chunk_of(tl.load(p_choice + pair_of(i, g, H, GROUP, REMOTE), i < pairs, other=-1), KEYS)
        count += tl.histogram(tl.where(c >= 0, c, BINS - 1), BINS)
    count = tl.where(bins < M, count, 0)
    begin = tl.cumsum(count, 0) - count
    extra = tl.maximum((count + SHARE - 1) // SHARE - 1, 0)
    share = tl.cumsum(extra, 0) - extra
    if m == 0:
        tl.store(p_offset + g * (M + 1) + bins, begin, bins <= M)
        tl.store(p_share + g * (M + 1) + bins, share, bins <= M)
        for at in range(tl.sum(count, 0), pairs, BT):
            i = at + tl.arange(0, BT)
            tl.store(p_list + i, tl.zeros([BT], tl.int32), i < pairs)
        for at in range(tl.sum(extra, 0), EXTRA, BT):
            i = at + tl.arange(0, BT)
            tl.store(p_chunk + i, tl.zeros([BT], tl.int32), i < EXTRA)
    first = tl.sum(tl.where(bins == m, share, 0), 0)
    for j in range(tl.sum(tl.where(bins == m, extra, 0), 0)):
        tl.store(p_chunk + first + j, m)
    place = tl.sum(tl.where(bins == m, begin, 0), 0)
    for at in range(0, pairs, BT):
        i = at + tl.arange(0, BT)
        pair = pair_of(i, g, H, GROUP, REMOTE)
        mine = chunk_of(tl.load(p_choice + pair, i < pairs, other=-1), KEYS) == m
        order = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(p_list + place + order - 1, pair.to(tl.int32), mine)
        place += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def count_kernel(
    p_choice,
    p_count,
    p_rank,
    pairs,
    M,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    REMOTE: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    BT: tl.constexpr,
):
    """Write each pair's rank among those of its block with the same chunk, and how many there are of each."""
    block = tl.program_id(0)
    g = tl.program_id(1)
    p_count += (g * tl.num_programs(0) + block).to(tl.int64) * M
    i = block * BLOCK + tl.arange(0, BT)
    o = tl.arange(0, BT)
    following = tl.load(p_choice + pair_of(i, g, H, GROUP, REMOTE), i < pairs, other=-1)
    for _ in range(0, BLOCK, BT):
        pair = pair_of(i, g, H, GROUP, REMOTE)
        i += BT
        c = chunk_of(following, KEYS)
        # The next tile's choices come while this one's are counted.
        following = tl.load(p_choice + pair_of(i, g, H, GROUP, REMOTE), i < pairs, other=-1)
        real = c >= 0
        before = tl.load(p_count + c, real, other=0, volatile=True)
        equal = (c[:, None] == c[None, :]).to(tl.int32)
        rank = tl.sum(tl.where(o[None, :] < o[:, None], equal, 0), 1)
        total = tl.sum(equal, 1)
        tl.store(p_rank + pair, before + rank, real)
        # The next tile reads what this one counted, and may not overtake the reads above.
        tl.debug_barrier()
        tl.store(p_count + c, before + total, real & (rank == total - 1))
        tl.debug_barrier()


@triton.jit
def scan_kernel(p_count, p_total, blocks, M, BC: tl.constexpr, BB: tl.constexpr):
    """Replace each block's count by the sum of those before it; write the sum of all."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    g = tl.program_id(1).to(tl.int64)
    total = tl.zeros([BC], tl.int32)
    for at in range(0, blocks, BB):
        block = at + tl.arange(0, BB)
        mask = (block < blocks)[:, None] & (c < M)[None, :]
        p = p_count + (g * blocks + block)[:, None] * M + c[None, :]
        count = tl.load(p, mask, other=0)
        tl.store(p, total[None, :] + tl.cumsum(count, 0) - count, mask)
        total += tl.sum(count, 0)
    tl.store(p_total + g * M + c, total, c < M)


@triton.jit
def offset_kernel(p_total, p_offset, p_share, p_chunk, M, SHARE: tl.constexpr, EXTRA, BC: tl.constexpr):
    """Write where each chunk's list starts, and the shares of long lists beyond the first SHARE pairs.

    p_offset, p_share [G, M + 1]: starts of the lists of pairs and of extra shares; p_chunk [G, EXTRA]: their chunks.
    """
    g = tl.program_id(0).to(tl.int64)
    start = 0
    share = 0
    for at in range(0, M, BC):
        c = at + tl.arange(0, BC)
        count = tl.load(p_total + g * M + c, c < M, other=0)
        extra = tl.maximum((count + SHARE - 1) // SHARE - 1, 0)
        begin = share + tl.cumsum(extra, 0) - extra
        tl.store(p_offset + g * (M + 1) + c, start + tl.cumsum(count, 0) - count, c < M)
        tl.store(p_share + g * (M + 1) + c, begin, c < M)
        for j in range(tl.max(extra, 0)):
            tl.store(p_chunk + g * EXTRA + begin + j, c, j < extra)
        start += tl.sum(count, 0)
        share += tl.sum(extra, 0)
    tl.store(p_offset + g * (M + 1) + M, start)
    tl.store(p_share + g * (M + 1) + M, share)


@triton.jit
def scatter_kernel(
    p_choice,
    p_rank,
    p_count,
    p_offset,
    p_list,
    pairs,
    blocks,
    M,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    REMOTE: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    BT: tl.constexpr,
):
    """Put every pair at its place in its chunk's list."""
    i = tl.program_id(0) * BT + tl.arange(0, BT)
    g = tl.program_id(1)
    pair = pair_of(i, g, H, GROUP, REMOTE)
    c = chunk_of(tl.load(p_choice + pair, i < pairs, other=-1), KEYS)
    real = c >= 0
    place = tl.load(p_offset + g * (M + 1) + c, real, other=0)
    place += tl.load(p_count + (g * blocks + i // BLOCK).to(tl.int64) * M + c, real, other=0)
    place += tl.load(p_rank + pair, real, other=0)
    tl.store(p_list + g.to(tl.int64) * pairs + place, pair, real)
