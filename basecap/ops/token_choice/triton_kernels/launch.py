"""Launches the Triton kernels of the choice of tokens and of the indexer's loss."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from basecap.ops._dispatch import MOST_PROGRAMS
from basecap.ops._launch import block_of, first_tokens, three_tf32
from basecap.ops._sums import exact_dtype
from basecap.ops.known_bad import PIPELINES, known_bad_on
from basecap.ops.token_choice.triton_kernels import kernels, kernels_loss

LOG2E = 1.4426950408889634

#: Pairs of tokens whose scores exist at one time, 128 MiB of them.
PAIRS = 1 << 25

#: Queries of a row that is cut are multiples of this.
QUERIES = 128

#: Scores that one program holds, where its queries have so many tokens or fewer.
SCORES = 8192

#: Bytes of a number -> queries and tokens of a tile of scores, and of one of gradients, with their warps.
TILES = {2: ((128, 64, 8), (64, 64, 4)), 4: ((32, 32, 4), (32, 32, 4))}


class _Part(NamedTuple):
    """Rows of the batch and queries whose scores exist at one time."""

    row: int
    rows: int
    first: int
    queries: int


def _parts(B: int, T: int) -> list[_Part]:
    """Return parts of the batch, the largest first; where the scores of one row are too many, of its queries."""
    rows = min(PAIRS // T**2, MOST_PROGRAMS)
    if rows:
        return [_Part(row, min(rows, B - row), 0, T) for row in range(0, B, rows)]
    queries = max(1, PAIRS // T // QUERIES) * QUERIES
    return [_Part(row, 1, at, min(queries, T - at)) for row in range(B) for at in range(0, T, queries)]


def _tile(x: Tensor, *, gradients: bool = False) -> dict[str, Any]:
    """Return options of kernels with products of these queries and their keys."""
    queries, keys, warps = TILES[x.element_size()][gradients]
    ahead = x.element_size() == 2 and PIPELINES not in known_bad_on(x.device)
    return {
        "K": x.shape[3], "BQ": queries, "BS": keys, "BK": block_of(x.shape[3]), "PRECISION": "ieee",
        "num_warps": warps, "num_stages": 2 if ahead else 1,
    }  # fmt: skip


def _rows(T: int) -> dict[str, int]:
    """Return options of kernels whose programs hold all scores of their queries."""
    block = triton.next_power_of_2(T)
    queries = min(16, max(1, SCORES // block))
    return {"BQ": queries, "BT": block, "num_warps": max(1, min(16, queries * block // 1024))}


def _scratch(x: Tensor, parts: list[_Part], heads: int | None = None) -> Tensor:
    """Return room for numbers of a part's pairs, or for two of each query of as many heads."""
    each = x.shape[1] if heads is None else 2 * heads
    size = parts[0].rows * parts[0].queries * each if parts else 0
    return torch.empty(size, dtype=torch.float32, device=x.device)


def _score(index: Sequence[Tensor], scores: Tensor, part: _Part) -> None:
    """Write index scores of a part."""
    q, k, weights = index
    T, tile = q.shape[1], _tile(q)
    grid = (triton.cdiv(part.first + part.queries, tile["BS"]), triton.cdiv(part.queries, tile["BQ"]), part.rows)
    kernels.index_fwd_kernel[grid](q, k, weights, scores, T, part.row, part.first, part.queries, X=q.shape[2], **tile)


