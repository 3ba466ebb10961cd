"""Chunk boundaries: sequences of any lengths, packed in one row of tokens, each cut into chunks from its start."""

import torch
from torch import Tensor

from basecap.errors import ConfigError, nearest
from basecap.ops._kept import Kept, is_plain
from basecap.ops._shapes import check_scale, is_whole


def _uniform_grid(batch: int, length: int, chunk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the grid of `batch` sequences of one length."""
    per_row = -(-length // chunk)
    row = torch.arange(batch, device=device)[:, None]
    start = row * length + torch.arange(per_row, device=device) * chunk
    end = torch.minimum(start + chunk, (row + 1) * length)
    first = (row * per_row).expand_as(start)
    own = first[:, :1] + (torch.arange(length, device=device) >> _log2(chunk))
    return torch.stack([start, end, first], dim=2).flatten(0, 1).to(torch.int32), own.flatten().to(torch.int32)


#: Grids of batches of one length.
_GRIDS = Kept(_uniform_grid, lambda grid: grid)


def _log2(chunk: int) -> int:
    # Not a division: of ranges, compiled for a CPU, PyTorch 2.13 gets the last ones wrong.
    return chunk.bit_length() - 1


def _packed_grid(bounds: Tensor, tokens: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the grid of sequences [bounds[i], bounds[i+1]); rows after the last chunk are empty, at `tokens`."""
    bounds = bounds.to(torch.int64)
    count = (bounds[1:] - bounds[:-1] + chunk - 1) >> _log2(chunk)
    after = count.cumsum(0)
    # An upper bound: reading the number of chunks back would synchronise.
    index = torch.arange(tokens // chunk + count.numel(), device=bounds.device)
    sequence = torch.searchsorted(after, index, right=True)
    empty = sequence >= count.numel()
    sequence = sequence.clamp(max=count.numel() - 1)
    first = after[sequence] - count[sequence]
    start = (bounds[sequence] + (index - first) * chunk).masked_fill(empty, tokens)
    end = torch.minimum(start + chunk, bounds[sequence + 1]).masked_fill(empty, tokens)
    first = torch.where(empty, index, first)
    token = torch.arange(tokens, device=bounds.device)
    sequence = torch.searchsorted(bounds, token, right=True) - 1  # torch 2.11 compiles no search in a slice for GPUs
    own = after[sequence] - count[sequence] + ((token - bounds[sequence]) >> _log2(chunk))
    return torch.stack([start, end, first], dim=1).to(torch.int32), own.to(torch.int32)


def bounds_of(segments: Tensor) -> Tensor:
    """Return int64 [S + 1], where the sequences of `segments` [B, T] start and end in the row of B * T tokens."""
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    positions = starts.flatten().nonzero().squeeze(1)
    return torch.cat([positions, positions.new_tensor([segments.numel()])])


def check_chunk(chunk: int) -> int:
    """Return the size as a Python number; ConfigError unless the kernels can cut such chunks."""
    if not is_whole(chunk) or not 16 <= chunk <= 256 or chunk & (chunk - 1):
        raise ConfigError(f"chunk must be a power of two from 16 to 256, a Python number, not {chunk!r}.")
    return int(chunk)


def check_options(q: Tensor, chunk: int, mode: str, scale: float | None, remote: int) -> tuple[int, float, int]:
    """Return chunk, scale and remote as Python numbers; ConfigError unless these are options of `top1_chunk`."""
    chunk, scale = check_chunk(chunk), check_scale(scale, q.shape[3])
    if mode not in ("exact", "approx"):
        raise ConfigError(f"unknown mode {mode!r}: {nearest(str(mode), ('exact', 'approx'))}")
    if not is_whole(remote) or remote < 1:
        raise ConfigError(f"remote must be an integer of at least 1, not {remote!r}.")
    return chunk, scale, int(remote)


def most_remote(length: int, chunk: int) -> int:
    """Return how many chunks a query can choose in sequences of up to `length` tokens; at least 1, as kernels want."""
    return max(1, (length - 1) // chunk)


def chunk_grid(x_BTGK: Tensor, chunk: int, segments: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the chunks and each token's chunk, for the B * T tokens of `x_BTGK` in one row.

    Returns:
        int32 [M, 3], each chunk's first token, the token after its last, and the first chunk of its sequence;
        int32 [B * T], each token's chunk. Every chunk before the last of its sequence is full.
    """
    B, T, *_ = x_BTGK.shape
    if segments is not None:
        cu_seqlens = bounds_of(segments)
    if cu_seqlens is not None:
        return _packed_grid(cu_seqlens, B * T, chunk)
    return (_GRIDS if is_plain(x_BTGK) else _uniform_grid)(B, T, chunk, x_BTGK.device)
