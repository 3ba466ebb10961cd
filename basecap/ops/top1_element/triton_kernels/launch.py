"""Launches the Triton kernels. Signatures as in `eager`."""

import torch
import triton
from torch import Tensor

from basecap.ops._launch import block_of, dense
from basecap.ops._selection.launch import invert
from basecap.ops.top1_element.triton_kernels import kernels


def choose(q: Tensor, k: Tensor, first: Tensor | None, length: int) -> Tensor:
    """Return int32 [N, H], the row of the best key; see `eager.choose`."""
    q, k = dense(q), dense(k)
    N, H, K = q.shape
    width = block_of(K)
    small = width > 128 or q.element_size() == 4
    choice = torch.empty(N, H, dtype=torch.int32, device=q.device)
    rows = 64 if small else 128
    kernels.choose_kernel[triton.cdiv(N, rows), H](
        q, k, first, choice, *q.stride()[:2], *k.stride()[:2], N, length,
        H=H, GROUP=H // k.shape[1], K=K, BK=width, BQ=rows, BN=64,
        num_warps=8 if width > 64 else 4, num_stages=1 if small else 3,
    )  # fmt: skip
    return choice


def gather(v: Tensor, choice: Tensor) -> Tensor:
    """Return [N, H, K], the chosen values."""
    v = dense(v)
    (N, H), K = choice.shape, v.shape[2]
    o, pairs = v.new_empty(N, H, K), 32
    kernels.gather_kernel[(triton.cdiv(N * H, pairs),)](
        v, choice, o, *v.stride()[:2], N * H, H=H, GROUP=H // v.shape[1], K=K, BK=block_of(K), BM=pairs
    )
    return o


def scatter(do: Tensor, choice: Tensor, groups: int) -> Tensor:
    """Return [N, G, K], for each key the sum of do over the queries that chose it; the same bits every time."""
    do = do.contiguous()
    N, H, K = do.shape
    width = block_of(K)
    keys = 64
    index = invert(choice.unsqueeze(2), triton.cdiv(N, keys), groups, N * H, keys)
    dv = do.new_empty(N, groups, K)
    kernels.scatter_kernel[triton.cdiv(N, keys), groups](
        do, choice, *index.parts[:2], dv, N, triton.cdiv(N, keys),
        G=groups, GROUP=H // groups, K=K, BK=width, BN=keys, BM=64, num_stages=1,
    )  # fmt: skip
    return dv
