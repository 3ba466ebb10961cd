"""The leak test of trained models: losses on held-out text depend on earlier tokens of their window only."""

import re

import pytest
import torch
from torch import Tensor, nn

from basecap.evals import Context, build_evaluation
from basecap.mixers import ForwardOnly
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.plugins import load_plugin
from basecap.testing.fresh_process import FreshProcess, NotRunError, StoredModel
from basecap.testing.trained_model import _Tester, find_leaks, find_leaks_untrained
from basecap.train.checkpoint import save_weights
from tests.evals._context import LENGTH, make_context
from tests.forks import Answering

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


class SometimesAhead(Means):
    def mixed(self, x):
        return x.roll(-1, 1) if torch.rand(()) < 0.1 else x


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
    torch.manual_seed(0)  # of models that draw random numbers
    found = find_leaks_untrained(model.initialise(0).eval(), evaluation, context, 0)
    keys = {"leaks", "raised", "moved", "shapes", "fresh_process", "untested", "seconds"}
    assert found.record().keys() == keys and found.untested == []
    return found.leaks


@pytest.mark.parametrize("mixer", [Means, Fourier])
def test_a_causal_model_passes(mixer, register, context):
    assert leaks_of(register(mixer), context) == ""


def test_rounding_differs_from_a_leak_however_small(register, context, monkeypatch):
    monkeypatch.setattr("basecap.testing.trained_model.ROUNDING", {torch.float32: 1e-9})
    monkeypatch.setattr("basecap.testing.trained_model._Tester.test_fresh", lambda tester: None)
    assert leaks_of(register(Fourier), context) == ""
    assert leaks_of(register(FaintlyAhead), context).startswith("sees the future in held-out text")


@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (Ahead, r"sees the future in held-out text: of \(\d+, 48\) tokens, the loss at position \d+ changes"),
        (AheadWithoutGradients, "sees the future in held-out text"),
        (AheadInLargeBatches, "sees the future in held-out text"),
        (OtherRows, "sees the future in held-out text"),
        (Remembers, "gives two losses for one window"),
        (RemembersTheFirst, "carries state from batch to batch"),
        (Random, "gives two losses for one window"),
        (SometimesAhead, "sees the future in held-out text"),
        (RaisesAtEnd, "cannot be tested for leaks .ValueError: not now"),
    ],
)
def test_a_model_that_leaks_is_found(mixer, words, register, context):
    assert re.match(words, leaks_of(register(mixer), context))


def test_a_model_that_reads_the_targets_is_found(register, context, monkeypatch):
    whole = LanguageModel.token_losses

    def spied(model, tokens, targets, **options):
        SEEN[:] = [targets]
        return whole(model, tokens, targets, **options)

    monkeypatch.setattr(LanguageModel, "token_losses", spied)
    assert leaks_of(register(ReadsTargets), context) == "reads the targets: activations change with them"


OUTSIDE = """
import torch
from torch import nn
from basecap.mixers import ForwardOnly, mixer

FIRST = []

@mixer("NAME", backbone="transformer++", paper="none", summary="keeps the first batch that its process reads")
class Outside(ForwardOnly):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.out = nn.Linear(layer.hidden, layer.hidden, bias=False)

    def forward(self, x, segments=None):
        FIRST.append(x.detach().mean((0, 1)))
        return self.out(x + FIRST[0] * WEIGHT)

    def flops(self, length):
        return 2.0 * length * self.layer.hidden**2
"""


LACK = "9.0 GiB of cuda:0, which has 1.0 free"


@pytest.mark.parametrize(
    ("weight", "words", "lacks"),
    [
        ("1.0", "carries state outside the model: in a new process, with the same weights", [None]),
        ("1.00", "carries state outside the model: in a new process, with the same weights", [LACK, None]),
        ("0.0", "", [None]),
        ("0.00", "", [LACK, LACK]),
    ],
    ids=["state", "state, room once this process has tested", "none", "no room"],
)
def test_state_outside_the_model_is_found_in_a_new_process(weight, words, lacks, context, tmp_path, monkeypatch):
    if words or len(lacks) > 1:  # a fork has not read the plugin either, and starts at once
        monkeypatch.setattr(FreshProcess, "__init__", lambda self: setattr(self, "_process", Answering()))
    asked_before, last, early = lacks == [None], lacks[-1], []
    monkeypatch.setattr("basecap.testing.trained_model.lack_of_memory", lambda question: lacks.pop(0))
    name = f"outside {weight}"
    path = tmp_path / f"outside_{weight.replace('.', '_')}.py"
    path.write_text(OUTSIDE.replace("NAME", name).replace("WEIGHT", weight))
    plugins = {path: load_plugin(path)}
    vocab = context.data.tokenizer.vocab_size
    model = LanguageModel(model_config(name, hidden=16, vocab=vocab, layers=2, max_length=LENGTH)).initialise(0)
    model(*torch.zeros(2, 1, 8, dtype=torch.int64))
    save_weights(tmp_path, model, 1)
    stored = StoredModel(weights=tmp_path / "step-1", plugins=plugins)
    evaluation = build_evaluation("domain-loss")
    with FreshProcess() as process:
        test_fresh = _Tester.test_fresh
        monkeypatch.setattr(_Tester, "test_fresh", lambda own: (early.append(process.asked), test_fresh(own)))
        found = find_leaks(model.eval(), evaluation, context, 0, whole=False, elsewhere=(process, stored))
    assert found.leaks.startswith(words) and bool(found.leaks) == bool(words) and early == [asked_before]
    assert found.fresh_process == (words == "" and last is None)
    assert found.untested == ([] if last is None else [f"a new process: it needs {LACK}"])


def test_what_does_not_fit_is_named(register, context, monkeypatch):
    monkeypatch.setattr("basecap.testing.trained_model.BUDGET", -1.0)
    vocab = context.data.tokenizer.vocab_size
    model = LanguageModel(model_config(register(Ahead), hidden=16, vocab=vocab, layers=1, max_length=LENGTH))
    found = find_leaks_untrained(model.initialise(0).eval(), build_evaluation("domain-loss"), context, 0)
    assert (found.leaks, found.shapes) == ("", [])
    assert re.fullmatch(r"\d+ x 48 tokens: the -1 s of the test are over", found.untested[0])


@pytest.mark.parametrize(
    ("code", "seconds", "error", "words"),
    [
        ("import time; time.sleep(60)", 0.1, NotRunError, "it took more than 0 s"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 60, NotRunError, "its process was killed"),
        ("pass", 60, RuntimeError, "a new process ended without an answer"),
    ],
)
def test_a_new_process_that_does_not_answer(code, seconds, error, words, monkeypatch):
    monkeypatch.setattr("basecap.testing.fresh_process.PROGRAM", code)
    with FreshProcess() as process:
        process.ask([], seconds)
        with pytest.raises(error, match=words):
            process.answers()
