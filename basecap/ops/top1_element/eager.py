"""Top-1 element selection in plain PyTorch, in memory O(T)."""

import torch
from torch import Tensor

from basecap.ops._dispatch import EAGER

RUNS, BACKEND = EAGER, "eager"

#: Score matrices are made in slices of at most this many numbers.
SLICE = 1 << 22


def supports(q: Tensor) -> None:
    """Return None: this runs everywhere."""


def choose(q_NHK: Tensor, k_NGK: Tensor, first_N: Tensor | None, length: int) -> Tensor:
    """Return int32 [N, H], the row of the key first_t <= s <= t with the highest q_t.k_s, the earliest among equals.

    A score that is NaN is never the highest. Without `first_N` all sequences have `length` tokens.
    """
    N, H, _ = q_NHK.shape
    if first_N is None:
        token = torch.arange(N, device=q_NHK.device, dtype=torch.int32)
        first_N = token - token % length
    G = k_NGK.shape[1]
    wide = torch.promote_types(q_NHK.dtype, torch.float32)
    k_GKN = k_NGK.to(wide).permute(1, 2, 0)
    choice = torch.empty(N, H, dtype=torch.int32, device=q_NHK.device)
    at = 0
    while at < N:
        low = int(first_N[at])
        stop = min(N, at + min(256, max(1, SLICE // ((min(at + 256, N) - low) * H))))
        q_GTK = q_NHK[at:stop].to(wide).unflatten(1, (G, H // G)).permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.bmm(q_GTK, k_GKN[:, :, low:stop]).view(H, stop - at, stop - low)
        s = torch.arange(low, stop, device=q_NHK.device, dtype=torch.int32)
        t = torch.arange(at, stop, device=q_NHK.device, dtype=torch.int32)[:, None]
        visible = (s <= t) & (s >= first_N[at:stop, None])
        scores = scores.masked_fill(~visible | scores.isnan(), float("-inf"))
        best = visible & (scores == scores.amax(-1, keepdim=True))
        choice[at:stop] = torch.where(best, s, stop - 1).amin(-1).T
        at = stop
    return choice


def gather(v_NGK: Tensor, choice_NH: Tensor) -> Tensor:
    """Return [N, H, K], the chosen values."""
    H = choice_NH.shape[1]
    head = torch.arange(H, device=v_NGK.device) // (H // v_NGK.shape[1])
    return v_NGK[choice_NH.long(), head]


def scatter(do_NHK: Tensor, choice_NH: Tensor, groups: int) -> Tensor:
    """Return [N, G, K], for each key the sum of do over the queries that chose it."""
    N, H, K = do_NHK.shape
    wide = torch.promote_types(do_NHK.dtype, torch.float32)
    head = torch.arange(H, device=do_NHK.device) // (H // groups)
    dv = do_NHK.new_zeros(N * groups, K, dtype=wide)
    dv.index_add_(0, (choice_NH.long() * groups + head).flatten(), do_NHK.to(wide).flatten(0, 1))
    return dv.view(N, groups, K).to(do_NHK.dtype)
