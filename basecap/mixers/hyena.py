"""Hyena (arXiv 2302.10866): gates around a convolution as long as the sequence, its filter from a small network."""

import math

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from basecap.mixers._contract import Cache, Mixer, MixerConfig, mixer
from basecap.mixers._parts import ShortConvolution, fourier_flops, remember
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, constant, default_recipe, normal, residual_std, values
from basecap.ops import Influence, without_autocast
from basecap.ops.long_convolution import influence, long_convolution

#: Most numbers of the matrices that a few further tokens are convolved with.
FEW = 2**24


class ImplicitFilter(nn.Module):
    """The taps of a long filter: a network of the position times an exponential decay (section 3.3).

    Features of the position (trained too, as published) go through sines of trained frequency; channels decay to 1 %
    within 0.3 to 1.5 times the longest training sequence. A trained skip connection is added to the first tap.
    """

    def __init__(self, channels: int, max_length: int, features: int, width: int):
        super().__init__()
        self.max_length = max_length
        self.positions = nn.Parameter(torch.empty(max_length, features))
        self.first = nn.Linear(features, width)
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.last = nn.Linear(width, channels, bias=False)
        self.frequency = nn.Parameter(torch.empty(width))
        self.skip = nn.Parameter(torch.empty(channels))

    def forward(self, length: int) -> Tensor:
        """Return the first min(length, max_length) taps [L, D] in float32 or wider; later ones are zero."""
        L = min(length, self.max_length)
        wide = torch.promote_types(self.positions.dtype, torch.float32)
        device = self.positions.device
        # In half precision neighbouring positions would be equal.
        with without_autocast(device):
            h = self.positions[:L].to(wide)
            for layer in (self.first, *self.inner):
                h = torch.sin(self.frequency.to(wide) * F.linear(h, layer.weight.to(wide), layer.bias.to(wide)))
            h = F.linear(h, self.last.weight.to(wide))
            slow, fast = math.log(100) / 1.5, math.log(100) / 0.3
            rates = torch.linspace(slow, fast, h.shape[1], dtype=wide, device=device)
            time = torch.arange(L, dtype=wide, device=device) / max(1, self.max_length - 1)
            taps = h * torch.exp(-time[:, None] * rates)
            return torch.cat([taps[:1] + self.skip.to(wide), taps[1:]])

    def recipe(self, frequency: float) -> dict[str, ParameterRecipe]:
        """Normal(0.02) weights under sines of high frequency; the filter has no weight decay."""
        recipes = {
            name: ParameterRecipe(init=recipe.init, decay=False) for name, recipe in default_recipe(self).items()
        }
        L, features = self.positions.shape
        return recipes | {
            "positions": ParameterRecipe(
                init=values(position_features(L, features), "time, cosines and sines"), decay=False
            ),
            "frequency": ParameterRecipe(init=constant(frequency), decay=False),
            "skip": ParameterRecipe(init=normal(1.0), decay=False),
        }


def position_features(length: int, features: int) -> Tensor:
    """Return [L, 1 + 2 b], b bands: time from 0 to 1, then cosines and minus sines of b frequencies (appendix D.3)."""
    bands = (features - 1) // 2
    t = torch.arange(length, dtype=torch.float64)
    angles = 2 * math.pi / length * t[:, None] * torch.linspace(1e-4, bands - 1, bands, dtype=torch.float64)
    return torch.cat([t[:, None] / max(1, length - 1), angles.cos(), -angles.sin()], dim=1)


def _last(u_BSD: Tensor, filter_LD: Tensor, count: int) -> Tensor:
    """Return the last `count` outputs of `long_convolution`, [B, count, D], by products: an FFT gives all outputs."""
    time = torch.arange(u_BSD.shape[1], device=u_BSD.device)
    age = time[-count:, None] - time
    weights = filter_LD[age.clamp(0, len(filter_LD) - 1)]
    weights_TSD = weights.masked_fill(((age < 0) | (age >= len(filter_LD)))[..., None], 0)
    with without_autocast(u_BSD.device):
        return torch.einsum("tsd,bsd->btd", weights_TSD, u_BSD.to(weights_TSD.dtype)).to(u_BSD.dtype)


