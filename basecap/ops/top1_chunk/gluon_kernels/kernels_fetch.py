"""The backward pass's fetching warpgroup, in Gluon: it finds each work item and copies what it needs."""

import triton
import triton.experimental.gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@triton.experimental.gluon.jit
def find_chunk(p_grid, p_share, p_chunk, g, item, extras, M, EXTRA):
    """Return a work item's chunk and share, and the chunk's first token and end.

    Items below `extras` are the extra shares of long lists, the M next ones the chunks with their lists' first shares.
    """
    chunk = item - extras
    share = 0
    if item < extras:
        chunk = gl.load(p_chunk + g * EXTRA + item)
        share = 1 + item - gl.load(p_share + g * (M + 1) + chunk)
    return chunk, share, gl.load(p_grid + 3 * chunk), gl.load(p_grid + 3 * chunk + 1)


@triton.experimental.gluon.jit
def find_list(p_offset, g, chunk, share, M, SHARE: gl.constexpr):
    """Return where a share of the chunk's list begins and stops."""
    begin = gl.load(p_offset + g * (M + 1) + chunk) + share * SHARE
    return begin, gl.minimum(gl.load(p_offset + g * (M + 1) + chunk + 1), begin + SHARE)


@triton.experimental.gluon.jit
def fetch_tile(
    p_q,
    p_do,
    p_lse,
    p_delta,
    offset,
    row,
    mask,
    line,
    line_mask,
    s_q,
    s_do,
    s_lse,
    s_delta,
    full,
    o_k,
    K: gl.constexpr,
):
    """Copy a tile of queries. Rows beyond the mask become zeros, so that nothing of them reaches dk or dv."""
    async_copy.async_copy_global_to_shared(s_q, p_q + (offset[:, None] + o_k[None, :]), mask[:, None])
    async_copy.async_copy_global_to_shared(s_do, p_do + ((row * K)[:, None] + o_k[None, :]), mask[:, None])
    async_copy.async_copy_global_to_shared(s_lse, p_lse + line, line_mask)
    async_copy.async_copy_global_to_shared(s_delta, p_delta + line, line_mask)
    async_copy.mbarrier_arrive(full, increment_count=False)


@triton.experimental.gluon.jit
def fetch(
    p_q,
    p_k,
    p_v,
    p_do,
    p_lse,
    p_delta,
    p_list,
    p_grid,
    p_offset,
    p_share,
    p_chunk,
    s_k,
    s_v,
    s_q,
    s_do,
    s_lse,
    s_delta,
    ready,
    done,
    full,
    empty,
    first,
    step,
    extras,
    chunk,
    share,
    start,
    end,
    g,
    M,
    EXTRA,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vg,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    REMOTE: gl.constexpr,
    SHARE: gl.constexpr,
    K: gl.constexpr,
    C: gl.constexpr,
    BM: gl.constexpr,
    S: gl.constexpr,
    KV: gl.constexpr,
    INDEX: gl.constexpr,
):
    """Copy each chunk's keys and values, then its own queries, then the list's, into shared memory."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, wide))
    # The same rows in two layouts: of copies of whole rows, and of copies of single numbers.
    o_m = gl.arange(0, BM, layout=gl.SliceLayout(1, wide))
    o_l = gl.arange(0, BM, layout=flat)
    j = 0
    n = 0
    begin, stop = find_list(p_offset, g, chunk, share, M, SHARE)
    for trip in range(1 if KV == 1 else gl.cdiv(extras + M - first, step)):
        item = first + trip * step
        if start < end:
            u = n % KV
            mbarrier.wait(done.index(u), ((n // KV) & 1) ^ 1)
            for half in gl.static_range(C // BM):
                o_s = start + half * BM + o_m
                mask = (o_s < end)[:, None]
                row = o_s.to(INDEX)
                keys = p_k + ((row * stride_kt + g * stride_kg)[:, None] + o_k[None, :])
                async_copy.async_copy_global_to_shared(s_k.index(2 * u + half), keys, mask)
                values = p_v + ((row * stride_vt + g * stride_vg)[:, None] + o_k[None, :])
                async_copy.async_copy_global_to_shared(s_v.index(2 * u + half), values, mask)
            async_copy.mbarrier_arrive(ready.index(u), increment_count=False)
            n += 1
            # The positions of queries are read one iteration ahead, because loading their rows depends on them.
            pair = gl.load(p_list + begin + o_m, begin + o_m < stop, other=0)
            line = gl.load(p_list + begin + o_l, begin + o_l < stop, other=0)
            if share == 0:
                for own in range(GROUP * (C // BM)):
                    h = g * GROUP + own // (C // BM)
                    low = start + own % (C // BM) * BM
                    o_t = (low + o_m).to(INDEX)
                    at_l = (low + o_l).to(INDEX) * H + h
                    i = j % S
                    mbarrier.wait(empty.index(i), ((j // S) & 1) ^ 1)
                    fetch_tile(
                        p_q, p_do, p_lse, p_delta, o_t * stride_qt + h * stride_qh, o_t * H + h, low + o_m < end, at_l,
                        low + o_l < end, s_q.index(i), s_do.index(i), s_lse.index(i), s_delta.index(i), full.index(i),
                        o_k, K,
                    )  # fmt: skip
                    j += 1
            for at in range(begin, stop, BM):
                row = (pair // REMOTE).to(INDEX)
                at_l = (line // REMOTE).to(INDEX)
                pair = gl.load(p_list + at + BM + o_m, at + BM + o_m < stop, other=0)
                line = gl.load(p_list + at + BM + o_l, at + BM + o_l < stop, other=0)
                i = j % S
                mbarrier.wait(empty.index(i), ((j // S) & 1) ^ 1)
                fetch_tile(
                    p_q, p_do, p_lse, p_delta, row // H * stride_qt + row % H * stride_qh, row, at + o_m < stop, at_l,
                    at + o_l < stop, s_q.index(i), s_do.index(i), s_lse.index(i), s_delta.index(i), full.index(i), o_k,
                    K,
                )  # fmt: skip
                j += 1
        if KV > 1 and item + step < extras + M:
            chunk, share, start, end = find_chunk(p_grid, p_share, p_chunk, g, item + step, extras, M, EXTRA)
            begin, stop = find_list(p_offset, g, chunk, share, M, SHARE)
