"""Decoding with Top-1 chunk selection: a cache of keys and values, with the sum of each chunk's keys."""

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import Backend, choose, families, functions_of, without_autocast
from basecap.ops._selection.checks import append_rows, check_cache, check_heads
from basecap.ops._shapes import FLOATS, is_whole
from basecap.ops.operators import operator
from basecap.ops.top1_chunk import eager, triton_step
from basecap.ops.top1_chunk.grid import check_chunk, check_options, most_remote

#: The families of one decoding step, the fastest first.
STEP_FAMILIES = families(triton_step, eager)

#: The tensors of a cache.
CACHE = ("k", "v", "sums")


def top1_chunk_cache(
    batch: int,
    max_length: int,
    heads: int,
    head_dim: int,
    *,
    chunk: int = 128,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Return an empty cache: "k" and "v" [B, max_length, G, K], and "sums" [B, chunks, G, K], of full chunks' keys.

    Args:
        batch: B.
        max_length: tokens the cache can hold.
        heads: G, key/value heads.
        head_dim: K.
        chunk: C, as in `top1_chunk`.
        dtype: of keys and values; the sums are in float32 (float64 for float64).
        device: of the cache.

    Raises:
        ConfigError: an invalid size, chunk or dtype.
    """
    chunk = check_chunk(chunk)
    sizes = {"batch": (batch, 0), "max_length": (max_length, 0), "heads": (heads, 1), "head_dim": (head_dim, 1)}
    for name, (size, least) in sizes.items():
        if not is_whole(size) or size < least:
            raise ConfigError(f"{name} must be an integer of at least {least}, not {size!r}.")
    if dtype not in FLOATS:
        raise ConfigError(f"dtype must be a floating-point torch.dtype of 16, 32 or 64 bits, not {dtype!r}.")
    wide = torch.promote_types(dtype, torch.float32)
    shape = B, capacity, G, K = tuple(int(size) for size, _ in sizes.values())
    return {
        "k": torch.zeros(shape, dtype=dtype, device=device),
        "v": torch.zeros(shape, dtype=dtype, device=device),
        "sums": torch.zeros(B, -(-capacity // chunk), G, K, dtype=wide, device=device),
    }


@torch.no_grad()  # else the cache would keep the graphs of all its tokens
def top1_chunk_fill(
    k: Tensor,
    v: Tensor,
    cache: dict[str, Tensor],
    length: int = 0,
    *,
    lengths: Tensor | None = None,
    chunk: int = 128,
) -> None:
    """Put keys and values [B, T, G, K] into a cache: those of a prompt if it is empty, else of further tokens.

    No gradient flows through the cache.

    Args:
        k: keys.
        v: values.
        cache: from `top1_chunk_cache`, with the same `chunk`.
        length: see `top1_chunk_step`.
        lengths: see `top1_chunk_step`.
        chunk: see `top1_chunk`.

    Raises:
        ConfigError: more tokens than the cache has room for, or tokens that do not fit it.
    """
    chunk = check_chunk(chunk)
    check_cache({"k": k, "v": v}, cache, length, chunk=chunk, lengths=lengths)
    end = length + k.shape[1]
    if lengths is None:
        cache["k"][:, length:end] = k
        cache["v"][:, length:end] = v
    else:
        append_rows(cache, k, v, lengths)
    # The sum of a chunk that is not full in its sequence is not read, and written again once it is.
    eager.sum_keys(cache, 0 if lengths is not None else length // chunk, end // chunk, chunk)


@torch.no_grad()
def top1_chunk_further(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: dict[str, Tensor],
    length: int,
    *,
    lengths: Tensor | None = None,
    chunk: int = 128,
    mode: str = "exact",
    scale: float | None = None,
    remote: int = 1,
) -> Tensor:
    """Append T tokens to the cache, in place, and attend from them: `top1_chunk` at the last T positions.

    It is made for a few tokens, as it computes the scores of all keys, in plain PyTorch. With more than a chunk has,
    zeros for the earlier queries of `top1_chunk` take less time. The output has no gradient.

    Args:
        q: queries [B, T, H, K].
        k: their keys [B, T, G, K].
        v: their values [B, T, G, K].
        cache: see `top1_chunk_step`.
        length: tokens already in the cache; the caller adds T.
        lengths: see `top1_chunk_step`.
        chunk: see `top1_chunk`.
        mode: see `top1_chunk`.
        scale: see `top1_chunk`.
        remote: see `top1_chunk`.

    Returns:
        [B, T, H, K] in the dtype of q.

    Raises:
        ConfigError: as `top1_chunk_step`, except for a backend.
    """
    check_heads({"q": q, "k": k, "v": v})
    chunk, scale, remote = check_options(q, chunk, mode, scale, remote)
    top1_chunk_fill(k, v, cache, length, lengths=lengths, chunk=chunk)
    end = length + q.shape[1]
    held = {name: cache[name][:, :end] for name in ("k", "v")} | {"sums": cache["sums"]}
    start = length if lengths is None else lengths[:, None]
    with without_autocast(q.device):  # else the scores would be rounded to half precision
        o = eager.attend_further(q.to(held["k"].dtype), held, start, chunk, mode == "exact", scale, remote)
    return o.to(q.dtype)


@torch.no_grad()
def top1_chunk_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: dict[str, Tensor],
    length: int,
    *,
    lengths: Tensor | None = None,
    chunk: int = 128,
    mode: str = "exact",
    scale: float | None = None,
    remote: int = 1,
    backend: Backend = "auto",
) -> Tensor:
    """Append one token to the cache, in place, and attend from it: `top1_chunk` at the last position.

    A position may be written again, as speculative decoding does with tokens that were rejected: with a smaller
    `length` the cache holds only the tokens before it, and what it held after them makes no difference.

    The output has no gradient: train with `top1_chunk`.

    Args:
        q: the query [B, 1, H, K].
        k: its key [B, 1, G, K].
        v: its value [B, 1, G, K].
        cache: from `top1_chunk_cache`, with the same `chunk`; a wider dtype than that of q, k and v may be used.
        length: tokens already in the cache; the caller adds one after each step, and may subtract any number.
        lengths: int64 [B], such numbers of sequences that differ, none above `length`. They are read on the device,
            so that one CUDA graph serves all of them.
        chunk: see `top1_chunk`.
        mode: see `top1_chunk`.
        scale: see `top1_chunk`.
        remote: see `top1_chunk`.
        backend: see `top1_chunk`.

    Returns:
        [B, 1, H, K] in the dtype of q.

    Raises:
        ConfigError: a full cache, one made for other shapes or devices or of a narrower dtype, an invalid option or
            backend.
    """
    if torch.compiler.is_compiling():
        held = [cache[name] for name in CACHE]
        token = [q, k, v] if lengths is None else [q, k, v, lengths]
        return _step_operator(token, held, length, chunk, mode, scale, remote, backend)
    check_cache({"q": q, "k": k, "v": v}, cache, length, chunk=check_chunk(chunk), lengths=lengths)
    chunk, scale, remote = check_options(q, chunk, mode, scale, remote)
    length = int(length)
    dtype = q.dtype
    q, k, v = (x.to(cache["k"].dtype) for x in (q, k, v))
    remote = min(remote, most_remote(cache["k"].shape[1], chunk))
    run = functions_of(STEP_FAMILIES[choose("top1_chunk_step", backend, STEP_FAMILIES, q, chunk)])
    o: Tensor = run.decode((q, k, v), cache, length, chunk, mode == "exact", scale, remote, lengths)
    return o.to(dtype)


# The kernels depend on the number of chunks; traced, each length would be compiled again.
@operator("basecap::top1_chunk_step", mutates_args=("held",))
def _step_operator(
    token: Sequence[Tensor],
    held: Sequence[Tensor],
    length: int,
    chunk: int,
    selection: str,
    scale: float | None,
    remote: int,
    backend: str,
) -> Tensor:
    """Run `top1_chunk_step` as one node of a compiled graph.

    `token` is q, k and v, and the lengths if sequences differ, `held` the tensors of the cache, `selection` the `mode`:
    a name that PyTorch does not let an operator's argument have.
    """
    (q, k, v), lengths = token[:3], token[3] if len(token) > 3 else None
    cache = dict(zip(CACHE, held, strict=True))
    chosen = cast(Backend, backend)
    step = partial(top1_chunk_step, chunk=chunk, mode=selection, scale=scale, remote=remote, backend=chosen)
    return step(q, k, v, cache, length, lengths=lengths)


@_step_operator.register_fake
def _(token, held, length, chunk, selection, scale, remote, backend):
    return token[0].new_empty(token[0].shape)
