"""A graph of a step writes the tokens that steps from Python write, and what cannot be one is said and runs."""

import pytest
import torch

from basecap.mixers import ARCHITECTURES
from basecap.models import decoding_steps, generate
from basecap.models.config import model_config
from basecap.models.decoding_steps import GraphSteps, PythonSteps, refusal, steps_of
from basecap.models.language_model import LanguageModel
from basecap.testing.marks import requires_gpu
from tests.recorded_graph import recorded


def names() -> list[str]:
    """Return the first name of each set of mixers, and attention that keeps its state in other ways."""
    found: dict[object, str] = {}
    for name, architecture in ARCHITECTURES.items():
        found.setdefault(frozenset(choice.mixer for choice in architecture.layers), name)
    own = ("transformer", "transformer++ window", "transformer++ alibi", "transformer++ ngram", "fox pro")
    return sorted({*found.values(), *own})


def small(name: str) -> LanguageModel:
    return LanguageModel(model_config(name, hidden=32, vocab=31, layers=2, max_length=64)).initialise(0)


def prompts(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 31, (length,), generator=generator) for length in lengths]


class Graphs:
    """Stands in for a GPU: steps are recorded on the CPU and replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capture=recorded):
        self.captures = self.replays = 0
        self._capture = capture
        monkeypatch.setattr(generate, "steps_of", lambda *given: GraphSteps(*given, capture=self.capture))
        for name, value in (("LEAST", 4), ("SMALLEST", 8)):
            monkeypatch.setattr(decoding_steps, name, value)

    def capture(self, run):
        replay = self._capture(run)
        self.captures += 1

        def counted():
            self.replays += 1
            replay()

        return counted


@pytest.mark.parametrize("name", names())
def test_a_graph_writes_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch):
    model, given = small(name), prompts(2, 5)
    assert refusal(model) is None
    expected = generate.generate_each(model, given, 7, temperature=1.0)
    graphs = Graphs(monkeypatch)
    monkeypatch.setattr(decoding_steps, "LEAST", 1)
    assert generate.generate_each(model, given, 7, temperature=1.0) == expected
    # Rooms of 8 and 11 tokens; the first step of each runs from Python.
    assert (graphs.captures, graphs.replays) == (2, 6 - 2)


def test_a_graph_serves_until_half_of_the_sequences_have_ended(monkeypatch: pytest.MonkeyPatch):
    model, given = small("transformer++ window"), prompts(3, 3, 3, 3)
    expected = generate.generate_each(model, given, 12, temperature=1.0)
    lengths = dict(zip((one[0] for one in expected), (2, 5, 8, 12), strict=True))
    graphs = Graphs(monkeypatch)
    ends = 4 * [lambda one: len(one) == lengths[one[0]]]
    found = generate.generate_each(model, given, 12, temperature=1.0, ends=ends)
    assert found == [one[: lengths[one[0]]] for one in expected]
    assert graphs.captures == 3 and graphs.replays == 11 - 3  # of four, two and one sequences


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "from Python" in record.getMessage()]


def test_what_cannot_be_captured_runs_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(run):
        raise RuntimeError("operation not permitted.\nmore")

    model, given = small("transformer++"), prompts(3)
    expected = generate.generate_each(model, given, 9)
    decoding_steps._from_python.cache_clear()
    Graphs(monkeypatch, refuse)
    assert [generate.generate_each(model, given, 9) for _ in range(2)] == [expected] * 2
    (sentence,) = said(caplog)
    assert sentence.endswith("because its step cannot be captured (operation not permitted).")


def test_a_layer_that_replaces_its_state_is_not_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    model, given = small("rwkv-7"), prompts(3)
    expected = generate.generate_each(model, given, 9)
    mixer = model._blocks[1].mixer
    step = mixer.step

    def replacing(x, cache, *more):
        cache.tensors = {name: tensor.clone() for name, tensor in cache.tensors.items()}
        return step(x, cache, *more)

    monkeypatch.setattr(mixer, "step", replacing)
    graphs = Graphs(monkeypatch)
    assert generate.generate_each(model, given, 9) == expected and graphs.captures == 0
    assert "new tensors" in said(caplog)[0]


def test_only_a_gpu_with_many_steps_and_layers_that_take_lengths_has_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def kind(room: int) -> type:
        lengths = decoding_steps.Lengths(torch.tensor([4]), 4, 4 + room)
        return type(steps_of(model, model.init_cache(1, 64), lambda logits, draws: draws, lengths))

    model = small("transformer++")
    assert kind(decoding_steps.LEAST) is PythonSteps
    monkeypatch.setattr(decoding_steps, "_on_gpu", lambda model: True)
    assert kind(decoding_steps.LEAST) is GraphSteps and kind(decoding_steps.LEAST - 1) is PythonSteps
    monkeypatch.setattr(type(model._blocks[0].mixer), "takes_lengths", False)
    assert kind(decoding_steps.LEAST) is PythonSteps
    assert "because Attention does not take sequences of different lengths" in said(caplog)[0]


@pytest.mark.parametrize("name", ["transformer++", "rwkv-7", "mamba-2", "top1-chunk-exact", "fox", "kda 3:1"])
class TestOnGpu:
    pytestmark = requires_gpu

    def test_tokens_are_those_of_steps_from_python(self, name: str, monkeypatch: pytest.MonkeyPatch):
        model = LanguageModel(model_config(name, hidden=256, vocab=257, layers=4, max_length=512)).initialise(0).cuda()
        given = [prompt.cuda() for prompt in prompts(40, 70)]
        found = [generate.generate_each(model, given, 300, temperature=t) for t in (0.0, 1.0)]
        monkeypatch.setattr(decoding_steps, "_on_gpu", lambda model: False)
        assert found == [generate.generate_each(model, given, 300, temperature=t) for t in (0.0, 1.0)]
