"""Knowledge: how many bits about the people of a task a model holds, per parameter (arXiv 2404.05405)."""

import math

import numpy as np
import torch
from pydantic import Field

from basecap.data.config import Count
from basecap.data.task_data import TaskData
from basecap.errors import DataError
from basecap.evals._contract import Context, EvaluationConfig, Measurement, Outcome, SharedEvaluation, evaluation
from basecap.evals._passes import token_losses
from basecap.evals._statistics import standard_error
from basecap.models.language_model import LanguageModel
from basecap.tasks import NOTHING, Facts, Instances, Ints, Task

#: The unit of losses.
PER_PERSON = "bits per person"


@evaluation("knowledge", unit="bits per parameter", better="higher")
class KnowledgeCapacity(SharedEvaluation[TaskData]):
    """Bits that a model holds of the N people of a task, by arXiv 2404.05405, section 3, per parameter.

    - `bits_per_parameter`: N (log2 N0 - p1 + log2 S0 - p2) / P, where a name is one of N0, the facts about a person are
      one of S0, and p1 and p2 are the losses of a name and of all facts about a person, in bits. P is the number of all
      parameters. Below 0 for a model that is worse than one that takes all tokens for equally likely.
    - `most_bits_per_parameter`: the same of a model that knows everything: N (log2 N0 - log2 N + log2 S0) / P.
    - `name_loss`, `fact_loss`: p1 and p2.

    It reads test examples of the training task, in which people are drawn at random: all are seen in training. Runs on
    other tasks have no number. Standard errors are over examples.
    """

    class Config(EvaluationConfig):
        """Options of knowledge."""

        tokens_per_batch: Count = Field(32_768, ge=1, le=2**30, description="tokens per forward pass")

    config: Config
    needs = "task"
    reduced_by = "task.held_out"

    def check(self, data: TaskData, length: int) -> None:
        """Raise DataError if no task of the study has facts to know."""
        if not data.facts:
            raise DataError(
                f"knowledge: {data.task} has no facts to know, which a task such as capo has; remove it from evals."
            )

    def tokens_read(self, data: TaskData, length: int) -> int:
        """Return how many tokens the examples of all cells have."""
        return data.held_out_examples * sum(cell.length for cell in _cells(data))

    def run(self, model: LanguageModel, context: Context[TaskData]) -> Outcome:
        """Return the numbers of this process's share of the cells."""
        measurements = []
        for cell in _cells(context.data)[context.rank :: context.world]:
            assert cell.facts is not None
            examples = context.data.held_out("test", cell)
            losses = self._losses(model, context, examples)
            parameters = sum(parameter.numel() for parameter in model.parameters())
            axis = {key: float(value) for key, value in cell.cell.items()}
            measurements += measure(context.data.task, cell.facts, parameters, losses, axis)
        return Outcome(measurements=measurements)

    def trial(self, model: LanguageModel, context: Context[TaskData]) -> None:
        """Compute the losses of one batch."""
        for cell in _cells(context.data)[:1]:
            examples = context.data.held_out("test", cell)
            self._losses(model, context, examples.rows(slice(0, self._rows(examples.inputs))))

    def _rows(self, inputs: Ints) -> int:
        return max(1, self.config.tokens_per_batch // inputs.shape[1])

    def _losses(self, model: LanguageModel, context: Context[TaskData], examples: Instances) -> np.ndarray:
        """Return the losses of a name and of the facts about a person in bits, means of each example: [N, 2]."""
        inputs, targets = torch.from_numpy(examples.inputs), torch.from_numpy(examples.targets)
        rows = self._rows(examples.inputs)
        parts = [
            token_losses(model, context, *part, self.config.tokens_per_batch).cpu()
            for part in zip(inputs.split(rows), targets.split(rows), strict=True)
        ]
        bits = torch.cat(parts).numpy() / math.log(2)
        asked, people = examples.groups != NOTHING, examples.pairs.max(axis=1) + 1
        return np.stack([(bits * ~asked).sum(1) / people, (bits * asked).sum(1) / people], axis=1)


def _cells(data: TaskData) -> list[Task]:
    """Return the training task in its cells if it has facts."""
    return [cell for cell in data.cells if cell.facts is not None]


def measure(task: str, facts: Facts, parameters: int, losses: np.ndarray, axis: dict[str, float]) -> list[Measurement]:
    """Return what a model of so many parameters knows.

    Args:
        task: the subset of the numbers.
        facts: what there is to know.
        parameters: of the model.
        losses: float64 [N, 2], of a name and of the facts about a person in bits, by example.
        axis: the cell.
    """
    known = facts.people * (facts.name_bits + facts.fact_bits - losses.sum(axis=1)) / parameters
    most = facts.people * (facts.name_bits - math.log2(facts.people) + facts.fact_bits) / parameters
    numbers = {"bits_per_parameter": known, "name_loss": losses[:, 0], "fact_loss": losses[:, 1]}
    found = [
        Measurement(
            subset=task,
            metric=metric,
            value=float(column.mean()),
            n=len(column),
            stderr=standard_error(column),
            axis=axis,
            unit=None if metric == "bits_per_parameter" else PER_PERSON,
            better=None if metric == "bits_per_parameter" else "lower",
        )
        for metric, column in numbers.items()
    ]
    whole = Measurement(
        subset=task, metric="most_bits_per_parameter", value=most, n=len(losses), axis=axis, better="neither"
    )
    return [found[0], whole, *found[1:]]
