"""Mamba-1 (arXiv 2312.00752): a selective state space with one decay per channel and state; its ablations.

Global selection (arXiv 2410.15678, section 4.2) gates the step size by a long convolution of the mixer's input.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import Cache, Mixer, Variant, choose_heads, mixer
from basecap.mixers._parts import ShortConvolution, check_rank, fourier_flops
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, constant, default_recipe, uniform, values
from basecap.mixers._state_space import (
    REPOSITORY,
    SHARED_DECAY,
    StateSpaceConfig,
    convolve,
    convolve_step,
    log_of_uniform,
    step_size,
    step_size_bias,
)
from basecap.ops import Influence
from basecap.ops.long_convolution import long_convolution
from basecap.ops.selective_scan import influence as scan_influence
from basecap.ops.selective_scan import selective_scan
from basecap.ops.ssd import influence as ssd_influence
from basecap.ops.ssd import ssd

GLOBAL_SELECTION = (
    "ZetangForward/Global_Mamba@859b5695e7a05d880371d70fb10da6bba699afb0: models/custom_mamba_v3_fast_dev.py, "
    "models/modules/longconv.py, models/configuration_mamba.py, src/train_dev2.py"
)
START = (
    "It starts and decays as mamba-1 does, so that the long convolution alone differs. In Global_Mamba both have an "
    "embedding of std 0.1, an output projection not shrunk with depth, and a step-size bias of 0, so that step sizes "
    "start at 0.69: the class inherits a start that knows only the mixer of transformers. All parameters decay there."
)


@mixer(
    "mamba-1",
    backbone="mamba",
    paper="arXiv 2312.00752",
    summary="selective state space with one data-dependent decay per channel and state, short convolution",
    source=f"{REPOSITORY}: mamba_ssm/modules/mamba_simple.py, mamba_ssm/models/mixer_seq_simple.py",
    variants={
        "mamba-1 decay one": Variant(
            options={"decay": "one"}, summary="one decay shared by all channels", differences=(SHARED_DECAY,)
        ),
        "mamba-1 decay none": Variant(options={"decay": "none"}, summary="no decay: a plain running sum"),
        "mamba-1 decay none w/o conv": Variant(
            options={"decay": "none", "conv": False}, summary="neither decay nor short convolution"
        ),
        "mamba-1 w/o conv": Variant(options={"conv": False}, summary="without the short convolution"),
        "mamba-1 state x2": Variant(options={"state": 32}, summary="state 32"),
        "mamba-1 state x4": Variant(options={"state": 64}, summary="state 64"),
        "mamba-1 global selection": Variant(
            options={"global_every": 1},
            summary="step sizes gated by a long convolution in every layer",
            paper="arXiv 2410.15678, section 4.2",
            source=GLOBAL_SELECTION,
            differences=(START,),
        ),
        "mamba-1 global selection lm": Variant(
            options={"global_every": 8},
            summary="step sizes gated by a long convolution in every eighth layer, as for language modelling",
            paper="arXiv 2410.15678, section 4.2",
            source=GLOBAL_SELECTION,
            differences=(START,),
        ),
    },
)
class Mamba1(Mixer):
    """The Mamba-1 mixer: project, convolve, choose dt, B and C, run the state space, gate, project."""

    class Config(StateSpaceConfig):
        """Options of Mamba-1."""

        state: int = Field(16, ge=1, description="state size per channel")
        dt_rank: int | None = Field(None, ge=1, description="rank of the step size's projection; hidden / 16")
        global_every: int = Field(0, ge=0, description="interval of layers with global selection; 0: none")
        global_width: int | None = Field(
            None, ge=1, description="tokens its long convolution sees; a quarter of the training length"
        )

    config: Config
    sizes: ClassVar = {768: {"dt_rank": 48}, 2048: {"dt_rank": 128}}
    takes_lengths = True
    continues = True

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        self.inner = config.expand * layer.hidden
        self.heads = choose_heads(self.inner, None)
        self.rank = config.dt_rank or math.ceil(layer.hidden / 16)
        check_rank("dt_rank", self.rank, self.inner)
        self.in_proj = nn.Linear(layer.hidden, 2 * self.inner, bias=False)
        self.conv = ShortConvolution(self.inner, config.conv_width, activation="silu") if config.conv else None
        # A decay shared by all channels has a separate step size; those of the channels still scale their inputs.
        self.shared = 1 if config.decay == "one" else 0
        self.x_proj = nn.Linear(self.inner, self.rank + 2 * config.state + self.shared, bias=False)
        self.dt_proj = nn.Linear(self.rank, self.inner, bias=True)
        rates = {"full": (self.inner, config.state), "one": (1,), "none": None}[config.decay]
        self.A_log = None if rates is None else nn.Parameter(torch.empty(rates))
        self.decay_bias = nn.Parameter(torch.empty(1)) if self.shared else None
        self.D = nn.Parameter(torch.empty(self.inner))
        selects = config.global_every > 0 and (layer.index + 1) % config.global_every == 0
        width = config.global_width or max(1, layer.max_length // 4)
        self.long_conv = ShortConvolution(self.inner, width) if selects else None
        self.out_proj = nn.Linear(self.inner, layer.hidden, bias=False)

    def _look_back(self, raw_x: Tensor, segments: Tensor | None, last: Tensor | None = None) -> Tensor | None:
        """Return the long convolution of the mixer's input, None in a layer without it.

        `last` are the inputs before, which are updated.
        """
        if self.long_conv is None or self.long_conv.bias is None:
            return None
        inputs = raw_x if last is None else self.long_conv.append(raw_x, last)
        y = long_convolution(inputs, self.long_conv.weight.flip(1).T, segments=segments)
        return y[:, -raw_x.shape[1] :] + self.long_conv.bias.to(raw_x.dtype)

    def _select(self, x: Tensor, global_x: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the step sizes [B, T, D], B and C [B, T, N], and the decay.

        The decay is A [D, N] if each channel and state has one, else the shared log decay [B, T, 1].
        """
        state = self.config.state
        low_rank, B, C, raw_decay = self.x_proj(x).split([self.rank, state, state, self.shared], dim=-1)
        raw_dt = F.linear(low_rank, self.dt_proj.weight)
        if global_x is not None:
            raw_dt = raw_dt * F.silu(global_x)
        dt = step_size(raw_dt, self.dt_proj.bias)
        if self.A_log is None:
            return dt, B, C, torch.zeros_like(dt[..., :1])
        A = -self.A_log.to(dt.dtype).exp()
        return dt, B, C, A if self.decay_bias is None else A * step_size(raw_decay, self.decay_bias)

    def _scan(
        self, x: Tensor, global_x: Tensor | None, state: Tensor | None, segments: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the state space's output [B, T, D] without its skip connection, and the final state."""
        dt, B, C, decay = self._select(x, global_x)
        if self.config.decay == "full":
            y, state = selective_scan(x, dt, decay, B, C, state_BDN=state, segments=segments)
        else:
            # With one decay for all channels the scan is linear attention, with values in any number of heads.
            v = (x * dt).to(x.dtype).unflatten(-1, (self.heads, -1))
            shared = decay.expand(*decay.shape[:2], self.heads)
            y, state = ssd(
                C[:, :, None], B[:, :, None], v, shared, state_BHKV=state, segments=segments, final=state is not None
            )
            y = y.flatten(2)
        return y, state

    def _finish(self, y: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        return self.out_proj((y + self.D.to(y.dtype) * x) * F.silu(gate))

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Mix; see `Mixer.forward`."""
        raw_x, gate = self.in_proj(x_BTD).chunk(2, dim=-1)
        global_x = self._look_back(raw_x, segments)
        x = convolve(self.conv, raw_x, segments)
        y, _ = self._scan(x, global_x, None, segments)
        return self._finish(y, x, gate)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """The state, at least float32, and both convolutions' last inputs; constant in `max_length`."""
        weight = self.in_proj.weight
        N = self.config.state
        shape: tuple[int, ...] = (batch, self.inner, N)
        if self.config.decay != "full":
            shape = (batch, self.heads, N, self.inner // self.heads)
        tensors = {"state": weight.new_zeros(shape, dtype=torch.promote_types(weight.dtype, torch.float32))}
        if self.conv is not None:
            tensors["conv"] = self.conv.init_cache(batch)
        if self.long_conv is not None:
            tensors["long_conv"] = self.long_conv.init_cache(batch)
        return Cache(tensors=tensors)

    def _advance(self, x: Tensor, global_x: Tensor | None, gate: Tensor, cache: Cache) -> Tensor:
        y, state = self._scan(x, global_x, cache.tensors["state"], None)
        cache.tensors["state"].copy_(state)
        cache.length += gate.shape[1]
        return self._finish(y, x, gate)

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Mix one more token."""
        raw_x, gate = self.in_proj(x_B1D).chunk(2, dim=-1)
        global_x = None if self.long_conv is None else self.long_conv.step(raw_x, cache.tensors["long_conv"])
        return self._advance(convolve_step(self.conv, raw_x, cache), global_x, gate, cache)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix a prompt, or more of it, and keep its final state."""
        raw_x, gate = self.in_proj(x_BTD).chunk(2, dim=-1)
        if cache.length:
            global_x = self._look_back(raw_x, None, cache.tensors.get("long_conv"))
            x = convolve(None, raw_x, None) if self.conv is None else self.conv.further(raw_x, cache.tensors["conv"])
            return self._advance(x, global_x, gate, cache)
        if self.long_conv is not None:
            self.long_conv.fill(raw_x, cache.tensors["long_conv"])
        if self.conv is not None:
            self.conv.fill(raw_x, cache.tensors["conv"])
        return self._advance(convolve(self.conv, raw_x, None), self._look_back(raw_x, None), gate, cache)

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return for each inner channel the factor in front of the convolved x_s; without the skip connection D.

        arXiv 2410.15678, section 3.1, draws its mean over the channels.
        """
        raw_x, _ = self.in_proj(x_BTD).chunk(2, dim=-1)
        global_x = self._look_back(raw_x, None)
        dt, B, C, decay = self._select(convolve(self.conv, raw_x, None), global_x)
        if self.config.decay == "full":
            return scan_influence(dt, decay, B, C)
        return ssd_influence(C[:, :, None], B[:, :, None], decay.expand_as(dt)).scaled(writes_BTH=dt)

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the convolved x and the state space's output without its skip connection, [B, T, D, 1]."""
        raw_x, _ = self.in_proj(x_BTD).chunk(2, dim=-1)
        x = convolve(self.conv, raw_x, None)
        y, _ = self._scan(x, self._look_back(raw_x, None), None, None)
        return x[..., None], y[..., None]

    def recipe(self) -> dict[str, ParameterRecipe]:
        """PyTorch's defaults for the projections, the last one shrunk with depth; A = -(1..N), dt in [1e-3, 0.1]."""
        weights = {"in_proj": self.layer.hidden, "x_proj": self.inner, "dt_proj": self.rank}
        weights["out_proj"] = self.inner * self.layer.depth
        recipes = default_recipe(self) | {
            f"{name}.weight": ParameterRecipe(init=uniform(-(fan_in**-0.5), fan_in**-0.5))
            for name, fan_in in weights.items()
        }
        recipes["dt_proj.bias"] = ParameterRecipe(init=step_size_bias(), decay=False)
        recipes["D"] = ParameterRecipe(init=constant(1.0), decay=False)
        if self.config.decay == "full":
            rates = torch.arange(1, self.config.state + 1, dtype=torch.float32)
            recipes["A_log"] = ParameterRecipe(init=values(rates.log(), "log of 1 to N"), decay=False)
        elif self.shared:
            recipes["A_log"] = ParameterRecipe(init=log_of_uniform(1.0, 16.0), decay=False)
            recipes["decay_bias"] = ParameterRecipe(init=step_size_bias(), decay=False)
        for name, conv in (("conv", self.conv), ("long_conv", self.long_conv)):
            if conv is not None:
                recipes |= {f"{name}.{key}": recipe for key, recipe in conv.recipe().items()}
        return recipes

    def flops(self, length: int) -> float:
        """Projections, convolutions and the recurrence, for each state and token.

        Write 2 and read 2; a shared decay 1; a decay per state 3, including the exponential of dt A.
        """
        return self._products(length) + self._long(length)

    def training_flops(self, length: int) -> float:
        """Three times the products; the long convolution has as many FFTs backward as forward."""
        return 3.0 * self._products(length) + 2.0 * self._long(length)

    def _products(self, length: int) -> float:
        matrices = [layer.weight for layer in (self.in_proj, self.x_proj, self.dt_proj, self.out_proj)]
        matrices += [] if self.conv is None else [self.conv.weight]
        weights = sum(matrix.numel() for matrix in matrices)
        each = {"full": 7.0, "one": 5.0, "none": 4.0}[self.config.decay]
        return length * (2.0 * weights + each * self.inner * self.config.state)

    def _long(self, length: int) -> float:
        return 0.0 if self.long_conv is None else fourier_flops(length, self.long_conv.width, self.inner)

    def state_bytes(self, length: int) -> int:
        """The state and the convolutions' last inputs, whatever the length."""
        itemsize = self.in_proj.weight.element_size()
        kept = sum(conv.width - 1 for conv in (self.conv, self.long_conv) if conv is not None)
        return self.inner * (self.config.state * max(itemsize, 4) + kept * itemsize)
