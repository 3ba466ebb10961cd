"""Sizes that no layer can have, and names that no architecture has: refused in one sentence, whatever the mixer."""

import pytest
import torch

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES, LayerChoice, LayerSpec
from basecap.models.config import LayerConfig, model_config

HIDDEN = 64


def options_of(choice: LayerChoice) -> dict:
    return choice.configure(HIDDEN, {}).model_dump()


def having(option: str, value: object = None) -> list:
    """Return every distinct layer that has the option (and has it at `value`, if given), with its architecture."""
    found = []
    for name, architecture in ARCHITECTURES.items():
        if not ARCHITECTURES.built_in(name):  # a plugin of another test
            continue
        for index, choice in enumerate(architecture.layers):
            options = options_of(choice)
            first = choice not in architecture.layers[:index]
            if first and option in options and value in (None, options[option]):
                found.append(pytest.param(choice, id=f"{name}-{index}"))
    return found


def build(choice: LayerChoice, hidden: int = HIDDEN, **options: object) -> None:
    with torch.device("meta"):
        choice.mixer(choice.configure(hidden, options), LayerSpec(hidden=hidden))


@pytest.mark.parametrize("choice", having("heads"))
def test_heads_that_do_not_divide_the_width(choice: LayerChoice):
    build(choice, heads=4)
    with pytest.raises(ConfigError, match=r"by heads: \d+ is not a multiple of 7; choose a divisor of"):
        build(choice, heads=7)
    for heads in (0, -4):
        with pytest.raises(ConfigError, match="option 'heads' of mixer"):
            build(choice, heads=heads)


@pytest.mark.parametrize("option", ["kv_heads", "groups"])
def test_groups_that_do_not_divide_the_heads(option: str):
    choices = [parameter.values[0] for parameter in having(option)]
    assert choices
    for choice in choices:
        build(choice, heads=4, **{option: 2})
        with pytest.raises(ConfigError, match=f"cannot divide heads by {option}: 4 is not a multiple of 3"):
            build(choice, heads=4, **{option: 3})


@pytest.mark.parametrize("choice", having("position", "rope"))
def test_heads_that_rope_cannot_turn(choice: LayerChoice):
    build(choice, heads=8)
    whole = options_of(choice).get("rotary_fraction", 1.0) == 1.0
    message = "RoPE needs an even head size, not 1;" if whole else "leaves RoPE none to rotate"
    with pytest.raises(ConfigError, match=message):
        build(choice, heads=64)
    if whole:
        with pytest.raises(ConfigError, match="RoPE needs an even head size, not 65;"):
            build(choice, hidden=65)


def test_heads_of_memories_that_half_a_width_or_rope_leaves_nothing():
    for use in ("gla", "mlstm"):
        choice = ARCHITECTURES.get(use).layers[0]
        build(choice, heads=32)
        with pytest.raises(
            ConfigError, match=r"^cannot divide half the hidden size by heads: 32 is not a multiple of 64;"
        ):
            build(choice, heads=64)
        with pytest.raises(
            ConfigError, match=r"^cannot divide hidden size in two, for keys: 63 is not a multiple of 2"
        ):
            build(choice, hidden=63, heads=3)
    with pytest.raises(
        ConfigError, match=r"^RoPE needs an even head size, not 1; choose other heads than 64, or another width\.$"
    ):
        build(ARCHITECTURES.get("retnet").layers[0], heads=64)


@pytest.mark.parametrize("use", ["rwkv-5", "rwkv-6", "rwkv-7"])
def test_heads_that_a_norm_per_head_would_empty(use: str):
    choice = ARCHITECTURES.get(use).layers[0]
    build(choice, heads=32)
    with pytest.raises(ConfigError, match=r"each head needs at least 2 channels; choose fewer than 64 heads"):
        build(choice, heads=64)


@pytest.mark.parametrize(("use", "option", "channels"), [("gla", "rank", HIDDEN), ("mamba-1", "dt_rank", 2 * HIDDEN)])
def test_ranks_that_a_linear_map_cannot_have(use: str, option: str, channels: int):
    choice = ARCHITECTURES.get(use).layers[0]
    build(choice, **{option: channels})
    message = rf"^{option}: a map of {channels} channels has no rank of {channels + 1}; choose at most {channels}\.$"
    with pytest.raises(ConfigError, match=message):
        build(choice, **{option: channels + 1})


@pytest.mark.parametrize("option", ["window", "chunk", "remote", "conv_width", "global_width"])
def test_lengths_below_one(option: str):
    choices = [parameter.values[0] for parameter in having(option)]
    assert choices
    for choice in choices:
        for length in (0, -1):
            with pytest.raises(ConfigError, match=f"option '{option}' of mixer .* cannot be {length}"):
                build(choice, **{option: length})


@pytest.mark.parametrize("option", ["temperature", "rope_base", "filter_frequency"])
def test_numbers_without_end(option: str):
    choices = [parameter.values[0] for parameter in having(option)]
    assert choices
    for choice in choices:
        with pytest.raises(ConfigError, match=f"option '{option}' of mixer .* cannot be inf: .* a finite number"):
            build(choice, **{option: float("inf")})


@pytest.mark.parametrize("choice", having("chunk"))
def test_chunks_that_are_no_power_of_two(choice: LayerChoice):
    for chunk in (24, 100, 8, 512):
        with pytest.raises(ConfigError, match=f"cannot be {chunk}: it should be 16, 32, 64, 128 or 256"):
            build(choice, chunk=chunk)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("mamba-2 w/o gm", "mamba-2 w/o gn"),
        ("mamba-1 global selektion", "mamba-1 global selection"),
        ("transformer++ alibo", "transformer++ alibi"),
        ("top1-chunk-aprox", "top1-chunk-approx"),
    ],
)
def test_unknown_variants_suggest_the_nearest(wrong: str, meant: str):
    pattern = (LayerConfig(use="transformer++"), LayerConfig(use=wrong))
    mixed = model_config("transformer++", hidden=HIDDEN, vocab=61, layers=2, pattern=pattern)
    for read in (
        lambda: ARCHITECTURES.get(wrong),
        lambda: model_config(wrong, hidden=HIDDEN, vocab=61),
        mixed.build_mixers,
    ):
        with pytest.raises(ConfigError, match="did you mean") as refused:
            read()
        assert f"'{meant}'" in str(refused.value)
