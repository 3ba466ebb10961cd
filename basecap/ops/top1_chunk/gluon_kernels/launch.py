"""Launches the Gluon kernels, and those in Triton that do the rest. Signatures as in `eager`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from basecap.ops._launch import dense
from basecap.ops.top1_chunk.gluon_kernels import kernels_approx, kernels_backward, kernels_exact
from basecap.ops.top1_chunk.triton_kernels import launch as triton_launch
from basecap.ops.top1_chunk.triton_kernels.launch import attend

__all__ = ["attend", "attend_backward", "choose"]


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
    """Return int32 [N, H, remote], the chosen chunks in descending order; -1 where there is none.

    More than one chunk is chosen in Triton, and so are exact ones for queries with large scores.
    """
    if remote > 1:
        return triton_launch.choose(q, k, grid, own, chunk, exact, scale, remote)
    q, k = dense(q), dense(k)
    shape = (*q.shape[:2], remote)
    means, low, norm = triton_launch.summarise(k, grid, chunk, exact)
    if exact:
        # Neither kernel writes the choice of a tile of queries that are NaN in part: their tiles differ.
        choice = torch.full(shape, -1, dtype=torch.int32, device=q.device)
        kernels_exact.choose_exact(q, k, grid, own, norm, choice, chunk, scale * triton_launch.LOG2E)
        triton_launch.choose_exact(q, k, (grid, own, norm), choice, chunk, scale, bounded=False)
    else:
        assert low is not None  # numbers of 16 bits have a second part
        choice = torch.empty(shape, dtype=torch.int32, device=q.device)
        kernels_approx.choose_approx(q, means, low, grid, own, choice)
    return choice


def attend_backward(do: Tensor, saved: Sequence[Tensor], chunk: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv (arXiv 2505.18522, algorithm 2); `saved` as in `operators.attend_backward`."""
    q, k, v, *_, choice, _, _ = saved
    (_, H, K), G = q.shape, k.shape[1]
    shape = {"GROUP": H // G, "REMOTE": choice.shape[2], "SHARE": triton_launch.share_of(chunk), "K": K, "C": chunk}
    kernel = triton_launch.BackwardKernel(
        kernel=kernels_backward.attend_bwd_kernel,
        options=shape | kernels_backward.options(K),
        blocks=1,
        programs=lambda items: kernels_backward.programs(K, items, G, q.device),
    )
    inputs = [kernels_backward.aligned(x) for x in (q, k, v, do.contiguous())]
    return triton_launch.run_backward(kernel, inputs, saved, chunk, scale)