def _weigh(
    heads: Sequence[Tensor], starts: Tensor | None, chosen: Tensor | None, norms: Tensor, mass: Tensor, part: _Part
) -> None:
    """Write the mass of a part."""
    q, k = heads
    (_, T, H, K), tile = q.shape, _tile(q)
    numbers = T, part.rows * H * part.queries, part.row, part.first, part.queries, K**-0.5 * LOG2E
    options = {"H": H, "GROUP": H // k.shape[2], "PACKED": starts is not None, "CHOSEN": chosen is not None, **tile}
    tiles = triton.cdiv(part.queries, tile["BQ"])
    kernels.norm_fwd_kernel[tiles, H, part.rows](q, k, starts, chosen, norms, *numbers, **options)
    grid = triton.cdiv(part.first + part.queries, tile["BS"]), tiles, part.rows
    kernels.mass_fwd_kernel[grid](q, k, starts, chosen, norms, mass, *numbers, **options)


def _choose(scores: Tensor, starts: Tensor | None, chosen: Tensor, part: _Part, top: int) -> None:
    """Write what the queries of a part choose by their scores."""
    T = chosen.shape[1]
    numbers, options = (T, part.row, part.first, part.queries, min(top, T)), _rows(T)
    kernels.choose_fwd_kernel[triton.cdiv(part.queries, options["BQ"]), part.rows](
        scores, starts, chosen, *numbers, PACKED=starts is not None, **options
    )


def choose_by_index(q: Tensor, k: Tensor, weights: Tensor, segments: Tensor | None, top: int) -> Tensor:
    """Return bool [B, T, T], the tokens that each query reads."""
    index, starts = [x.contiguous() for x in (q, k, weights)], first_tokens(segments)
    B, T = q.shape[:2]
    chosen = torch.empty(B, T, T, dtype=torch.bool, device=q.device)
    parts = _parts(B, T)
    scores = _scratch(q, parts)
    for part in parts:
        _score(index, scores, part)
        _choose(scores, starts, chosen, part, top)
    return chosen


def choose_by_mass(q: Tensor, k: Tensor, segments: Tensor | None, top: int) -> Tensor:
    """Return bool [B, T, T], the tokens that each query reads."""
    heads, starts = [q.contiguous(), k.contiguous()], first_tokens(segments)
    B, T, H, _ = q.shape
    chosen = torch.empty(B, T, T, dtype=torch.bool, device=q.device)
    parts = _parts(B, T)
    mass, norms = _scratch(q, parts), _scratch(q, parts, H)
    for part in parts:
        _weigh(heads, starts, None, norms, mass, part)
        _choose(mass, starts, chosen, part, top)
    return chosen


def divergence(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    heads: Sequence[Tensor],
    chosen: Tensor | None,
    segments: Tensor | None,
    learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the mean divergence, and gradients of its sum over queries; see `operators.diverge`."""
    index, heads = [x.contiguous() for x in (index_q, index_k, weights)], [x.contiguous() for x in heads]
    chosen, starts = None if chosen is None else chosen.contiguous(), first_tokens(segments)
    (B, T), H = index_q.shape[:2], heads[0].shape[2]
    losses = torch.empty(B, T, dtype=torch.float32, device=index_q.device)
    # The keys' gradients are added to, one part after the other.
    dq, dk, dweights = (torch.zeros(x.shape if learn else 0, dtype=torch.float32, device=x.device) for x in index)
    parts = _parts(B, T)
    scores, mass, norms = _scratch(index_q, parts), _scratch(index_q, parts), _scratch(index_q, parts, H)
    for part in parts:
        _score(index, scores, part)
        _weigh(heads, starts, chosen, norms, mass, part)
        kernels_loss.divergence_fwd_kernel[triton.cdiv(part.queries, _rows(T)["BQ"]), part.rows](
            scores, mass, starts, chosen, losses, T, part.row, part.first, part.queries,
            PACKED=starts is not None, CHOSEN=chosen is not None, LEARN=learn, **_rows(T),
        )  # fmt: skip
        if learn:
            _differentiate(index, scores, (dq, dk, dweights), part)
    loss = losses.sum(dtype=exact_dtype(losses.device)) / max(1, B * T)
    return loss.to(torch.float32), dq, dk, dweights


def _differentiate(index: Sequence[Tensor], dscores: Tensor, grads: Sequence[Tensor], part: _Part) -> None:
    """Write gradients of a part's queries and weights, and add to those of keys."""
    (q, k, weights), (dq, dk, dweights) = index, grads
    T, X, tile = q.shape[1], q.shape[2], _tile(q, gradients=True)
    wide = "ieee" if q.dtype == torch.float32 else three_tf32()
    numbers = T, part.row, part.first, part.queries
    grid = X, triton.cdiv(part.queries, tile["BQ"]), part.rows
    kernels_loss.queries_bwd_kernel[grid](q, k, weights, dscores, dq, dweights, *numbers, X=X, WIDE=wide, **tile)
    keys = triton.cdiv(part.first + part.queries, tile["BS"])
    kernels_loss.keys_bwd_kernel[keys, part.rows](q, k, weights, dscores, dk, *numbers, X=X, WIDE=wide, **tile)
