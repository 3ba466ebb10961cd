"""Windows, ALiBi and segments on PyTorch's FlexAttention, which has fused kernels on a GPU."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from basecap.ops._kept import Kept, is_plain

RUNS, BACKEND = "FlexAttention", None

#: Queries and keys of one tile; tiles without a visible pair are never touched.
BLOCK = 128


def supports(q_BTHK: Tensor, v_BTGV: Tensor, plain: bool, sinks: bool) -> str | None:
    """Return why FlexAttention does not run here, or None; `plain`: neither window nor slopes nor segments."""
    if plain:
        return "full attention is faster on SDPA"
    if sinks:
        return "sinks are a key of their own, which only SDPA takes"
    if not q_BTHK.is_cuda:
        return "FlexAttention has no backward off the GPU"
    if q_BTHK.dtype == torch.float64:
        return "FlexAttention has no float64"
    if q_BTHK.shape[3] < 16 or v_BTGV.shape[3] < 16:
        return "FlexAttention needs head sizes of at least 16"
    if q_BTHK.shape[1] % BLOCK or not q_BTHK.numel():
        return f"tiles are whole for multiples of {BLOCK} tokens only"
    if not (torch.is_grad_enabled() and q_BTHK.requires_grad):
        return "FlexAttention is compiled for every length, and lengths vary outside training"
    return None


@cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function around FlexAttention, compiled as one graph, which a caller in Python launches at once."""
    # fullgraph: too many variants are then an error instead of a silent T x T matrix.
    return torch.compile(function, dynamic=False, fullgraph=True)


def block_mask(
    batch: int,
    length: int,
    window: int | None,
    segments: Tensor | None,
    device: torch.device,
    open_BHNN: Tensor | None = None,
    seen: Callable[..., Tensor] | None = None,
) -> BlockMask:
    """Return the visible tiles, from the ends of each tile alone: nothing of size T x T is made.

    Args:
        batch: B.
        length: T; with segments a multiple of BLOCK.
        window: see `attention`.
        segments: see `attention`; ids do not decrease along T, so their first and last decide for a whole tile.
        device: where the mask is used.
        open_BHNN: bool [B, H, tiles of queries, tiles of keys], the tiles to look at, all when None.
        seen: takes a row, a head, a query and a key, and returns whether they may see each other; all when None.
    """
    window = length if window is None else window

    def visible(b, head, t, s):
        band = (t >= s) & (t - s < window)
        band = band if segments is None else band & (segments[b, t] == segments[b, s])
        return band if seen is None else band & seen(b, head, t, s)

    tile = torch.arange(-(-length // BLOCK), device=device)
    apart = BLOCK * (tile[:, None] - tile)  # from the first query to the first key
    some = (apart >= 0) & (apart - (BLOCK - 1) < window)
    # None are whole where something else says which pairs see each other.
    every = (apart > 0) & (apart + (BLOCK - 1) < window) if seen is None else None
    if segments is not None:
        first, last = segments[:, ::BLOCK], segments[:, BLOCK - 1 :: BLOCK]
        some = some & (last[:, None, :] >= first[:, :, None])
        every = None if every is None else every & (first[:, None, :] == last[:, :, None])
    some = _looked_at(some, batch, open_BHNN)
    whole: tuple[Tensor | None, Tensor | None] = None, None
    if every is not None:
        every = _looked_at(every, batch, open_BHNN)
        some, whole = some & ~every, _listed(every)
    return BlockMask.from_kv_blocks(*_listed(some), *whole, BLOCK, visible, seq_lengths=(length, length))


def _looked_at(tiles: Tensor, batch: int, open_BHNN: Tensor | None) -> Tensor:
    """Return [B, heads, tiles of queries, tiles of keys], those of `tiles` that are open; heads may be 1 for all."""
    tiles = tiles.expand(batch, 1, *tiles.shape[-2:]) if tiles.dim() == 2 else tiles[:, None]
    return tiles if open_BHNN is None else tiles & open_BHNN


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of tiles set in each row, and their columns in front."""
    ones = tiles.to(torch.int32).contiguous()  # the kernels on a GPU read both as contiguous tensors, whatever they are
    return ones.sum(-1, dtype=torch.int32), ones.argsort(dim=-1, descending=True, stable=True).to(torch.int32)


def _tensors(mask: BlockMask) -> list[Tensor | None]:
    kinds = "kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"
    return [getattr(mask, prefix + kind) for prefix in ("", "full_") for kind in kinds]


#: Masks without segments: a mask takes several times as long to make as FlexAttention to launch.
_MASKS = Kept(lambda batch, length, window, device: block_mask(batch, length, window, None, device), _tensors)


def attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    scale: float,
    window: int | None,
    slopes: Tensor | None,
    segments: Tensor | None,
    sinks: None = None,
) -> Tensor:
    """Return [B, T, H, V]; memory O(T)."""
    (B, T), device = q_BTHK.shape[:2], q_BTHK.device
    mask = _MASKS(B, T, window, device) if segments is None and is_plain(q_BTHK) else None
    run = _attend if torch.compiler.is_compiling() else compiled(_attend)
    return run(q_BTHK, k_BTGK, v_BTGV, mask, scale, window, slopes, segments)


def _attend(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    mask: BlockMask | None,
    scale: float,
    window: int | None,
    slopes: Tensor | None,
    segments: Tensor | None,
) -> Tensor:
    """Return [B, T, H, V]; see `attention`. Makes the mask where it is None."""
    if mask is None:
        B, T = q_BTHK.shape[:2]
        mask = block_mask(B, T, window, segments, q_BTHK.device)
    with_slope = None
    if slopes is not None:

        def with_slope(score, batch, head, t, s):
            return score - slopes[head] * (t - s)

    return attend(q_BTHK, k_BTGK, v_BTGV, mask, scale, with_slope)


def attend(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    mask: BlockMask,
    scale: float,
    change: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return [B, T, H, V], FlexAttention in code that is being compiled; `change` is its `score_mod`."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGV))
    grouped = q.shape[1] != k.shape[1]
    o_BHTV = flex_attention(q, k, v, score_mod=change, block_mask=mask, scale=scale, enable_gqa=grouped)
    return o_BHTV.transpose(1, 2)
