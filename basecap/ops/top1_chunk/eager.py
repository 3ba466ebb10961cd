"""Top-1 chunk selection in plain PyTorch, any device and dtype, in memory O(T): the same passes as the kernels.

All tensors have the B * T tokens in one row of N; `grid` and `own` come from `chunk_grid`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops._dispatch import EAGER, without_autocast
from basecap.ops._selection.checks import append_rows

RUNS, BACKEND = EAGER, "eager"

#: Score matrices are made in slices of at most this many numbers.
SLICE = 1 << 22


def supports(q: Tensor, chunk: int) -> None:
    """Return None: this runs everywhere."""


def _positions(grid: Tensor, chunk: int, tokens: int) -> Tensor:
    """Return int64 [M, C], the token at each place of each chunk; places after the end repeat some later token."""
    places = torch.arange(chunk, device=grid.device)
    return (grid[:, :1].long() + places).clamp(max=tokens - 1)


def choose(
    q_NHK: Tensor,
    k_NGK: Tensor,
    grid: Tensor,
    own: Tensor,
    chunk: int,
    exact: bool,
    scale: float,
    remote: int,
) -> Tensor:
    """Return int32 [N, H, remote], the chunks with the highest scores in descending order; -1 where there is none."""
    N, H, _ = q_NHK.shape
    G = k_NGK.shape[1]
    wide = torch.promote_types(q_NHK.dtype, torch.float32)
    k_MCGK = k_NGK[_positions(grid, chunk, N)].to(wide)
    # The score of a chunk: of each of its keys (exact), or of their mean (approx).
    k_GKS = (k_MCGK if exact else k_MCGK.mean(1, keepdim=True)).permute(2, 3, 0, 1).flatten(2)
    per_chunk = k_GKS.shape[2] // grid.shape[0]
    choice = torch.full((N, H, remote), -1, dtype=torch.int32, device=q_NHK.device)
    first = grid[own.long(), 2]
    at = 0
    while at < N:
        low = int(first[at])
        width = max(1, int(own[min(at + 256, N) - 1]) - low) * per_chunk * H
        stop = min(N, at + min(256, max(1, SLICE // width)))
        high = int(own[stop - 1])
        if high > low:
            q_GTK = q_NHK[at:stop].to(wide).unflatten(1, (G, H // G)).permute(1, 2, 0, 3).flatten(1, 2)
            scores = torch.bmm(q_GTK, k_GKS[:, :, low * per_chunk : high * per_chunk]) * scale
            if exact:
                scores = scores.unflatten(2, (high - low, chunk)).logsumexp(-1)
            scores_THM = scores.unflatten(1, (H // G, stop - at)).flatten(0, 1).transpose(0, 1)
            choice[at:stop] = _best(scores_THM, first[at:stop], own[at:stop], low, remote)
        at = stop
    return choice


def _best(scores_THM: Tensor, first: Tensor, own: Tensor, low: int, remote: int) -> Tensor:
    """Return int32 [T, H, remote], the best chunks of first <= c < own; column 0 of `scores_THM` is chunk `low`."""
    c = torch.arange(low, low + scores_THM.shape[2], dtype=torch.int32, device=own.device)
    candidate = (c >= first[:, None]) & (c < own[:, None])
    scores = scores_THM.masked_fill(~candidate[:, None] | scores_THM.isnan(), float("-inf"))
    chosen = []
    for _ in range(remote):
        best = scores.amax(-1, keepdim=True)
        index = torch.where(scores == best, c, c[-1] + 1).amin(-1, keepdim=True)
        chosen.append(torch.where(best > float("-inf"), index, -1))
        scores = scores.masked_fill(c == index, float("-inf"))
    return torch.cat(chosen, dim=-1)


def _blocks(choice: Tensor, grid: Tensor, own: Tensor, groups: int, block: int) -> tuple[Tensor, Tensor]:
    """Group the (query, slot) pairs by the chunk they attend: slot 0 is the own chunk, the others the chosen ones.

    Returns:
        int64 [n, block], the pairs as (t * H + h) * slots + slot, -1 where a block is not full; int64 [n], the
        block's key head times M plus its chunk.
    """
    N, H, _ = choice.shape
    M = grid.shape[0]
    target = torch.cat([own[:, None, None].expand(N, H, 1), choice], dim=2).long()
    head = torch.arange(H, device=own.device) // (H // groups)
    key = torch.where(target >= 0, head[:, None] * M + target, groups * M).flatten()
    order = key.argsort(stable=True)
    count = torch.bincount(key, minlength=groups * M + 1)[: groups * M]
    order = order[: int(count.sum())]
    blocks = (count + block - 1) // block
    begin = (blocks.cumsum(0) - blocks) * block - (count.cumsum(0) - count)
    pairs = torch.full((int(blocks.sum()), block), -1, dtype=torch.int64, device=own.device)
    pairs.view(-1)[begin[key[order]] + torch.arange(order.numel(), device=own.device)] = order
    return pairs, torch.repeat_interleave(torch.arange(groups * M, device=own.device), blocks)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, [n, T, K] by [n, K, S], in float32 or wider: rounded to half precision, large scores are wrong."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.bmm(a.to(wide), b.to(wide))


class _Slice:
    """The queries, keys, values and masked scores of some blocks."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, pairs: Tensor, key: Tensor, grid: Tensor, chunk: int, slots: int
    ):
        N, H, _ = q.shape
        M = grid.shape[0]
        self.key = key
        self.real = pairs >= 0
        self.pair = pairs.clamp(min=0)
        self.row = self.pair // slots
        self.t, self.h = self.row // H, self.row % H
        self.place = _positions(grid, chunk, N)[key % M]
        self.head = (key // M)[:, None].expand_as(self.place)
        self.q, self.k, self.v = q[self.t, self.h], k[self.place, self.head], v[self.place, self.head]
        # A remote chunk is full and ends earlier, so this is the mask of both kinds.
        inside = torch.arange(chunk, device=q.device) < (grid[:, 1] - grid[:, 0])[key % M][:, None]
        self.mask = inside[:, None] & (self.place[:, None] <= self.t[:, :, None]) & self.real[:, :, None]

    def scores(self, scale: float) -> Tensor:
        """Return the scores [n, block, C] in float32 or wider; -inf outside the mask."""
        return (wide_product(self.q, self.k.transpose(1, 2)) * scale).masked_fill(~self.mask, float("-inf"))


def _slices(q: Tensor, k: Tensor, v: Tensor, choice: Tensor, grid: Tensor, own: Tensor, chunk: int):
    block = min(chunk, 64)
    pairs, key = _blocks(choice, grid, own, k.shape[1], block)
    step = max(1, SLICE // (block * chunk))
    for at in range(0, len(key), step):
        yield _Slice(q, k, v, pairs[at : at + step], key[at : at + step], grid, chunk, choice.shape[2] + 1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, choice: Tensor, grid: Tensor, own: Tensor, chunk: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [N, H, K], the logsumexp of the attended scores [N, H], float32 or wider, and an empty index."""
    N, H, K = q.shape
    slots = choice.shape[2] + 1
    wide = torch.promote_types(q.dtype, torch.float32)
    part = q.new_zeros(N * H * slots, K)
    lse = torch.full((N * H * slots,), float("-inf"), dtype=wide, device=q.device)
    for piece in _slices(q, k, v, choice, grid, own, chunk):
        s = piece.scores(scale)
        mass = s.logsumexp(-1)
        p = (s - mass[..., None]).exp().to(v.dtype)
        part[piece.pair[piece.real]] = torch.bmm(p, piece.v)[piece.real]
        lse[piece.pair[piece.real]] = mass[piece.real]
    lse = lse.view(N, H, slots)
    total = lse.logsumexp(-1)
    share = (lse - total[..., None]).exp()
    o = (part.view(N, H, slots, K).to(wide) * share[..., None]).sum(2)
    return o.to(q.dtype), total, torch.empty(0, dtype=torch.int32, device=q.device)


def attend_backward(do: Tensor, saved: Sequence[Tensor], chunk: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv (arXiv 2505.18522, algorithm 2); `saved` as in `operators.attend_backward`."""
    q, k, v, o, lse, _, choice, grid, own = saved
    N, H, K = q.shape
    M, slots = grid.shape[0], choice.shape[2] + 1
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = q.new_zeros(N * H * slots, K, dtype=wide)
    dk, dv = (x.new_zeros(x.shape[1] * M, chunk, K, dtype=wide) for x in (k, v))
    delta = (do.to(wide) * o.to(wide)).sum(-1)
    for piece in _slices(q, k, v, choice, grid, own, chunk):
        p = (piece.scores(scale) - lse[piece.t, piece.h][..., None]).exp()
        g = do[piece.t, piece.h]
        dp = wide_product(g, piece.v.transpose(1, 2))
        ds = (p * (dp - delta[piece.t, piece.h][..., None]) * scale).to(q.dtype)
        dv.index_add_(0, piece.key, torch.bmm(p.to(v.dtype).transpose(1, 2), g).to(wide))
        dk.index_add_(0, piece.key, torch.bmm(ds.transpose(1, 2), piece.q).to(wide))
        dq[piece.pair[piece.real]] = torch.bmm(ds, piece.k).to(wide)[piece.real]
    place = torch.arange(N, device=q.device) - grid[own.long(), 0]
    dk, dv = (x.unflatten(0, (-1, M))[:, own.long(), place].transpose(0, 1) for x in (dk, dv))
    return dq.view(N, H, slots, K).sum(2).to(q.dtype), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()


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
    """Return the output [B, 1, H, K] of a token (q, k, v), which joins the `length` in the cache, or `lengths` [B]."""
    q, k, v = token
    if lengths is None:
        cache["k"][:, length] = k[:, 0]
        cache["v"][:, length] = v[:, 0]
        if (length + 1) % chunk == 0:
            sum_keys(cache, length // chunk, length // chunk + 1, chunk)
    else:
        append_rows(cache, k, v, lengths)
        _sum_filled(cache, lengths, chunk)
    # Under autocast the scores would be rounded to half precision.
    with without_autocast(q.device):
        return _attend_cache(q, cache, length + 1, chunk, exact, scale, remote, lengths)


def _sum_filled(cache: dict[str, Tensor], lengths: Tensor, chunk: int) -> None:
    """Write the sums of the chunks that are full with the token after `lengths` [B]."""
    row, own = torch.arange(len(lengths), device=lengths.device), lengths // chunk
    place = (own * chunk)[:, None] + torch.arange(chunk, device=lengths.device)
    keys = cache["k"][row[:, None], place.clamp(max=cache["k"].shape[1] - 1)]
    sums, full = cache["sums"], ((lengths + 1) % chunk == 0)[:, None, None]
    sums[row, own] = torch.where(full, keys.sum(1, dtype=sums.dtype), sums[row, own])


def sum_keys(cache: dict[str, Tensor], start: int, end: int, chunk: int) -> None:
    """Write the sums of the full chunks from `start` to `end`.

    They are computed from the keys that a chunk holds when it is full. Added up token by token, they would include keys
    that were overwritten.
    """
    keys = cache["k"][:, start * chunk : end * chunk].unflatten(1, (end - start, chunk))
    cache["sums"][:, start:end] = keys.sum(2, dtype=cache["sums"].dtype)


def _attend_cache(
    q: Tensor,
    cache: dict[str, Tensor],
    length: int,
    chunk: int,
    exact: bool,
    scale: float,
    remote: int,
    lengths: Tensor | None,
) -> Tensor:
    """Return the output at the last of `length` tokens, or at position `lengths` [B] of each sequence."""
    B, _, H, K = q.shape
    k, v = cache["k"], cache["v"]
    G = k.shape[2]
    wide = cache["sums"].dtype
    full = (length - 1) // chunk  # chunks before that of the query, in the longest sequence
    if lengths is None:
        newest, reach = torch.full((1, 1, 1, 1), length - 1, device=q.device), length - full * chunk
    else:
        newest, reach = lengths[:, None, None, None], chunk
    own = newest // chunk
    remote = min(remote, full)
    q_BGRK = q[:, 0].unflatten(1, (G, H // G))
    local = (own * chunk + torch.arange(reach, device=q.device)).expand(B, G, H // G, -1)
    place, hidden = local.minimum(newest), local > newest
    if remote:
        if exact:
            k_BMCGK = k[:, : full * chunk].unflatten(1, (full, chunk)).to(wide)
            score = (torch.einsum("bgrk,bmcgk->bgrmc", q_BGRK.to(wide), k_BMCGK) * scale).logsumexp(-1)
        else:
            score = torch.einsum("bgrk,bmgk->bgrm", q_BGRK.to(wide), cache["sums"][:, :full])
        best, chosen = (x[..., None] for x in _best_full(score, own, remote))
        none = best == float("-inf")
        inside = torch.arange(chunk, device=q.device)
        # The own token stands for a chunk that is not chosen, and is hidden: NaN would count even with weight 0.
        remote_place = torch.where(none, newest[..., None], chosen * chunk + inside).flatten(3)
        place = torch.cat([remote_place, place], dim=3)
        hidden = torch.cat([none.expand(-1, -1, -1, -1, chunk).flatten(3), hidden], dim=3)
    row = torch.arange(B, device=q.device)[:, None, None, None]
    head = torch.arange(G, device=q.device)[:, None, None]
    at = (row * k.shape[1] + place) * G + head
    # In slices, as large new memory takes longer to fetch than to fill.
    rows = max(1, SLICE // (H * place.shape[3] * K))
    slices = zip(q_BGRK.split(rows), at.split(rows), hidden.expand_as(at).split(rows), strict=True)
    keys, values = k.flatten(0, 2), v.flatten(0, 2)
    return torch.cat([_mix(*part, keys, values, scale, wide) for part in slices]).reshape(B, 1, H, K)


def _best_full(score: Tensor, own: Tensor, remote: int) -> tuple[Tensor, Tensor]:
    """Return score and index [..., remote] of the best chunks of [..., M] before `own`, -inf where there is none."""
    later = torch.arange(score.shape[-1], device=score.device) >= own
    score = score.masked_fill(score.isnan() | later, float("-inf"))
    best, chosen = score.sort(dim=-1, descending=True, stable=True)
    return best[..., :remote], chosen[..., :remote]


def _mix(
    q_BGRK: Tensor, at: Tensor, hidden: Tensor, keys: Tensor, values: Tensor, scale: float, wide: torch.dtype
) -> Tensor:
    """Return the outputs [B, G, R, K] for the rows `at` [B, G, R, S] of keys and values [rows, K].

    Rows of one table: indices of several dimensions copy number by number on a CPU.
    """
    s = torch.einsum("bgrk,bgrsk->bgrs", q_BGRK.to(wide), F.embedding(at, keys).to(wide)) * scale
    s = s.masked_fill(hidden, float("-inf"))
    return torch.einsum("bgrs,bgrsk->bgrk", s.softmax(-1).to(values.dtype), F.embedding(at, values))


def attend_further(
    q: Tensor, cache: dict[str, Tensor], start: int | Tensor, chunk: int, exact: bool, scale: float, remote: int
) -> Tensor:
    """Return the outputs [B, T, H, K] of queries at the positions from `start` on, a number or int64 [B, 1].

    The cache, in the dtype of q, has no tokens but theirs and earlier ones. The scores of all keys are made, in slices.
    """
    _, T, H, _ = q.shape
    newest = (start + torch.arange(T, device=q.device)).expand(len(q), -1)
    rows = max(1, SLICE // (H * T * cache["k"].shape[1]))
    options = (chunk, exact, scale, remote)
    outputs = [
        _by_all_scores(q[at], newest[at], {name: x[at] for name, x in cache.items()}, *options)
        for at in (slice(first, first + rows) for first in range(0, max(1, len(q)), rows))
    ]
    return torch.cat(outputs)


def _by_all_scores(
    q: Tensor, newest: Tensor, cache: dict[str, Tensor], chunk: int, exact: bool, scale: float, remote: int
) -> Tensor:
    """Return the outputs [B, T, H, K] of queries at the positions `newest` [B, T]."""
    k, v, sums = cache["k"], cache["v"], cache["sums"]
    L, G = k.shape[1:3]
    wide = sums.dtype
    full = (L - 1) // chunk
    remote = min(remote, full)
    q_BTGRK = q.to(wide).unflatten(2, (G, -1))
    s = torch.einsum("btgrk,bsgk->bgrts", q_BTGRK, k.to(wide)) * scale
    place, newest = torch.arange(L, device=q.device), newest[:, None, None, :, None]
    own = newest // chunk
    seen = (place >= own * chunk) & (place <= newest)
    if remote:
        if exact:
            score = s[..., : full * chunk].unflatten(-1, (full, chunk)).logsumexp(-1)
        else:
            score = torch.einsum("btgrk,bmgk->bgrtm", q_BTGRK, sums[:, :full])
        best, chosen = _best_full(score, own, remote)
        attended = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, chosen, best > float("-inf"))
        seen = seen | F.pad(attended.repeat_interleave(chunk, -1), (0, L - full * chunk))
    p = s.masked_fill(~seen, float("-inf")).softmax(-1).to(v.dtype)
    return torch.einsum("bgrts,bsgk->btgrk", p, v).flatten(2, 3)
