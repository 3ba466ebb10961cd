"""Launches the Triton kernels: tile sizes, scratch memory, order. Signatures as in `eager`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from basecap.ops._dispatch import interpreted
from basecap.ops._launch import block_of, dense
from basecap.ops._selection.launch import Index, invert
from basecap.ops.top1_chunk.triton_kernels import SHARED, kernels_attend, kernels_choose

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """Rows (queries) and columns (keys) of a tile, warps and pipeline stages of a kernel, a cap on its registers."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None


def _tile(table: dict[int, Tile], x: Tensor) -> Tile:
    """Return the tile for this head size; in float32 half as large, which the pipeline's shared memory demands."""
    tile = next(tile for width, tile in table.items() if x.shape[-1] <= width)
    if x.element_size() == 4:
        return Tile(max(16, tile.rows // 2), max(16, tile.columns // 2), tile.warps, 1)
    return tile


#: How many of four exponentials of the exact choice are made by polynomial.
POLYNOMIALS = 1

#: Largest head size -> tile, chosen on an H200. With 168 registers a thread, three programs share a multiprocessor.
EXACT = {64: Tile(128, 128, 4, 3, 168), 128: Tile(256, 128, 8, 3), 256: Tile(128, 64, 8, 2)}
APPROX = {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 4, 2), 256: Tile(64, 64, 4, 2)}
FORWARD = {64: Tile(64, 128, 4, 1, 128), 128: Tile(64, 128, 4, 1), 256: Tile(64, 64, 8, 1)}
BACKWARD = {64: Tile(32, 128, 4, 1), 128: Tile(64, 128, 8, 1), 256: Tile(32, 64, 8, 1)}


def _index(*tensors: Tensor) -> tl.dtype:
    """Return the integers that reach every number of the tensors: 64 bits cost registers and instructions."""
    last = max(sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) for x in tensors)
    return tl.int32 if last < 2**31 else tl.int64


