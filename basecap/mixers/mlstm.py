"""mLSTM, xLSTM's matrix memory (arXiv 2405.04517), as in xLSTM 7B (arXiv 2503.13427): exponential gates, normalised."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import Cache, Mixer, MixerConfig, divide, mixer
from basecap.mixers._parts import starts_of
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, constant, matrices, values
from basecap.ops import Influence, exact_dtype, running_sums
from basecap.ops.ssd import influence, ssd

#: Epsilon of the norm of each head's output, and of its denominator.
EPS = 1e-6

#: Value columns, the normaliser among them, for which a GPU's kernels are fastest; rows of multiples of 8 are aligned.
COLUMNS, ALIGNED = 64, 8


@dataclass(frozen=True, kw_only=True)
class GatedInputs:
    """What the memory reads and writes at each token.

    Attributes:
        q: [B, T, H, K] queries, scaled.
        k: [B, T, H, K] keys.
        v: [B, T, H, V] values.
        log_input: [B, T, H] logarithms of the input gates, in float32 or wider.
        log_forget: [B, T, H] logarithms of the forget gates, at most 0, likewise.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_input: Tensor
    log_forget: Tensor


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the memory reads, and its state afterwards.

    Attributes:
        k: [B, T, H, K] keys times the input gates, relative to the level.
        log_decay: [B, T, H] logarithms of the decays, relative to the level.
        sums: [B, T, H, V] sums of values.
        below: [B, T, H] what they are divided by.
        state: [B, H, K, V + 1] memory and normaliser, divided by exp(level); [0] if no state was given.
        level: [B, T, H] m_t of the paper.
    """

    k: Tensor
    log_decay: Tensor
    sums: Tensor
    below: Tensor
    state: Tensor
    level: Tensor


def levels(inputs: GatedInputs, first_BH: Tensor | None, segments: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return m_t = max(m_{t-1} + log f_t, log i_t) and m_{t-1}, [B, T, H] (arXiv 2405.04517, eq. 15).

    Before a sequence m is 0, or `first`. Sums and maxima are those of a running maximum, without a loop over tokens.
    """
    forget = inputs.log_forget.to(exact_dtype(inputs.log_forget.device))
    total = running_sums(forget, 1)
    first = torch.zeros_like(total[:, 0]) if first_BH is None else first_BH.to(total.dtype)
    if segments is None:
        raised = torch.cat([first[:, None], inputs.log_input - total], dim=1).cummax(1).values[:, 1:] + total
        level = raised.to(inputs.log_input.dtype)
        return level, torch.cat([first[:, None].to(level.dtype), level[:, :-1]], dim=1)
    begins = starts_of(segments)
    gained = inputs.log_input - total
    gained = torch.where(begins[..., None], torch.maximum(gained, forget - total), gained)
    # Every sequence is lifted above the one before it, so that one running maximum serves all.
    lift = begins.cumsum(1)[..., None] * (gained.amax(1, keepdim=True) - gained.amin(1, keepdim=True) + 1).detach()
    level = ((gained + lift).cummax(1).values - lift + total).to(inputs.log_input.dtype)
    return level, F.pad(level, (0, 0, 1, -1)).masked_fill(begins[..., None], 0)