@mixer(
    "hyena",
    backbone="hyena",
    paper="arXiv 2302.10866",
    summary="gates around an implicitly given convolution as long as the sequence",
    source="HazyResearch/safari@02220c69d247e5473616cd053a443ad99fd2559b: configs/experiment/pile/hyena.yaml, "
    "src/models/sequence/hyena.py, src/models/sequence/long_conv_lm.py, train.py",
)
class Hyena(Mixer):
    """The Hyena operator of order 2: y = out(q * conv(k * v)), q, k and v from a projection and a short convolution.

    The filter is as long as the longest training sequence; older inputs have no effect.
    """

    takes_lengths = True
    continues = True

    class Config(MixerConfig):
        """Options of Hyena."""

        conv_width: int = Field(3, ge=1, description="tokens the short convolution sees")
        filter_features: int = Field(33, ge=5, description="features of a tap's position: odd, time and pairs of waves")
        filter_width: int = Field(64, ge=1, description="width of the network that gives the filter")
        filter_frequency: float = Field(14.0, gt=0, description="initial frequency of its sines")

        @field_validator("filter_features")
        @classmethod
        def _odd(cls, value: int) -> int:
            if value % 2 == 0:
                raise ValueError(f"must be odd, not {value}")
            return value

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        self.in_proj = nn.Linear(layer.hidden, 3 * layer.hidden)
        self.conv = ShortConvolution(3 * layer.hidden, config.conv_width)
        self.filter = ImplicitFilter(layer.hidden, layer.max_length, config.filter_features, config.filter_width)
        self.out = nn.Linear(layer.hidden, layer.hidden)

    def _gates(self, x_BTD: Tensor, segments: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        return self.conv(self.in_proj(x_BTD), segments).chunk(3, dim=-1)

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Mix; see `Mixer.forward`."""
        q, k, v = self._gates(x_BTD, segments)
        return self.out(q * long_convolution(k * v, self.filter(x_BTD.shape[1]), segments=segments))

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """The last inputs of both convolutions, and the long filter, computed once and shared by the batch.

        The inputs of the long convolution are a ring [B, min(max_length, longest training sequence), D].
        """
        taps = self.filter(max_length)
        tensors = {
            "conv": self.conv.init_cache(batch),
            "past": self.out.weight.new_zeros(batch, *taps.shape),
            "filter": taps.expand(batch, -1, -1),
        }
        return Cache(tensors=tensors)

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Mix one more token: one product with the whole filter, O(T)."""
        q, k, v = self.conv.step(self.in_proj(x_B1D), cache.tensors["conv"]).chunk(3, dim=-1)
        start = cache.start
        self._remember(k * v, cache)
        past, taps = cache.tensors["past"], cache.tensors["filter"]
        capacity = past.shape[1]
        age = (start - torch.arange(capacity, device=past.device)) % capacity
        row = torch.arange(len(taps), device=past.device)[:, None]
        y = (past.to(taps.dtype) * taps[row, age]).sum(1, keepdim=True)
        return self.out(q * y.to(q.dtype))

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix a prompt, or more of it, at once and keep what later tokens can reach."""
        projected, last = self.in_proj(x_BTD), cache.tensors["conv"]
        if cache.length:
            q, k, v = self.conv.further(projected, last).chunk(3, dim=-1)
            inputs = torch.cat([self._reached(cache).to(k.dtype), k * v], dim=1)
        else:
            self.conv.fill(projected, last)
            q, k, v = self.conv(projected).chunk(3, dim=-1)
            inputs = k * v
        (_, T, D), taps_LD = x_BTD.shape, self.filter(inputs.shape[1])
        self._remember(inputs[:, -T:], cache)
        few = inputs.shape[1] > T and T * inputs.shape[1] * D <= FEW
        return self.out(q * (_last(inputs, taps_LD, T) if few else long_convolution(inputs, taps_LD)[:, -T:]))

    def _reached(self, cache: Cache) -> Tensor:
        """Return the inputs that the next token reaches, oldest first, [B, S, D]; zeros before a sequence."""
        past = cache.tensors["past"]
        capacity = past.shape[1]
        place = cache.start - torch.arange(min(cache.length, capacity), 0, -1, device=past.device)
        row = torch.arange(len(past), device=past.device)[:, None]
        return past[row, place % capacity].masked_fill((place < 0)[..., None], 0)

    def _remember(self, inputs_BTD: Tensor, cache: Cache) -> None:
        # Only inputs beyond the last tap may be overwritten.
        whole = cache.tensors["past"].shape[1] == self.layer.max_length
        remember(cache, {"past": inputs_BTD}, ring=whole)

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return q_t filter_{t-s} k_s in front of v_s, channel by channel."""
        (q, k, _), (B, T, _) = self._gates(x_BTD), x_BTD.shape
        return influence(self.filter(T), batch=B, length=T).scaled(q, k)

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return v and the gated convolution, each channel a head."""
        q, k, v = self._gates(x_BTD)
        return v[..., None], (q * long_convolution(k * v, self.filter(x_BTD.shape[1])))[..., None]

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Normal(0.02), biases zero, the output projection shrunk with depth; the convolutions' own."""
        return {
            **{f"in_proj.{name}": recipe for name, recipe in default_recipe(self.in_proj).items()},
            **{f"conv.{name}": recipe for name, recipe in self.conv.recipe().items()},
            **{f"filter.{name}": recipe for name, recipe in self.filter.recipe(self.config.filter_frequency).items()},
            "out.weight": ParameterRecipe(init=normal(residual_std(self.layer))),
            "out.bias": ParameterRecipe(init=constant(0.0), decay=False),
        }

    def flops(self, length: int) -> float:
        """Projections, taps, the filter's network and a long convolution of as many taps as tokens.

        Beyond the longest training sequence, where the filter ends, the true number is slightly smaller.
        """
        return self._products(length) + fourier_flops(length, length, self.layer.hidden)

    def training_flops(self, length: int) -> float:
        """Three times the products; as many FFTs backward as forward."""
        return 3.0 * self._products(length) + 2.0 * fourier_flops(length, length, self.layer.hidden)

    def _products(self, length: int) -> float:
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear | ShortConvolution))
        return 2.0 * length * weights

    def state_bytes(self, length: int) -> int:
        """The last inputs of both convolutions and the filter: grows until the longest training sequence."""
        itemsize, D = self.out.weight.element_size(), self.layer.hidden
        capacity = min(length, self.layer.max_length)
        return (self.conv.width - 1) * 3 * D * itemsize + capacity * D * (itemsize + max(itemsize, 4))