def stages_for(stages: int, x: Tensor, rows: int, chunk: int) -> int:
    """Return how many chunks of keys fit into shared memory beside `rows` queries, up to `stages`."""
    row = block_of(x.shape[-1]) * x.element_size()
    return min(stages, max(1, (SHARED - rows * row) // (chunk * row)))


def choose(
    q: Tensor,
    k: Tensor,
    grid: Tensor,
    own: Tensor,
    chunk: int,
    exact: bool,
    scale: float,
    remote: int,
) -> Tensor:
    """Return int32 [N, H, remote], the chosen chunks in descending order; -1 where there is none."""
    q, k = dense(q), dense(k)
    choice = torch.empty(*q.shape[:2], remote, dtype=torch.int32, device=q.device)
    means, low, norm = summarise(k, grid, chunk, exact)
    if exact:
        for bounded in (True, False):
            choose_exact(q, k, (grid, own, norm), choice, chunk, scale, bounded)
        return choice
    N, H, _ = q.shape
    tile = _tile(APPROX, q)
    kernels_choose.choose_approx_kernel[triton.cdiv(N, tile.rows), H](
        q, means, low, grid, own, choice, *q.stride()[:2], N, grid.shape[0], **_choosing(q, k, remote, tile),
        BQ=tile.rows, BM=tile.columns, SPLIT=low is not None, num_stages=tile.stages,
    )  # fmt: skip
    return choice


def choose_exact(
    q: Tensor,
    k: Tensor,
    chunks: tuple[Tensor, Tensor, Tensor],
    choice: Tensor,
    chunk: int,
    scale: float,
    bounded: bool,
) -> None:
    """Write the exact choice of all tiles of queries whose scores are bounded, or of those whose scores are not.

    Args:
        q: [N, H, K].
        k: [N, G, K].
        chunks: int32 [M, 3] and [N], see `grid.chunk_grid`; float32 [G], the largest squared norm of a head's keys.
        choice: where the choice goes, int32 [N, H, remote].
        chunk: C.
        scale: factor of the scores.
        bounded: which tiles, as the kernel's BOUNDED.
    """
    N, H, _ = q.shape
    tile = _tile(EXACT, q)
    # The interpreter knows no assembly.
    assembly = "" if interpreted() else kernels_choose.exp2_assembly(POLYNOMIALS)
    kernels_choose.choose_exact_kernel[triton.cdiv(N, tile.rows), H](
        q, k, *chunks, choice, *q.stride()[:2], *k.stride()[:2], N, scale * LOG2E,
        **_choosing(q, k, choice.shape[2], tile), C=chunk, BQ=tile.rows,
        BN=min(tile.columns, chunk) if chunk >= 64 else tile.columns, BOUNDED=bounded, ASSEMBLY=assembly,
        num_stages=stages_for(tile.stages, q, tile.rows, chunk),
    )  # fmt: skip


def _choosing(q: Tensor, k: Tensor, remote: int, tile: Tile) -> dict[str, Any]:
    """Return the options that both kernels of the choice take."""
    _, H, K = q.shape
    shape = {"H": H, "GROUP": H // k.shape[1], "K": K, "BK": block_of(K)}
    shape |= {"REMOTE": remote, "R": triton.next_power_of_2(remote)}
    return {**shape, "num_warps": tile.warps, "maxnreg": tile.registers}


def summarise(k: Tensor, grid: Tensor, chunk: int, exact: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return each chunk's mean key [G, M, K] in two parts, or (exact) the largest squared norm, float32 [G]."""
    _, G, K = k.shape
    M = grid.shape[0]
    split = not exact and k.element_size() == 2
    means = k.new_empty(G, M, K) if not exact else k
    low = k.new_empty(G, M, K) if split else None
    norm = torch.zeros(G, dtype=torch.float32, device=k.device) if exact else means
    kernels_choose.summarise_kernel[(M * G,)](
        k, grid, means, low, norm, *k.stride()[:2], M,
        G=G, K=K, BK=block_of(K), C=chunk, BN=min(chunk, 16384 // block_of(K)), MEAN=not exact, SPLIT=split,
    )  # fmt: skip
    return means, low, norm


def _shape(q: Tensor, k: Tensor, remote: int, chunk: int, tile: Tile) -> dict[str, Any]:
    H, K = q.shape[1:]
    return {
        "GROUP": H // k.shape[1],
        "REMOTE": remote,
        "SHARE": share_of(chunk),
        "K": K,
        "BK": block_of(K),
        "C": chunk,
        "BN": min(chunk, tile.columns),
        "BM": tile.rows,
        "BL": min(chunk, tile.rows),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "maxnreg": tile.registers,
    }


def share_of(chunk: int) -> int:
    """Return how many queries of a chunk's list one work item has."""
    return max(512, 4 * chunk)


def attend(
    q: Tensor, k: Tensor, v: Tensor, choice: Tensor, grid: Tensor, own: Tensor, chunk: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [N, H, K], the base-2 logsumexp of the attended scores [N, H] and the index of the choice."""
    q, k, v = dense(q), dense(k), dense(v)
    N, H, K = q.shape
    G, M, remote = k.shape[1], grid.shape[0], choice.shape[2]
    tile = _tile(FORWARD, q)
    shape = _shape(q, k, remote, chunk, tile)
    blocks = chunk // shape["BN"]
    index = invert(choice, M, G, shape["SHARE"])
    part = q.new_empty((1 + remote) * blocks, N, H, K)
    part_lse = torch.empty((1 + remote) * blocks, N, H, dtype=torch.float32, device=q.device)
    kernels_attend.attend_fwd_kernel[((M + index.extra) * blocks * G,)](
        q, k, v, part, part_lse, grid, *index.parts,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], N, M, index.extra, scale * LOG2E,
        H=H, INDEX=_index(part, q, k, v), **shape,
    )  # fmt: skip
    o = q.new_empty(N, H, K)
    lse = torch.empty(N, H, dtype=torch.float32, device=q.device)
    kernels_attend.merge_kernel[(triton.cdiv(N * H, 64),)](
        part, part_lse, choice, o, lse, N * H, P=blocks, REMOTE=remote, K=K, BK=block_of(K), BR=64, INDEX=_index(part)
    )
    return o, lse, index.buffer


def _adds_at_once(q: Tensor) -> bool:
    """Return whether memory can add 16 bytes at a time: from Hopper on."""
    return interpreted() or torch.cuda.get_device_capability(q.device) >= (9, 0)


@dataclass(frozen=True)
class BackwardKernel:
    """A family's kernel of the backward attention pass, and how it is launched."""

    kernel: Any
    #: Compile-time options.
    options: dict[str, Any]
    #: Blocks of keys that a chunk is cut into.
    blocks: int
    #: How many programs share so many work items of each block and head.
    programs: Callable[[int], int]


def attend_backward(do: Tensor, saved: Sequence[Tensor], chunk: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv (arXiv 2505.18522, algorithm 2); `saved` as in `operators.attend_backward`."""
    q, k, v, *_, choice, _, _ = saved
    options = _shape(q, k, choice.shape[2], chunk, _tile(BACKWARD, q))
    kernel = BackwardKernel(kernels_attend.attend_bwd_kernel, options, chunk // options["BN"], lambda items: items)
    return run_backward(kernel, (dense(q), dense(k), dense(v), do.contiguous()), saved, chunk, scale)


def run_backward(
    run: BackwardKernel, inputs: Sequence[Tensor], saved: Sequence[Tensor], chunk: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv by this kernel and those around it; `inputs` are q, k, v and do, laid out as it takes them."""
    q, k, v, do = inputs
    *_, o, lse, index, choice, grid, _ = saved
    N, H, K = q.shape
    G, M, remote = k.shape[1], grid.shape[0], choice.shape[2]
    lists = Index(index, G, choice.numel() // G, M, share_of(chunk))
    adds = remote == 1 and run.blocks == 1 and _adds_at_once(q)
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    part = dq if adds else q.new_empty((1 + remote) * run.blocks, N, H, K)
    scratch = k.new_empty(G, 2 * lists.extra, 2 * chunk * block_of(K), dtype=torch.float32)
    wide = {"K": K, "BK": block_of(K), "INDEX": _index(part, q, k, v, scratch)}
    rows = wide | {"BR": 64}
    delta = torch.empty(N, H, dtype=torch.float32, device=q.device)
    kernels_attend.delta_kernel[(triton.cdiv(N * H, 64),)](o, do, delta, part, N * H, ADD=adds, **rows)
    run.kernel[(run.programs(M + lists.extra) * run.blocks * G,)](
        q, k, v, do, lse, delta, part, dk, dv, scratch, grid, *lists.parts,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], N, M, lists.extra, scale,
        G=G, ADD=adds, INDEX=wide["INDEX"], **run.options,
    )  # fmt: skip
    if lists.extra:
        kernels_attend.share_kernel[(4 * lists.extra * G,)](
            scratch, dk, dv, grid, *lists.parts[2:], M, lists.extra, scale,
            G=G, C=chunk, BN=chunk // run.blocks, BR=16, PARTS=4, **wide,
        )  # fmt: skip
    if not adds:
        kernels_attend.sum_kernel[(triton.cdiv(N * H, 64),)](
            part, choice, dq, N * H, P=run.blocks, REMOTE=remote, **rows
        )
    return dq, dk, dv
