"""RWKV-5 against its formulas written anew, its state."""

import torch
from torch import Tensor

from basecap.mixers import Mixer
from tests.mixers._rwkv import build, draw, fresh, normalised, outputs_and_gradients, previous


def formula(m: Mixer, x_BTD: Tensor) -> Tensor:
    """arXiv 2404.05892, section 4.1, the sum over the past written out."""
    B, T, _ = x_BTD.shape
    H, K = m.bonus.shape

    def lerp(share: Tensor) -> Tensor:
        return x_BTD * (1 - share) + previous(x_BTD) * share

    r = (lerp(m.share_r) @ m.receptance.weight.T).view(B, T, H, K)
    k = (lerp(m.share_k) @ m.key.weight.T).view(B, T, H, K)
    v = (lerp(m.share_v) @ m.value.weight.T).view(B, T, H, K)
    g = lerp(m.share_g) @ m.gate.weight.T
    w = torch.exp(-torch.exp(m.decay))
    rows = []
    for t in range(T):
        wkv = torch.einsum("hk,bhk,bhv->bhkv", m.bonus, k[:, t], v[:, t])
        for i in range(t):
            wkv = wkv + torch.einsum("hk,bhk,bhv->bhkv", w ** (t - 1 - i), k[:, i], v[:, i])
        rows.append(torch.einsum("bhk,bhkv->bhv", r[:, t], wkv))
    o = normalised(torch.stack(rows, dim=1), m.norm.weight, m.norm.bias)
    return (g * torch.sigmoid(g) * o) @ m.output.weight.T


def test_formula():
    module, x = build("rwkv-5", heads=2), draw(1, 2, 9, 32)
    wanted = list(module.parameters())
    actual = outputs_and_gradients(module, x, wanted)
    expected = outputs_and_gradients(lambda h: formula(module, h), x, wanted)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_norm_is_that_of_outputs_over_eight():
    """The official code divides the outputs by 8 and normalises with epsilon 1e-5."""
    module = fresh("rwkv-5", heads=4)
    o = draw(2, 3, 5, 32)
    official = torch.nn.functional.group_norm(o.flatten(0, 1) / 8, 4, module.norm.weight, module.norm.bias, 1e-5)
    torch.testing.assert_close(module.norm(o), official.view_as(o))


def test_heads_of_64():
    assert fresh("rwkv-5", 128).bonus.shape == (2, 64)


def test_state_is_constant():
    module = fresh("rwkv-5", heads=2).float()
    assert module.state_bytes(10) == module.state_bytes(100_000) == 4 * (2 * 16 * 16 + 32)
