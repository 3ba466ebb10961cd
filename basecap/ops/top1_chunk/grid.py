"""Where the chunks lie: sequences of any lengths, packed in one row of tokens, each cut into chunks from its start.

And the checks of what is cut: kernels would read and write outside of what does not fit.
"""

from functools import lru_cache

import torch
from torch import Tensor

from basecap.errors import ConfigError, nearest
from basecap.ops._shapes import check_floating, check_integers, check_scale, check_segments, is_whole


@lru_cache(maxsize=32)
def _uniform(batch: int, length: int, chunk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # what is kept may meet a training step next
        return _uniform_grid(batch, length, chunk, device)


def _uniform_grid(batch: int, length: int, chunk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the grid of `batch` sequences of one length."""
    per_row = -(-length // chunk)
    row = torch.arange(batch, device=device)[:, None]
    start = row * length + torch.arange(per_row, device=device) * chunk
    end = torch.minimum(start + chunk, (row + 1) * length)
    first = (row * per_row).expand_as(start)
    own = first[:, :1] + (torch.arange(length, device=device) >> _log2(chunk))
    return torch.stack([start, end, first], dim=2).flatten(0, 1).to(torch.int32), own.flatten().to(torch.int32)


def _log2(chunk: int) -> int:
    # Not a division: of ranges, compiled for a CPU, PyTorch 2.13 gets the last ones wrong.
    return chunk.bit_length() - 1


def _packed_grid(bounds: Tensor, tokens: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the grid of sequences [bounds[i], bounds[i+1]); rows after the last chunk are empty, at `tokens`."""
    bounds = bounds.to(torch.int64)
    count = (bounds[1:] - bounds[:-1] + chunk - 1) >> _log2(chunk)
    after = count.cumsum(0)
    # No reading back of the number of chunks: it is at most this.
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


def check_heads(tensors: dict[str, Tensor]) -> None:
    """Raise ConfigError unless "q" [B, T, H, K], "k" and "v" [B, T, G, K], as many as are given, fit together."""
    check_floating(tensors)
    (first, like), *_ = tensors.items()
    for name, x in tensors.items():
        if x.dim() != 4 or 0 in x.shape[1:]:
            raise ConfigError(f"{name} {tuple(x.shape)} must be [B, T, heads, K], with all but B at least 1.")
        if x.dtype != like.dtype or x.device != like.device:
            raise ConfigError(
                f"{name} is {x.dtype} on {x.device}, {first} is {like.dtype} on {like.device}; make them alike."
            )
        if x.shape[:2] != like.shape[:2] or x.shape[3] != like.shape[3]:
            raise ConfigError(f"{name} {tuple(x.shape)} must have the B, T and K of {first} {tuple(like.shape)}.")
    k = tensors["k"]
    v = tensors.get("v", k)
    if v.shape != k.shape:
        raise ConfigError(f"v {tuple(v.shape)} must have the shape of k {tuple(k.shape)}.")
    if like.shape[2] % k.shape[2]:
        raise ConfigError(f"q has {like.shape[2]} heads, no multiple of the {k.shape[2]} heads of k and v.")


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
        raise ConfigError(f"remote must be at least 1 and whole, not {remote!r}.")
    return chunk, scale, int(remote)


def most_remote(length: int, chunk: int) -> int:
    """Return how many chunks a query can choose in sequences of up to `length` tokens; at least 1, as kernels want."""
    return max(1, (length - 1) // chunk)


def check_packing(x_BTHK: Tensor, segments: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raise ConfigError unless at most one of `segments` and `cu_seqlens` is given and it fits [B, T]."""
    batch, length = x_BTHK.shape[:2]
    if segments is not None and cu_seqlens is not None:
        raise ConfigError("segments and cu_seqlens say the same thing; give one of them.")
    name, given = ("segments", segments) if cu_seqlens is None else ("cu_seqlens", cu_seqlens)
    if given is None:
        return
    check_integers(name, given)
    if given.device != x_BTHK.device:
        raise ConfigError(f"{name} is on {given.device}, q is on {x_BTHK.device}; put both on one device.")
    if cu_seqlens is None:
        check_segments(segments, (batch, length))
        return
    if batch != 1:
        raise ConfigError(f"cu_seqlens packs sequences into one row, so q, k and v need B = 1, not {batch}.")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ConfigError("cu_seqlens must be an integer vector of at least two bounds, [0, ..., T].")
    increasing = (cu_seqlens[1:] > cu_seqlens[:-1]).all() & (cu_seqlens[0] == 0) & (cu_seqlens[-1] == length)
    if cu_seqlens.is_cuda or torch.compiler.is_compiling():
        # Without waiting for the device: a violation stops the program at the next synchronisation.
        torch._assert_async(increasing, "cu_seqlens must increase strictly from 0 to T.")
    elif not increasing:
        raise ConfigError(f"cu_seqlens must increase strictly from 0 to T = {length}.")


def chunk_grid(x_BTGK: Tensor, chunk: int, segments: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the chunks and each token's chunk, for the B * T tokens of `x_BTGK` in one row.

    Returns:
        int32 [M, 3], each chunk's first token, the token after its last, and the first chunk of its sequence;
        int32 [B * T], each token's chunk. Every chunk before the last of its sequence is full.
    """
    B, T = x_BTGK.shape[:2]
    if segments is not None:
        cu_seqlens = bounds_of(segments)
    if cu_seqlens is not None:
        return _packed_grid(cu_seqlens, B * T, chunk)
    # What is traced must not be kept for others.
    plain = type(x_BTGK) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    return (_uniform if plain else _uniform_grid)(B, T, chunk, x_BTGK.device)
