"""Unfinished mixers: one sentence with class, file and what is missing, wherever a model is built or priced."""

import inspect
import re

import pytest
import torch
from torch import nn

from basecap.cli.lists import CATALOGUES
from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES, Architecture, LayerChoice
from basecap.mixers.attention import Attention
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.plan.checks import check
from basecap.study.config import validate
from basecap.testing.check_all import check_all
from basecap.testing.check_mixer import check_mixer


class ForgetsSuper(Attention):
    def __init__(self, config, layer):
        self.out = nn.Linear(layer.hidden, layer.hidden)


class ForgetsSuperWithoutModules(Attention):
    def __init__(self, config, layer):
        self.width = layer.hidden


class TextFlops(Attention):
    def flops(self, length):
        return "many"


class NegativeFlops(Attention):
    def flops(self, length):
        return -1.0


class LeavesInInit(Attention):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        raise SystemExit(0)


class FailingState(Attention):
    def state_bytes(self, length):
        return length + None


class LacksARecipe(Attention):
    def recipe(self):
        return {name: recipe for name, recipe in super().recipe().items() if name != "out.weight"}


class FailingRecipe(Attention):
    def recipe(self):
        return {"out.weight": self.nothing}


class ListsRecipes(Attention):
    def recipe(self):
        return list(super().recipe())


class FailingForward(Attention):
    def forward(self, x_BTD, segments=None):
        return self._helper(x_BTD)

    def _helper(self, x_BTD):
        return x_BTD + "one"  # here


class WidthOne(Attention):
    def forward(self, x_BTD, segments=None):
        return super().forward(x_BTD, segments)[..., :1]


class ReturnsNothing(Attention):
    def forward(self, x_BTD, segments=None):
        super().forward(x_BTD, segments)


@pytest.fixture
def register(monkeypatch):
    """Register a mixer for one test; return its name."""

    def add(mixer):
        layers = (LayerChoice(mixer=mixer),)
        entry = Architecture(name="unfinished", layers=layers, backbone="gpt", summary="", paper="")
        ARCHITECTURES.names()
        monkeypatch.setitem(ARCHITECTURES._entries, "unfinished", entry)
        monkeypatch.setitem(ARCHITECTURES._defined_by, "unfinished", mixer)
        return "unfinished"

    return add


def model(name: str) -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(model_config(name, hidden=32, vocab=61, layers=1))


@pytest.mark.parametrize("mixer", [ForgetsSuper, ForgetsSuperWithoutModules])
def test_a_forgotten_super_is_named(mixer, register):
    name = register(mixer)
    for build in (lambda: model(name), lambda: CATALOGUES["mixers"](False)):
        with pytest.raises(
            ConfigError, match=rf"mixer {mixer.__name__} \(.*test_faults\.py:\d+\) .*super\(\)\.__init__"
        ):
            build()


def test_costs_that_are_no_numbers_are_named(register):
    with pytest.raises(ConfigError, match=r"flops of mixer TextFlops \(.*test_faults\.py:\d+\) returns 'many'"):
        model(register(TextFlops)).flops(8)
    with pytest.raises(ConfigError, match=r"state_bytes of mixer FailingState \(.*\.py:\d+\) fails: TypeError"):
        model(register(FailingState)).state_bytes(8)
    with pytest.raises(ConfigError, match=r"returns -\d.*; it must return a finite number of at least 0"):
        model(register(NegativeFlops)).training_flops(8)


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (LacksARecipe, r"mixer LacksARecipe \(.*\): parameter 'out\.weight' has no recipe; give it one in recipe\(\)"),
        (
            FailingRecipe,
            r"recipe of mixer FailingRecipe \(.*test_faults\.py:\d+\) fails: AttributeError: .*; fix it\.$",
        ),
        (ListsRecipes, r"recipe of mixer ListsRecipes \(.*\) returns list; it must return a dict by name\.$"),
    ],
)
def test_wrong_recipes_are_named_before_anything_trains(mixer, words, optimiser, register):
    content = {"architectures": [register(mixer)], "reference": "unfinished"}
    train = {"tokens": 64, "batch": 1, "optimiser": optimiser}
    data = {"source": "installed", "tokenizer": "bytes", "seq_len": 32, "train": ["prose"]}
    with pytest.raises(ConfigError, match=f"^architecture 'unfinished': {words}"):
        check(
            validate({"name": "x", "model": {"hidden": 32, "layers": 1}, "train": train, "data": data} | content, "x")
        )


def test_a_mixer_does_not_end_the_program(register):
    with pytest.raises(ConfigError, match=r"mixer LeavesInInit .* cannot be built: SystemExit: 0; fix it\."):
        model(register(LeavesInInit))


@pytest.mark.parametrize(("mixer", "found"), [(WidthOne, r"\[2, 5, 1\]"), (ReturnsNothing, "NoneType")])
def test_a_model_refuses_an_output_of_another_shape(mixer, found, register):
    name = register(mixer)
    built = LanguageModel(model_config(name, hidden=32, vocab=61, layers=1)).initialise(0)
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ConfigError, match=rf"{mixer.__name__} \(.*\) must return \[B, T, D\] like .*, not {found}"):
        built(tokens, tokens)


def test_check_says_where_a_mixer_raised(register):
    rows = []
    check_all([register(FailingForward)], torch.device("cpu"), on_rows=rows.extend)
    lines, first = inspect.getsourcelines(FailingForward)
    number = first + next(index for index, line in enumerate(lines) if "# here" in line)
    assert [row["result"].startswith("raised TypeError: ") for row in rows] == [True]
    assert rows[0]["result"].endswith(f"(test_faults.py:{number}, for x [2, 147, 64]).")


@pytest.mark.parametrize(("mixer", "found"), [(WidthOne, r"\[2, 147, 1\]"), (ReturnsNothing, "NoneType")])
def test_an_output_of_another_shape_is_the_first_thing_said(mixer, found, register):
    (failure,) = check_mixer(register(mixer)).checks
    assert failure.name == "shape"
    assert re.search(
        rf"forward \(.*:\d+\) must return \[B, T, D\] like x, \[2, 147, 64\], not {found}", failure.message
    )
