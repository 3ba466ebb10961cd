"""The backward pass's computing warpgroups, in Gluon: two make dk and dv of 64 keys each, one makes dq."""

import triton
import triton.experimental.gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from basecap.ops.top1_chunk.gluon_kernels.kernels_fetch import find_chunk, find_list
from basecap.ops.top1_chunk.gluon_kernels.kernels_parts import product_layout


@triton.experimental.gluon.jit
def key_tile(
    j,
    dk,
    dv,
    o_s,
    first_t,
    b_k,
    b_v,
    s_q,
    s_do,
    s_lse,
    s_delta,
    s_ds,
    full,
    empty,
    ds_full,
    ds_empty,
    scale2,
    MASK: gl.constexpr,
    HALF: gl.constexpr,
    K: gl.constexpr,
    BM: gl.constexpr,
    BS: gl.constexpr,
    S: gl.constexpr,
):
    """Return dk, dv [64, K] with the parts of the j-th tile of queries added; leave ds in shared memory.

    Scores are held transposed, [64, BM], so that both sums over queries take them as the left factor as they are.
    """
    square: gl.constexpr = product_layout(BS)
    total: gl.constexpr = product_layout(K)
    left: gl.constexpr = gl.DotOperandLayout(0, total, 2)
    column: gl.constexpr = gl.SliceLayout(0, square)
    i = j % S
    mbarrier.wait(full.index(i), (j // S) & 1)
    # Products read shared memory another way than the copies have written it.
    fence_async_shared()
    zero = gl.zeros([BM, BS], gl.float32, layout=square)
    for low in gl.static_range(0, BM, BS):
        b_q = s_q.index(i).slice(low, BS, dim=0)
        b_do = s_do.index(i).slice(low, BS, dim=0)
        s = warpgroup_mma(b_k, b_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(b_v, b_do.permute((1, 0)), zero, use_acc=False, is_async=True)
        lse = s_lse.index(i).slice(low, BS, dim=0).load(column)
        s = warpgroup_mma_wait(1, deps=[s])
        x = s * scale2 - lse[None, :]
        if MASK:
            o_t = first_t + low + gl.arange(0, BS, layout=column)
            x = gl.where(o_s[:, None] <= o_t[None, :], x, float("-inf"))
        p = gl.exp2(x)
        delta = s_delta.index(i).slice(low, BS, dim=0).load(column)
        dp = warpgroup_mma_wait(0, deps=[dp])
        b_p = gl.convert_layout(p.to(s_q.dtype), left)
        dv = warpgroup_mma(b_p, b_do, dv, is_async=True)
        ds = (p * (dp - delta[None, :])).to(s_q.dtype)
        b_ds = gl.convert_layout(ds, left)
        dk = warpgroup_mma(b_ds, b_q, dk, is_async=True)
        if low == 0:
            mbarrier.wait(ds_empty.index(j % 2), ((j // 2) & 1) ^ 1)
        s_ds.index(j % 2 * 2 + HALF).slice(low, BS, dim=1).store(ds)
        if low + BS == BM:
            fence_async_shared()
            mbarrier.arrive(ds_full.index(j % 2))
        dk, dv, b_p, b_ds = warpgroup_mma_wait(0, deps=[dk, dv, b_p, b_ds])
    mbarrier.arrive(empty.index(i))
    return dk, dv


@triton.experimental.gluon.jit
def key_gradients(
    p_dk,
    p_dv,
    p_scratch,
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
    s_ds,
    ready,
    done,
    full,
    empty,
    ds_full,
    ds_empty,
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
    scale,
    G: gl.constexpr,
    GROUP: gl.constexpr,
    SHARE: gl.constexpr,
    K: gl.constexpr,
    C: gl.constexpr,
    BM: gl.constexpr,
    BS: gl.constexpr,
    S: gl.constexpr,
    KV: gl.constexpr,
    HALF: gl.constexpr,
    INDEX: gl.constexpr,
):
    """Write dk and dv of half of each chunk's keys; those of a list in shares go to scratch memory."""
    square: gl.constexpr = product_layout(BS)
    total: gl.constexpr = product_layout(K)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    scale2 = scale * 1.4426950408889634
    o_n = HALF * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, total))
    o_scratch = o_n[:, None] * K + gl.arange(0, K, layout=gl.SliceLayout(0, total))[None, :]
    o_s = HALF * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, square))
    j = 0
    n = 0
    for trip in range(1 if KV == 1 else gl.cdiv(extras + M - first, step)):
        item = first + trip * step
        if start < end:
            # Not read ahead: Triton 3.6 keeps the first ones for all items, as only a loop's bounds need them.
            begin, stop = find_list(p_offset, g, chunk, share, M, SHARE)
            dk = gl.zeros([BM, K], gl.float32, layout=total)
            dv = gl.zeros([BM, K], gl.float32, layout=total)
            u = n % KV
            b_k = s_k.index(2 * u + HALF)
            b_v = s_v.index(2 * u + HALF)
            mbarrier.wait(ready.index(u), (n // KV) & 1)
            fence_async_shared()
            if share == 0:
                for own in range(GROUP * (C // BM)):
                    dk, dv = key_tile(
                        j, dk, dv, o_s, own % (C // BM) * BM, b_k, b_v, s_q, s_do, s_lse, s_delta, s_ds, full, empty,
                        ds_full, ds_empty, scale2, True, HALF, K, BM, BS, S,
                    )  # fmt: skip
                    j += 1
            for _ in range(begin, stop, BM):
                dk, dv = key_tile(
                    j, dk, dv, None, None, b_k, b_v, s_q, s_do, s_lse, s_delta, s_ds, full, empty, ds_full, ds_empty,
                    scale2, False, HALF, K, BM, BS, S,
                )  # fmt: skip
                j += 1
            mbarrier.arrive(done.index(u))
            n += 1
            lower = gl.load(p_share + g * (M + 1) + chunk)
            if lower == gl.load(p_share + g * (M + 1) + chunk + 1):
                row = start + HALF * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, wide))
                o = (row.to(INDEX)[:, None] * G + g) * K + gl.arange(0, K, layout=gl.SliceLayout(0, wide))[None, :]
                dk *= scale
                gl.store(p_dk + o, gl.convert_layout(dk.to(p_dk.dtype.element_ty), wide), (row < end)[:, None])
                gl.store(p_dv + o, gl.convert_layout(dv.to(p_dv.dtype.element_ty), wide), (row < end)[:, None])
            else:
                slot = gl.where(item < extras, item, EXTRA + lower)
                p = p_scratch + (g * (2 * EXTRA) + slot) * (2 * C * K)
                gl.store(p + o_scratch, dk)
                gl.store(p + C * K + o_scratch, dv)
        if KV > 1 and item + step < extras + M:
            chunk, share, start, end = find_chunk(p_grid, p_share, p_chunk, g, item + step, extras, M, EXTRA)


@triton.experimental.gluon.jit
def query_tile(
    j,
    u,
    row,
    mask,
    p_part,
    s_k,
    s_ds,
    ds_full,
    ds_empty,
    scale,
    K: gl.constexpr,
    BM: gl.constexpr,
    ADD: gl.constexpr,
):
    """Write the partial dq of the j-th tile of queries to the rows `row`, 64 columns at a time, or ADD it to them."""
    total: gl.constexpr = product_layout(64)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = j % 2
    mbarrier.wait(ds_full.index(i), (j // 2) & 1)
    for low in gl.static_range(0, K, 64):
        dq = gl.zeros([BM, 64], gl.float32, layout=total)
        for half in gl.static_range(2):
            b_k = s_k.index(2 * u + half).slice(low, 64, dim=1)
            dq = warpgroup_mma(s_ds.index(2 * i + half).permute((1, 0)), b_k, dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        if low + 64 == K:
            mbarrier.arrive(ds_empty.index(i))
        o_k = low + gl.arange(0, 64, layout=gl.SliceLayout(0, wide))
        b_dq = gl.convert_layout((dq * scale).to(p_part.dtype.element_ty), wide)
        if ADD:
            gl.atomic_add(p_part + (row[:, None] * K + o_k[None, :]), b_dq, mask[:, None], sem="relaxed")
        else:
            gl.store(p_part + (row[:, None] * K + o_k[None, :]), b_dq, mask[:, None])


@triton.experimental.gluon.jit
def query_gradients(
    p_part,
    p_list,
    p_grid,
    p_offset,
    p_share,
    p_chunk,
    s_k,
    s_ds,
    ready,
    done,
    ds_full,
    ds_empty,
    first,
    step,
    extras,
    chunk,
    share,
    start,
    end,
    g,
    N,
    M,
    EXTRA,
    scale,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    REMOTE: gl.constexpr,
    SHARE: gl.constexpr,
    K: gl.constexpr,
    C: gl.constexpr,
    BM: gl.constexpr,
    KV: gl.constexpr,
    ADD: gl.constexpr,
    INDEX: gl.constexpr,
):
    """Write the partial dq of all queries that attend each chunk, or ADD them up."""
    o_m = gl.arange(0, BM, layout=gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    j = 0
    n = 0
    begin, stop = find_list(p_offset, g, chunk, share, M, SHARE)
    for trip in range(1 if KV == 1 else gl.cdiv(extras + M - first, step)):
        item = first + trip * step
        if start < end:
            pair = gl.load(p_list + begin + o_m, begin + o_m < stop, other=0)
            u = n % KV
            mbarrier.wait(ready.index(u), (n // KV) & 1)
            fence_async_shared()
            if share == 0:
                for own in range(GROUP * (C // BM)):
                    o_t = start + own % (C // BM) * BM + o_m
                    row = o_t.to(INDEX) * H + g * GROUP + own // (C // BM)
                    query_tile(j, u, row, o_t < end, p_part, s_k, s_ds, ds_full, ds_empty, scale, K, BM, ADD)
                    j += 1
            for at in range(begin, stop, BM):
                row = (pair // REMOTE).to(INDEX)
                if not ADD:
                    row += (1 + pair % REMOTE) * (gl.cast(N, INDEX) * H)
                pair = gl.load(p_list + at + BM + o_m, at + BM + o_m < stop, other=0)
                query_tile(j, u, row, at + o_m < stop, p_part, s_k, s_ds, ds_full, ds_empty, scale, K, BM, ADD)
                j += 1
            mbarrier.arrive(done.index(u))
            n += 1
        if KV > 1 and item + step < extras + M:
            chunk, share, start, end = find_chunk(p_grid, p_share, p_chunk, g, item + step, extras, M, EXTRA)
            begin, stop = find_list(p_offset, g, chunk, share, M, SHARE)
