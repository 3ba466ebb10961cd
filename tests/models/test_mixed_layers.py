"""Models of several mixers, and mixers in a backbone that is not their own, decode as they compute in training."""

import pytest
import torch

from basecap.errors import ConfigError
from basecap.mixers import Cache, _cache
from basecap.models.config import LayerConfig, model_config
from basecap.models.language_model import LanguageModel

LENGTH, PROMPT = 80, 50


def layers(*uses: str) -> tuple[LayerConfig, ...]:
    small = {
        "transformer++": {"heads": 2},
        "transformer++ window": {"heads": 2, "window": 9},
        "top1-chunk-exact": {"heads": 2, "chunk": 16},
    }
    return tuple(LayerConfig(use=use, mixer=small.get(use, {})) for use in uses)


@pytest.mark.parametrize(
    ("backbone", "pattern"),
    [
        ("transformer++", ["mamba-2", "mamba-2", "mamba-2", "top1-chunk-exact"]),
        ("rwkv-7", ["top1-chunk-exact"]),
        ("rwkv-7", ["rwkv-7", "transformer++"]),
    ],
)
def test_a_mixed_model_decodes_as_it_prefills(backbone: str, pattern: list[str]):
    config = model_config(backbone, hidden=64, vocab=50, layers=4, pattern=layers(*pattern), max_length=LENGTH)
    model = LanguageModel(config).initialise(0).double()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (2, LENGTH), generator=generator)
    with torch.no_grad():
        for parameter in model.parameters():  # as initialised, some branches are zero
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        logits, caches = model.logits(tokens), model.init_cache(2, LENGTH)
        found = [model.prefill(tokens[:, :PROMPT], caches)]
        found += [model.step(tokens[:, t : t + 1], caches) for t in range(PROMPT, LENGTH)]
        torch.testing.assert_close(torch.stack(found, dim=1), logits[:, PROMPT - 1 :])
        caches = model.init_cache(2, LENGTH)
        found = [model.step(tokens[:, t : t + 1], caches) for t in range(LENGTH)]
    torch.testing.assert_close(torch.stack(found, dim=1), logits)


@pytest.mark.parametrize(
    ("backbone", "pattern", "read"),
    [
        ("rwkv-7", ["rwkv-7", "hyena", "transformer++ window"], 16),
        ("rwkv-7", ["rwkv-7", "transformer++"], PROMPT),  # keys and values grow with the prompt
    ],
)
def test_a_long_prompt_is_read_in_pieces(backbone: str, pattern: list[str], read: int, monkeypatch):
    monkeypatch.setattr("basecap.models.language_model.PIECE", 16)
    config = model_config(backbone, hidden=64, vocab=50, layers=3, pattern=layers(*pattern), max_length=12)
    model = LanguageModel(config).initialise(0).double()
    tokens, seen = torch.randint(50, (2, LENGTH), generator=torch.Generator().manual_seed(0)), []
    prefill = model.blocks[0].mixer.prefill
    monkeypatch.setattr(model.blocks[0].mixer, "prefill", lambda x, *rest: seen.append(x.shape[1]) or prefill(x, *rest))
    with torch.no_grad():
        caches, logits = model.init_cache(2, LENGTH), model.logits(tokens)
        torch.testing.assert_close(model.prefill(tokens[:, :PROMPT], caches), logits[:, PROMPT - 1])
        assert model.reads(PROMPT) == max(seen) == read and sum(seen) == PROMPT
        for t in range(PROMPT, PROMPT + 8):
            torch.testing.assert_close(model.step(tokens[:, t : t + 1], caches), logits[:, t])


