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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from basecap.ops.top1_chunk.gluon_kernels.kernels_fetch import fetch, find_chunk
from basecap.ops.top1_chunk.gluon_kernels.kernels_gradients import key_gradients, query_gradients

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


@triton.experimental.gluon.jit(
    do_not_specialize=["N", "M", "EXTRA"], do_not_specialize_on_alignment=["p_offset", "p_share", "p_chunk"]
)
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

    Arguments and results are those of `kernels_attend.attend_bwd_kernel`. Each program takes items of one head at a
    fixed stride, extra shares first, and copies the next item while it computes the present one.
    """
    H: gl.constexpr = G * GROUP
    # Heads are the first index: what they read is adjacent in memory.
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
