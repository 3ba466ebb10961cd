"""The audit is calibrated by layers whose answers are known."""

from dataclasses import replace

import pytest
import torch

from basecap.errors import ConfigError
from basecap.mixers import Mixer, ShortConvolution
from basecap.mixers.attention import Attention
from basecap.models.audit import audits_of
from basecap.ops.wkv4 import wkv4
from basecap.records.audits import Audit
from tests.testing._running_mean import RunningMean

#: Tokens, and those that a window sees.
LENGTH, WINDOW = 64, 16


def only(name: str, length: int = LENGTH, **options: object) -> Audit:
    (found,) = audits_of(name, length=length, options=options)
    return found


class Unknown(Attention):
    """Attention that says nothing of its factors."""

    influence = Mixer.influence


class Convolved(Unknown):
    """The same, behind a short convolution."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.conv = ShortConvolution(layer.hidden)

    def recipe(self):
        return {**super().recipe(), **{f"conv.{name}": each for name, each in self.conv.recipe().items()}}

    def forward(self, x_BTD, segments=None):
        return super().forward(self.conv(x_BTD, segments), segments)


class Once(Unknown):
    """The same, behind an op without second derivatives."""

    def forward(self, x_BTD, segments=None):
        ones = torch.ones(x_BTD.shape[-1])
        return super().forward(wkv4(x_BTD, x_BTD, ones, ones)[0], segments)


class Sharing(Unknown):
    takes_shared = True


class Broken(Attention):
    def influence(self, x_BTD):
        return super().influence(x_BTD[..., 1:])


def test_attention_has_all_three():
    found = only("transformer++")
    assert found.visibility == 1 and min(found.relation, found.selection) > 0.9 and found.null < 0.03
    assert found.sentence == (
        "It sees the whole past, weighs positions by their content and can select any one position."
    )
    assert found == only("transformer++")  # no number is random


@pytest.mark.parametrize(("window", "share"), [(WINDOW, 24), (3 * WINDOW, 75)])
def test_a_window_is_blind_beyond_it(window: int, share: int):
    found = only("transformer++", window=window)
    assert found.visibility == (window - 1) / (LENGTH - 1)
    assert found.relation > 0.9 and found.selection < found.visibility + 0.2
    assert f"sees {share} % of the past" in found.sentence


def test_fixed_keys_have_no_relation():
    found = only("transformer++ random k")
    assert found.visibility == 1 and found.relation == 0
    assert "hardly weighs positions by their content" in found.sentence


def test_linear_attention_without_decay_cannot_select():
    found = only("mamba-2 decay none w/o conv", length=160)  # many more positions than channels of its state
    assert found.visibility == 1 and found.relation > 0.9 and found.selection - found.null < 0.3
    assert "cannot select any one position" in found.sentence
    assert replace(found, trained=True).sentence.endswith("and as trained hardly selects one position.")


def test_a_mixer_without_influence_is_judged_by_its_jacobian(register):
    attention, convolved, mean = audits_of(register(Unknown, Convolved, RunningMean), length=LENGTH)
    assert attention.weights == convolved.weights == mean.weights == "jacobian"
    assert attention.visibility == 1 and min(attention.relation, attention.selection) > 0.8
    assert (mean.visibility, mean.relation) == (1, 0) and mean.selection == pytest.approx(1 / (LENGTH - 1), rel=1e-3)


def test_a_mixer_that_cannot_be_audited(register):
    with pytest.raises(ConfigError, match="unless its mixer defines `influence`: it takes values of other layers"):
        audits_of(register(Sharing), length=LENGTH)
    with pytest.raises(ConfigError, match=r"Once cannot be audited unless .*: wkv4 has no second derivatives"):
        audits_of(register(Once), length=LENGTH)
    with pytest.raises(ConfigError, match=r"Broken cannot be audited; fix its `influence`: .*shapes"):
        audits_of(register(Broken), length=LENGTH)
