"""The parts mixers share, each against its formula written out."""

import pytest
import torch

from basecap.errors import ConfigError
from basecap.mixers import Cache, initialise, positions_of
from basecap.mixers._attention import AttentionHeads, HeadsConfig
from basecap.mixers._parts import ShortConvolution, remember, rms_norm, rotary, starts_of, token_shift
from basecap.testing.marks import requires_gpu
from tests.mixers._built import draw

SEGMENTS = torch.tensor([[0, 0, 0, 2, 2, 7], [1, 1, 1, 1, 1, 1]])


def test_positions_and_starts():
    assert positions_of(SEGMENTS).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert starts_of(SEGMENTS).int().tolist() == [[1, 0, 0, 1, 0, 1], [1, 0, 0, 0, 0, 0]]


def test_rotary_turns_each_pair_by_its_angle():
    x = draw(1, 5, 2, 6)
    turned = rotary(x, torch.arange(5), base=100.0)
    for t in range(5):
        for i in range(3):
            pair = torch.complex(x[0, t, :, i], x[0, t, :, i + 3])
            angle = torch.tensor(t * 100.0 ** (-i / 3), dtype=torch.float64)
            pair = pair * torch.polar(torch.ones_like(angle), angle)
            torch.testing.assert_close(turned[0, t, :, i], pair.real)
            torch.testing.assert_close(turned[0, t, :, i + 3], pair.imag)


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = draw(1, 1, 1, 8), draw(1, 1, 1, 8, seed=1)

    def score(t, s):
        turned = (rotary(x, torch.tensor([p]), 10_000.0) for x, p in ((q, t), (k, s)))
        return (next(turned) * next(turned)).sum()

    torch.testing.assert_close(score(100_007, 100_000), score(7, 0))


def test_rotary_leaves_the_other_channels():
    x = draw(2, 4, 1, 8)
    turned = rotary(x, torch.arange(4), 10_000.0, dims=2)
    assert torch.equal(turned[..., 2:], x[..., 2:])
    torch.testing.assert_close(turned[..., :2], rotary(x[..., :2], torch.arange(4), 10_000.0))


def test_rotary_takes_positions_per_row():
    x = draw(2, 6, 1, 4)
    turned = rotary(x, positions_of(SEGMENTS), 10_000.0)
    torch.testing.assert_close(turned[:1, 3:5], rotary(x[:1, 3:5], torch.arange(2), 10_000.0))


def test_rotary_refuses_odd_channels():
    with pytest.raises(ConfigError, match="even number of channels per head, not 5"):
        rotary(draw(1, 1, 1, 5), torch.arange(1), 10_000.0)


def test_rms_norm():
    x = draw(3, 5)
    torch.testing.assert_close(rms_norm(x, eps=0.0), x / x.square().mean(-1, keepdim=True).sqrt())
    assert rms_norm(torch.zeros(2, 4)).eq(0).all()
    assert rms_norm(x.bfloat16()).dtype == torch.bfloat16


def test_token_shift_stops_at_segments():
    x = draw(2, 6, 3)
    shifted = token_shift(x, SEGMENTS)
    for b, t in ((0, 0), (0, 3), (0, 5), (1, 0)):
        assert shifted[b, t].eq(0).all()
    for b, t in ((0, 1), (0, 4), (1, 5)):
        assert torch.equal(shifted[b, t], x[b, t - 1])
    assert torch.equal(token_shift(x)[:, 1:], x[:, :-1])


@pytest.mark.parametrize("prompt", [0, 1, 2, 6])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_short_convolution_decodes(prompt, width, activation):
    module = ShortConvolution(3, width, activation=activation)
    initialise(module, module.recipe(), 0)
    module.double()
    x = draw(2, 6, 3)
    last = module.init_cache(2)
    module.fill(x[:, :prompt], last)
    steps = [module.step(x[:, t : t + 1], last) for t in range(prompt, 6)]
    torch.testing.assert_close(torch.cat([module(x)[:, :prompt], *steps], dim=1), module(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=requires_gpu)])
def test_short_convolution_in_parts(device: str, bias: bool):
    module = ShortConvolution(9, 4, bias, activation="silu").to(device)
    initialise(module, module.recipe(), 0)
    x, segments = draw(2, 6, 9).float().to(device), SEGMENTS.to(device)
    x, again = x.clone().requires_grad_(), x.clone().requires_grad_()
    parts = module.parts(x, [4, 2, 3], segments)
    assert [part.shape[-1] for part in parts] == [4, 2, 3]
    whole = module(again, segments)
    torch.testing.assert_close(torch.cat(parts, dim=-1), whole)
    seed = draw(2, 6, 9, seed=1).float().to(device)
    found = torch.autograd.grad(parts, [x, *module.parameters()], seed.split([4, 2, 3], dim=-1))
    expected = torch.autograd.grad(whole, [again, *module.parameters()], seed)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_short_convolution_starts_as_published():
    module = ShortConvolution(64, 4)
    initialise(module, module.recipe(), 0)
    assert module.weight.abs().max() <= 0.5
    assert module.weight.abs().max() > 0.45
    assert 0.45 < module.bias.abs().max() <= 0.5
    assert not module.recipe()["bias"].decay


def test_short_convolution_needs_a_width():
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        ShortConvolution(3, 0)


def heads(position="none", **options):
    module = AttentionHeads(32, HeadsConfig(heads=4, position=position), **options)
    initialise(module, module.recipe(), 0)
    return module.double()


def test_normalised_heads_have_unit_size_before_the_gain():
    x = draw(2, 5, 32)
    q, k, _ = heads("rope", norm="plain")(x)
    for part in (q, k):
        size = part.square().mean(-1).sqrt()
        torch.testing.assert_close(size, torch.ones_like(size), rtol=1e-3, atol=0)
    gained = heads(norm="gain")
    plain = [part * gain for part, gain in zip(heads(norm="plain")(x), (2.0, 3.0, 1.0), strict=True)]
    gained.q_gain.data.fill_(2.0)
    gained.k_gain.data.fill_(3.0)
    for one, other in zip(gained(x), plain, strict=True):
        torch.testing.assert_close(one, other)


def test_heads_start_at_the_given_values():
    x = draw(1, 5, 32)
    module = heads("rope")
    for whole, late in zip(module(x), module(x[:, 3:], start=3), strict=True):
        torch.testing.assert_close(whole[:, 3:], late)


def test_gains_are_not_decayed():
    recipe = heads(norm="gain").recipe()
    assert not recipe["q_gain"].decay
    assert recipe["qkv.weight"].decay


def test_remember_keeps_the_last_tokens_of_a_ring():
    x = draw(2, 11, 1)
    for cuts in ([11], [1] * 11, [3, 8], [7, 1, 3]):
        cache = Cache(tensors={"x": torch.zeros(2, 4, 1, dtype=torch.float64)})
        for part in x.split(cuts, dim=1):
            remember(cache, {"x": part}, ring=True)
        assert cache.length == 11
        assert torch.equal(cache.tensors["x"], x[:, [8, 9, 10, 7]])


def test_remember_refuses_what_does_not_fit():
    cache = Cache(tensors={"x": torch.zeros(1, 4, 1)})
    remember(cache, {"x": torch.ones(1, 3, 1)})
    with pytest.raises(ConfigError, match="room for 4 tokens; make it for at least 5"):
        remember(cache, {"x": torch.ones(1, 2, 1)})
    assert cache.length == 3
    assert cache.tensors["x"].flatten().tolist() == [1, 1, 1, 0]
