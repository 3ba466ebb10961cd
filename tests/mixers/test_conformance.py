"""Every architecture keeps the mixer contract, and the suite that says so notices every kind of breach.

A new file in `basecap/mixers` is tested by existing.
"""

import re

import pytest
import torch
from torch import nn

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES, Cache, ParameterRecipe, constant, normal
from basecap.mixers.attention import Attention
from basecap.mixers.hyena import Hyena
from basecap.ops import Influence
from basecap.testing._precision import GRAPHS
from basecap.testing.check_mixer import LENGTH, check_mixer
from tests._architectures import distinct_names

FLOAT32 = (torch.float32,)
#: An architecture with chunks of 128 tokens, and a length that needs two.
LONG_CHUNKS = ("based linear", 150)
#: Their graph with segments has all that the one without them has, which takes as long; "rwkv-4" has both compiled.
PACKED = ("based", "based linear", "deltanet", "fox", "gla", "hyena", "mamba-1", "mamba-2", "mamba-3", "mlstm")
#: The last one's graph without segments is that of "pythia".
PACKED += ("rwkv-5", "rwkv-7", "transformer++ random k")
#: Their ops compute in chunks of at most 64 tokens, so the shorter sequences of `FEW` tokens cross these, too.
SMALL_CHUNKS = ("deltanet", "gated-deltanet", "gated-deltanet-2", "gla", "hgrn-2", "hyena", "kda 3:1", "olmo-hybrid")
SMALL_CHUNKS += ("rwkv-4", "rwkv-5", "rwkv-6", "rwkv-7")
#: The chunks of their ops, of 128 tokens, are those of "mamba-2".
CHUNKS_OF_OTHERS = ("mamba-3", "mlstm", "retnet")
#: Neither has a chunk, or only that of `Mixer.tiny`; what blocks of kernels could leak shows on the long sequence.
ATTENTION = ("dsa", "fox", "nsa", "pythia", "top1-chunk-approx", "top1-element", "transformer++ random k")
FEW = 70
#: Tokens that cross the tiny windows and chunks, and the chunks of all recurrences except that of `LONG_CHUNKS`.
SHORT = 40


def apart(names):
    """Return the names but those of architectures all of whose layers are among those of another one."""
    layers = {name: ARCHITECTURES.get(name).layers for name in names}
    held: set[str] = set()
    for name in reversed(names):
        others = [choice for other in names if other not in {name, *held} for choice in layers[other]]
        if all(choice in others for choice in layers[name]):
            held.add(name)
    return [name for name in names if name not in held]


def one_name_per_mixer():
    """Return the first name of each mixer class, as its options rarely change the graph.

    An architecture all of whose layers are among another's is checked with that one.
    """
    names = {}
    for name, architecture in ARCHITECTURES.items():
        names.setdefault(frozenset(choice.mixer for choice in architecture.layers), name)
    return apart(sorted(names.values()))


def one_name_per_graph():
    """Return names with one mixer for each way to call an op: those that inherit it differ in projections and gates."""
    calls = ("forward", "mix", "attend")

    def graph(mixer):
        return tuple(next((cls for cls in mixer.__mro__ if call in vars(cls)), None) for call in calls)

    names, seen = [], set()
    for name in sorted(one_name_per_mixer(), key=lambda name: len(ARCHITECTURES.get(name).layers)):
        graphs = {graph(choice.mixer) for choice in ARCHITECTURES.get(name).layers}
        if not graphs <= seen:
            names.append(name)
            seen |= graphs
    return names


@pytest.mark.parametrize("name", one_name_per_mixer())
def test_conforms(name, monkeypatch):
    monkeypatch.setattr("basecap.testing._initialisation.DEPTHS", (12, 48))  # what grows is larger at 48 than at 24
    report = check_mixer(name, length=FEW if name in (*SMALL_CHUNKS, *CHUNKS_OF_OTHERS, *ATTENTION) else LENGTH)
    assert report.checks
    report.raise_failures()


@pytest.mark.parametrize("name", sorted({*apart(distinct_names())} - {*one_name_per_mixer()}))
def test_conforms_with_other_options(name, monkeypatch):
    # Options choose other terms, and `test_conforms` proves that chunks of any size meet. These ones are shorter. How
    # their parameters depend on depth is in the tables of `test_published_*.py`.
    monkeypatch.setattr("basecap.testing._initialisation.DEPTHS", (12,))
    report = check_mixer(name, length=SHORT, longest=0)
    assert report.checks
    report.raise_failures()


@pytest.mark.parametrize("name", sorted({*distinct_names()} - {*apart(distinct_names())}))
def test_starts_in_its_own_backbone(name, monkeypatch):
    # `test_conforms` proves the layers, with those of another architecture.
    monkeypatch.setattr("basecap.testing._initialisation.DEPTHS", (12, 48))
    monkeypatch.setattr("basecap.testing.check_mixer.PROOFS", ())
    report = check_mixer(name, longest=0, dtypes=())
    assert any(check.name.startswith("initialised") for check in report.checks)
    report.raise_failures()


