"""What a language model cannot read is refused in one sentence, whatever its mixers."""

import pytest
import torch

from basecap.errors import ConfigError
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel

USES = ["hyena", "rwkv-4", "based linear", "transformer", "transformer++"]


def small(use: str) -> LanguageModel:
    return LanguageModel(model_config(use, hidden=32, vocab=61, layers=2, max_length=32)).initialise(0)


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("use", USES)
def test_segments_that_do_not_fit(use: str):
    model = small(use)
    for shape in ((2, 8), (2, 10), (1, 9), (9,)):
        with pytest.raises(ConfigError, match=r"segments .* must be \[B, T\] = \(2, 9\)"):
            model.logits(tokens(2, 9), torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(ConfigError, match="segments is on meta but tokens on cpu"):
        model(tokens(2, 9), tokens(2, 9), torch.zeros(2, 9, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("use", USES)
def test_no_token(use: str):
    model, nothing = small(use), tokens(2, 0)
    caches = model.init_cache(2, 8)
    for read in (
        lambda: model.logits(nothing),
        lambda: model(nothing, nothing),
        lambda: model.prefill(nothing, caches),
        lambda: model.step(nothing, caches),
        lambda: model.logits(tokens(1, 5)[0]),
    ):
        with pytest.raises(ConfigError, match=r"tokens .* must be \[B, T\] with at least one token"):
            read()


@pytest.mark.parametrize("use", USES)
@torch.no_grad()
def test_a_second_prompt_into_the_same_caches(use: str):
    model, prompt = small(use), tokens(2, 5)
    for start in (model.prefill, lambda prompt, caches: model.step(prompt[:, :1], caches)):
        caches = model.init_cache(2, 16)
        start(prompt, caches)
        with pytest.raises(ConfigError, match=r"the caches have seen \d tokens; prefill new ones"):
            model.prefill(prompt, caches)


@pytest.mark.parametrize("use", ["transformer", "transformer++ absolute"])
def test_a_text_longer_than_the_learned_positions(use: str):
    model, text = small(use), tokens(2, 33)
    for read in (
        lambda: model.logits(text),
        lambda: model(text, text),
        lambda: model.token_losses(text, text),
        lambda: model.logits(text, torch.zeros_like(text)),
        lambda: model.prefill(text, small("transformer++").init_cache(2, 33)),
    ):
        with pytest.raises(ConfigError, match="learned positions end at 32 tokens; take at most that many, not 33"):
            read()
    packed = torch.tensor([[0] * 31 + [1] * 2] * 2)
    torch.testing.assert_close(model.logits(text, packed)[:, 31:], model.logits(text[:, 31:]))


@pytest.mark.parametrize("use", USES)
@torch.no_grad()
def test_a_step_of_several_tokens(use: str):
    model, text = small(use), tokens(2, 7)
    caches = model.init_cache(2, 8)
    model.prefill(text[:, :5], caches)
    with pytest.raises(ConfigError, match="a step reads one token at a time, not 2; read a prompt with prefill"):
        model.step(text[:, 5:], caches)
