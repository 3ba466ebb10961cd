"""The mixer contract: registration, options, recipes and initialisation."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from basecap.errors import ConfigError
from basecap.mixers import (
    ARCHITECTURES,
    Cache,
    LayerChoice,
    LayerSpec,
    Mixer,
    MixerConfig,
    ParameterRecipe,
    Variant,
    choose_heads,
    constant,
    default_recipe,
    divide,
    generator_for,
    hybrid,
    initialise,
    mixer,
    normal,
    orthogonal,
    residual_std,
    uniform,
    values,
)
from basecap.registry import Registry


class Decay(Mixer):
    """y_t = x_t + rate * y_{t-1}."""

    class Config(MixerConfig):
        rate: float = 0.5
        heads: int = 1

    sizes: ClassVar = {16: {"heads": 4}}

    def forward(self, x_BTD, segments=None):
        return self.prefill(x_BTD, self.init_cache(x_BTD.shape[0], x_BTD.shape[1]))

    def init_cache(self, batch, max_length):
        return Cache(tensors={"y": torch.zeros(batch, 1, self.layer.hidden)})

    def step(self, x_B1D, cache):
        cache.tensors["y"] = x_B1D + self.config.rate * cache.tensors["y"]
        cache.length += 1
        return cache.tensors["y"]

    def flops(self, length):
        return 2.0 * length * self.layer.hidden

    def state_bytes(self, length):
        return 4 * self.layer.hidden


@pytest.fixture
def registry(monkeypatch):
    """An empty registry in the place of the real one."""
    ARCHITECTURES.names()  # modules that were imported now would be registered in the wrong one
    fresh = Registry("mixer", "basecap.mixers", "mixers")
    fresh._discovered = True
    monkeypatch.setattr("basecap.mixers._contract.ARCHITECTURES", fresh)
    return fresh


def layer(hidden=8):
    return LayerSpec(hidden=hidden)


def test_default_prefill_steps_through_the_prompt():
    module = Decay(Decay.Config(), layer())
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    expected = [x[:, 0]]
    for t in range(1, 5):
        expected.append(x[:, t] + 0.5 * expected[-1])
    torch.testing.assert_close(module(x), torch.stack(expected, dim=1))


def test_defaults_of_the_contract():
    module = Decay(Decay.Config(), layer())
    x = torch.zeros(1, 2, 8)
    assert module.influence(x) is None
    assert module.mixed(x) is None
    assert module.exact_gradient
    assert module.recipe() == {}


def test_cache_counts_its_bytes():
    cache = Cache(tensors={"k": torch.zeros(2, 3, dtype=torch.bfloat16), "n": torch.zeros(5)})
    assert cache.nbytes == 2 * 3 * 2 + 5 * 4


def test_options_stack_up():
    choice = LayerChoice(mixer=Decay, options={"rate": 0.25})
    assert choice.configure(8, {}) == Decay.Config(rate=0.25, heads=1)
    assert choice.configure(16, {}) == Decay.Config(rate=0.25, heads=4)
    assert choice.configure(16, {"heads": 2, "rate": 1.0}) == Decay.Config(rate=1.0, heads=2)


def test_bad_options_are_named():
    with pytest.raises(ConfigError, match="unknown option 'rat' of mixer Decay: did you mean 'rate'"):
        LayerChoice(mixer=Decay).configure(8, {"rat": 1.0})


def test_options_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Decay.Config().rate = 1.0


def test_registering_names_the_mixer_and_its_variants(registry):
    variants = {"slow": Variant(options={"rate": 0.9}), "other": Variant(backbone="gpt", summary="in a GPT block")}
    variants |= {"more": Variant(ngram=3, canon="ac"), "moved": Variant(backbone="gpt")}
    assert mixer("decay", backbone="mamba", paper="none", summary="decays", variants=variants)(Decay) is Decay
    assert registry.names() == ["decay", "more", "moved", "other", "slow"]
    assert registry.get("decay").backbone == registry.get("slow").backbone == "mamba"
    assert registry.get("other").backbone == "gpt"
    assert registry.get("slow").summary == "decay with rate = 0.9"
    assert registry.get("more").summary == "decay with canon = ac, ngram = 3"
    assert registry.get("moved").summary == "decay with another backbone"
    assert registry.get("slow").layers[0].configure(8, {}).rate == 0.9
    assert "test_contract.py" in registry.origin("slow")


def test_a_name_is_given_once(registry):
    register = mixer("decay", backbone="mamba", paper="none", summary="decays")
    register(Decay)
    with pytest.raises(ConfigError, match="registered twice"):
        register(Decay)


def test_a_name_does_not_look_like_a_mixer_in_another_body(registry):
    with pytest.raises(ConfigError, match="choose another name"):
        mixer("wolf in sheep", backbone="mamba", paper="none", summary="decays")(Decay)


def test_an_unknown_name_leads_to_the_list_and_to_plugins(registry):
    with pytest.raises(ConfigError, match=r"unknown mixer 'mine': see `basecap list mixers`\. .*--plugin FILE\."):
        ARCHITECTURES.get("mine")


def test_only_mixers_are_registered(registry):
    with pytest.raises(ConfigError, match=r"linear\.py:\d+\) is not a subclass of"):
        mixer("linear", backbone="gpt", paper="none", summary="no")(nn.Linear)


class OneDocument(Decay):
    def forward(self, x):
        return x


class NoSelf(Decay):
    def flops(length):
        return 0.0


class NoStep(Decay):
    step = Mixer.step


class OnlyForward(Decay):
    init_cache, step, state_bytes = Mixer.init_cache, Mixer.step, Mixer.state_bytes


class NoConfig(Decay):
    Config = dict


class NeedsRate(Decay):
    class Config(MixerConfig):
        rate: float


class MisnamesTiny(Decay):
    tiny: ClassVar = {"headz": 2}


@pytest.mark.parametrize(
    ("unfinished", "words"),
    [
        (NoStep, "lacks step; define it"),
        (OnlyForward, r"lacks init_cache, state_bytes, step; define them, or derive from basecap\.mixers\.ForwardOnly"),
        (OneDocument, r"has forward\(self, x\), which is .* arguments; define forward\(self, x, segments=None\)"),
        (NoSelf, r"has flops\(length\), which is called with other arguments; define flops\(self, length\)"),
        (NoConfig, "Config must subclass .*MixerConfig"),
        (NeedsRate, "option 'rate' has no default; every option in Config needs one"),
        (MisnamesTiny, "tiny names 'headz', which is no option; "),
    ],
)
def test_unfinished_mixers_are_refused_with_their_place(registry, unfinished, words):
    with pytest.raises(ConfigError, match=rf"mixer 'new' \(.*test_contract\.py:\d+\):? .*{words}"):
        mixer("new", backbone="gpt", paper="none", summary="no")(unfinished)
    assert not registry.names()


@pytest.mark.parametrize(
    ("options", "variants", "words"),
    [
        (None, {"slow": Variant(differences="slow")}, "the differences of variant 'slow' must be a tuple of sentences"),
        (None, {"slow": {"rate": 0.9}}, r"variant 'slow' must be a Variant, such as Variant\(options="),
        (None, {"slow": Variant(options=0.9)}, "the options of variant 'slow' must be a dict"),
        (None, {"slow": Variant(canon="ba")}, r"canon of variant 'slow' must be places among .* not 'ba'\."),
        (None, {"slow": Variant(canon=None)}, r"canon of variant 'slow' must be places among .* not None\."),
        *(
            (
                None,
                {"slow": Variant(ngram=wrong)},
                rf"ngram of variant 'slow' must be 2 to 256 tokens, .* not {wrong!r}\.",
            )
            for wrong in (1, 257, -3, "six", True, 2.0, None)
        ),
        (None, [Variant()], "variants must be a dict of names and Variants"),
        (None, {3: Variant()}, "the name of a variant must be text, not 3"),
        ("rate", None, "options must be a dict"),
    ],
)
def test_arguments_of_another_type_are_refused_with_their_place(registry, options, variants, words):
    with pytest.raises(ConfigError, match=rf"mixer 'new' \(.*test_contract\.py:\d+\): {words}"):
        mixer("new", backbone="gpt", paper="none", summary="no", options=options, variants=variants)(Decay)
    assert not registry.names()


def test_differences_are_a_tuple_of_sentences(registry):
    with pytest.raises(
        ConfigError, match=r"\.py:\d+\): differences must be a tuple of sentences, such as .* not 'one'"
    ):
        mixer("new", backbone="gpt", paper="none", summary="no", differences="one")(Decay)
    assert not registry.names()


def test_a_variant_has_its_own_source_and_differences_and_says_whose_it_is(registry):
    variants = {"slow": Variant(options={"rate": 0.9}, paper="later", source="theirs", differences=("Slower.",))}
    mixer("new", backbone="gpt", paper="first", summary="no", source="ours", differences=("None.",), variants=variants)(
        Decay
    )
    new, slow = registry.get("new"), registry.get("slow")
    assert (new.source, new.differences, new.variant_of, new.paper) == ("ours", ("None.",), None, "first")
    assert (slow.source, slow.differences, slow.variant_of, slow.paper) == ("theirs", ("Slower.",), "new", "later")


def test_names_and_sentences_are_text(registry):
    with pytest.raises(ConfigError, match=r"mixer 'new' \(.*\.py:\d+\): summary must be text, not 3"):
        mixer("new", backbone="gpt", paper="none", summary=3)(Decay)


def test_hybrid_keeps_its_pattern(registry):
    layers = (LayerChoice(mixer=Decay), LayerChoice(mixer=Decay, options={"rate": 0.1}))
    made = hybrid("two", layers=layers, backbone="gpt", paper="none", summary="two rates")
    assert registry.get("two") is made
    assert made.layers == layers


def test_every_published_name_is_complete():
    for name, architecture in ARCHITECTURES.items():
        assert architecture.name == name
        assert architecture.summary and architecture.paper and architecture.backbone
        if ARCHITECTURES.built_in(name):  # so that no architecture is slower to evaluate than another
            assert all(choice.mixer.takes_lengths and choice.mixer.continues for choice in architecture.layers)


class Pair(nn.Module):
    def __init__(self, hidden=6, names=("first", "second")):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(hidden, hidden))


def start(module, seed=0):
    initialise(module, default_recipe(module), seed)
    return dict(module.named_parameters())


def test_initialisation_depends_on_seed_and_name_alone():
    one, other = start(Pair()), start(Pair(names=("new", "second", "first")))
    for name, parameter in one.items():
        assert torch.equal(parameter, other[name])
    assert not torch.equal(one["first.weight"], one["second.weight"])
    assert not torch.equal(one["first.weight"], start(Pair(), seed=1)["first.weight"])


def test_initialisation_ignores_the_dtype_and_the_global_generator():
    single, double, half = Pair(), Pair().double(), Pair().bfloat16()
    before = torch.get_rng_state()
    one = start(single)
    for name, parameter in start(double).items():
        assert torch.equal(parameter, one[name].double())
    for name, parameter in start(half).items():
        assert torch.equal(parameter, one[name].bfloat16())
    assert torch.equal(torch.get_rng_state(), before)


def test_initialisation_is_frozen():
    """The first numbers of seed 0: changing how they are drawn changes every published run."""
    drawn = torch.randn(3, generator=generator_for(0, "blocks.0.mixer.out.weight"))
    torch.testing.assert_close(drawn, torch.tensor([-0.235268, -0.151313, -0.719694]), rtol=0, atol=1e-6)


def test_missing_and_spare_recipes_are_named():
    recipes = default_recipe(Pair())
    with pytest.raises(
        ConfigError, match=r"Pair: parameter 'third\.bias' has no recipe; give it one in recipe\(\), such"
    ):
        initialise(Pair(names=("first", "second", "third")), recipes, 0)
    with pytest.raises(
        ConfigError, match=r"Pair: recipe\(\) names 'second\.bias', which is not a parameter; choose from first\.bias"
    ):
        initialise(Pair(names=("first",)), recipes, 0)


class Forgetful(Decay):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.speed = nn.Parameter(torch.empty(3))


def test_an_initialiser_that_fails_is_named_with_its_mixer():
    model = nn.ModuleDict({"mixer": Forgetful(Decay.Config(), layer())})
    for recipe, words in (
        (ParameterRecipe(init=values(torch.zeros(4))), "fails: RuntimeError"),
        (ParameterRecipe(init=0.5), "fails: TypeError: 'float'"),
        (normal(0.5), "is of type Start; write ParameterRecipe"),
    ):
        with pytest.raises(ConfigError, match=rf"mixer Forgetful \(.*\.py:\d+\): the recipe of 'speed' {words}"):
            initialise(model, {"mixer.speed": recipe}, 0)


def test_default_recipe_covers_standard_layers_only():
    module = nn.ModuleDict(
        {
            "linear": nn.Linear(3, 3),
            "table": nn.Embedding(3, 3),
            "rms": nn.RMSNorm(3),
            "layer": nn.LayerNorm(3),
            "group": nn.GroupNorm(1, 3),
            "convolution": nn.Conv1d(3, 3, 2),
        }
    )
    recipes = default_recipe(module)
    assert {name for name, _ in module.named_parameters()} - set(recipes) == {
        "convolution.weight",
        "convolution.bias",
    }
    assert {name for name, recipe in recipes.items() if recipe.decay} == {"linear.weight", "table.weight"}
    assert all(recipe.lr == 1.0 for recipe in recipes.values())


@pytest.mark.parametrize(
    ("init", "check"),
    [
        (normal(0.3), lambda p: abs(p.std() - 0.3) < 0.01 and abs(p.mean()) < 0.01),
        (uniform(-2.0, 1.0), lambda p: -2 <= p.min() < -1.9 and 0.9 < p.max() < 1),
        (constant(0.7), lambda p: (p == 0.7).all()),
        (values(torch.arange(64.0)), lambda p: torch.equal(p[3], torch.arange(64.0))),
        (orthogonal(2.0), lambda p: torch.allclose(p.T @ p, 4 * torch.eye(64), atol=1e-5)),
    ],
)
def test_initialisers(init, check):
    module = nn.Linear(64, 128, bias=False)
    initialise(module, {"weight": ParameterRecipe(init=init)}, 0)
    assert check(module.weight.detach())


def test_residual_projections_shrink_with_depth():
    assert residual_std(LayerSpec(hidden=8, depth=12)) == pytest.approx(0.02 / 24**0.5)


@pytest.mark.parametrize(
    ("hidden", "heads", "expected"), [(768, None, 12), (2048, None, 32), (64, 4, 4), (48, None, 1), (200, None, 2)]
)
def test_choose_heads(hidden, heads, expected):
    assert choose_heads(hidden, heads) == expected


@pytest.mark.parametrize(("whole", "parts"), [(64, 7), (64, 0), (64, -2)])
def test_what_does_not_divide_is_refused(whole, parts):
    with pytest.raises(ConfigError, match=f"cannot divide width by heads: 64 is not a multiple of {parts}"):
        divide(whole, parts, "width by heads")
