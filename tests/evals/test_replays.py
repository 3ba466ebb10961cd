"""Passes of evaluations as CUDA graphs: the numbers of passes without, to the bit, whatever the weights are by then."""

from dataclasses import replace
from itertools import count

import pytest
import torch

from basecap.errors import TrainingError
from basecap.evals import Context, Outcome, ReplayedPasses, build_evaluation
from basecap.models.language_model import LanguageModel
from tests.train._graphs import RecordedPool, read_back

#: Passes of one row of 48 tokens and of three of 16, at least four of each at a point.
EVALUATIONS = [
    {"domain-loss": {"tokens_per_batch": 48, "max_document_tokens": 64}},
    {"copying": {"tokens_per_batch": 48, "documents": 4}},
]


@pytest.fixture
def own(model, monkeypatch) -> LanguageModel:
    """A model that reads passes of two lengths, as a compiled one does; what it computes is not compiled here."""
    monkeypatch.setattr("basecap.evals._passes.SHORTEST", 8)
    monkeypatch.setattr("basecap.evals._passes.SHORT", 0.7)
    own = LanguageModel(model.config).initialise(0).eval()
    own.compiled = True
    return own


def points(model: LanguageModel, context: Context) -> list[Outcome]:
    """Evaluate a model at two points of its training."""
    evaluations, found = [build_evaluation(entry) for entry in EVALUATIONS], []
    with torch.no_grad():
        for seed in range(2):
            model.load_state_dict(LanguageModel(model.config).initialise(seed).state_dict())
            found += [evaluation.run(model, context) for evaluation in evaluations]
    return found


def numbers(outcomes: list[Outcome]) -> list:
    return [
        (outcome.measurements, [losses.nats.tolist() for losses in outcome.documents.values()]) for outcome in outcomes
    ]


def test_replayed_passes_give_the_numbers_of_ordinary_ones_to_the_bit(own, context, monkeypatch):
    monkeypatch.setattr(RecordedPool, "captures", 0)
    expected, said = points(own, context), []
    replays = ReplayedPasses(own, said.append, RecordedPool)
    assert numbers(points(own, replace(context, replays=replays))) == numbers(expected)
    assert RecordedPool.captures == 2 and said == []  # one of each length
    other = LanguageModel(own.config).initialise(1).eval()
    other.compiled = True
    assert numbers(points(other, replace(context, replays=replays))) == numbers(points(other, context))
    assert RecordedPool.captures == 2  # of another model none is replayed


def test_passes_with_hooks_are_not_replayed(own, context):
    seen, replays = [], ReplayedPasses(own, pool=RecordedPool)
    points(own, replace(context, replays=replays))
    own.norm.register_forward_hook(lambda module, given, output: seen.append(output.sum().item()))
    points(own, context)
    expected = seen.copy()
    seen.clear()
    points(own, replace(context, replays=replays))
    assert seen == expected != []


class WrongPool(RecordedPool):
    """Replays that do nothing any more, from one of them on."""

    right = 0

    def capture(self, run):
        replay, calls = super().capture(run), count()
        return lambda: replay() if next(calls) < self.right else None


def test_later_replays_that_are_wrong_end_a_run(own, context, monkeypatch):
    monkeypatch.setattr(WrongPool, "right", 2)
    with pytest.raises(TrainingError, match="differs from an ordinary one"):
        points(own, replace(context, replays=ReplayedPasses(own, pool=WrongPool)))


@pytest.mark.parametrize("fault", ["reads", "large", "full", "wrong"])
def test_passes_that_cannot_be_captured_are_ordinary_ones_and_that_is_said_once(fault, own, context, monkeypatch):
    def refuse(pool, run):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    if fault == "reads":
        compute = own.token_losses
        own.token_losses = lambda *given, **options: read_back(own, given, compute(*given, **options))
    elif fault == "large":
        monkeypatch.setattr(RecordedPool, "taken", 501)
    elif fault == "full":
        monkeypatch.setattr(RecordedPool, "capture", refuse)
    expected, said = points(own, context), []
    pool = WrongPool if fault == "wrong" else RecordedPool
    found = points(own, replace(context, replays=ReplayedPasses(own, said.append, pool)))
    reason = {
        "reads": "operation not permitted when stream is capturing",
        "large": "a pass takes 0.0 GiB, more than half of the free memory",
        "full": "CUDA out of memory. Tried to allocate 2 GiB",
        "wrong": "a replay differs from an ordinary pass",
    }[fault]
    assert numbers(found) == numbers(expected)
    assert said == [f"evaluation passes are not CUDA graphs: {reason}."]
