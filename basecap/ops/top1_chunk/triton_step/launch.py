"""Launches the Triton kernels of one decoding step. Signature as in `eager`."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from basecap.ops._launch import block_of, dense
from basecap.ops.top1_chunk.triton_kernels.launch import LOG2E, Tile, stages_for
from basecap.ops.top1_chunk.triton_step import kernels

#: Parts that the caches of a batch are cut into for the exact choice of one step: many, so that the last wave is short.
SPLITS = 65536

#: Chunks of one part, as long as there are `FEWEST` parts: the next ones load while one is summed up.
CHUNKS, FEWEST = 4, 8192

#: The most candidates the parts of one cache may leave: a step's last kernel holds them in one warp's registers.
CANDIDATES = 1024

#: Largest head size -> tile, chosen on an H200.
TILES = {64: Tile(16, 128, 4, 4), 128: Tile(16, 64, 4, 3), 256: Tile(16, 32, 4, 3)}


def decode(
    token: Sequence[Tensor],
    cache: dict[str, Tensor],
    length: int,
    chunk: int,
    exact: bool,
    scale: float,
    remote: int,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return the output [B, 1, H, K] of a token (q, k, v), which joins the `length` in the cache, or `lengths` [B].

    With `lengths` the kernels are launched for `length` tokens, and each program reads how many its sequence has. So
    one CUDA graph serves all numbers up to `length`; programs of chunks that are not full yet have nothing to read.
    """
    q, k, v = (dense(x[:, 0]) for x in token)
    keys, sums = cache["k"], cache["sums"]
    lengths = None if lengths is None else lengths.contiguous()
    B, H, K = q.shape
    G = k.shape[1]
    full = length // chunk
    part = _chunks_of_a_part(full, B * G, remote) if exact else 64
    splits = triton.cdiv(full, part)
    score = torch.empty(B, H, splits, remote, dtype=torch.float32, device=q.device)
    index = torch.empty(B, H, splits, remote, dtype=torch.int32, device=q.device)
    width = {"GROUP": H // G, "K": K, "BK": block_of(K), "REMOTE": remote}
    tile = next(tile for widest, tile in TILES.items() if widest >= K)
    places = triton.next_power_of_2(remote)
    if splits and exact:
        kernels.score_exact_kernel[G, splits, B](
            q, keys, lengths, score, index, *q.stride()[:2], *keys.stride()[:3], length, part, scale * LOG2E,
            **width, C=chunk, BN=min(chunk, tile.columns), R=places, GP=max(tile.rows, triton.next_power_of_2(H // G)),
            num_stages=min(part, stages_for(tile.stages, keys, tile.rows, chunk)), num_warps=tile.warps,
        )  # fmt: skip
    elif splits:
        kernels.score_approx_kernel[splits, G, B](
            q, sums, lengths, score, index, *q.stride()[:2], *sums.stride()[:3], length,
            **width, C=chunk, BN=part, R=places,
        )  # fmt: skip
    o = q.new_empty(B, 1, H, K)
    kernels.step_kernel[H, B](
        q, k, v, keys, cache["v"], sums, lengths, score, index, o, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        *keys.stride()[:3], *sums.stride()[:3], splits * remote, length, scale * LOG2E,
        **width, C=chunk, BN=min(chunk, 4096 // block_of(K)), BC=triton.next_power_of_2(max(1, splits * remote)),
        # One warp's sums need no exchange through shared memory, which takes longer than the keys do.
        num_warps=1,
    )  # fmt: skip
    return o


def _chunks_of_a_part(full: int, caches: int, remote: int) -> int:
    """Return how many of the `full` chunks of each of the `caches` one program of the exact choice reads."""
    total = full * caches
    return max(1, triton.cdiv(total, SPLITS), min(CHUNKS, total // FEWEST), triton.cdiv(full * remote, CANDIDATES))
