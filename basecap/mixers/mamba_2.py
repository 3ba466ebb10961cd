"""Mamba-2 (arXiv 2405.21060): a state space with one data-dependent decay per head, and its ablations."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import Cache, Mixer, Variant, choose_heads, divide, mixer
from basecap.mixers._parts import ShortConvolution, parted, rms_norm
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, constant, default_recipe, uniform
from basecap.mixers._state_space import (
    REPOSITORY,
    SHARED_DECAY,
    StateSpaceConfig,
    convolve_step,
    log_of_uniform,
    step_size,
    step_size_bias,
)
from basecap.ops import Influence
from basecap.ops.ssd import influence, ssd


@mixer(
    "mamba-2",
    backbone="mamba",
    paper="arXiv 2405.21060",
    summary="state space with one data-dependent decay per head, short convolution, gated norm",
    source=f"{REPOSITORY}: mamba_ssm/modules/mamba2.py, mamba_ssm/models/mixer_seq_simple.py",
    variants={
        "mamba-2 decay one": Variant(
            options={"decay": "one"}, summary="one decay shared by all heads", differences=(SHARED_DECAY,)
        ),
        "mamba-2 decay none": Variant(options={"decay": "none"}, summary="no decay: a plain running sum"),
        "mamba-2 decay none w/o conv": Variant(
            options={"decay": "none", "conv": False}, summary="neither decay nor short convolution"
        ),
        "mamba-2 w/o conv": Variant(options={"conv": False}, summary="without the short convolution"),
        "mamba-2 w/o gn": Variant(options={"norm": False}, summary="gated, but without the group norm"),
        "mamba-2 canon": Variant(
            canon="a",
            summary="with a Canon layer before the mixer, besides its own convolution",
            paper="arXiv 2405.21060, ssrn 5240330 (Canon layers)",
            differences=(
                "Its blocks have no feed-forward layer, as published, so there are no places c and d; the authors of "
                "Canon layers add one.",
            ),
        ),
        "mamba-2 state x2": Variant(options={"state": 256}, summary="state 256"),
        "mamba-2 state x4": Variant(options={"state": 512}, summary="state 512"),
    },
)
class Mamba2(Mixer):
    """The Mamba-2 mixer: project, convolve, run the state space (q = C, k = B, v = dt x), gate, normalise, project."""

    class Config(StateSpaceConfig):
        """Options of Mamba-2."""

        state: int = Field(128, ge=1, description="state size per channel")
        heads: int | None = Field(None, ge=1, description="heads; inner channels / 64 when not given")
        groups: int = Field(1, ge=1, description="sets of B and C; each serves heads / groups heads")
        norm: bool = Field(True, description="whether the gated output is normalised per group")

    config: Config
    sizes: ClassVar = {768: {"heads": 24}, 2048: {"heads": 64}}
    takes_lengths = True
    continues = True

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        self.inner = config.expand * layer.hidden
        self.heads = choose_heads(self.inner, config.heads)
        self.head_dim = self.inner // self.heads
        divide(self.heads, config.groups, "heads by groups")
        #: Channels of x, B and C.
        self.widths = [self.inner, config.groups * config.state, config.groups * config.state]
        # A decay shared by all heads has a separate step size; those of the heads still scale their inputs.
        self.decays = {"full": self.heads, "one": 1, "none": 0}[config.decay]
        self.steps = self.heads + (1 if config.decay == "one" else 0)
        channels = sum(self.widths)
        #: Channels of the gate, of x with B and C, and of the step sizes.
        self.parts = [self.inner, channels, self.steps]
        self.in_proj = nn.Linear(layer.hidden, sum(self.parts), bias=False)
        self.conv = ShortConvolution(channels, config.conv_width, activation="silu") if config.conv else None
        self.dt_bias = nn.Parameter(torch.empty(self.steps))
        self.A_log = nn.Parameter(torch.empty(self.decays)) if self.decays else None
        self.D = nn.Parameter(torch.empty(self.heads))
        self.norm_weight = nn.Parameter(torch.empty(self.inner)) if config.norm else None
        self.out_proj = nn.Linear(self.inner, layer.hidden, bias=False)

    def _convolve(self, mixed: Tensor, segments: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return x, B and C [B, T, channels] after the convolution, or only the SiLU where there is none."""
        if self.conv is None:
            return F.silu(mixed).split(self.widths, dim=-1)
        return self.conv.parts(mixed, self.widths, segments)

    def _state_space(self, mixed: tuple[Tensor, ...], raw_dt: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return x [B, T, H, V], q, k [B, T, G, K], the step sizes and log decays [B, T, H] of the state space."""
        x, k, q = mixed
        k, q = (part.unflatten(-1, (self.config.groups, self.config.state)) for part in (k, q))
        dt = step_size(raw_dt, self.dt_bias)
        if self.A_log is None:
            log_decay = torch.zeros_like(dt)
        else:
            rate = self.A_log.to(dt.dtype).exp()
            log_decay = (-rate * dt[..., -self.decays :]).expand(*dt.shape[:2], self.heads)
        return x.unflatten(-1, (self.heads, self.head_dim)), q, k, dt[..., : self.heads], log_decay

    def _scan(
        self, mixed: tuple[Tensor, ...], raw_dt: Tensor, state: Tensor | None, segments: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, q, k, dt, log_decay = self._state_space(mixed, raw_dt)
        v = (x * dt[..., None]).to(x.dtype)
        o, state = ssd(q, k, v, log_decay, state_BHKV=state, segments=segments, final=state is not None)
        return (o + self.D.to(o.dtype)[:, None] * x).flatten(2), state

    def _finish(self, o: Tensor, gate: Tensor) -> Tensor:
        o = o * F.silu(gate)
        if self.norm_weight is not None:
            o = rms_norm(o.unflatten(-1, (self.config.groups, -1)), eps=1e-5).flatten(2)
            o = o * self.norm_weight.to(o.dtype)
        return self.out_proj(o)

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Mix; see `Mixer.forward`."""
        gate, mixed, raw_dt = parted(self.in_proj, x_BTD, self.parts)
        o, _ = self._scan(self._convolve(mixed, segments), raw_dt, None, segments)
        return self._finish(o, gate)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """The state [B, H, K, V], at least float32, and the convolution's last inputs; constant in `max_length`."""
        weight = self.in_proj.weight
        state = weight.new_zeros(batch, self.heads, self.config.state, self.head_dim)
        tensors = {"state": state.to(torch.promote_types(weight.dtype, torch.float32))}
        if self.conv is not None:
            tensors["conv"] = self.conv.init_cache(batch)
        return Cache(tensors=tensors)

    def _advance(self, mixed: tuple[Tensor, ...], raw_dt: Tensor, gate: Tensor, cache: Cache) -> Tensor:
        o, state = self._scan(mixed, raw_dt, cache.tensors["state"], None)
        cache.tensors["state"].copy_(state)
        cache.length += gate.shape[1]
        return self._finish(o, gate)

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Mix one more token."""
        gate, mixed, raw_dt = parted(self.in_proj, x_B1D, self.parts)
        mixed = convolve_step(self.conv, mixed, cache)
        return self._advance(mixed.split(self.widths, dim=-1), raw_dt, gate, cache)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix a prompt, or more of it, chunk by chunk and keep its final state."""
        gate, mixed, raw_dt = parted(self.in_proj, x_BTD, self.parts)
        if self.conv is not None and cache.length:
            parts = self.conv.further(mixed, cache.tensors["conv"]).split(self.widths, dim=-1)
            return self._advance(parts, raw_dt, gate, cache)
        if self.conv is not None:
            self.conv.fill(mixed, cache.tensors["conv"])
        return self._advance(self._convolve(mixed), raw_dt, gate, cache)

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the factor C_t.B_s dt_s prod_{s<r<=t} decay_r in front of the convolved x_s.

        The skip connection D is not part of it (arXiv 2410.15678, section 3.1).
        """
        _, mixed, raw_dt = parted(self.in_proj, x_BTD, self.parts)
        _, q, k, dt, log_decay = self._state_space(self._convolve(mixed), raw_dt)
        return influence(q, k, log_decay).scaled(writes_BTH=dt)

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the convolved x and the state space's output without its skip connection, [B, T, H, V]."""
        _, mixed, raw_dt = parted(self.in_proj, x_BTD, self.parts)
        x, q, k, dt, log_decay = self._state_space(self._convolve(mixed), raw_dt)
        return x, ssd(q, k, (x * dt[..., None]).to(x.dtype), log_decay)[0]

    def recipe(self) -> dict[str, ParameterRecipe]:
        """PyTorch's defaults for the projections, the last one shrunk with depth; A in [1, 16), dt in [1e-3, 0.1]."""
        bound = self.layer.hidden**-0.5
        out_bound = (self.inner * self.layer.depth) ** -0.5
        recipes = default_recipe(self) | {
            "in_proj.weight": ParameterRecipe(init=uniform(-bound, bound)),
            "dt_bias": ParameterRecipe(init=step_size_bias(), decay=False),
            "D": ParameterRecipe(init=constant(1.0), decay=False),
            "out_proj.weight": ParameterRecipe(init=uniform(-out_bound, out_bound)),
        }
        if self.A_log is not None:
            recipes["A_log"] = ParameterRecipe(init=log_of_uniform(1.0, 16.0), decay=False)
        if self.norm_weight is not None:
            recipes["norm_weight"] = ParameterRecipe(init=constant(1.0), decay=False)
        if self.conv is not None:
            recipes |= {f"conv.{name}": recipe for name, recipe in self.conv.recipe().items()}
        return recipes

    def flops(self, length: int) -> float:
        """Projections, convolution and the recurrence (write 2, read 2, decay 1: 5 K V per head and token)."""
        weights = self.in_proj.weight.numel() + self.out_proj.weight.numel()
        weights += 0 if self.conv is None else self.conv.weight.numel()
        each = 4.0 if self.config.decay == "none" else 5.0
        return length * (2.0 * weights + each * self.inner * self.config.state)

    def state_bytes(self, length: int) -> int:
        """The state and the convolution's last inputs, whatever the length."""
        itemsize = self.in_proj.weight.element_size()
        conv = 0 if self.conv is None else (self.conv.width - 1) * self.conv.weight.shape[0] * itemsize
        return self.inner * self.config.state * max(itemsize, 4) + conv
