"""Attention to constants: keys, or queries and keys, that do not depend on the text."""

import pytest
import torch

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES, LayerSpec, initialise
from basecap.testing.check_mixer import check_mixer
from tests.mixers._built import draw

HIDDEN, HEADS, LONGEST = 64, 4, 40


def build(name, hidden=HIDDEN, **options):
    choice = ARCHITECTURES.get(name).layers[0]
    layer = LayerSpec(hidden=hidden, max_length=LONGEST)
    mixer = choice.mixer(choice.configure(hidden, {"heads": HEADS, **options}), layer)
    initialise(mixer, mixer.recipe(), seed=0)
    return mixer.double()


def test_random_qk_attends_the_same_whatever_the_text():
    mixer = build("transformer++ random qk")
    one, other = (mixer.influence(draw(1, 30, HIDDEN, seed=seed)).whole() for seed in (0, 1))
    assert torch.equal(one, other)


def test_random_k_depends_on_the_query_alone():
    mixer, x = build("transformer++ random k"), draw(1, 30, HIDDEN)
    changed = torch.cat([draw(1, 29, HIDDEN, seed=1), x[:, 29:]], dim=1)
    one, other = (mixer.influence(part).whole() for part in (x, changed))
    torch.testing.assert_close(one[:, :, 29], other[:, :, 29])
    assert not torch.allclose(one[:, :, 28], other[:, :, 28])


@pytest.mark.parametrize("name", ["transformer++ random k", "transformer++ random qk"])
def test_is_attention_with_the_constants_for_projections(name):
    """Identity inputs make a projection a table of constants: ordinary attention over them is the same."""
    mixer, full = build(name, position="none"), build("transformer++", position="none")
    x = torch.eye(HIDDEN, dtype=torch.float64)[None, :LONGEST]
    with torch.no_grad():
        queries = mixer.query.weight if mixer.queries is None else _as_weight(mixer.queries)
        full.project.qkv.weight.copy_(torch.cat([queries, _as_weight(mixer.keys), mixer.value.weight]))
        full.out.weight.copy_(mixer.out.weight)
    torch.testing.assert_close(mixer(x), full(x))


def _as_weight(table):
    return torch.nn.functional.pad(table.T, (0, HIDDEN - LONGEST))


@pytest.mark.parametrize("constant", ["k", "qk"])
def test_without_rope_conforms(constant, monkeypatch):
    monkeypatch.setattr("basecap.testing._initialisation.DEPTHS", (12,))
    options = {"constant": constant, "position": "none"}
    report = check_mixer("transformer++ random k", options=options, length=70, longest=0)
    assert report.checks
    report.raise_failures()


def test_constants_start_as_large_as_projections():
    mixer = build("transformer++ random qk", hidden=256)
    projected = build("transformer++", hidden=256).project.qkv(draw(1, 40, 256))
    for table in (mixer.keys, mixer.queries):
        assert 0.95 < table.std() / projected.std() < 1.05


@pytest.mark.parametrize("name", ["transformer++ random k", "transformer++ random qk"])
def test_longer_texts_are_refused(name):
    mixer = build(name)
    with pytest.raises(ConfigError, match="constants for 40 positions, not for 41"):
        mixer(draw(1, 41, HIDDEN))
    cache = mixer.init_cache(1, 41)
    mixer.prefill(draw(1, 40, HIDDEN), cache)
    with pytest.raises(ConfigError, match="constants for 40 positions, not for 41"):
        mixer.step(draw(1, 1, HIDDEN), cache)


def test_an_unknown_constant_is_named():
    with pytest.raises(ConfigError, match="constant"):
        build("transformer++ random k", constant="q")
