"""The backward attention pass on Hopper GPUs, in Gluon: chunks of 128 keys, the work items of `kernels_attend`.

Four warpgroups share an item's work. One gathers tiles of queries, own ones and then those of the chunk's list, into
a ring of S stages. Two hold 64 keys each and add up their dk and dv in registers; what they find for ds they leave in
shared memory, where the last one makes the queries' partial dq of it. Barriers: `ready` and `done` for each place that
keys and values have, `full` and `empty` for each stage of the ring, `ds_full` and `ds_empty` for each of the two tiles
of ds that can wait.
"""

import torch
import triton
import triton.experimental.gluon
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from basecap.ops.top1_chunk.kernels_hopper import product_layout

#: Queries of a tile and keys of a warpgroup, which a product takes at least.
ROWS = 64

#: Queries that a warpgroup of keys takes at a time. At K = 128 more do not fit into its registers, and then every
#: instruction of a product in the kernel waits for the one before.
COLUMNS = {64: 64, 128: 32}

#: Stages of the ring for each head size.
STAGES = {64: 4, 128: 3}

#: Chunks whose keys and values have room at a time.
CHUNKS = {64: 2, 128: 1}

#: For each head size the registers a thread of the key warpgroups has, of the query warpgroup, of the fetching one.
REGISTERS = {64: (184, 88, 56), 128: (192, 80, 48)}


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
    # The same rows twice: as the copies of whole rows are laid out, and as those of single numbers are.
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
            # Where the queries are is read one turn ahead: their rows wait for it.
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
            # Not read ahead: Triton 3.6 keeps the first ones for all items, as nothing but a loop's bounds needs them.
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