@pytest.mark.parametrize(
    ("name", "length"),
    [*((name, SHORT) for name in (*one_name_per_graph(), "transformer++ alibi", "transformer++ window")), LONG_CHUNKS],
)
def test_conforms_compiled(name, length, monkeypatch):
    # `test_conforms` proves the rest.
    monkeypatch.setattr("basecap.testing.check_mixer.initialisation", lambda *given: ())
    monkeypatch.setattr("basecap.testing.check_mixer.PROOFS", ())
    graphs = tuple(graph for graph in GRAPHS if graph or name not in PACKED)
    monkeypatch.setattr("basecap.testing._precision.GRAPHS", graphs)
    report = check_mixer(name, length=length, longest=0, dtypes=(), compiled=True)
    assert {f"compiled{graph}" for graph in graphs} <= {check.name for check in report.checks}
    report.raise_failures()


REST = "unequal prompts, then the rest"


class SeesTheFuture(Attention):
    def forward(self, x_BTD, segments=None):
        return super().forward(x_BTD, segments) + 1e-9 * x_BTD.flip(1)


class ForgetsInDecoding(Attention):
    def step(self, x_B1D, cache):
        y = super().step(x_B1D, cache)
        cache.tensors["v"][:, 0] = 0
        return y


class MiscountsTokens(Attention):
    def prefill(self, x_BTD, cache):
        y = super().prefill(x_BTD, cache)
        cache.length -= 1
        return y


class RandomAndLeaking(Attention):
    """Its noise would make everything excusable."""

    def forward(self, x_BTD, segments=None):
        return super().forward(nn.functional.dropout(x_BTD + x_BTD.flip(1), 0.5), segments)


class MisplacesShortPrompts(Attention):
    takes_lengths = True

    def step(self, x_B1D, cache: Cache):
        own, cache.lengths = cache.lengths, None
        y_B1D = super().step(x_B1D, cache)
        cache.lengths = own
        return y_B1D


class BeginsAnew(Attention):
    continues = True

    def prefill(self, x_BTD, cache: Cache):
        cache.length = 0
        return super().prefill(x_BTD, cache)


class MisplacesFurtherTokens(Hyena):
    continues = True

    def prefill(self, x_BTD, cache: Cache):
        cache.lengths = None
        return super().prefill(x_BTD, cache)


class PadsItsLastTokens(Hyena):
    def init_cache(self, batch, max_length):
        cache = super().init_cache(batch, max_length)
        cache.by_position = True
        return cache


class IgnoresSegments(Attention):
    def forward(self, x_BTD, segments=None):
        return super().forward(x_BTD, None)


class IgnoresSegmentsCompiled(Attention):
    def forward(self, x_BTD, segments=None):
        return super().forward(x_BTD, None if torch.compiler.is_compiling() else segments)


class MixesTheBatch(Attention):
    def forward(self, x_BTD, segments=None):
        return super().forward(x_BTD - 1e-6 * x_BTD.mean(0, keepdim=True), segments)


class WrongGradient(Attention):
    def forward(self, x_BTD, segments=None):
        y = super().forward(x_BTD, segments)
        return y + 1e-3 * (y - y.detach())


class DeadParameter(Attention):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.unused = torch.nn.Linear(2, 2, bias=False)

    def recipe(self):
        return {**super().recipe(), "unused.weight": ParameterRecipe(init=normal(0.02))}


class NarrowsTheDtype(Attention):
    def forward(self, x_BTD, segments=None):
        narrow = x_BTD.bfloat16().float() if x_BTD.dtype == torch.float32 else x_BTD
        return super().forward(narrow, segments)


class ReturnsFloat32(Attention):
    def forward(self, x_BTD, segments=None):
        y = super().forward(x_BTD, segments)
        return y.float() if y.dtype == torch.bfloat16 else y


class UnderstatesState(Attention):
    def state_bytes(self, length):
        return super().state_bytes(length) - 4


class UnderstatesFlops(Attention):
    def flops(self, length):
        return super().flops(length) / 8


class WrongInfluence(Attention):
    def influence(self, x_BTD):
        return Influence.of(super().influence(x_BTD).whole().square())


class Explodes(Attention):
    def recipe(self):
        return {**super().recipe(), "out.weight": ParameterRecipe(init=normal(100.0))}


class ExplodesWhenDeep(Attention):
    def recipe(self):
        usual = super().recipe()["out.weight"].init

        def init(parameter, generator):
            usual(parameter, generator)
            parameter *= 1000.0 if self.layer.depth > 12 else 1.0

        return {**super().recipe(), "out.weight": ParameterRecipe(init=init)}


class DiesInTraining(Attention):
    """Its gradient is infinite at the start alone."""

    def forward(self, x_BTD, segments=None):
        return (
            super().forward(x_BTD, segments) + self.out.weight.abs().sqrt().sum() - self.out.weight.abs().sqrt().sum()
        )

    def recipe(self):
        return {**super().recipe(), "out.weight": ParameterRecipe(init=constant(0.0))}


