"""Mamba-3 (arXiv 2603.15569): a state space with a trapezoidal rule and data-dependent rotations, no convolution."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.errors import ConfigError
from basecap.mixers._contract import Cache, Mixer, MixerConfig, Variant, choose_heads, mixer
from basecap.mixers._parts import PartedLinear, rms_norm, token_shift
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, constant, uniform
from basecap.mixers._state_space import REPOSITORY, step_size, step_size_bias
from basecap.ops import Influence, exact_dtype, running_sums
from basecap.ops.ssd import influence, ssd

#: Epsilon of the norms of B and C.
EPS = 1e-5

#: No head forgets more slowly than exp(-SLOWEST dt).
SLOWEST = 1e-4


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What the state space reads and writes at each token.

    Attributes:
        x: [B, T, H, V] values.
        q: [B, T, H, K] C after norm, bias and rotation.
        k: [B, T, H, K] B likewise.
        log_decay: [B, T, H], in float32 or wider.
        now: [B, T, H] strength with which a token is written at its own step, lambda dt.
        later: [B, T, H] strength with which the token before is written again, (1 - lambda) dt.
    """

    x: Tensor
    q: Tensor
    k: Tensor
    log_decay: Tensor
    now: Tensor
    later: Tensor


@mixer(
    "mamba-3",
    backbone="swiglu",
    paper="arXiv 2603.15569",
    summary="state space with a trapezoidal rule, rotated by the data, without a convolution",
    source=f"{REPOSITORY}: mamba_ssm/modules/mamba3.py, tests/ops/triton/test_mamba3_siso.py",
    differences=(
        "Blocks of mixer and SwiGLU, as many as of transformer++, as in the paper; the official library also stacks "
        "mixers alone.",
        "A is at most -1e-4 by softplus, as in the paper; `mamba-3 heavy tail` is what the library changed it to.",
        "Mamba's authors publish no trainer: embedding, head and SwiGLU start with std 0.02, and gains do not decay.",
    ),
    variants={
        "mamba-3 heavy tail": Variant(
            options={"rate": "heavy tail"},
            summary="decay rates grow linearly and vanish like 1 / x, as in the library since June 2026",
        ),
        "mamba-3 w/o rotation": Variant(options={"rotation": 0.0}, summary="without rotations: real states"),
        "mamba-3 w/o trapezoid": Variant(
            options={"trapezoid": False}, summary="each token is written once, as in Mamba-2"
        ),
    },
)
class Mamba3(Mixer):
    """The Mamba-3 mixer for one input and one output a channel: project, run the state space, gate, project."""

    class Config(MixerConfig):
        """Options of Mamba-3."""

        expand: int = Field(2, ge=1, description="channels inside the mixer per channel of the model")
        state: int = Field(128, ge=2, description="state size per channel")
        heads: int | None = Field(None, ge=1, description="heads; inner channels / 64 when not given")
        rotation: float = Field(0.5, ge=0, le=1, description="share of the state that rotates")
        trapezoid: bool = Field(True, description="whether a token is written at its own step and the next one")
        rate: Literal["softplus", "heavy tail"] = Field("softplus", description="what makes decay rates positive")

    sizes: ClassVar = {768: {"heads": 24}, 2048: {"heads": 64}}
    takes_lengths = True

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        self.inner = config.expand * layer.hidden
        self.heads = choose_heads(self.inner, config.heads)
        self.head_dim = self.inner // self.heads
        self.angles = int(config.state * config.rotation) // 2
        if config.rotation and not self.angles:
            raise ConfigError(
                f"rotation {config.rotation} of {config.state} states leaves no pair to rotate; choose a larger one."
            )
        state, H = config.state, self.heads
        self.in_proj = PartedLinear(
            layer.hidden, [self.inner, self.inner, state, state, H, H, H if config.trapezoid else 0, self.angles]
        )
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.B_gain = nn.Parameter(torch.empty(state))
        self.C_gain = nn.Parameter(torch.empty(state))
        self.B_bias = nn.Parameter(torch.empty(H, state))
        self.C_bias = nn.Parameter(torch.empty(H, state))
        self.D = nn.Parameter(torch.empty(H))
        self.out_proj = nn.Linear(self.inner, layer.hidden, bias=False)

    def _rate(self, raw_BTH: Tensor) -> Tensor:
        """Return -A, at least SLOWEST."""
        if self.config.rate == "softplus":
            rate = F.softplus(raw_BTH)
        else:
            rate = torch.where(raw_BTH >= 0, 1 + raw_BTH, 1 / (1 - raw_BTH.clamp(max=0)))
        return rate.clamp(min=SLOWEST)

    def _flow(self, x_BTD: Tensor, start_BHA: Tensor | None = None) -> tuple[Tensor, Flow, Tensor]:
        """Return the gate [B, T, inner], the flow, and the phases after each token [B, T, H, angles] in float64."""
        gate, x, k, q, raw_dt, raw_rate, raw_share, raw_turn = self.in_proj(x_BTD)
        dt = step_size(raw_dt, self.dt_bias)
        share = raw_share.to(dt.dtype).sigmoid() if self.config.trapezoid else torch.ones_like(dt)
        turns = dt[..., None] * (math.pi * torch.tanh(raw_turn.to(dt.dtype)))[:, :, None]
        # Sums of many turns would lose digits in float32; a whole turn changes nothing.
        phases = running_sums(turns.to(exact_dtype(turns.device)), 1) + (
            0.0 if start_BHA is None else start_BHA[:, None]
        )
        cos, sin = ((phases % math.tau).to(dt.dtype).cos(), (phases % math.tau).to(dt.dtype).sin())

        def per_head(raw_BTK: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
            wide = rms_norm(raw_BTK.to(dt.dtype), EPS) * gain.to(dt.dtype)
            return _rotate(wide[:, :, None] + bias.to(dt.dtype), cos, sin).to(raw_BTK.dtype)

        flow = Flow(
            x=x.unflatten(-1, (self.heads, self.head_dim)),
            q=per_head(q, self.C_gain, self.C_bias),
            k=per_head(k, self.B_gain, self.B_bias),
            log_decay=-self._rate(raw_rate.to(dt.dtype)) * dt,
            now=share * dt,
            later=(1 - share) * dt,
        )
        return gate, flow, phases

    def _scan(self, flow: Flow, cache: Cache | None, segments: Tensor | None) -> Tensor:
        """Return what is read [B, T, H, V], without the skip connection, and update the state in `cache`.

        A token is written twice, at its own step and, decayed, at the next one. Both are one write at the next step,
        and the token reads itself apart.
        """
        state = None if cache is None else cache.tensors["state"]
        if not self.config.trapezoid:
            o, state = ssd(
                flow.q, flow.k, _times(flow.x, flow.now), flow.log_decay, state_BHKV=state, segments=segments
            )
        else:
            k, x, now = (_delayed(part, segments) for part in (flow.k, flow.x, flow.now))
            if cache is not None:  # the state has the last token's first write
                k[:, 0], x[:, 0] = cache.tensors["k"].to(k.dtype), cache.tensors["x"].to(x.dtype)
            v = _times(x, flow.log_decay.exp() * (now + flow.later))
            o, state = ssd(flow.q, k, v, flow.log_decay, state_BHKV=state, segments=segments)
            o = o + _times(flow.x, flow.now * (flow.q * flow.k).sum(-1, dtype=flow.now.dtype))
        if cache is not None:
            if self.config.trapezoid:
                last_k, last_v = flow.k[:, -1], _times(flow.x, flow.now)[:, -1]
                state = state + (last_k[..., None] * last_v[..., None, :]).to(state.dtype)
                cache.tensors["k"].copy_(flow.k[:, -1])
                cache.tensors["x"].copy_(flow.x[:, -1])
            cache.tensors["state"].copy_(state)
        return o

    def _finish(self, o: Tensor, flow: Flow, gate: Tensor) -> Tensor:
        o = o + self.D.to(o.dtype)[:, None] * flow.x
        return self.out_proj(o.flatten(2) * F.silu(gate))

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Mix; see `Mixer.forward`."""
        gate, flow, _ = self._flow(x_BTD)
        return self._finish(self._scan(flow, None, segments), flow, gate)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """The state [B, H, K, V], the phases in float64, the last token's B and x; constant in `max_length`."""
        weight, (H, K, V) = self.in_proj.weight, (self.heads, self.config.state, self.head_dim)
        wide = torch.promote_types(weight.dtype, torch.float32)
        tensors = {"state": weight.new_zeros(batch, H, K, V, dtype=wide)}
        if self.angles:
            tensors["phases"] = weight.new_zeros(batch, H, self.angles, dtype=exact_dtype(weight.device))
        if self.config.trapezoid:
            tensors |= {"k": weight.new_zeros(batch, H, K), "x": weight.new_zeros(batch, H, V)}
        return Cache(tensors=tensors)

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Mix one more token."""
        return self.prefill(x_B1D, cache)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix a prompt chunk by chunk and keep its final state."""
        gate, flow, phases = self._flow(x_BTD, cache.tensors.get("phases"))
        o = self._scan(flow, cache, None)
        if self.angles:
            cache.tensors["phases"].copy_(phases[:, -1] % math.tau)
        cache.length += x_BTD.shape[1]
        return self._finish(o, flow, gate)

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return C_t.B_s (lambda_s dt_s + (1 - lambda_{s+1}) dt_{s+1}) prod_{s<r<=t} decay_r, s < t, before x_s.

        At s = t it is C_t.B_t lambda_t dt_t; the skip connection D is not part of it.
        """
        _, flow, _ = self._flow(x_BTD)
        scores = influence(flow.q, flow.k, flow.log_decay)
        then = flow.now + F.pad(flow.later, (0, 0, -1, 1))

        def factors(heads: slice) -> Tensor:
            found = scores.factors(heads)
            now_BHT, then_BHT = flow.now[:, :, heads].mT, then[:, :, heads].mT
            own = torch.eye(found.shape[-1], dtype=torch.bool, device=found.device)
            return found * torch.where(own, now_BHT[..., None, :], then_BHT[..., None, :])

        return replace(scores, factors=factors)

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and the state space's output without its skip connection, [B, T, H, V]."""
        _, flow, _ = self._flow(x_BTD)
        return flow.x, self._scan(flow, None, None)

    def recipe(self) -> dict[str, ParameterRecipe]:
        """PyTorch's defaults for the projections, the last one shrunk with depth; gains, biases and D 1; dt as Mamba-2.

        Official: biases of B and C and gains of norms have weight decay there; here none of a study's gains do.
        """
        bound, out_bound = self.layer.hidden**-0.5, (self.inner * self.layer.depth) ** -0.5
        ones = {name: ParameterRecipe(init=constant(1.0), decay=False) for name in ("B_gain", "C_gain", "D")}
        return {
            **ones,
            **{name: ParameterRecipe(init=constant(1.0)) for name in ("B_bias", "C_bias")},
            "in_proj.weight": ParameterRecipe(init=uniform(-bound, bound)),
            "dt_bias": ParameterRecipe(init=step_size_bias(), decay=False),
            "out_proj.weight": ParameterRecipe(init=uniform(-out_bound, out_bound)),
        }

    def flops(self, length: int) -> float:
        """Projections and the recurrence: decay 1, write 2 (a token's two writes are one), read 2, K V per head."""
        weights = self.in_proj.weight.numel() + self.out_proj.weight.numel()
        return length * (2.0 * weights + 5.0 * self.inner * self.config.state)

    def state_bytes(self, length: int) -> int:
        """The state, the phases, and the last token's B and x, whatever the length."""
        itemsize, K = self.in_proj.weight.element_size(), self.config.state
        last = self.heads * K + self.inner if self.config.trapezoid else 0
        return self.inner * K * max(itemsize, 4) + self.heads * self.angles * 8 + last * itemsize


def _rotate(x_BTHK: Tensor, cos_BTHA: Tensor, sin_BTHA: Tensor) -> Tensor:
    """Rotate the first pairs of neighbouring channels, as many as there are angles."""
    dims = 2 * cos_BTHA.shape[-1]
    pairs, rest = x_BTHK[..., :dims].unflatten(-1, (-1, 2)), x_BTHK[..., dims:]
    first, second = pairs.unbind(-1)
    turned = torch.stack([first * cos_BTHA - second * sin_BTHA, first * sin_BTHA + second * cos_BTHA], dim=-1)
    return torch.cat([turned.flatten(-2), rest.expand(*turned.shape[:3], -1)], dim=-1)


def _delayed(x_BTH: Tensor, segments: Tensor | None) -> Tensor:
    """Return [B, T, H, ...] delayed by one token, zero at the start of every sequence."""
    return token_shift(x_BTH.flatten(2), segments).view_as(x_BTH)


def _times(x_BTHV: Tensor, strength_BTH: Tensor) -> Tensor:
    return (x_BTHV * strength_BTH[..., None]).to(x_BTHV.dtype)
