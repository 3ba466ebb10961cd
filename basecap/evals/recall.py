"""Recall: the share of a task's queries that a model answers correctly."""

from collections.abc import Collection, Iterator

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from basecap.data.config import Count
from basecap.data.task_data import TaskData
from basecap.evals._contract import Context, EvaluationConfig, Measurement, Outcome, SharedEvaluation, evaluation
from basecap.models.language_model import LanguageModel
from basecap.tasks import NOTHING, Instances, Ints

#: Maximum number of logits computed at a time.
LOGITS = 2**25


@evaluation("recall", unit="share", better="higher")
class Recall(SharedEvaluation[TaskData]):
    """Accuracy of the most likely token, on the test tasks and on validation examples of the run's task.

    All cells of the tasks are measured; the axes of a number are those of its task. `accuracy` is the share of queried
    values with all tokens right, `case_accuracy` the share of examples with all values right. In tasks with one right
    value per region of the context, `region_1` and so on are the shares of queried values that are answered with the
    value of that region.
    """

    class Config(EvaluationConfig):
        """Options of recall."""

        tokens_per_batch: Count = Field(32_768, ge=1, le=2**30, description="tokens per forward pass")

    config: Config
    needs = "task"
    reduced_by = "task.held_out"

    def expects(self, data: TaskData) -> Collection[tuple[str, str]]:
        """Return the accuracy of every test task."""
        return [(name, "accuracy") for name in data.tests]

    def tokens_read(self, data: TaskData, length: int) -> int:
        """Return how many tokens the examples of all cells have."""
        cells = [cell for cells in (data.cells, *data.tests.values()) for cell in cells]
        return data.held_out_examples * sum(cell.length for cell in cells)

    def run(self, model: LanguageModel, context: Context[TaskData]) -> Outcome:
        """Return the accuracies of this process's share of the cells."""
        data, measurements = context.data, []
        tests = [("", name, cell) for name, cells in data.tests.items() for cell in cells]
        jobs = [*tests, *(("validation_", data.task, cell) for cell in data.cells)]
        for prefix, name, cell in jobs[context.rank :: context.world]:
            examples = data.held_out("validation" if prefix else "test", cell)
            axis = {key: float(value) for key, value in cell.cell.items()}
            for metric, value, n in _scores(examples, self._answers(model, context, examples), regions=not prefix):
                measurements.append(Measurement(subset=name, metric=prefix + metric, value=value, n=n, axis=axis))
        return Outcome(measurements=measurements)

    def trial(self, model: LanguageModel, context: Context[TaskData]) -> None:
        """Predict the answers of one batch of the longest examples."""
        longest = max((cell for cells in context.data.tests.values() for cell in cells), key=lambda cell: cell.length)
        examples = context.data.held_out("test", longest)
        rows = max(1, self.config.tokens_per_batch // longest.length)
        answers(model, context, torch.from_numpy(examples.inputs[:rows]), torch.from_numpy(examples.groups[:rows]))

    def _answers(self, model: LanguageModel, context: Context[TaskData], examples: Instances) -> Ints:
        """Return the model's tokens at the scored positions: int64 [N, T], -1 elsewhere."""
        rows = max(1, self.config.tokens_per_batch // examples.inputs.shape[1])
        inputs, groups = torch.from_numpy(examples.inputs), torch.from_numpy(examples.groups)
        parts = zip(inputs.split(rows), groups.split(rows), strict=True)
        return torch.cat([answers(model, context, *part) for part in parts]).numpy()


def answers(model: LanguageModel, context: Context[TaskData], inputs_BT: Tensor, groups_BT: Tensor) -> Tensor:
    """Return the most likely next token at positions with a group, int64 [B, T] on the CPU, -1 elsewhere.

    The head, whose output is the largest tensor of the model, is only applied at those positions.
    """
    asked = groups_BT != NOTHING
    found = torch.full(inputs_BT.shape, NOTHING, dtype=torch.int64)
    with context.autocast():
        hidden = model.hidden(inputs_BT.to(context.device))[asked.to(context.device)]
        parts = hidden.split(max(1, LOGITS // model.config.vocab))
        tokens = [nn.functional.linear(part, model.head_weight).argmax(-1) for part in parts]
    found[asked] = torch.cat(tokens).cpu()
    return found


def _scores(examples: Instances, predictions: Ints, *, regions: bool) -> Iterator[tuple[str, float, int]]:
    """Yield (metric, value, number of averaged items)."""
    right, asked = examples.score(predictions)
    values = int(asked.sum())
    yield "accuracy", right.sum() / values, values
    yield "case_accuracy", float(np.mean(right == asked)), len(examples)
    if examples.choices is not None and regions:
        found = examples.region(predictions)
        for region in range(examples.choices.shape[2]):
            yield f"region_{region + 1}", np.count_nonzero(found == region) / values, values
