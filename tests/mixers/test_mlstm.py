"""mLSTM: the paper's recurrence token by token, transformers' layer, a linear memory, gates beyond all numbers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.mixers import LayerSpec
from basecap.mixers._linear_memory import linear_memory
from basecap.mixers.mlstm import MLSTM, GatedInputs, read
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from tests.mixers._built import draw, moved
from tests.mixers._parity import assert_compiled_is_as_accurate


def build() -> MLSTM:
    mixer = moved(MLSTM(MLSTM.Config(heads=2), LayerSpec(hidden=16)), 0.3)
    with torch.no_grad():
        mixer.input_bias += 8.0
    return mixer


def inputs_of(T: int = 40) -> GatedInputs:
    q, k, v = draw(3, 2, T, 3, 8).unbind()
    return GatedInputs(q=q, k=k, v=v[..., :5], log_input=5 * k[..., 0], log_forget=F.logsigmoid(3 * v[..., 6]))


def by_token(inputs: GatedInputs, begins: tuple[int, ...] = ()) -> Tensor:
    """The definition: every exponent is relative to m, which is 0 before a sequence."""
    B, T, H, K = inputs.q.shape
    outputs = []
    for t in range(T):
        if t == 0 or t in begins:
            C, n, m = (
                inputs.q.new_zeros(B, H, K, inputs.v.shape[-1]),
                inputs.q.new_zeros(B, H, K),
                inputs.q.new_zeros(B, H),
            )
        forget, gate, k = inputs.log_forget[:, t], inputs.log_input[:, t], inputs.k[:, t]
        last, m = m, torch.maximum(forget + m, gate)
        kept, added = torch.exp(forget + last - m)[..., None], torch.exp(gate - m)[..., None]
        C = kept[..., None] * C + (added * k)[..., None] * inputs.v[:, t, :, None]
        n = kept * n + added * k
        below = torch.maximum((n * inputs.q[:, t]).sum(-1).abs(), torch.exp(-m)) + 1e-6
        outputs.append((inputs.q[:, t, :, :, None] * C).sum(-2) / below[..., None])
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("width", [None, 3, 4])
def test_the_memory_is_its_recurrence(width: int | None):
    inputs = inputs_of()
    empty = torch.zeros(2, 3, 8, 6, dtype=torch.float64)
    found = read(inputs, empty, width=width)
    torch.testing.assert_close(found.sums / found.below[..., None], by_token(inputs), rtol=1e-9, atol=1e-10)
    # In two calls, the second from the state of the first.
    halves = [
        GatedInputs(**{name: getattr(inputs, name)[:, part] for name in vars(inputs)})
        for part in (slice(0, 17), slice(17, None))
    ]
    first = read(halves[0], empty, width=width)
    second = read(halves[1], first.state, first.level[:, -1], width=width)
    torch.testing.assert_close(second.sums / second.below[..., None], by_token(inputs)[:, 17:], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(second.state, found.state, rtol=1e-9, atol=1e-10)


def test_segments_begin_with_nothing():
    inputs, segments = inputs_of(), torch.tensor([0] * 9 + [1] * 1 + [4] * 30).expand(2, -1)
    found = read(inputs, segments=segments)
    torch.testing.assert_close(found.sums / found.below[..., None], by_token(inputs, (9, 10)), rtol=1e-9, atol=1e-10)


def test_a_gate_beyond_all_numbers_leaves_what_it_writes():
    inputs = inputs_of()
    inputs.log_input[:, 10] = 1e3
    inputs = replace(inputs, log_forget=torch.full_like(inputs.log_forget, -1e-3))
    found = read(inputs)
    sign = (inputs.q[:, 10:] * inputs.k[:, 10:11]).sum(-1, keepdim=True).sign()
    near = (found.sums / found.below[..., None])[:, 10:]
    torch.testing.assert_close(near, sign * inputs.v[:, 10:11], rtol=1e-3, atol=1e-3)


def test_weak_input_gates_make_it_a_linear_memory():
    """While the normaliser is below 1 nothing is divided: C alone is a linear memory of decays f and keys i k."""
    inputs = inputs_of()
    inputs = replace(inputs, log_input=inputs.log_input - 30)
    found = read(inputs)
    expected, _ = linear_memory(
        inputs.q, inputs.k * inputs.log_input.exp()[..., None], inputs.v, inputs.log_forget, None, None
    )
    # The epsilon is 1e-6 exp(m), and m is at most 0.
    torch.testing.assert_close(found.sums / found.below[..., None], expected, rtol=2e-6, atol=1e-16)


def oracle(mixer: MLSTM, chunk: int) -> torch.nn.Module:
    """Return transformers' layer with the weights of `mixer`."""
    from transformers.models.xlstm.configuration_xlstm import xLSTMConfig
    from transformers.models.xlstm.modeling_xlstm import xLSTMLayer

    config = xLSTMConfig(hidden_size=mixer.layer.hidden, num_heads=mixer.heads, chunk_size=chunk, mode="train")
    layer, half = xLSTMLayer(config).double(), mixer.layer.hidden // 2
    q, k, v = mixer.qkv.weight.split([half, half, 2 * half])
    gates = mixer.gates.weight.chunk(2)
    layer.load_state_dict(
        {
            "q.weight": q,
            "k.weight": k,
            "v.weight": v,
            "igate_preact.weight": gates[0],
            "igate_preact.bias": mixer.input_bias,
            "fgate_preact.weight": gates[1],
            "fgate_preact.bias": mixer.forget_bias,
            "ogate_preact.weight": mixer.output_gate.weight,
            "multihead_norm.weight": mixer.norm_weight,
            "out_proj.weight": mixer.out.weight,
        }
    )
    return layer


def test_equals_xlstm():
    mixer, x, weight = build(), 2 * draw(2, 48, 16, seed=9), draw(2, 48, 16, seed=10)
    layer, found = oracle(mixer, chunk=16), []
    # Their norm of the heads is in float32 unless told.
    layer.multihead_norm.force_float32_reductions = False
    for run in (mixer, lambda inputs: layer(inputs)[0]):
        inputs = x.clone().requires_grad_()
        y = run(inputs)
        found.append((y, *torch.autograd.grad((y * weight).sum(), inputs)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8 * theirs.abs().max().item())


def test_published_size():
    with torch.device("meta"):
        model = LanguageModel(model_config("mlstm", hidden=768, vocab=32_000))
    mixer = model.blocks[0].mixer
    assert (mixer.heads, mixer.key_dim, mixer.value_dim) == (4, 96, 192)
    assert sum(p.numel() for p in mixer.parameters()) == 4 * 768**2 + 2 * 4 * (768 + 1) + 768


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own, as is the next
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_on_a_gpu():
    """Few long sums of gates: Inductor splits such scans."""
    assert_compiled_is_as_accurate(moved(MLSTM(MLSTM.Config(heads=4), LayerSpec(hidden=64)), 0.05), length=2048)