@pytest.mark.parametrize(
    ("backbone", "pattern"),
    [
        ("transformer++ absolute", ["top1-chunk-exact", "transformer++"]),
        ("mamba-2", ["mamba-2", "hyena"]),
        ("rwkv-7", ["rwkv-7", "top1-element"]),
    ],
)
@pytest.mark.parametrize("lengths", [[30, 1, PROMPT, 30], [23, 20, 21, 22]], ids=["one by one", "in pieces"])
def test_prompts_of_any_lengths_decode_as_each_alone(backbone: str, pattern: list[str], lengths: list[int]):
    config = model_config(backbone, hidden=64, vocab=50, layers=2, pattern=layers(*pattern), max_length=LENGTH)
    model = LanguageModel(config).initialise(0).double()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (4, LENGTH), generator=generator)
    lengths = torch.tensor(lengths)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        logits, caches = model.logits(tokens), model.init_cache(4, LENGTH)
        found = model.prefill_each([row[:length] for row, length in zip(tokens, lengths, strict=True)], caches)
        torch.testing.assert_close(found, logits[torch.arange(4), lengths - 1])
        for kept in ([0, 1, 2, 3], [2, 1], [0, 1, 0]):  # all, some in another order, one of these twice
            tokens, lengths, logits = tokens[kept], lengths[kept], logits[kept]
            caches, row = [cache.take(torch.tensor(kept)) for cache in caches], torch.arange(len(kept))
            for _ in range(10):
                found = model.step(tokens[row, lengths, None], caches)
                torch.testing.assert_close(found, logits[row, lengths])
                lengths = lengths + 1


PADDED = [(11, 66), (11, 55), (11, 44), (11, 33), (11, 22), (9, 11)]
PIECES = [(64, 3), (32, 32), (32, 16), (32, 8), (32, 4), (32, 2), (32, 1)]
SMALL_PIECES = [(64, 3), *4 * [(8, 32)], *2 * [(16, 16)], (32, 8), (32, 4), (32, 2), (32, 1)]


@pytest.mark.parametrize(("use", "shapes"), [("transformer++", PADDED), ("transformer++ canon-a", PIECES)])
def test_prompts_of_many_lengths_take_few_passes(use: str, shapes: list, monkeypatch: pytest.MonkeyPatch):
    model = LanguageModel(model_config(use, hidden=16, vocab=50, layers=1)).initialise(0)
    prompts = [torch.arange(length) % 50 for length in range(3, 67)]
    passes, read = [], model._read

    def watched(tokens: torch.Tensor, *rest, **options) -> torch.Tensor:
        passes.append(tuple(tokens.shape))
        return read(tokens, *rest, **options)

    monkeypatch.setattr(model, "_read", watched)
    found = model.prefill_each(prompts, model.init_cache(len(prompts), 70))
    assert passes == shapes
    for prompt, own in zip(prompts, found, strict=True):
        torch.testing.assert_close(own, model.prefill(prompt[None], model.init_cache(1, 70))[0])
    monkeypatch.setattr(_cache, "PADDING_ON_CPU", 5_000)
    passes.clear()
    caches = model.init_cache(len(prompts), 70)
    torch.testing.assert_close(model.prefill_each(prompts, caches, at_once=256), found)
    assert passes == SMALL_PIECES if shapes is PIECES else all(rows * most <= 256 for rows, most in passes)


@pytest.mark.parametrize("use", ["transformer++", "rwkv-7"])
def test_equal_prompts_are_read_in_passes_too(use: str, monkeypatch: pytest.MonkeyPatch):
    model = LanguageModel(model_config(use, hidden=16, vocab=50, layers=1)).initialise(0)
    prompts_BT, passes = torch.arange(5 * 9).view(5, 9), []
    expected, read = model.prefill(prompts_BT, model.init_cache(5, 9)), model._read

    def watched(tokens: torch.Tensor, *rest, **options) -> torch.Tensor:
        passes.append(tuple(tokens.shape))
        return read(tokens, *rest, **options)

    monkeypatch.setattr(model, "_read", watched)
    found = model.prefill_each([*prompts_BT], model.init_cache(5, 9), at_once=20)
    torch.testing.assert_close(found, expected)
    assert passes == [(2, 9), (2, 9), (1, 9)]


@pytest.mark.parametrize("lengths", [[0], [3, 0], [0, 1, 2, 3]])
def test_an_empty_prompt_is_refused(lengths: list[int]):
    model = LanguageModel(model_config("transformer++", hidden=16, vocab=50, layers=1)).initialise(0)
    prompts = [torch.arange(length) for length in lengths]
    with pytest.raises(ConfigError, match="with at least one token"):
        model.prefill_each(prompts, model.init_cache(len(prompts), 9))


def test_a_state_that_grows_is_refused_for_prompts_of_different_lengths():
    cache = Cache(tensors={"past": torch.zeros(2, 3, 8)})
    grown = Cache(tensors={"past": torch.zeros(1, 4, 8)})
    with pytest.raises(ConfigError, match=r"'past' changes its shape from \[3, 8\] to \[4, 8\]"):
        cache.put(grown, torch.tensor([1]))
