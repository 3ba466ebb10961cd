"""RWKV-6 against its formulas written anew, its identity with RWKV-5."""

import pytest
import torch
from torch import Tensor

from basecap.mixers import Mixer
from basecap.ops import _saved
from tests.mixers._rwkv import build, draw, fresh, normalised, outputs_and_gradients, previous


def formula(m: Mixer, x_BTD: Tensor) -> Tensor:
    """arXiv 2404.05892, section 4.2, the sum over the past and the products of decays written out."""
    B, T, _ = x_BTD.shape
    H, K = m.bonus.shape
    delta = previous(x_BTD) - x_BTD
    low = torch.tanh((x_BTD + delta * m.share_x) @ m.mix_down).chunk(5, dim=-1)

    def data_lerp(share: Tensor, place: int) -> Tensor:
        return x_BTD + delta * (share + low[place] @ m.mix_up[place])

    x_w = data_lerp(m.share_w, 0)
    k = (data_lerp(m.share_k, 1) @ m.key.weight.T).view(B, T, H, K)
    v = (data_lerp(m.share_v, 2) @ m.value.weight.T).view(B, T, H, K)
    r = (data_lerp(m.share_r, 3) @ m.receptance.weight.T).view(B, T, H, K)
    g = data_lerp(m.share_g, 4) @ m.gate.weight.T
    d = m.decay.base + torch.tanh(x_w @ m.decay.down) @ m.decay.up
    w = torch.exp(-torch.exp(d)).view(B, T, H, K)
    rows = []
    for t in range(T):
        wkv = torch.einsum("hk,bhk,bhv->bhkv", m.bonus, k[:, t], v[:, t])
        for i in range(t):
            wkv = wkv + torch.einsum("bhk,bhk,bhv->bhkv", w[:, i + 1 : t].prod(1), k[:, i], v[:, i])
        rows.append(torch.einsum("bhk,bhkv->bhv", r[:, t], wkv))
    o = normalised(torch.stack(rows, dim=1), m.norm.weight, m.norm.bias)
    return (g * torch.sigmoid(g) * o) @ m.output.weight.T


@pytest.mark.parametrize("recomputed", [(), ("cpu",)])
def test_formula(recomputed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_saved, "RECOMPUTED", recomputed)
    module, x = build("rwkv-6", heads=2, mix_rank=3, decay_rank=5), draw(1, 2, 9, 32)
    wanted = list(module.parameters())
    actual = outputs_and_gradients(module, x, wanted)
    expected = outputs_and_gradients(lambda h: formula(module, h), x, wanted)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_constant_decay_is_rwkv_5():
    sixth, fifth = build("rwkv-6", heads=2), build("rwkv-5", heads=2)
    with torch.no_grad():
        sixth.mix_up.zero_()
        sixth.decay.up.zero_()
        sixth.decay.base.copy_(fifth.decay.flatten())
        for name, parameter in fifth.named_parameters():
            if name != "decay":
                sixth.get_parameter(name).copy_(parameter)
    x = draw(1, 2, 70, 32)
    common = [name for name, _ in fifth.named_parameters() if name != "decay"]
    actual = outputs_and_gradients(sixth, x, [sixth.decay.base, *map(sixth.get_parameter, common)])
    expected = outputs_and_gradients(fifth, x, [fifth.decay, *map(fifth.get_parameter, common)])
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b.view_as(a))


def test_ranks():
    module = fresh("rwkv-6", 64, 1, 3)
    assert module.mix_down.shape == (64, 160)
    assert module.decay.down.shape == (64, 64)
