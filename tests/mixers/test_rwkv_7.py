"""RWKV-7 against its formulas written anew, the values it shares between layers, its ranks."""

import math

import pytest
import torch
from torch import Tensor

from basecap.mixers import Mixer
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from tests.mixers._rwkv import build, draw, normalised, outputs_and_gradients, previous


def formula(m: Mixer, x_BTD: Tensor, first_BTD: Tensor) -> Tensor:
    """arXiv 2503.14456, section 4, one transition matrix per token written out; the state there is [V, K]."""
    B, T, _ = x_BTD.shape
    H, K = m.bonus.shape

    def lerp(share: Tensor) -> Tensor:
        return x_BTD + (previous(x_BTD) - x_BTD) * share

    def low_rank(low, x: Tensor, act=lambda inner: inner) -> Tensor:
        return act(x @ low.down) @ low.up + (0 if low.base is None else low.base)

    r = lerp(m.share_r) @ m.receptance.weight.T
    k = lerp(m.share_k) @ m.key.weight.T
    v = lerp(m.share_v) @ m.value.weight.T
    nu = torch.sigmoid(low_rank(m.first, lerp(m.share_v)))
    v = v * (1 - nu) + first_BTD * nu
    a = torch.sigmoid(low_rank(m.rate, lerp(m.share_a)))
    w = torch.exp(-math.exp(-0.5) * torch.sigmoid(low_rank(m.decay, lerp(m.share_w), torch.tanh)))
    g = low_rank(m.gate, lerp(m.share_g), torch.sigmoid)
    kappa = (k * m.removal).view(B, T, H, K)
    kappa = kappa / kappa.square().sum(-1, keepdim=True).sqrt()
    k = k * (1 - m.replacement + a * m.replacement)
    r, w, k, v, a = (part.view(B, T, H, K) for part in (r, w, k, v, a))
    state, rows = torch.zeros(B, H, K, K, dtype=x_BTD.dtype), []
    for t in range(T):
        removal = torch.einsum("bhi,bhj->bhij", kappa[:, t], a[:, t] * kappa[:, t])
        transition = torch.diag_embed(w[:, t]) - removal
        state = state @ transition + torch.einsum("bhv,bhk->bhvk", v[:, t], k[:, t])
        rows.append(torch.einsum("bhvk,bhk->bhv", state, r[:, t]))
    p = normalised(torch.stack(rows, dim=1), m.norm.weight, m.norm.bias)
    own = ((r * m.bonus * k).sum(-1, keepdim=True) * v).flatten(2)
    return (g * (p + own)) @ m.output.weight.T


def test_formula():
    module, x = build("rwkv-7", heads=2, decay_rank=3, gate_rank=5), draw(1, 2, 9, 32)
    first = draw(2, 2, 9, 32)
    wanted = list(module.parameters())

    def run(h: Tensor) -> Tensor:
        return module(h, None, {"rwkv-7 values": first})

    actual = outputs_and_gradients(run, x, wanted)
    expected = outputs_and_gradients(lambda h: formula(module, h, first), x, wanted)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_first_layer_leaves_its_values():
    module, x = build("rwkv-7", index=0, heads=2), draw(1, 2, 9, 32)
    shared: dict[str, Tensor] = {}
    module(x, None, shared)
    values = (x + (previous(x) - x) * module.share_v) @ module.value.weight.T
    torch.testing.assert_close(shared["rwkv-7 values"], values)
    assert not any(name.startswith("first") for name, _ in module.named_parameters())


def test_gradients_reach_the_first_layer_through_checkpointing():
    config = model_config("rwkv-7", hidden=32, vocab=20, layers=3)
    tokens = torch.randint(20, (2, 12), generator=torch.Generator().manual_seed(0))
    grads = []
    for checkpointing in (False, True):
        model = LanguageModel(config, checkpointing=checkpointing).initialise(0).double()
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter += 0.2 * draw(number, *parameter.shape)
        model(tokens, tokens).backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, recomputed)


@pytest.mark.parametrize(
    ("hidden", "ranks"),
    # RWKV-LM, RWKV-v7/train_temp/src/model.py: D_DECAY_LORA, D_AAA_LORA, D_MV_LORA, D_GATE_LORA.
    [
        (256, (32, 32, 32, 64)),
        (512, (64, 64, 32, 128)),
        (768, (64, 64, 32, 128)),
        (2048, (128, 128, 64, 224)),
    ],
)
def test_ranks(hidden: int, ranks: tuple[int, ...]):
    with torch.device("meta"):
        mixer = LanguageModel(model_config("rwkv-7", hidden=hidden, vocab=8, layers=2)).blocks[1].mixer
    assert tuple(low.down.shape[1] for low in (mixer.decay, mixer.rate, mixer.first, mixer.gate)) == ranks
