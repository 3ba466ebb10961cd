"""Modules and functions that several mixers share: rotary positions, short convolution, segments, caches."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basecap.errors import ConfigError
from basecap.mixers._contract import Cache
from basecap.mixers._recipes import Initialiser, ParameterRecipe, uniform
from basecap.ops import exact_device
from basecap.ops.operators import operator
from basecap.ops.short_convolution import Activation, short_convolution


def positions_of(segments_BT: Tensor) -> Tensor:
    """Return [B, T] int64: each position's distance from the start of its segment."""
    index = torch.arange(segments_BT.shape[1], device=segments_BT.device).expand_as(segments_BT)
    return index - torch.where(starts_of(segments_BT), index, 0).cummax(dim=1).values


def starts_of(segments_BT: Tensor) -> Tensor:
    """Return [B, T] bool: whether a position is the first of its segment."""
    first = torch.ones_like(segments_BT[:, :1], dtype=torch.bool)
    return torch.cat([first, segments_BT[:, 1:] != segments_BT[:, :-1]], dim=1)


def check_rank(option: str, rank: int, channels: int) -> None:
    """Raise ConfigError if the rank of a linear map from `channels` channels, set by `option`, is above them."""
    if rank > channels:
        raise ConfigError(f"{option}: a map of {channels} channels has no rank of {rank}; choose at most {channels}.")


def _rotary_table(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of RoPE's angles, [T, 1, half] or [B, T, 1, half]."""
    # In float32 an angle at position 100,000 would be wrong by up to 0.006.
    exact = exact_device(positions.device)
    frequencies = base ** (-torch.arange(half, device=exact, dtype=torch.float64) / half)
    angles = positions.to(exact).to(torch.float64)[..., None, None] * frequencies
    return angles.cos().to(dtype).to(positions.device), angles.sin().to(dtype).to(positions.device)


# A custom operator, so that a compiled graph computes the table once instead of in every channel of every head.
_rotary_table_once = operator("basecap::rotary_table")(_rotary_table)


@_rotary_table_once.register_fake
def _(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, 1, half)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


def refuse_odd_heads(dim: int, heads: int) -> None:
    """Raise ConfigError for heads of a size that RoPE cannot rotate in pairs."""
    if dim % 2:
        raise ConfigError(
            f"RoPE needs an even head size, not {dim}; choose other heads than {heads}, or another width."
        )


def rotary(x_BTHK: Tensor, positions: Tensor, base: float, dims: int | None = None) -> Tensor:
    """Rotate the first `dims` channels of each head by position (RoPE, arXiv 2104.09864, eq. 34; halves, not pairs).

    Args:
        x_BTHK: queries or keys.
        positions: int64 [T] or [B, T].
        base: base of the geometric series of frequencies.
        dims: even number of channels to rotate; all when None.
    """
    dims = x_BTHK.shape[-1] if dims is None else dims
    if dims % 2:
        raise ConfigError(f"RoPE rotates an even number of channels per head, not {dims}; change the heads.")
    half = dims // 2
    dtype = torch.promote_types(x_BTHK.dtype, torch.float32)
    # For one token, computing the table in the same kernel is cheaper than a separate one.
    table = _rotary_table if positions.shape[-1] == 1 else _rotary_table_once
    cos, sin = table(positions, half, base, dtype)
    turning, rest = x_BTHK.split([dims, x_BTHK.shape[-1] - dims], dim=-1)
    first, second = turning.to(dtype).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTHK.dtype)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalise the last dimension to root mean square 1, computed in float32 or wider; keeps the dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def token_shift(x_BTD: Tensor, segments_BT: Tensor | None = None) -> Tensor:
    """Return x delayed by one token, zero at the start of every sequence."""
    shifted = F.pad(x_BTD, (0, 0, 1, -1))
    if segments_BT is None:
        return shifted
    return shifted.masked_fill(starts_of(segments_BT)[..., None], 0)


def fourier_flops(length: int, taps: int, channels: int) -> float:
    """Floating-point operations of a causal convolution by FFT, forward.

    The backward pass, with stored spectra, takes as many.

    Each pass has three real FFTs of n = length + taps points, at 2.5 n log2 n operations for each channel: of inputs,
    taps and outputs, or of their gradients.
    """
    points = length + min(length, taps)
    return 3 * 2.5 * points * math.log2(points) * channels


