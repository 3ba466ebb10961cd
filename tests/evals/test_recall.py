"""Recall: only what a task asks for counts, wherever it stands and however many processes share the cells."""

import contextlib
from dataclasses import replace

import pytest
import torch

from basecap.data.task_config import TaskSection
from basecap.data.task_data import TaskData
from basecap.evals import Context, build_evaluation, recall
from basecap.evals.recall import answers
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel

SECTION = TaskSection(
    train=("mqar",),
    test=("mqar-k2v2", "mqar-position-robustness"),
    options={"vocab": 64},
    cells=({"length": 64, "pairs": 2}, {"length": 128, "pairs": 4}),
    held_out=6,
)


@pytest.fixture
def context() -> Context[TaskData]:
    return Context(data=TaskData(SECTION, "mqar"), device=torch.device("cpu"), autocast=contextlib.nullcontext)


@pytest.fixture
def model() -> LanguageModel:
    config = model_config("transformer++", hidden=32, vocab=SECTION.vocabulary, layers=1, max_length=128)
    return LanguageModel(config).initialise(0)


def measured(model, context, **options):
    with torch.no_grad():
        found = build_evaluation({"recall": options} if options else "recall").run(model, context).measurements
    return {(row.subset, row.metric, row.axis["length"]): row for row in found}


def test_answers_are_the_most_probable_tokens_of_all(model, context, monkeypatch):
    examples = context.data.held_out("test", context.data.tests["mqar-k2v2"][1])
    inputs, groups = torch.from_numpy(examples.inputs), torch.from_numpy(examples.groups)
    monkeypatch.setattr(recall, "LOGITS", 5 * model.config.vocab)
    with torch.no_grad():
        expected = torch.where(groups >= 0, model.logits(inputs).argmax(-1), -1)
        assert torch.equal(answers(model, context, inputs, groups), expected)


def test_a_model_that_is_right_scores_one_and_one_wrong_token_costs_a_value_and_a_case(model, context, monkeypatch):
    def solved(model, context, inputs, groups):
        found = next(made for made in every if torch.equal(torch.from_numpy(made.inputs), inputs))
        predictions = torch.from_numpy(found.targets.copy())
        if found.choices is None and found.inputs.shape[1] == 128:
            row, place = (groups >= 0).nonzero()[1].tolist()
            predictions[row, place] = 0
        return predictions

    cells = [cell for cells in context.data.tests.values() for cell in cells]
    every = [context.data.held_out("test", cell) for cell in cells]
    every += [context.data.held_out("validation", cell) for cell in context.data.cells]
    monkeypatch.setattr(recall, "answers", solved)
    found = measured(model, context)
    assert len(found) == 2 * (2 + 6 + 2)
    assert found["mqar-k2v2", "accuracy", 64.0].value == 1.0
    wrong = found["mqar-k2v2", "accuracy", 128.0]
    assert (wrong.value, wrong.n, wrong.axis) == (23 / 24, 24, {"length": 128.0, "pairs": 4.0})
    assert (found["mqar-k2v2", "case_accuracy", 128.0].value, wrong.stderr) == (5 / 6, None)
    assert found["mqar", "validation_accuracy", 128.0].value == 23 / 24
    regions = [found["mqar-position-robustness", f"region_{number}", 64.0].value for number in (1, 2, 3, 4)]
    assert regions == [1.0, 0.0, 0.0, 0.0]  # targets hold the values of the first region


def test_processes_share_the_cells_and_the_batch_does_not_matter(model, context):
    whole = measured(model, context)
    evaluation = build_evaluation({"recall": {"tokens_per_batch": 200}})
    with torch.no_grad():
        parts = [evaluation.run(model, replace(context, rank=rank, world=3)) for rank in range(3)]
        evaluation.trial(model, context)
    joined = evaluation.join(parts).measurements
    assert {(row.subset, row.metric, row.axis["length"]): row for row in joined} == whole
    assert set(evaluation.expects(context.data)) <= {(row.subset, row.metric) for row in joined}
