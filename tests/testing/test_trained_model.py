"""The leak test of trained models: losses on held-out text depend on earlier tokens of their window only."""

import re

import pytest
import torch
from torch import Tensor, nn

from basecap.evals import Context, build_evaluation
from basecap.mixers import ForwardOnly
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.testing.trained_model import find_leaks_untrained
from tests.evals._context import LENGTH, make_context

#: Targets of the pass that runs now, for a mixer that reads them.
SEEN: list[Tensor] = []


class Means(ForwardOnly):
    """The mean of the inputs so far, projected."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.out = nn.Linear(layer.hidden, layer.hidden, bias=False)

    def forward(self, x, segments=None):
        return self.out(self.mixed(x))

    def mixed(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]

    def flops(self, length):
        return 2.0 * length * self.layer.hidden**2


class Ahead(Means):
    def mixed(self, x):
        return x.roll(-1, 1)


class FaintlyAhead(Means):
    def mixed(self, x):
        return super().mixed(x) + 1e-3 * x.roll(-1, 1)


class AheadWithoutGradients(Means):
    def mixed(self, x):
        return x if torch.is_grad_enabled() else x.roll(-1, 1)


class AheadInLargeBatches(Means):
    def mixed(self, x):
        return x.roll(-1, 1) if len(x) > 8 else x


class OtherRows(Means):
    def mixed(self, x):
        return x + x.roll(1, 0).mean(1, keepdim=True)


class ReadsTargets(Means):
    def mixed(self, x):
        own = SEEN[-1] if SEEN and SEEN[-1].shape == x.shape[:2] else torch.zeros(x.shape[:2])
        return x + own[..., None]


class Remembers(Means):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.register_buffer("memory", torch.zeros(layer.hidden))

    def mixed(self, x):
        before = self.memory.clone()
        self.memory.copy_(x.detach().mean((0, 1)))
        return x + before


class RemembersTheFirst(Means):
    """Keeps the sum of the first batch that it reads, so that two passes over a later batch agree."""

    memory = None

    def mixed(self, x):
        self.memory = x.detach().sum((0, 1)) if self.memory is None else self.memory
        return x + self.memory


class Random(Means):
    generator = torch.Generator()

    def mixed(self, x):
        return x * torch.rand(x.shape, generator=self.generator)


class RaisesAtEnd(Means):
    def mixed(self, x):
        raise ValueError("not now")


class Fourier(Means):
    """A causal convolution in float32, whose rounding errors are at every position."""

    def mixed(self, x):
        length = x.shape[1]
        decay = (-0.02 * torch.arange(length)[:, None] * torch.arange(1, x.shape[2] + 1)).exp()
        parts = [torch.fft.rfft(part.float(), n=2 * length, dim=-2) for part in (x, decay)]
        return torch.fft.irfft(parts[0] * parts[1], n=2 * length, dim=1)[:, :length].to(x.dtype)


@pytest.fixture(scope="session")
def context(tmp_path_factory) -> Context:
    return make_context(tmp_path_factory.mktemp("context"))


def leaks_of(architecture: str, context: Context) -> str:
    vocab = context.data.tokenizer.vocab_size
    model = LanguageModel(model_config(architecture, hidden=16, vocab=vocab, layers=2, max_length=LENGTH))
    evaluation = build_evaluation("domain-loss")
    found = find_leaks_untrained(model.initialise(0).eval(), evaluation, context, 0)
    assert found.record().keys() == {"leaks", "raised", "moved", "shapes", "seconds"}
    return found.leaks


@pytest.mark.parametrize("mixer", [Means, Fourier])
def test_a_causal_model_passes(mixer, register, context):
    assert leaks_of(register(mixer), context) == ""


def test_rounding_differs_from_a_leak_however_small(register, context, monkeypatch):
    monkeypatch.setattr("basecap.testing.trained_model.ROUNDING", {torch.float32: 1e-9})
    monkeypatch.setattr("basecap.testing.trained_model._Tester.test_fresh", lambda tester: None)
    assert leaks_of(register(Fourier), context) == ""
    assert leaks_of(register(FaintlyAhead), context).startswith("sees the future after training")


@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (Ahead, r"sees the future after training: of \(\d+, 48\) held-out tokens, the loss at position \d+ changes"),
        (AheadWithoutGradients, "sees the future after training"),
        (AheadInLargeBatches, "sees the future after training"),
        (OtherRows, "sees the future after training"),
        (Remembers, "gives two losses for one window"),
        (RemembersTheFirst, "carries state from batch to batch"),
        (Random, "gives two losses for one window"),
        (RaisesAtEnd, "cannot be tested for leaks .ValueError: not now"),
    ],
)
def test_a_model_that_leaks_is_found(mixer, words, register, context):
    assert re.match(words, leaks_of(register(mixer), context))


def test_a_model_that_reads_the_targets_is_found(register, context, monkeypatch):
    whole = LanguageModel.token_losses

    def spied(model, tokens, targets):
        SEEN[:] = [targets]
        return whole(model, tokens, targets)

    monkeypatch.setattr(LanguageModel, "token_losses", spied)
    assert leaks_of(register(ReadsTargets), context) == "reads the targets: activations change with them"