def parted(linear: nn.Module, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the output of a linear layer without bias in parts: [..., D] -> a tensor [..., size] for each size."""
    # An adapter around a linear layer does more, and a hook wants its whole output.
    if x.is_cuda or type(linear) is not nn.Linear or linear._forward_hooks:
        return linear(x).split(sizes, dim=-1)
    # On a CPU, split would concatenate the gradients, a large copy, and products with rows of odd length are slow.
    return tuple(F.linear(x, weight) for weight in linear.weight.split(sizes))


class ShortConvolution(nn.Module):
    """Depthwise causal convolution over a few tokens, with its decoding step.

    The cache holds the last `width - 1` inputs, [B, width - 1, D].
    """

    def __init__(self, channels: int, width: int = 4, bias: bool = True, activation: Activation = "none"):
        super().__init__()
        if width < 1:
            raise ConfigError(f"the convolution width must be at least 1, not {width}.")
        self.width, self.activation = width, activation
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Convolve; see `basecap.ops.short_convolution.short_convolution`."""
        return short_convolution(x_BTD, self.weight, self.bias, activation=self.activation, segments=segments)

    def parts(self, x_BTD: Tensor, sizes: Sequence[int], segments: Tensor | None = None) -> tuple[Tensor, ...]:
        """Convolve into tensors [B, T, size], one for each of `sizes`."""
        if not x_BTD.is_cuda:
            return self(x_BTD, segments).split(sizes, dim=-1)
        # On a GPU, split would concatenate the gradients of the parts: 8 % of a training step of Mamba-2.
        weights, biases = self.weight.split(sizes), [None] * len(sizes) if self.bias is None else self.bias.split(sizes)
        return tuple(
            short_convolution(x, weight, bias, activation=self.activation, segments=segments)
            for x, weight, bias in zip(x_BTD.split(sizes, dim=-1), weights, biases, strict=True)
        )

    def init_cache(self, batch: int) -> Tensor:
        """Return the zeroed last inputs."""
        return self.weight.new_zeros(batch, self.width - 1, self.weight.shape[0])

    def step(self, x_B1D: Tensor, last: Tensor) -> Tensor:
        """Convolve one more token and update `last` in place."""
        window = torch.cat([last.to(x_B1D.dtype), x_B1D], dim=1)
        last.copy_(window[:, 1:])
        wide = torch.promote_types(x_B1D.dtype, torch.float32)
        out = (window.to(wide) * self.weight.T.to(wide)).sum(1, keepdim=True)
        if self.bias is not None:
            out = out + self.bias.to(wide)
        return (F.silu(out) if self.activation == "silu" else out).to(x_B1D.dtype)

    def further(self, x_BTD: Tensor, last: Tensor) -> Tensor:
        """Convolve further tokens [B, T, D] and update `last` in place."""
        return self(self.append(x_BTD, last))[:, last.shape[1] :]

    def append(self, x_BTD: Tensor, last: Tensor) -> Tensor:
        """Return the last inputs followed by further ones [B, width - 1 + T, D], and update `last` in place."""
        whole = torch.cat([last.to(x_BTD.dtype), x_BTD], dim=1)
        last.copy_(whole[:, whole.shape[1] - last.shape[1] :])
        return whole

    def fill(self, x_BTD: Tensor, last: Tensor) -> None:
        """Put the last inputs of a prompt into an empty cache."""
        kept = min(self.width - 1, x_BTD.shape[1])
        if kept:
            last[:, self.width - 1 - kept :] = x_BTD[:, x_BTD.shape[1] - kept :]

    def recipe(self, weight: Initialiser | None = None) -> dict[str, ParameterRecipe]:
        """Uniform within 1/sqrt(width), PyTorch's default as in most official models; `weight` for the weights."""
        bound = self.width**-0.5
        recipes = {"weight": ParameterRecipe(init=weight or uniform(-bound, bound))}
        if self.bias is not None:
            recipes["bias"] = ParameterRecipe(init=uniform(-bound, bound), decay=False)
        return recipes


def remember(cache: Cache, new: Mapping[str, Tensor], *, ring: bool = False) -> None:
    """Append tokens to tensors of the cache, [B, T, ...] to [B, capacity, ...]; a `ring` overwrites its oldest ones.

    Raises:
        ConfigError: the cache is full and not a ring.
    """
    (T,) = {tensor.shape[1] for tensor in new.values()}
    end = cache.length + T
    for name, tensor in new.items():
        kept = cache.tensors[name]
        capacity = kept.shape[1]
        if end > capacity and not ring:
            raise ConfigError(f"the cache has room for {capacity} tokens; make it for at least {end}.")
        if cache.lengths is not None:
            new_T = torch.arange(max(0, T - capacity), T, device=kept.device)
            row, slots = torch.arange(len(kept), device=kept.device)[:, None], cache.lengths[:, None] + new_T
            kept[row, slots % capacity] = tensor[:, new_T].to(kept.dtype)
            continue
        if T == 1 or end <= capacity:  # a slice is copied faster than it is written by index
            slot = cache.length % capacity
            # Not kept[:, slot], which would be compiled for one slot only.
            kept[:, slot : slot + T] = tensor.to(kept.dtype)
            continue
        slots = torch.arange(max(cache.length, end - capacity), end, device=kept.device)
        kept[:, slots % capacity] = tensor[:, slots - cache.length].to(kept.dtype)
    cache.length = end
