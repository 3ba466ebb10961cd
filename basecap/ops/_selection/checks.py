"""Checks of inputs and caches: with wrong shapes, kernels would read and write outside of their memory."""

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._shapes import FLOATS, check_floating, check_integers, check_segments, is_whole


def check_heads(tensors: dict[str, Tensor]) -> None:
    """Raise ConfigError unless "q" [B, T, H, K], "k" and "v" [B, T, G, K], as many as are given, match."""
    check_floating(tensors)
    (first, like), *_ = tensors.items()
    shape, dtype, device = like.shape, like.dtype, like.device
    for name, x in tensors.items():
        size = x.shape
        if len(size) != 4 or not (size[1] and size[2] and size[3]):
            raise ConfigError(f"{name} {tuple(size)} must be [B, T, heads, K], with all but B at least 1.")
        if x.dtype != dtype or x.device != device:
            raise ConfigError(
                f"{name} is {x.dtype} on {x.device}, {first} is {dtype} on {device}; use the same for both."
            )
        if size[0] != shape[0] or size[1] != shape[1] or size[3] != shape[3]:
            raise ConfigError(
                f"{name} {tuple(size)} must have the B, T and K of {first} {tuple(shape)}; both are "
                "[B, T, heads, K], time before heads."
            )
    k = tensors["k"]
    v = tensors.get("v", k)
    if v.shape != k.shape:
        raise ConfigError(f"v {tuple(v.shape)} must have the shape of k {tuple(k.shape)}.")
    if like.shape[2] % k.shape[2]:
        raise ConfigError(f"q has {like.shape[2]} heads, which is not a multiple of the {k.shape[2]} heads of k and v.")


def check_packing(x_BTHK: Tensor, segments: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raise ConfigError unless at most one of `segments` and `cu_seqlens` is given and it fits [B, T]."""
    name, given = ("segments", segments) if cu_seqlens is None else ("cu_seqlens", cu_seqlens)
    if given is None:
        return
    if segments is not None and cu_seqlens is not None:
        raise ConfigError("segments and cu_seqlens both describe the packing; give one of them.")
    batch, length = x_BTHK.shape[:2]
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
    if cu_seqlens.is_cuda or torch.compiler.is_compiling() or type(cu_seqlens) is not Tensor:
        # Without reading the numbers, which would wait for the device and which traced tensors lack: a violation stops
        # the program at the next synchronisation.
        torch._assert_async(increasing, "cu_seqlens must increase strictly from 0 to T.")
    elif not increasing:
        raise ConfigError(f"cu_seqlens must increase strictly from 0 to T = {length}; leave out empty sequences.")


def check_cache(
    new: dict[str, Tensor],
    cache: dict[str, Tensor],
    length: int,
    *,
    chunk: int | None = None,
    lengths: Tensor | None = None,
) -> None:
    """Raise ConfigError unless a cache of `length` tokens takes these.

    Args:
        new: "k" and "v" [B, T, G, K], and for a step, where T = 1, "q" [B, 1, H, K].
        cache: "k" and "v" [B, max_length, G, K], on the same device, in a dtype that holds the new numbers exactly:
            under autocast they are narrower than the parameters.
        length: tokens already in the cache.
        chunk: C, where the cache has "sums" too.
        lengths: such numbers of sequences that differ.
    """
    check_heads(new)
    if lengths is not None and (lengths.shape != new["k"].shape[:1] or lengths.dtype != torch.int64):
        raise ConfigError(
            f"lengths {tuple(lengths.shape)}, {lengths.dtype}, must be int64 [B], ({len(new['k'])},); give one number "
            "for each sequence."
        )
    if lengths is not None and lengths.device != new["k"].device:
        raise ConfigError(f"lengths is on {lengths.device}, k is on {new['k'].device}; put both on one device.")
    names = ("k", "v") if chunk is None else ("k", "v", "sums")
    if not isinstance(cache, dict):
        raise ConfigError(f"cache must be a dict of the tensors {', '.join(names)}, not {type(cache).__name__}.")
    if missing := [name for name in names if not isinstance(cache.get(name), Tensor)]:
        raise ConfigError(f"cache must be a dict of the tensors {', '.join(names)}; it has no {missing[0]}.")
    k = new["k"]
    B, T, G, K = k.shape
    if cache["k"].dim() != 4:
        raise ConfigError(f"the cache's k {tuple(cache['k'].shape)} must be [B, max_length, G, K].")
    capacity = cache["k"].shape[1]
    if "q" in new and T != 1:
        raise ConfigError(f"q, k and v have {T} tokens; a step takes one at a time.")
    if not is_whole(length) or length < 0:
        raise ConfigError(f"length must be the number of tokens in the cache, a Python number, not {length!r}.")
    if length + T > capacity:
        raise ConfigError(
            f"the cache is full: it has room for {capacity} tokens, not {length + T}; make max_length larger."
        )
    shapes = {"k": (B, capacity, G, K), "v": (B, capacity, G, K)}
    if chunk is not None:
        shapes["sums"] = (B, -(-capacity // chunk), G, K)
    for name, shape in shapes.items():
        held = cache[name]
        if held.shape != shape:
            use = f"k {tuple(k.shape)}" if chunk is None else f"k {tuple(k.shape)} and chunk {chunk}"
            raise ConfigError(f"the cache's {name} {tuple(held.shape)} must be {shape} for {use}; make it for these.")
        if held.device != k.device:
            raise ConfigError(f"the cache's {name} is on {held.device}, k is on {k.device}; put both on one device.")
        if held.dtype not in FLOATS or torch.promote_types(held.dtype, k.dtype) != held.dtype:
            raise ConfigError(f"k is {k.dtype}, the cache's {name} {held.dtype}; make the cache with dtype={k.dtype}.")


def append_rows(cache: dict[str, Tensor], k: Tensor, v: Tensor, lengths: Tensor) -> None:
    """Write keys and values [B, T, G, K] after the `lengths` [B] tokens of each sequence."""
    row = torch.arange(len(lengths), device=lengths.device)[:, None]
    place = lengths[:, None] + torch.arange(k.shape[1], device=lengths.device)
    cache["k"][row, place] = k.to(cache["k"].dtype)
    cache["v"][row, place] = v.to(cache["v"].dtype)
