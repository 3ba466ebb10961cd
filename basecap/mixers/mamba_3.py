"""Mamba-3 (arXiv 2603.15569): a state space with a trapezoidal rule and data-dependent rotations, no convolution."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.errors import ConfigError
from basecap.mixers._contract import Cache, Mixer, MixerConfig, Variant, choose_heads, mixer
from basecap.mixers._parts import parted, rms_norm
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, constant, uniform
from basecap.mixers._state_space import REPOSITORY, step_size, step_size_bias
from basecap.ops import Influence, exact_dtype, recomputed, running_sums
from basecap.ops.ssd import influence
from basecap.ops.ssd_mimo import Heads, Strengths, of_heads, ssd_mimo

#: Epsilon of the norms of B and C.
EPS = 1e-5

#: No head forgets more slowly than exp(-SLOWEST dt).
SLOWEST = 1e-4


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What the state space reads and writes at each token.

    Attributes:
        x: [B, T, H, V] values.
        q: [B, T, R, 1, K] C as projected, of each of R reads; see `Mamba3._shared`.
        k: [B, T, R, 1, K] B likewise, of each of R writes.
        angles: [B, T, H, angles] by which q and k are rotated, in float32 or wider.
        log_decay: [B, T, H], in float32 or wider.
        now: [B, T, H] strength with which a token is written at its own step, lambda dt.
        later: [B, T, H] strength with which the token before is written again, (1 - lambda) dt.
    """

    x: Tensor
    q: Tensor
    k: Tensor
    angles: Tensor
    log_decay: Tensor
    now: Tensor
    later: Tensor

    @property
    def kept(self) -> Tensor:
        """[B, T, H] strength with which later tokens read a token: of both writes, that of the last one still alone."""
        return self.now + F.pad(self.later, (0, 0, -1, 1))


