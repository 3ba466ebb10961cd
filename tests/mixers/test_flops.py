"""FLOPs as declared are those counted: of every architecture's built model, forward and backward.

PyTorch's counter sees matrix products and, told how, FFTs. Ops that it does not see are replaced: those that are matrix
products by their definitions (without what the mask hides), recurrences by a count of what they are called with. The
convention is that of `Mixer.flops`.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from basecap.mixers import (
    ARCHITECTURES,
    Mixer,
    _delta,
    _linear_memory,
    _parts,
    _rwkv_heads,
    attention,
    based,
    dsa,
    fox,
    mamba_1,
    mamba_2,
    mamba_3,
    mlstm,
    nsa,
    rwkv_4,
    rwkv_7,
    synthesizer,
    top1_chunk,
    top1_element,
)
from basecap.models import BACKBONES
from basecap.models.config import LayerConfig, model_config
from basecap.models.language_model import LanguageModel
from basecap.ops.attention import reference as attention_reference
from basecap.ops.top1_element import reference as element_reference

#: Three heads of most mixers; no published size of a state, a rank or a head is that of the model.
HIDDEN, VOCAB, LENGTH = 192, 61, 64
#: Transformer layers that hold every kind of layer, where two do not.
LAYERS = {"based": 4, "mamba-1 global selection lm": 4}
#: A quarter of it, the taps of global selection, is LENGTH: then FFTs have 2 LENGTH points, a power of two as in eager.
LONGEST = 4 * LENGTH

ADD = MULTIPLY = EXPONENTIAL = 1
#: Of each element of a recurrent state and token: to add an outer product, to multiply with a vector and sum.
WRITE = READ = MULTIPLY + ADD
DECAY = MULTIPLY


READ_MEANS, CHOOSE_BY_INDEX, CHOOSE_BY_MASS = nsa.read_means, dsa.choose_by_index, dsa.choose_by_mass


def like(x: Tensor, *others: Tensor) -> Tensor:
    """Return something of the shape of x that has gradients to all others, without a product."""
    return x + sum(other.sum() for other in others)


def pairs(length: int, window: int | None = None) -> int:
    """Return how many pairs of tokens see each other causally."""
    return sum(min(t + 1, window or length) for t in range(length))


def state_of(k_BTHK: Tensor, v_BTHV: Tensor) -> int:
    """Return the elements of a state [H, K, V], over all tokens."""
    return v_BTHV.numel() * k_BTHK.shape[-1]


class Ops:
    """Replacements of the ops, and what is to be added to the counter for them, forward and backward."""

    def __init__(self) -> None:
        self.forward = self.backward = 0.0

    def add(self, forward: float, backward: float) -> None:
        """Count operations."""
        self.forward += forward
        self.backward += backward

    def recurrence(self, forward: float) -> None:
        """Count a recurrence, twice as much of it backward."""
        self.add(forward, 2 * forward)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the ops where mixers call them."""
        for module, name, op in (
            (_parts, "short_convolution", self.short_convolution),
            (_delta, "delta_rule", self.delta_rule),
            (_delta, "channel_delta_rule", self.delta_rule),
            (_delta, "decoupled_delta_rule", self.delta_rule),
            (attention, "attention", self.attend),
            (synthesizer, "attention", self.attend),
            (fox, "forgetting_attention", self.forget),
            (dsa, "choose_by_index", self.choose_by_index),
            (dsa, "choose_by_mass", self.choose_by_mass),
            (dsa, "index_divergence", self.index_divergence),
            (dsa, "selected_attention", self.select_blocks),
            (nsa, "attention", self.attend),
            (nsa, "read_means", self.read_means),
            (nsa, "selected_attention", self.select_blocks),
            (top1_element, "top1_element", self.select_element),
            (top1_chunk, "top1_chunk", self.select_chunk),
            (based, "taylor_attention", self.taylor_attention),
            (mamba_1, "selective_scan", self.selective_scan),
            (mamba_1, "ssd", self.ssd),
            (mamba_2, "ssd", self.ssd),
            (mamba_3, "ssd_mimo", self.ssd_mimo),
            (mlstm, "ssd", self.ssd),
            (rwkv_4, "wkv4", self.wkv4),
            (_rwkv_heads, "wkv6", self.wkv6),
            (_linear_memory, "wkv6", self.wkv6),
            (_linear_memory, "ssd", self.ssd),
            (rwkv_7, "wkv7_bounded", self.wkv7),
        ):
            monkeypatch.setattr(module, name, op)

    def short_convolution(self, x_BTD, weight_DW, bias_D, **_):
        seen_BTDW = F.pad(x_BTD, (0, 0, weight_DW.shape[1] - 1, 0)).unfold(1, weight_DW.shape[1], 1)
        return torch.einsum("btdw,dw->btd", seen_BTDW, weight_DW)

    def attend(self, q, k, v, *, scale=1.0, window=None, slopes=None, **_):
        B, T, H, K = q.shape
        masked = B * H * (T * T - pairs(T, window))
        product = masked * K * (MULTIPLY + ADD)
        self.add(-2 * product, -4 * product)
        return attention_reference.attention(q, k, v, scale, window, slopes)

    def forget(self, q, k, v, log_decay, **_):
        return like(self.attend(q, k, v), log_decay)

    def read_means(self, q, k, reads):
        # Scores and values, of which the mask hides the same pairs.
        product = 2 * (~reads).sum().item() * q.shape[2] * q.shape[3] * (MULTIPLY + ADD)
        self.add(-product, -2 * product)
        return READ_MEANS(q, k, reads)

    def choose_by_index(self, q, k, weights, top, **_):
        B, T, heads, size = q.shape
        self.add(B * pairs(T) * heads * (size + 1) * (MULTIPLY + ADD), 0)
        return CHOOSE_BY_INDEX(q, k, weights, top)

    def choose_by_mass(self, q, k, top, **_):
        B, T, H, K = q.shape
        self.add(B * pairs(T) * H * K * (MULTIPLY + ADD), 0)
        return CHOOSE_BY_MASS(q, k, top)

    def index_divergence(self, index_q, index_k, weights, q, k, *, chosen_BTT, **_):
        (B, T, heads, size), (H, K) = index_q.shape, q.shape[2:]
        visible = B * pairs(T) if chosen_BTT is None else chosen_BTT.sum().item()
        scores = visible * heads * (size + 1) * (MULTIPLY + ADD)
        self.add(visible * H * K * (MULTIPLY + ADD) + scores, 2 * scores)
        return index_q.sum() + index_k.sum() + weights.sum()

    def select_blocks(self, q, k, v, chosen, blocks, **_):
        seen = chosen.gather(-1, blocks[:, None, None].expand(-1, *chosen.shape[1:3], -1)).transpose(1, 2).tril()
        product = 2 * seen.sum().item() * q.shape[2] // chosen.shape[2] * q.shape[3] * (MULTIPLY + ADD)
        self.add(product, 2 * product)
        return like(q, k, v)

    def select_element(self, q, k, v, *, scale=1.0, **_):
        B, T, H, K = q.shape
        square, visible = (B * H * count * K * (MULTIPLY + ADD) for count in (T * T, pairs(T)))
        # The definition multiplies the values with zeros and ones where a copy does, and their gradients too.
        self.add(visible - 2 * square, 3 * visible - 4 * square)
        return element_reference.top1_element(q, k, v, scale)

    def select_chunk(self, q, k, v, *, chunk, mode, remote, **_):
        (B, T, H, K), forward, backward = q.shape, 0, 0
        for t in range(T):
            earlier = t // chunk
            attended = t % chunk + 1 + chunk * min(earlier, remote)
            scored = earlier * chunk + t % chunk + 1 if mode == "exact" else earlier + attended
            forward += (scored + attended) * B * H * K * (MULTIPLY + ADD)
            backward += 4 * attended * B * H * K * (MULTIPLY + ADD)
        self.add(forward, backward)
        return like(q, k, v)

    def taylor_attention(self, q, k, v, **_):
        # exp(q.k) to the second order is a sum over these features of q and k; the sum over them makes weights 1.
        features = sum(math.comb(k.shape[-1] + order - 1, order) for order in range(3))
        B, T, H, V = v.shape
        self.recurrence((WRITE + READ) * B * T * H * features * (V + 1))
        return like(v, q, k)

    def selective_scan(self, x, dt, A, B, C, **_):
        discretise = MULTIPLY + EXPONENTIAL  # exp(dt A), for each channel and state
        self.recurrence((discretise + DECAY + WRITE + READ) * x.numel() * A.shape[1])
        return like(x, dt, A, B, C), None

    def ssd(self, q, k, v, log_decay, **_):
        decay = DECAY if log_decay.any() else 0
        self.recurrence((decay + WRITE + READ) * state_of(k, v))
        return like(v, q, k, log_decay), None

    def ssd_mimo(self, q, k, v, steps, heads, **_):
        # One decay of the state for all writes and reads of a token.
        ranks = v.shape[2]
        self.recurrence((DECAY + ranks * (WRITE + READ)) * state_of(k, v) // ranks)
        return like(v, q, k, *steps, *heads), None

    def delta_rule(self, q, k, v, beta, log_decay, **_):
        recall, decay = READ, 0 if log_decay is None else DECAY
        self.recurrence((decay + recall + WRITE + READ) * state_of(k, v))
        return like(v, q, k, beta, *([] if log_decay is None else [log_decay])), None

    def wkv4(self, k, v, decay, bonus, **_):
        # Numerator and denominator, read with the present token's weight exp(k + bonus), written with exp(k).
        read = (ADD + EXPONENTIAL) + (MULTIPLY + ADD) + ADD + MULTIPLY
        write = EXPONENTIAL + (DECAY + MULTIPLY + ADD) + (DECAY + ADD)
        self.recurrence((read + write) * v.numel())
        return like(v, k, decay, bonus), None

    def wkv6(self, r, k, v, log_decay, bonus, **_):
        self.recurrence((DECAY + WRITE + READ) * state_of(k, v))
        return like(v, r, k, log_decay, bonus), torch.zeros(len(v), v.shape[2], k.shape[3], v.shape[3])

    def wkv7(self, r, log_decay, k, v, a, b, **_):
        recall, correct = READ, WRITE
        self.recurrence((DECAY + recall + correct + WRITE + READ) * state_of(k, v))
        return like(v, r, log_decay, k, a, b), None


def _fft(points: int, rows: int) -> int:
    return int(2.5 * points * math.log2(points) * rows)


def _to_spectrum(x_shape, dims, *_, out_shape, **__) -> int:
    # The gradient of a real FFT is a real one too: PyTorch makes it of complex numbers, twice the work.
    points = x_shape[dims[0]]
    return _fft(points, math.prod(x_shape) // points)


def _from_spectrum(x_shape, dims, normalisation, points, *, out_shape, **_) -> int:
    return _fft(points, math.prod(out_shape) // points)


FFTS = {
    torch.ops.aten._fft_r2c: _to_spectrum,
    torch.ops.aten._fft_c2c: _to_spectrum,
    torch.ops.aten._fft_c2r: _from_spectrum,
}


def counted(model: LanguageModel, length: int, monkeypatch) -> tuple[float, float]:
    """Return the operations of a forward pass, and of a forward and backward pass, of one sequence."""
    ops = Ops()
    ops.install(monkeypatch)
    tokens = torch.arange(length)[None] % VOCAB
    with FlopCounterMode(display=False, custom_mapping=FFTS) as counter:
        logits = model.logits(tokens)
        forward = counter.get_total_flops()
        logits.sum().backward()
    total = counter.get_total_flops() + ops.forward + ops.backward
    return forward + ops.forward, total + sum(of_losses(block.mixer, length, ops) for block in model.blocks)


def of_losses(mixer: Mixer, length: int, ops: Ops) -> float:
    """Return the operations of a mixer's own losses, forward and backward."""
    if not mixer.auxiliary:
        return 0.0

    def count(losses: dict[str, Tensor] | None) -> float:
        before = ops.forward + ops.backward
        with FlopCounterMode(display=False) as counter:
            mixer(torch.ones(1, length, HIDDEN), losses=losses)
            if losses is not None:
                sum(losses.values()).backward()
        return counter.get_total_flops() + ops.forward + ops.backward - before

    return count({}) - count(None)


def build(use: str, longest: int = LONGEST, backbone: str | None = None, **options) -> LanguageModel:
    pattern = (LayerConfig(use=use, mixer=options),) if options else None
    layers = LAYERS.get(use, 2)
    config = model_config(
        use, hidden=HIDDEN, vocab=VOCAB, layers=layers, max_length=longest, pattern=pattern, backbone=backbone
    )
    return LanguageModel(config).initialise(0)


def assert_flops(model: LanguageModel, length: int, monkeypatch) -> None:
    forward, total = counted(model, length, monkeypatch)
    assert model.flops(length) == pytest.approx(forward, rel=1e-6)
    assert model.training_flops(length) == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("use", [name for name in ARCHITECTURES.names() if ARCHITECTURES.built_in(name)])
def test_every_architecture(use: str, monkeypatch):
    assert_flops(build(use), LENGTH, monkeypatch)


@pytest.mark.parametrize("backbone", BACKBONES.names())
def test_every_block_family(backbone: str, monkeypatch):
    """Feed-forward layers, channel mixing and the head, tied or not, are all that is left beside a window of one."""
    assert_flops(build("transformer++", backbone=backbone, window=1), LENGTH, monkeypatch)


@pytest.mark.parametrize(
    ("use", "options"),
    [
        ("transformer++", {"kv_heads": 1}),
        ("transformer++ window", {"window": 24}),
        ("based", {"window": 24, "feature_dim": 8, "expand": 6, "conv_width": 5}),
        ("deltanet", {"heads": 4, "conv_width": 2}),
        ("gated-deltanet", {"heads": 2, "head_dim": 24, "value_expand": 3}),
        ("gated-deltanet-2", {"heads": 2, "head_dim": 24}),
        ("hyena", {"filter_features": 17, "filter_width": 24}),
        ("mamba-1", {"expand": 3, "dt_rank": 5, "conv_width": 3}),
        ("mamba-2", {"groups": 2, "heads": 4, "state": 24}),
        ("mamba-2 decay one", {"groups": 2, "heads": 4}),
        ("mamba-3", {"heads": 4, "state": 24, "rank": 3}),
        ("rwkv-6", {"heads": 4, "mix_rank": 3, "decay_rank": 5}),
        ("rwkv-7", {"heads": 4, "decay_rank": 3, "rate_rank": 5, "value_rank": 6, "gate_rank": 7}),
        ("dsa", {"top": 10, "index_heads": 3, "index_dim": 8, "kv_heads": 1}),
        ("dsa", {"top": 10, "target": "chosen"}),
        ("nsa", {"block": 8, "top": 4, "window": 24, "kv_heads": 1}),
        ("top1-element", {"kv_heads": 1, "qk_gain": True}),
        *(
            (use, {"chunk": 16, "remote": remote, "kv_heads": 1})
            for use in ("top1-chunk-exact", "top1-chunk-approx")
            for remote in (1, 2)
        ),
    ],
)
def test_options(use: str, options: dict, monkeypatch):
    assert_flops(build(use, **options), LENGTH, monkeypatch)


@pytest.mark.parametrize("use", ["top1-chunk-exact", "top1-chunk-approx"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 70])
def test_chunks_that_are_not_full(use: str, length: int, monkeypatch):
    assert_flops(build(use, chunk=16), length, monkeypatch)


def test_a_filter_shorter_than_the_sequence(monkeypatch):
    assert_flops(build("mamba-1 global selection", longest=64), 48, monkeypatch)  # 16 taps