class DrawsFromNowhere(Attention):
    def recipe(self):
        return {**super().recipe(), "out.weight": ParameterRecipe(init=lambda p, generator: p.normal_())}


@pytest.mark.parametrize(
    ("mixer", "broken"),
    [
        (SeesTheFuture, {"causality before 1"}),
        (RandomAndLeaking, {"repetition"}),
        (ForgetsInDecoding, {"decode"}),
        (MiscountsTokens, {"prefill 1, then decode: cache length"}),
        (MisplacesShortPrompts, {"unequal prompts", "decode unequal prompts in float32"}),
        (BeginsAnew, {"prefill 13, then the rest"}),
        (MisplacesFurtherTokens, {REST, f"read {REST} in float32"}),
        (PadsItsLastTokens, {"unequal prompts", "decode unequal prompts in float32"}),
        (IgnoresSegments, {"packed segments", "packed gradients"}),
        (MixesTheBatch, {"batch invariance"}),
        (WrongGradient, {"derivatives"}),
        (DeadParameter, {"every parameter learns"}),
        (NarrowsTheDtype, {"forward in float32", "gradients in float32"}),
        (UnderstatesState, {"state bytes at 1, torch.float32"}),
        (UnderstatesFlops, {"flops cover the linear layers"}),
        (WrongInfluence, {"influence"}),
        (Explodes, {"initialised activations, 12 layers"}),
        (ExplodesWhenDeep, {"initialised growth, 24 layers"}),
        (DrawsFromNowhere, {"recipe"}),
    ],
)
def test_notices(mixer, broken, register, monkeypatch):
    monkeypatch.setattr("basecap.testing._initialisation.DEPTHS", (12, 24))
    report = check_mixer(register(mixer), length=SHORT, longest=0, dtypes=FLOAT32)
    assert broken == {check.name for check in report.failures}
    sentence = r"broken: .* failed: (?:.* by .* with .* allowed|(?!.* allowed).*)\."
    with pytest.raises(AssertionError) as failed:
        report.raise_failures()
    assert all(re.fullmatch(sentence, line) for line in str(failed.value).splitlines())


def test_notices_a_graph_without_segments(register):
    report = check_mixer(register(IgnoresSegmentsCompiled), length=32, longest=0, dtypes=(), compiled=True)
    names = {check.name for check in report.failures}
    assert names == {"compiled with segments"}


def test_notices_a_gradient_that_is_not_finite(register):
    report = check_mixer(register(DiesInTraining), length=32, longest=0, dtypes=())
    assert "initialised parameters, 12 layers" in {check.name for check in report.failures}


def test_notices_a_changed_dtype(register):
    report = check_mixer(register(ReturnsFloat32), length=SHORT, longest=0, dtypes=(torch.bfloat16,))
    assert "forward keeps bfloat16" in {check.name for check in report.failures}


def test_sound_mixer_breaks_nothing(register):
    assert not check_mixer(register(Attention), length=32, longest=0, dtypes=FLOAT32).failures


def test_checks_every_distinct_layer_of_a_pattern(register):
    report = check_mixer(register(Attention, Attention, UnderstatesState), length=SHORT, longest=0, dtypes=())
    assert {check.subject for check in report.checks} == {"broken, layer 1", "broken, layer 2"}
    assert {check.subject for check in report.failures} == {"broken, layer 2"}


class SharesValues(Attention):
    """Adds the first layer's input to the later layers' output."""

    takes_shared = True

    def _share(self, x, y, shared):
        if self.layer.index == 0:
            shared["first"] = x
            return y
        return y + shared["first"]

    def forward(self, x_BTD, segments=None, shared=None):
        return self._share(x_BTD, super().forward(x_BTD, segments), shared)

    def prefill(self, x_BTD, cache, shared=None):
        return self._share(x_BTD, super().prefill(x_BTD, cache), shared)

    def step(self, x_B1D, cache: Cache, shared=None):
        return self._share(x_B1D, super().step(x_B1D, cache), shared)

    def influence(self, x_BTD):
        return None


def test_shared_values_pass_between_layers(register):
    report = check_mixer(register(SharesValues), length=SHORT, longest=0, dtypes=FLOAT32)
    report.raise_failures()
    assert not any(check.name.startswith("influence") for check in report.checks)


class NoRecipe(Attention):
    def recipe(self):
        return {name: recipe for name, recipe in super().recipe().items() if name != "out.weight"}


def test_missing_recipe_names_the_parameter(register):
    with pytest.raises(
        ConfigError, match=r"mixer NoRecipe \(.*test_conformance\.py:\d+\): parameter 'out\.weight' has no recipe"
    ):
        check_mixer(register(NoRecipe))


def test_unknown_architecture_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean"):
        check_mixer("transfomer++")


def test_short_sequences_are_refused():
    with pytest.raises(ConfigError, match="at least 32"):
        check_mixer("transformer++", length=31)