@triton.experimental.gluon.jit
def attend_bwd_kernel(
    p_q,
    p_k,
    p_v,
    p_do,
    p_lse,
    p_delta,
    p_part,
    p_dk,
    p_dv,
    p_scratch,
    p_grid,
    p_offset,
    p_list,
    p_share,
    p_chunk,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vg,
    N,
    M,
    EXTRA,
    scale,
    G: gl.constexpr,
    GROUP: gl.constexpr,
    REMOTE: gl.constexpr,
    SHARE: gl.constexpr,
    K: gl.constexpr,
    C: gl.constexpr,
    BM: gl.constexpr,
    BS: gl.constexpr,
    S: gl.constexpr,
    KV: gl.constexpr,
    R_KEYS: gl.constexpr,
    R_QUERIES: gl.constexpr,
    R_FETCH: gl.constexpr,
    ADD: gl.constexpr,
    INDEX: gl.constexpr,
):
    """Write dk and dv of chunks and the partial dq of all queries that attend them.

    Arguments and results are those of `kernels_attend.attend_bwd_kernel`. A program takes every so many-th item of one
    head, extra shares first; the copies for the next item run while this one is at work.
    """
    H: gl.constexpr = G * GROUP
    # Heads come first: what they read lies side by side.
    first = gl.program_id(0) // G
    step = gl.num_programs(0) // G
    g = (gl.program_id(0) % G).to(INDEX)
    extras = gl.load(p_share + g * (M + 1) + M)
    if first >= extras + M:
        return
    chunk, share, start, end = find_chunk(p_grid, p_share, p_chunk, g, first, extras, M, EXTRA)
    p_list += g * gl.cast(N, INDEX) * (GROUP * REMOTE)
    dtype: gl.constexpr = p_q.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_k = gl.allocate_shared_memory(dtype, [2 * KV, BM, K], swizzled)
    s_v = gl.allocate_shared_memory(dtype, [2 * KV, BM, K], swizzled)
    s_q = gl.allocate_shared_memory(dtype, [S, BM, K], swizzled)
    s_do = gl.allocate_shared_memory(dtype, [S, BM, K], swizzled)
    s_lse = gl.allocate_shared_memory(gl.float32, [S, BM], plain)
    s_delta = gl.allocate_shared_memory(gl.float32, [S, BM], plain)
    # A warpgroup writes BS columns of it at a time.
    halves: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * BS, element_bitwidth=16, rank=2)
    s_ds = gl.allocate_shared_memory(dtype, [4, BM, BM], halves)
    ready = gl.allocate_shared_memory(gl.int64, [KV, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [KV, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # Each thread of the fetching warpgroup arrives when its own copies have come.
    for i in gl.static_range(KV):
        mbarrier.init(ready.index(i), count=128)
        mbarrier.init(done.index(i), count=3)
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=1)
    gl.warp_specialize(
        [
            (
                key_gradients,
                (p_dk, p_dv, p_scratch, p_grid, p_offset, p_share, p_chunk, s_k, s_v, s_q, s_do, s_lse, s_delta, s_ds,
                 ready, done, full, empty, ds_full, ds_empty, first, step, extras, chunk, share, start, end, g, M,
                 EXTRA, scale, G, GROUP, SHARE, K, C, BM, BS, S, KV, 0, INDEX),
            ),
            (
                key_gradients,
                (p_dk, p_dv, p_scratch, p_grid, p_offset, p_share, p_chunk, s_k, s_v, s_q, s_do, s_lse, s_delta, s_ds,
                 ready, done, full, empty, ds_full, ds_empty, first, step, extras, chunk, share, start, end, g, M,
                 EXTRA, scale, G, GROUP, SHARE, K, C, BM, BS, S, KV, 1, INDEX),
            ),
            (
                query_gradients,
                (p_part, p_list, p_grid, p_offset, p_share, p_chunk, s_k, s_ds, ready, done, ds_full, ds_empty, first,
                 step, extras, chunk, share, start, end, g, N, M, EXTRA, scale, H, GROUP, REMOTE, SHARE, K, C, BM, KV,
                 ADD, INDEX),
            ),
            (
                fetch,
                (p_q, p_k, p_v, p_do, p_lse, p_delta, p_list, p_grid, p_offset, p_share, p_chunk, s_k, s_v, s_q, s_do,
                 s_lse, s_delta, ready, done, full, empty, first, step, extras, chunk, share, start, end, g, M, EXTRA,
                 stride_qt, stride_qh, stride_kt, stride_kg, stride_vt, stride_vg, H, GROUP, REMOTE, SHARE, K, C, BM, S,
                 KV, INDEX),
            ),
        ],
        [4, 4, 4],
        [R_KEYS, R_QUERIES, R_FETCH],
    )  # fmt: skip


def aligned(x: Tensor) -> Tensor:
    """Return x [N, H, K], or a copy of it, whose rows begin at multiples of 16 bytes that the compiler can see."""
    visible = x.stride(2) == 1 and all(stride % 16 == 0 for stride in x.stride()[:2]) and x.data_ptr() % 16 == 0
    return x if visible else x.clone(memory_format=torch.contiguous_format)


def programs(K: int, items: int, G: int, device: torch.device) -> int:
    """Return how many programs share the work items of each of G heads."""
    if CHUNKS[K] == 1:
        # Nothing could be copied for the next item, so that other programs' work is as good.
        return items
    # A multiprocessor has room for one program.
    room = torch.cuda.get_device_properties(device).multi_processor_count
    count = room // G
    if count * G < 0.95 * room:
        # They cannot all be busy at once: many programs even that out.
        count = max(1, 4 * room // G)
    return min(items, count)


def options(K: int) -> dict[str, int]:
    """Return the kernel's tile, stages, registers and warps for heads of size K, 64 or 128."""
    keys, queries, fetching = REGISTERS[K]
    registers = {"R_KEYS": keys, "R_QUERIES": queries, "R_FETCH": fetching}
    return {"BM": ROWS, "BS": COLUMNS[K], "S": STAGES[K], "KV": CHUNKS[K], "num_warps": 4, "maxnreg": 128} | registers
