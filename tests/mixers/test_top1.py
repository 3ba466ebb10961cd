"""Top-1 element and Top-1 chunk selection: what they have in common with softmax attention, and what they do not."""

import pytest
import torch

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES, LayerSpec, _further
from basecap.testing.check_mixer import check_mixer
from tests.mixers._built import built, draw

HIDDEN, HEADS = 64, 4
CHUNKED = ("top1-chunk-exact", "top1-chunk-approx")


def build(name, hidden=HIDDEN, **options):
    return built(name, hidden, 0.2, **{"heads": HEADS, **options})


def gradients(mixer, x):
    x = x.clone().requires_grad_()
    loss = (mixer(x) * draw(*x.shape, seed=1)).sum()
    return torch.autograd.grad(loss, [x, *mixer.parameters()])


def test_element_is_attention_at_temperature_zero():
    x = draw(2, 33, HIDDEN)
    cold = build("transformer++ temperature", temperature=1e-6)
    torch.testing.assert_close(build("top1-element")(x), cold(x))
    warm = build("transformer++ temperature", temperature=1.0)
    assert not torch.allclose(build("top1-element")(x), warm(x), rtol=0.1)


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_element_learns_straight_through(temperature):
    mixer, x = build("top1-element", temperature=temperature), draw(2, 33, HIDDEN).requires_grad_()
    weight = draw(2, 33, HIDDEN, seed=1)
    q, k, v = mixer.project(x)
    scores = torch.einsum("bthk,bshk->bhts", q, k)
    soft = (scores * 16**-0.5 / temperature).masked_fill(~torch.ones(33, 33).tril().bool(), -torch.inf).softmax(-1)
    hard = torch.nn.functional.one_hot(soft.argmax(-1), 33)
    mixed = torch.einsum("bhts,bshk->bthk", hard + soft - soft.detach(), v)
    expected = torch.autograd.grad((mixer.out(mixed.flatten(2)) * weight).sum(), [x, *mixer.parameters()])
    for grad, other in zip(gradients(mixer, x.detach()), expected, strict=True):
        torch.testing.assert_close(grad, other)


def test_element_influence_is_one_choice():
    matrix = build("top1-element").influence(draw(2, 33, HIDDEN)).whole()
    assert ((matrix == 0) | (matrix == 1)).all()
    assert (matrix.sum(-1) == 1).all()


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_two_chunks_are_full_attention(name, length):
    x = draw(2, length, HIDDEN)
    chunked, full = build(name, chunk=16), build("transformer++ temperature")
    torch.testing.assert_close(chunked(x), full(x))
    for grad, other in zip(gradients(chunked, x), gradients(full, x), strict=True):
        torch.testing.assert_close(grad, other)


@pytest.mark.parametrize("name", CHUNKED)
def test_enough_remote_chunks_are_full_attention(name):
    x = draw(2, 70, HIDDEN)
    torch.testing.assert_close(build(name, chunk=16, remote=4)(x), build("transformer++ temperature")(x))


def test_third_chunk_forces_a_choice():
    x = draw(2, 80, HIDDEN)
    exact, approx, full = (build(name)(x) for name in ("top1-chunk-exact", "top1-chunk-approx", "transformer++"))
    torch.testing.assert_close(exact, approx)
    exact, approx = (build(name, chunk=16)(x) for name in CHUNKED)
    assert not torch.allclose(exact[:, 48:], approx[:, 48:])
    assert not torch.allclose(exact[:, 48:], full[:, 48:])


@pytest.mark.parametrize("name", CHUNKED)
def test_each_query_attends_its_own_and_one_earlier_chunk(name):
    matrix = build(name, chunk=16).influence(draw(1, 80, HIDDEN)).whole()
    seen = (matrix > 0).unflatten(3, (5, 16)).any(-1)
    own = torch.arange(80) // 16
    assert (seen.sum(-1) == 1 + (own > 0)).all()
    assert seen.gather(3, own[None, None, :, None].expand(1, HEADS, 80, 1)).all()


def test_exact_choice_has_the_largest_mass():
    x = draw(1, 80, HIDDEN)
    full = build("transformer++ temperature").influence(x).whole()
    mass = full.unflatten(3, (5, 16)).sum(-1)
    seen = (build("top1-chunk-exact", chunk=16).influence(x).whole() > 0).unflatten(3, (5, 16)).any(-1)
    for t in range(16, 80):
        earlier = mass[:, :, t, : t // 16]
        assert torch.equal(earlier.argmax(-1), seen[:, :, t, : t // 16].int().argmax(-1))


@pytest.mark.parametrize(
    ("name", "options", "tokens"),
    [
        ("top1-element", {"kv_heads": 2, "qk_gain": True, "gate": "elementwise", "canon": True}, 0),
        ("top1-element", {"position": "none", "temperature": 0.5}, 64),
        ("top1-chunk-exact", {"kv_heads": 1, "chunk": 16}, 64),
        ("top1-chunk-exact", {"position": "none", "chunk": 32, "gate": "per head", "canon": True}, 0),
        ("top1-chunk-approx", {"kv_heads": 2, "remote": 2, "chunk": 16, "qk_gain": True}, 64),
    ],
)
def test_options_conform(name, options, tokens, monkeypatch):
    # `test_conformance.py` proves the layer on long sequences and in deep models; three chunks force a choice. Further
    # tokens are read in turn or at once, by the scores of all keys or, where they are more than a chunk has, among all.
    monkeypatch.setattr(_further, "TOKENS_OF_A_STEP_ON_CPU", tokens)
    monkeypatch.setattr("basecap.mixers.top1_chunk.TOKENS_OF_A_STEP", tokens)
    monkeypatch.setattr("basecap.testing._initialisation.DEPTHS", (12,))
    report = check_mixer(name, options={"heads": 4, **options}, length=70, longest=0)
    assert report.checks
    report.raise_failures()


@pytest.mark.parametrize("name", ["top1-element", *CHUNKED])
def test_parameters_are_those_of_the_transformer(name):
    for hidden in (768, 2048):
        choice = ARCHITECTURES.get(name).layers[0]
        with torch.device("meta"):
            mixer = choice.mixer(choice.configure(hidden, {}), LayerSpec(hidden=hidden))
        assert mixer.project.heads == {768: 12, 2048: 16}[hidden]
        assert sum(p.numel() for p in mixer.parameters()) == 4 * hidden**2


@pytest.mark.parametrize("name", ["top1-element", *CHUNKED])
def test_full_cache_is_refused(name):
    mixer = build(name)
    cache = mixer.init_cache(1, max_length=3)
    mixer.prefill(draw(1, 3, HIDDEN), cache)
    with pytest.raises(ConfigError, match="3 tokens"):
        mixer.step(draw(1, 1, HIDDEN), cache)
    with pytest.raises(ConfigError, match="3 tokens"):
        mixer.prefill(draw(1, 4, HIDDEN), mixer.init_cache(1, max_length=3))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("top1-element", {"temperature": -1.0}, "temperature"),
        ("top1-chunk-approx", {"mode": "aprox"}, "mode"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build(name, **options)


def test_more_chunks_than_there_are_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"^remote is 16, more than the earlier chunks of 128 in a sequence of 2048 tokens \(15\); choose a",
    ):
        build("top1-chunk-exact", remote=16)
    assert build("top1-chunk-exact", remote=15).config.remote == 15