def read(
    inputs: GatedInputs,
    state: Tensor | None = None,
    level_BH: Tensor | None = None,
    segments: Tensor | None = None,
    width: int | None = None,
) -> Reading:
    """Run C_t = f_t C_{t-1} + i_t k_t v_t^T and n_t = f_t n_{t-1} + i_t k_t (arXiv 2405.04517, eq. 19 to 27).

    h_t = C_t^T q_t / max(|n_t . q_t|, 1). Everything is divided by exp(m_t), so that no gate overflows: what is then
    left is a memory with decays f_t exp(m_{t-1} - m_t) and keys times i_t exp(-m_t), and n is one more column of it.

    Args:
        inputs: what is read and written.
        state: [B, H, K, V + 1] before the first token; None: zero, and none is returned.
        level_BH: its m.
        segments: int64 [B, T], see `Mixer.forward`.
        width: columns of one head of the kernels, among which those of a head here are distributed; None: all of them.
    """
    level, before = levels(inputs, level_BH, segments)
    fixed, before = level.detach(), before.detach()  # they cancel, but for the epsilon
    log_decay = inputs.log_forget + before - fixed
    k = (inputs.k * (inputs.log_input - fixed).exp()[..., None]).to(inputs.k.dtype)
    H, V = inputs.v.shape[2:]
    width = width or V + 1
    parts = -(-(V + 1) // width)
    columns = F.pad(torch.cat([inputs.v, torch.ones_like(inputs.v[..., :1])], dim=-1), (0, parts * width - V - 1))
    if state is not None:
        state = F.pad(state, (0, parts * width - V - 1)).unflatten(-1, (parts, width)).transpose(2, 3).flatten(1, 2)
    o, last = ssd(
        inputs.q,
        k,
        columns.unflatten(-1, (parts, width)).flatten(2, 3),
        log_decay.repeat_interleave(parts, dim=-1),
        state_BHKV=state,
        segments=segments,
        final=state is not None,
    )
    if state is not None:
        last = last.unflatten(1, (H, parts)).transpose(2, 3).flatten(-2)[..., : V + 1]
    wide = o.unflatten(2, (H, parts)).flatten(-2).to(level.dtype)
    below = torch.maximum(wide[..., V].abs(), (-fixed).exp()) + EPS * (level - fixed).exp()
    return Reading(k=k, log_decay=log_decay, sums=wide[..., :V], below=below, state=last, level=fixed)


@mixer(
    "mlstm",
    backbone="xlstm",
    paper="arXiv 2405.04517, arXiv 2503.13427",
    summary="matrix memory of xLSTM: exponential input gates, forget gates, a normaliser, gated norm",
    source="NX-AI/xlstm-jax@5333dc1bad5d9f178cbe673d0ee1968118dc271c: configs/model/mLSTMv1_default.yaml, "
    "configs/model/mLSTMv1_165M.yaml, xlstm_jax/models/xlstm_parallel/blocks/mlstm/layer_v1.py",
)
class MLSTM(Mixer):
    """The mLSTM layer of xLSTM 7B: matrix memory, layer norm of each head's output, output gate, projection."""

    class Config(MixerConfig):
        """Options of mLSTM."""

        heads: int = Field(4, ge=1, description="heads; queries and keys are half as wide as values")
        gate_cap: float = Field(15.0, gt=0, description="bound of what input and forget gates are made of, by tanh")

    sizes: ClassVar = {768: {"heads": 4}, 2048: {"heads": 4}, 4096: {"heads": 8}}
    takes_lengths = True
    continues = True

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        self.heads, D = config.heads, layer.hidden
        self.key_dim = divide(divide(D, 2, "hidden size in two, for keys"), self.heads, "half the hidden size by heads")
        self.value_dim = 2 * self.key_dim
        self.qkv = nn.Linear(D, 2 * D, bias=False)
        self.gates = nn.Linear(D, 2 * self.heads, bias=False)
        self.input_bias = nn.Parameter(torch.empty(self.heads))
        self.forget_bias = nn.Parameter(torch.empty(self.heads))
        self.output_gate = nn.Linear(D, D, bias=False)
        self.norm_weight = nn.Parameter(torch.empty(D))
        self.out = nn.Linear(D, D, bias=False)

    def _inputs(self, x_BTD: Tensor) -> GatedInputs:
        D, cap = self.layer.hidden, self.config.gate_cap
        q, k, v = self.qkv(x_BTD).split([D // 2, D // 2, D], dim=-1)
        raw = self.gates(x_BTD)
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32)).chunk(2, dim=-1)
        log_input, forget = (
            cap * torch.tanh((part + bias) / cap)
            for part, bias in zip(raw, (self.input_bias, self.forget_bias), strict=True)
        )
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in (q, k, v))
        return GatedInputs(q=q * self.key_dim**-0.5, k=k, v=v, log_input=log_input, log_forget=F.logsigmoid(forget))

    def _read(self, inputs: GatedInputs, cache: Cache | None = None, segments: Tensor | None = None) -> Reading:
        """Read at every token, from the state in `cache` if given, and update it."""
        width, columns = None, self.value_dim + 1
        if inputs.v.is_cuda and inputs.v.shape[1] > 1:
            width = -(-columns // (-(-columns // COLUMNS) * ALIGNED)) * ALIGNED
        if cache is None:
            return read(inputs, segments=segments, width=width)
        found = read(inputs, cache.tensors["state"], cache.tensors["level"], width=width)
        cache.tensors["state"].copy_(found.state)
        cache.tensors["level"].copy_(found.level[:, -1])
        cache.length += inputs.v.shape[1]
        return found

    def _finish(self, found: Reading, x_BTD: Tensor) -> Tensor:
        """Divide, normalise each head, gate, project."""
        o = F.layer_norm(found.sums / found.below[..., None], (self.value_dim,), eps=EPS).flatten(2).to(x_BTD.dtype)
        return self.out(o * self.norm_weight.to(o.dtype) * torch.sigmoid(self.output_gate(x_BTD)))

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Mix; see `Mixer.forward`."""
        return self._finish(self._read(self._inputs(x_BTD), segments=segments), x_BTD)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Memory and normaliser [B, H, K, V + 1] and their level [B, H], at least float32; constant in `max_length`."""
        weight, H = self.qkv.weight, self.heads
        dtype = torch.promote_types(weight.dtype, torch.float32)
        state = weight.new_zeros(batch, H, self.key_dim, self.value_dim + 1, dtype=dtype)
        return Cache(tensors={"state": state, "level": weight.new_zeros(batch, H, dtype=dtype)})

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Mix one more token."""
        return self.prefill(x_B1D, cache)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix a prompt, or more of it, chunk by chunk and keep its final state."""
        return self._finish(self._read(self._inputs(x_BTD), cache), x_BTD)

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return q_t . (i_s k_s prod_{s<r<=t} f_r) / max(|n_t . q_t|, 1), the factor in front of v_s."""
        inputs = self._inputs(x_BTD)
        found = self._read(inputs)
        return influence(inputs.q, found.k, found.log_decay).scaled(reads_BTH=1 / found.below)

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values and what the memory reads."""
        inputs = self._inputs(x_BTD)
        found = self._read(inputs)
        return inputs.v, (found.sums / found.below[..., None]).to(inputs.v.dtype)

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Official: matrices as in GPT-NeoX, those of gates 0; input gates exp(-10), forget biases from 3 to 6."""
        reading, writing = matrices("gpt-neox", self.layer)
        rising = torch.linspace(3.0, 6.0, self.heads)
        zero = ParameterRecipe(init=constant(0.0))
        return {
            "qkv.weight": reading,
            "gates.weight": zero,
            "output_gate.weight": zero,
            "out.weight": writing,
            "input_bias": ParameterRecipe(init=constant(-10.0), decay=False),
            "forget_bias": ParameterRecipe(init=values(rising, "3 to 6 from head to head"), decay=False),
            "norm_weight": ParameterRecipe(init=constant(1.0), decay=False),
        }

    def flops(self, length: int) -> float:
        """Products with weights, and the recurrence (decay 1, write 2, read 2: 5 K (V + 1) per head and token)."""
        weights = sum(parameter.numel() for parameter in self.parameters() if parameter.dim() == 2)
        return length * (2.0 * weights + 5.0 * self.heads * self.key_dim * (self.value_dim + 1))

    def state_bytes(self, length: int) -> int:
        """Memory, normaliser and level, whatever the length."""
        itemsize = max(self.qkv.weight.element_size(), 4)
        return self.heads * (self.key_dim * (self.value_dim + 1) + 1) * itemsize
