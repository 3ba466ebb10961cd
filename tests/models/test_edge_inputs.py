"""What is small, empty or nothing but padding is read right by the models of every architecture, gradients included."""

import pytest
import torch
from torch import Tensor

from basecap.models.config import LayerConfig, model_config
from basecap.models.language_model import LanguageModel
from tests._architectures import distinct_models, one_of_each_kind

VOCAB = 61
#: Of a length of some chunks, and on the grid of none.
LENGTH = 37
#: A model of each kind, with Canon layers and with an embedding of n-grams.
KINDS = [*one_of_each_kind(), "gated-deltanet canon", "transformer++ ngram"]
#: Options with which inputs of that length reach beyond a window or a chunk, and few layers hold every kind.
SHORT = {
    "based": {"window": 16},
    "transformer++ window": {"window": 16},
    "top1-chunk-exact": {"chunk": 16},
    "top1-chunk-approx": {"chunk": 16},
    "mamba-1 global selection lm": {"global_every": 2},
}


def small(name: str) -> LanguageModel:
    """Return a model in float64, every parameter off its start."""
    pattern = (LayerConfig(use=name, mixer=SHORT.get(name, {})),)
    layers = 3 if name == "based" else 2  # with fewer it has no window
    config = model_config(name, hidden=32, vocab=VOCAB, layers=layers, max_length=LENGTH, pattern=pattern)
    model = LanguageModel(config).initialise(0).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # as initialised, some branches are zero
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def draw(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


def gradients(model: LanguageModel, loss: Tensor) -> dict[str, Tensor]:
    """Return every parameter's gradient, zero where the loss does not depend on it."""
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


@pytest.mark.parametrize("name", distinct_models())
def test_any_length_is_read_like_the_start_of_a_longer_text(name: str):
    model, tokens = small(name), draw(2, LENGTH)
    logits = model.logits(tokens)
    for length in (1, 16, 17):
        torch.testing.assert_close(model.logits(tokens[:, :length]), logits[:, :length])
    loss = model(tokens[:, :1], tokens[:, 1:2])
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits[:, 0], tokens[:, 1]))
    assert all(grad.isfinite().all() for grad in gradients(model, loss).values())


@pytest.mark.parametrize("name", KINDS)
def test_padding_teaches_nothing(name: str):
    model, tokens = small(name), draw(2, LENGTH)
    segments, targets = torch.zeros_like(tokens), tokens.roll(-1, dims=1)
    segments[0, 19:], segments[1] = 4, 7  # a padded tail, and a row of padding
    targets[0, 19:], targets[1] = -1, -1
    padded, alone = model(tokens, targets, segments), model(tokens[:1, :19], targets[:1, :19])
    torch.testing.assert_close(padded, alone)
    expected = gradients(model, alone)
    for key, grad in gradients(model, padded).items():
        torch.testing.assert_close(
            grad, expected[key], rtol=1e-6, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}"
        )
    nothing = model(tokens, torch.full_like(tokens, -1), segments)
    assert nothing == 0
    assert all((grad == 0).all() for grad in gradients(model, nothing).values())


@pytest.mark.parametrize("name", KINDS)
def test_an_empty_batch_stays_empty(name: str):
    model, nobody = small(name), draw(0, 5)
    assert model.logits(nobody).shape == model.logits(nobody, nobody).shape == (0, 5, VOCAB)
    loss = model(nobody, nobody)
    assert loss == 0
    assert all((grad == 0).all() for grad in gradients(model, loss).values())
    with torch.no_grad():
        caches = model.init_cache(0, 8)
        assert model.prefill(nobody, caches).shape == (0, VOCAB)
        assert model.step(nobody[:, :1], caches).shape == (0, VOCAB)
