"""RWKV's channel mixing against its formulas, written out token by token."""

import pytest
import torch
from torch import Tensor

from basecap.mixers import LayerSpec
from basecap.models._channel_mix import ChannelMix

GENERATIONS = [4, 5, 6, 7]


def build(generation: int) -> ChannelMix:
    layer = ChannelMix(generation, LayerSpec(hidden=32, index=1, depth=3), 96).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return layer


def formula(layer: ChannelMix, x_TD: Tensor) -> Tensor:
    """One sequence, one token after the other, by the papers' definitions."""
    out, previous = [], torch.zeros_like(x_TD[0])
    for x in x_TD:
        x_k = (1 - layer.share_k) * x + layer.share_k * previous
        y = layer.value.weight @ torch.relu(layer.key.weight @ x_k) ** 2
        if layer.generation < 7:
            x_r = (1 - layer.share_r) * x + layer.share_r * previous
            y = y / (1 + torch.exp(-(layer.receptance.weight @ x_r)))
        out.append(y)
        previous = x
    return torch.stack(out)


def inputs(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randn(batch, length, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_formula(generation: int):
    layer, x = build(generation), inputs()
    expected = torch.stack([formula(layer, row) for row in x])
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_gradients(generation: int):
    layer, x = build(generation), inputs(1, 4).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_segments_do_not_leak(generation: int):
    layer, x = build(generation), inputs()
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2]]).expand(2, -1)
    parts = torch.cat([layer(x[:, :4]), layer(x[:, 4:6]), layer(x[:, 6:])], dim=1)
    torch.testing.assert_close(layer(x, segments), parts)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_decoding_equals_forward(generation: int):
    layer, x = build(generation), inputs()
    cache = layer.init_cache(2, 9)
    out = [layer.prefill(x[:, :5], cache)] + [layer.step(x[:, t : t + 1], cache) for t in range(5, 9)]
    torch.testing.assert_close(torch.cat(out, dim=1), layer(x))
    assert cache.length == 9
    assert cache.nbytes == 2 * layer.state_bytes(9)