@mixer(
    "mamba-3",
    backbone="swiglu",
    paper="arXiv 2603.15569",
    summary="state space with a trapezoidal rule, rotated by the data, without a convolution",
    source=f"{REPOSITORY}: mamba_ssm/modules/mamba3.py, tests/ops/triton/test_mamba3_siso.py, "
    "tests/ops/tilelang/test_mamba3_mimo.py",
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
        "mamba-3 mimo": Variant(
            options={"rank": 4},
            backbone="swiglu narrow",
            summary="four inputs and outputs a head: a token writes and reads the same state four times",
            differences=(
                "SwiGLU has width 7/3, which makes room for the further B and C: the model is as large as the plain "
                "one.",
                "Neighbouring channels rotate, as in the plain form and the official recurrence; the official kernels "
                "pair channel i with i + K / 2.",
            ),
        ),
        "mamba-3 w/o rotation": Variant(options={"rotation": 0.0}, summary="without rotations: real states"),
        "mamba-3 w/o trapezoid": Variant(
            options={"trapezoid": False}, summary="each token is written once, as in Mamba-2"
        ),
    },
)
class Mamba3(Mixer):
    """The Mamba-3 mixer: project, run the state space, gate, project.

    With a rank above 1 (MIMO) the values x enter as x mimo_x_r for each write r, and what each read r finds is gated by
    z mimo_z_r and summed with the weights mimo_o_r.
    """

    class Config(MixerConfig):
        """Options of Mamba-3."""

        expand: int = Field(2, ge=1, description="channels inside the mixer per channel of the model")
        state: int = Field(128, ge=2, description="state size per channel")
        heads: int | None = Field(None, ge=1, description="heads; inner channels / 64 when not given")
        rank: int = Field(1, ge=1, description="inputs and outputs per head: writes and reads at each token")
        rotation: float = Field(0.5, ge=0, le=1, description="share of the state that rotates")
        trapezoid: bool = Field(True, description="whether a token is written at its own step and the next one")
        rate: Literal["softplus", "heavy tail"] = Field("softplus", description="what makes decay rates positive")

    sizes: ClassVar = {768: {"heads": 24}, 2048: {"heads": 64}}
    takes_lengths = True
    continues = True

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
        state, H, R = config.state, self.heads, config.rank
        if min(state, self.head_dim) < R:
            raise ConfigError(
                f"rank is {R}, more than a state of {state} x {self.head_dim} per head can hold "
                f"({min(state, self.head_dim)}); choose a smaller one."
            )
        #: Channels of gate, x, B, C, step sizes, decay rates, shares and angles.
        self.parts = [self.inner, self.inner, R * state, R * state, H, H, H if config.trapezoid else 0, self.angles]
        self.in_proj = nn.Linear(layer.hidden, sum(self.parts), bias=False)
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.B_gain = nn.Parameter(torch.empty(state))
        self.C_gain = nn.Parameter(torch.empty(state))
        ranks = () if R == 1 else (R,)
        self.B_bias = nn.Parameter(torch.empty(H, *ranks, state))
        self.C_bias = nn.Parameter(torch.empty(H, *ranks, state))
        self.D = nn.Parameter(torch.empty(H))
        self.mimo_x, self.mimo_z, self.mimo_o = (
            nn.Parameter(torch.empty(H, R, self.head_dim)) if R > 1 else None for _ in range(3)
        )
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
        gate, x, k, q, raw_dt, raw_rate, raw_share, raw_turn = parted(self.in_proj, x_BTD, self.parts)
        dt = step_size(raw_dt, self.dt_bias)
        share = raw_share.to(dt.dtype).sigmoid() if self.config.trapezoid else torch.ones_like(dt)
        turns = dt[..., None] * (math.pi * torch.tanh(raw_turn.to(dt.dtype)))[:, :, None]
        # Sums of many turns would lose digits in float32; a whole turn changes nothing.
        phases = running_sums(turns.to(exact_dtype(turns.device)), 1) + (
            0.0 if start_BHA is None else start_BHA[:, None]
        )
        flow = Flow(
            x=x.unflatten(-1, (self.heads, self.head_dim)),
            q=q.unflatten(-1, (self.config.rank, 1, -1)),
            k=k.unflatten(-1, (self.config.rank, 1, -1)),
            angles=(phases % math.tau).to(dt.dtype),
            log_decay=-self._rate(raw_rate.to(dt.dtype)) * dt,
            now=share * dt,
            later=(1 - share) * dt,
        )
        return gate, flow, phases

    def _shared(self, flow: Flow) -> tuple[tuple[Tensor, Tensor], Heads]:
        """Return q and k after their norms [B, T, R, 1, K], and what each head makes of them."""
        wide = flow.angles.dtype
        raw = (flow.q, self.C_gain), (flow.k, self.B_gain)
        q, k = (rms_norm(x.to(wide), EPS) * gain.to(wide) for x, gain in raw)
        q_bias, k_bias = (x.to(wide).view(self.heads, self.config.rank, -1) for x in (self.C_bias, self.B_bias))
        return (q, k), Heads(q_bias, k_bias, flow.angles)

    def _rotated(self, flow: Flow) -> tuple[Tensor, Tensor]:
        """Return q and k of each head after norm, bias and rotation [B, T, R, H, K]."""
        shared, heads = self._shared(flow)
        q, k = of_heads(shared, self.heads, heads)
        return q.to(flow.q.dtype), k.to(flow.k.dtype)

    def _entering(self, x_BTHV: Tensor) -> Tensor:
        """Return the values of every write [B, T, R, H, V]."""
        if self.mimo_x is None:
            return x_BTHV[:, :, None]
        return x_BTHV[:, :, None] * _by_rank(self.mimo_x, x_BTHV.dtype)

    def _scan(self, flow: Flow, cache: Cache | None, segments: Tensor | None) -> Tensor:
        """Return what is read [B, T, R, H, V], without the skip connection, and update the state in `cache`.

        A token is written twice, at its own step and, decayed, at the next one. Both are one write for later tokens.
        """
        ((q, k), heads), v, state = self._shared(flow), self._entering(flow.x), None
        if cache is not None:
            state = cache.tensors["state"]
            if self.config.trapezoid:  # the last token's second write
                last_BRHV = (self._entering(cache.tensors["x"][:, None]) * flow.later[:, :1, None, :, None])[:, 0]
                added = cache.tensors["k"].to(state.dtype)[..., None] * last_BRHV.to(state.dtype)[..., None, :]
                state = state + added.sum(1)
        strengths = Strengths(flow.log_decay, flow.now, flow.kept)
        o, state = ssd_mimo(q, k, v, strengths, heads=heads, state_BHKV=state, segments=segments)
        if cache is not None:
            cache.tensors["state"].copy_(state)
            if self.config.trapezoid:
                _, last_B1RHK = of_heads((q[:, -1:], k[:, -1:]), self.heads, heads._replace(angles=flow.angles[:, -1:]))
                cache.tensors["k"].copy_(last_B1RHK[:, 0].to(flow.k.dtype))
                cache.tensors["x"].copy_(flow.x[:, -1])
        return o

    def _finish(self, o: Tensor, flow: Flow, gate_BTX: Tensor) -> Tensor:
        """Add the skip connection, gate every read, sum them, project."""
        o = o + self.D.to(o.dtype)[:, None] * self._entering(flow.x)
        gate = gate_BTX.view_as(flow.x)[:, :, None]
        if self.mimo_z is None or self.mimo_o is None:
            return self.out_proj((o * F.silu(gate)).flatten(2))
        z, summed = (_by_rank(part, o.dtype) for part in (self.mimo_z, self.mimo_o))
        return self.out_proj((o * F.silu(gate * z) * summed).sum(2).flatten(2))

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Mix; see `Mixer.forward`."""
        gate, flow, _ = self._flow(x_BTD)
        # What a head reads and writes is made of little: with a rank of 4 queries and keys are 64 times as large.
        o = recomputed(lambda: self._scan(flow, None, segments), x_BTD.device)
        return self._finish(o, flow, gate)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """The state [B, H, K, V], the phases in float64, the last token's B and x; constant in `max_length`."""
        weight, (H, K, V) = self.in_proj.weight, (self.heads, self.config.state, self.head_dim)
        wide = torch.promote_types(weight.dtype, torch.float32)
        tensors = {"state": weight.new_zeros(batch, H, K, V, dtype=wide)}
        if self.angles:
            tensors["phases"] = weight.new_zeros(batch, H, self.angles, dtype=exact_dtype(weight.device))
        if self.config.trapezoid:
            tensors |= {"k": weight.new_zeros(batch, self.config.rank, H, K), "x": weight.new_zeros(batch, H, V)}
        return Cache(tensors=tensors)

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Mix one more token."""
        return self.prefill(x_B1D, cache)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix a prompt, or more of it, chunk by chunk and keep its final state."""
        gate, flow, phases = self._flow(x_BTD, cache.tensors.get("phases"))
        o = self._scan(flow, cache, None)
        if self.angles:
            cache.tensors["phases"].copy_(phases[:, -1] % math.tau)
        cache.length += x_BTD.shape[1]
        return self._finish(o, flow, gate)

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return C_t.B_s (lambda_s dt_s + (1 - lambda_{s+1}) dt_{s+1}) prod_{s<r<=t} decay_r, s < t, before x_s.

        At s = t it is C_t.B_t lambda_t dt_t; the skip connection D is not part of it. With a rank above 1 every channel
        has its own C and B: sums over reads and writes with the channel's weights mimo_o and mimo_x.
        """
        _, flow, _ = self._flow(x_BTD)
        rotated, (B, T, H) = self._rotated(flow), flow.log_decay.shape
        V = self.head_dim if self.config.rank > 1 else 1
        own = torch.eye(T, dtype=torch.bool, device=x_BTD.device)

        def factors(parts: slice) -> Tensor:
            channels = torch.arange(H * V, device=x_BTD.device)[parts]
            heads = channels // V
            q, k = (self._summed(*part, channels) for part in zip(rotated, (self.mimo_o, self.mimo_x), strict=True))
            found = influence(q, k, flow.log_decay[:, :, heads]).whole()
            now, kept = (x[:, :, heads].mT[..., None, :] for x in (flow.now, flow.kept))
            return found * torch.where(own, now, kept)

        return Influence(shape=(B, H * V, T), device=x_BTD.device, factors=factors)

    def _summed(self, x_BTRHK: Tensor, weights: Tensor | None, channels: Tensor) -> Tensor:
        """Return the sum over R with the weights [H, R, V] of some of H V channels, [B, T, channels, K]."""
        if weights is None:
            return x_BTRHK[:, :, 0, channels]
        heads = channels // self.head_dim
        chosen_RC = weights.transpose(0, 1).flatten(1)[:, channels].to(x_BTRHK.dtype)
        return (x_BTRHK[:, :, :, heads] * chosen_RC[..., None]).sum(2)

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and the state space's output without its skip connection, [B, T, H, V].

        Of a rank above 1 by channel, [B, T, H V, 1]: reads summed with the weights mimo_o, without the gates.
        """
        _, flow, _ = self._flow(x_BTD)
        o = self._scan(flow, None, None)
        if self.mimo_o is None:
            return flow.x, o[:, :, 0]
        summed = (o * _by_rank(self.mimo_o, o.dtype)).sum(2)
        return flow.x.flatten(2)[..., None], summed.flatten(2)[..., None]

    def recipe(self) -> dict[str, ParameterRecipe]:
        """PyTorch's defaults for the projections, the last one shrunk with depth; gains, biases and D 1; dt as Mamba-2.

        Official: biases of B and C and gains of norms have weight decay there; here none of a study's gains do.
        """
        bound, out_bound = self.layer.hidden**-0.5, (self.inner * self.layer.depth) ** -0.5
        ones = {name: ParameterRecipe(init=constant(1.0), decay=False) for name in ("B_gain", "C_gain", "D")}
        shares = {"mimo_x": 1 / self.config.rank, "mimo_z": 1.0, "mimo_o": 1 / self.config.rank}
        mimo = {name: ParameterRecipe(init=constant(start)) for name, start in shares.items()}
        return {
            **ones,
            **(mimo if self.config.rank > 1 else {}),
            **{name: ParameterRecipe(init=constant(1.0)) for name in ("B_bias", "C_bias")},
            "in_proj.weight": ParameterRecipe(init=uniform(-bound, bound)),
            "dt_bias": ParameterRecipe(init=step_size_bias(), decay=False),
            "out_proj.weight": ParameterRecipe(init=uniform(-out_bound, out_bound)),
        }

    def flops(self, length: int) -> float:
        """Projections and the recurrence: decay 1, and 2 for each of R writes (both of a token as one) and R reads."""
        weights = self.in_proj.weight.numel() + self.out_proj.weight.numel()
        return length * (2.0 * weights + (1.0 + 4.0 * self.config.rank) * self.inner * self.config.state)

    def state_bytes(self, length: int) -> int:
        """The state, the phases, and the last token's B and x, whatever the length."""
        itemsize, K = self.in_proj.weight.element_size(), self.config.state
        last = self.config.rank * self.heads * K + self.inner if self.config.trapezoid else 0
        return self.inner * K * max(itemsize, 4) + self.heads * self.angles * 8 + last * itemsize


def _by_rank(weights_HRV: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights [R, H, V] for tensors of the same order: a transposed view would turn the layout of products."""
    return weights_HRV.to(dtype).transpose(0, 1).contiguous()
