"""Hyena: parity with the paper's formulas written out, sequences beyond the filter."""

import math

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES, LayerSpec, initialise
from basecap.mixers.hyena import Hyena
from tests.mixers._parity import assert_equals_paper


def build(hidden: int = 12, max_length: int = 40) -> Hyena:
    mixer = Hyena(Hyena.Config(filter_features=7, filter_width=8), LayerSpec(hidden=hidden, max_length=max_length))
    mixer.double()
    initialise(mixer, mixer.recipe(), 0)
    return mixer


def filter_by_the_paper(mixer: Hyena, trained: bool) -> Tensor:
    """Return [L, D] by arXiv 2302.10866, section 3.3: sine network of position features times a window."""
    net, L = mixer.filter, mixer.layer.max_length
    rows = []
    for i in range(L):
        t = i / (L - 1)
        waves = [2 * math.pi * f * i / L for f in torch.linspace(1e-4, 2, 3, dtype=torch.float64).tolist()]
        features = [t, *(math.cos(w) for w in waves), *(-math.sin(w) for w in waves)]
        h = net.positions[i] if trained else torch.tensor(features, dtype=torch.float64)
        for layer in (net.first, *net.inner):
            h = torch.sin(net.frequency * (layer.weight @ h + layer.bias))
        D = mixer.layer.hidden
        spread = [math.log(100) * (1 / 1.5 + (1 / 0.3 - 1 / 1.5) * d / (D - 1)) for d in range(D)]
        rows.append((net.last.weight @ h) * torch.tensor([math.exp(-t * rate) for rate in spread], dtype=torch.float64))
    return torch.stack(rows)


def by_the_paper(mixer: Hyena, x_TD: Tensor) -> Tensor:
    """Return [T, D] of the order-2 recurrence of section 3.1, one output at a time."""
    taps = filter_by_the_paper(mixer, trained=True)
    projected = x_TD @ mixer.in_proj.weight.T + mixer.in_proj.bias
    short = []
    for t in range(len(x_TD)):
        near = [mixer.conv.weight[:, 2 - j] * projected[t - j] for j in range(3) if t - j >= 0]
        short.append(sum(near) + mixer.conv.bias)
    outer, inner, value = torch.stack(short).chunk(3, dim=-1)
    u = inner * value
    rows = []
    for t in range(len(x_TD)):
        reached = sum(taps[t - s] * u[s] for s in range(max(0, t - len(taps) + 1), t + 1))
        rows.append(outer[t] * (reached + mixer.filter.skip * u[t]))
    return torch.stack(rows) @ mixer.out.weight.T + mixer.out.bias


@pytest.mark.parametrize("length", [30, 40, 55])
def test_equals_the_paper_in_outputs_and_gradients(length: int):
    mixer = build()
    assert_equals_paper(mixer, by_the_paper, length=length, tolerance=1e-8)


def test_the_initial_filter_is_that_of_the_paper():
    mixer = build()
    taps = filter_by_the_paper(mixer, trained=False)
    taps[0] += mixer.filter.skip
    torch.testing.assert_close(mixer.filter(40), taps)
    # The slowest channel has decayed to 1 % after 1.5 times the longest sequence, the fastest after 0.3 of it.
    assert mixer.filter(1000).shape == (40, 12)


def test_decoding_beyond_the_filter_forgets_the_oldest_inputs():
    mixer = build(max_length=20)
    x = torch.randn(2, 50, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = mixer(x)
    for prompt in (1, 15, 30):
        cache = mixer.init_cache(2, 50)
        assert cache.tensors["past"].shape == (2, 20, 12)
        with torch.no_grad():
            parts = [mixer.prefill(x[:, :prompt], cache)]
            parts += [mixer.step(x[:, t : t + 1], cache) for t in range(prompt, 50)]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected)


@pytest.mark.parametrize("few", [0, 2**24])
def test_further_tokens_are_convolved_by_products_or_by_fft(few: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("basecap.mixers.hyena.FEW", few)
    mixer = build(max_length=20)
    x = torch.randn(2, 50, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    cache = mixer.init_cache(2, 50)
    with torch.no_grad():
        parts = [mixer.prefill(part, cache) for part in x.split([7, 10, 25, 8], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), mixer(x))


def test_decoding_beyond_a_cache_shorter_than_the_filter_is_refused():
    mixer = build(max_length=20)
    x = torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        cache = mixer.init_cache(2, 8)
        parts = [mixer.prefill(x[:, :3], cache)] + [mixer.step(x[:, t : t + 1], cache) for t in range(3, 8)]
        torch.testing.assert_close(torch.cat(parts, dim=1), mixer(x[:, :8]))
        with pytest.raises(ConfigError, match="room for 8 tokens; make it for at least 9"):
            mixer.step(x[:, 8:9], cache)
        with pytest.raises(ConfigError, match="room for 8 tokens; make it for at least 12"):
            mixer.prefill(x, mixer.init_cache(2, 8))


def test_an_even_number_of_features_is_refused():
    with pytest.raises(ConfigError, match="filter_features"):
        ARCHITECTURES.get("hyena").layers[0].configure(64, {"filter_features": 6})
