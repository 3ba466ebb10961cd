"""Based (arXiv 2402.18668): Taylor linear attention, a small attention window and gated short convolutions."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import Cache, LayerChoice, Mixer, MixerConfig, choose_heads, divide, hybrid, mixer
from basecap.mixers._parts import ShortConvolution
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, default_recipe, normal, residual_std
from basecap.mixers.attention import Attention
from basecap.ops import Influence
from basecap.ops.short_convolution import influence as convolution_influence
from basecap.ops.taylor_attention import influence, taylor_attention, taylor_state

PAPER = "arXiv 2402.18668"
REPOSITORY = "HazyResearch/based@32c1bd4e09c8f7f718b0ed3f2e0a333908297879"

#: Tokens that the window sees, itself included: the official code cuts `window_size: 128` to 64 past tokens.
WINDOW = 65


@mixer(
    "based linear",
    backbone="based",
    paper=PAPER,
    summary="linear attention with the second-order Taylor expansion of exp: one layer kind of based",
    source=f"{REPOSITORY}: based/models/gpt.py, based/models/mixers/linear_attention.py",
)
class BasedLinear(Mixer):
    """Linear attention whose weights are the Taylor expansion of exp at q.k / sqrt(feature_dim), normalised."""

    class Config(MixerConfig):
        """Options of Taylor linear attention."""

        heads: int | None = Field(None, ge=1, description="heads; hidden / 64 when not given")
        feature_dim: int = Field(16, ge=1, description="query and key size per head before the expansion")

    sizes: ClassVar = {768: {"heads": 12}, 2048: {"heads": 16}}
    takes_lengths = True
    continues = True

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        self.heads = choose_heads(layer.hidden, config.heads)
        self.head_dim = divide(layer.hidden, self.heads, "hidden size by heads")
        self.keys = self.heads * config.feature_dim
        self.qkv = nn.Linear(layer.hidden, 2 * self.keys + layer.hidden, bias=False)
        self.out = nn.Linear(layer.hidden, layer.hidden, bias=False)

    def _project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x_BTD).split([self.keys, self.keys, self.layer.hidden], dim=-1)
        return tuple(x.unflatten(-1, (self.heads, -1)) for x in (q, k, v))

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Mix; see `Mixer.forward`."""
        return self.out(taylor_attention(*self._project(x_BTD), segments=segments).flatten(2))

    def _features(self) -> int:
        K = self.config.feature_dim
        return 1 + K + K * (K + 1) // 2

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """The sums over past keys and values [B, H, F, V + 1], at least float32, constant in `max_length`."""
        weight = self.qkv.weight
        state = weight.new_zeros(batch, self.heads, self._features(), self.head_dim + 1)
        return Cache(tensors={"state": state.to(torch.promote_types(weight.dtype, torch.float32))})

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix a prompt, or more of it, chunk by chunk and add it to the sums."""
        q, k, v = self._project(x_BTD)
        state = cache.tensors["state"]
        o = taylor_attention(q, k, v, state_BHFX=state if cache.length else None)
        state.copy_(taylor_state(k, v, state))
        cache.length += x_BTD.shape[1]
        return self.out(o.flatten(2))

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Mix one more token."""
        return self.prefill(x_B1D, cache)

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the normalised weights."""
        q, k, _ = self._project(x_BTD)
        return influence(q, k)

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values and their weighted means."""
        q, k, v = self._project(x_BTD)
        return v, taylor_attention(q, k, v)

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Normal(0.02), the output projection shrunk with depth."""
        return {**default_recipe(self), "out.weight": ParameterRecipe(init=normal(residual_std(self.layer)))}

    def flops(self, length: int) -> float:
        """Projections, and per token writing and reading the F x (V + 1) sums of each head."""
        weights = self.qkv.weight.numel() + self.out.weight.numel()
        return length * (2.0 * weights + 4.0 * self.heads * self._features() * (self.head_dim + 1))

    def state_bytes(self, length: int) -> int:
        """The sums, whatever the length."""
        return self.heads * self._features() * (self.head_dim + 1) * max(self.qkv.weight.element_size(), 4)


@mixer(
    "based conv",
    backbone="based",
    paper=PAPER,
    summary="gated convolution over three tokens: one layer kind of based",
    source=f"{REPOSITORY}: based/models/gpt.py, based/models/mixers/convolution.py",
)
class BasedConv(Mixer):
    """A gated short convolution: out(silu(conv(u)) * g), u and g two halves of a projection (BaseConv)."""

    class Config(MixerConfig):
        """Options of the gated short convolution."""

        expand: int = Field(4, ge=2, multiple_of=2, description="projected channels per channel: half u, half g")
        conv_width: int = Field(3, ge=1, description="tokens the convolution sees")

    takes_lengths = True
    continues = True

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        self.inner = config.expand * layer.hidden // 2
        self.in_proj = nn.Linear(layer.hidden, 2 * self.inner)
        self.conv = ShortConvolution(self.inner, config.conv_width, bias=False)
        self.out = nn.Linear(self.inner, layer.hidden)

    def _finish(self, convolved: Tensor, gate: Tensor) -> Tensor:
        return self.out(F.silu(convolved) * gate)

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Mix; see `Mixer.forward`."""
        u, gate = self.in_proj(x_BTD).chunk(2, dim=-1)
        return self._finish(self.conv(u, segments), gate)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """The convolution's last inputs, constant in `max_length`."""
        return Cache(tensors={"conv": self.conv.init_cache(batch)})

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Mix one more token."""
        u, gate = self.in_proj(x_B1D).chunk(2, dim=-1)
        cache.length += 1
        return self._finish(self.conv.step(u, cache.tensors["conv"]), gate)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix a prompt, or more of it, at once and keep its last inputs."""
        u, gate = self.in_proj(x_BTD).chunk(2, dim=-1)
        if cache.length:
            convolved = self.conv.further(u, cache.tensors["conv"])
        else:
            self.conv.fill(u, cache.tensors["conv"])
            convolved = self.conv(u)
        cache.length += x_BTD.shape[1]
        return self._finish(convolved, gate)

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the taps of each channel's convolution; the same for every input."""
        return convolution_influence(self.conv.weight, batch=x_BTD.shape[0], length=x_BTD.shape[1])

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return u and its convolution, each channel a head."""
        u, _ = self.in_proj(x_BTD).chunk(2, dim=-1)
        return u[..., None], self.conv(u)[..., None]

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Normal(0.02), biases zero, the output projection shrunk with depth; the convolution's own."""
        conv = {f"conv.{name}": recipe for name, recipe in self.conv.recipe().items()}
        out = ParameterRecipe(init=normal(residual_std(self.layer)))
        return {**default_recipe(self), **conv, "out.weight": out}

    def flops(self, length: int) -> float:
        """Projections and taps."""
        weights = self.in_proj.weight.numel() + self.conv.weight.numel() + self.out.weight.numel()
        return 2.0 * length * weights

    def state_bytes(self, length: int) -> int:
        """The convolution's last inputs, whatever the length."""
        return (self.conv.width - 1) * self.inner * self.conv.weight.element_size()


_CONV = LayerChoice(mixer=BasedConv)

# The published 27 layers have linear attention at 1, 6, 11, 16, 21, each followed by a window: a period of five.
hybrid(
    "based",
    layers=(
        _CONV,
        LayerChoice(mixer=BasedLinear),
        LayerChoice(mixer=Attention, options={"window": WINDOW}),
        _CONV,
        _CONV,
    ),
    backbone="based",
    paper=PAPER,
    summary="of five layers, one Taylor linear attention, one window of 65 tokens, three gated short convolutions",
    source=f"{REPOSITORY}: train/configs/experiment/example/based-360m.yaml, based/models/gpt.py, "
    "based/models/mixers/slide_attention.py, train/optim/param_grouping.py",
    differences=(
        "The window is 64 past tokens and the token itself, as the official code cuts its `window_size: 128` in half; "
        "`mixer: {window: 128}` in a study is what the configuration seems to say.",
        "The pattern of the 27 layers of the 360M model is repeated over any depth: 15 layers for 12 of a Transformer.",
    ),
)
