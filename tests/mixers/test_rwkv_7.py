"""RWKV-7 against its formulas written anew, the values it shares between layers, its recipe, its counts."""

import math

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.mixers._contract import Mixer
from basecap.mixers.rwkv_7 import rank
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from tests.mixers._rwkv import build, draw, fresh, normalised, outputs_and_gradients, parameters, previous


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
    # arXiv 2503.14456, the published models: decay and rate, values, gate.
    [(768, (64, 32, 128)), (2048, (96, 64, 256)), (2560, (96, 64, 320))],
)
def test_ranks(hidden: int, ranks: tuple[int, int, int]):
    assert (rank(hidden, 1.8), rank(hidden, 1.3), rank(hidden, 0.6, 0.8)) == ranks


def test_recipe():
    module = fresh("rwkv-7", 64, 2, 3, heads=2)
    for low in (module.decay, module.rate, module.gate, module.first):
        assert low.down.abs().max() == 0
        gram = low.up @ low.up.T
        torch.testing.assert_close(gram, 0.01 * torch.eye(len(gram), dtype=torch.float64), rtol=0, atol=1e-6)
    assert module.output.weight.abs().max() == 0
    for weight, bound in ((module.receptance.weight, 0.5), (module.key.weight, 0.05), (module.value.weight, 0.5)):
        assert 0.98 < weight.abs().max() * 8 / bound <= 1
    line = torch.arange(64).double() / 63
    zigzag = (torch.arange(64) % 32 - 15.5) / 15.5
    zigzag = zigzag * zigzag.abs()
    expected = -6 + 6 * line**2 + 0.5 + 2.5 * zigzag
    torch.testing.assert_close(module.decay.base, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(module.first.base[0].item(), 0.93, rtol=1e-6, atol=0)
    recipe = module.recipe()
    assert {name for name, entry in recipe.items() if entry.lr != 1} == {"decay.base"}
    assert {name for name, entry in recipe.items() if entry.decay} == {
        "receptance.weight",
        "key.weight",
        "value.weight",
        "output.weight",
    }


@pytest.mark.parametrize(("hidden", "millions"), [(768, 114.9), (2048, 1324.5)])
def test_parameters(hidden: int, millions: float):
    assert round(parameters("rwkv-7", hidden) / 1e6, 1) == millions


def test_heads_must_divide():
    with pytest.raises(ConfigError, match="does not divide"):
        fresh("rwkv-7", 32, heads=5)
