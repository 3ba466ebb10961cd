"""Shared by the influence evaluations: choosing a task that fits the models, and the influence of each layer."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from basecap.data.task_data import TaskData
from basecap.data.workload import Workload
from basecap.errors import DataError
from basecap.mixers import Mixer
from basecap.models.language_model import LanguageModel
from basecap.models.mixer_inputs import visit_mixers
from basecap.ops import Influence
from basecap.tasks import Task, build_task

T = TypeVar("T")

#: Default seed of the examples; no study trains with it by default.
SEED = 2**31


def map_layers(
    model: LanguageModel,
    tokens_BT: Tensor,
    reduce: Callable[[Influence], T],
    layers: Collection[int] | None = None,
) -> dict[int, T]:
    """Return the result of `reduce` for the influence of each layer that has one, by layer index from 0.

    Args:
        model: the model in evaluation mode.
        tokens_BT: int64, on the model's device; each row is one sequence.
        reduce: called once per layer during the forward pass; only its results are kept in memory.
        layers: the indices of the layers; all when None.
    """
    found: dict[int, T] = {}

    def keep(mixer: Mixer, x_BTD: Tensor) -> None:
        index = mixer.layer.index
        influence = mixer.influence(x_BTD) if layers is None or index in layers else None
        if influence is not None:
            found[index] = reduce(influence)

    visit_mixers(model, tokens_BT, keep)
    return found


def normalised(factors: Tensor) -> Tensor:
    """Return |factors| normalised to sum 1 over the last dimension; a row of zeros stays zero."""
    sizes = factors.abs()
    return sizes / sizes.sum(-1, keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)


def fitting_task(
    evaluation: str, name: str | None, options: Mapping[str, Any], data: Workload, length: int
) -> tuple[str, Task]:
    """Return the name and the task, checked to fit the vocabulary and the `length` of the models.

    The default is the training task of the models, or mqar if they are trained on text. A task of the study has the
    options of the study and its largest cell there, except for what `options` sets.

    Raises:
        ConfigError: the name or an option is unknown.
        DataError: the task has more token ids or tokens than the models; the message starts with `evaluation`.
    """
    if isinstance(data, TaskData) and (name is None or name == data.task or name in data.tests):
        name = name or data.task
        cells = data.cells if name == data.task else data.tests[name]
        task = max(cells, key=lambda cell: tuple(cell.cell.values())).at(options)
    else:
        name = name or "mqar"
        task = build_task(name, options)
    if task.vocabulary > data.vocabulary:
        fits = task.config.model_dump().get("vocab", 0) - (task.vocabulary - data.vocabulary)
        remedy = f"give the task the options {{vocab: {fits}}}" if fits > 0 else "choose another task"
        raise DataError(
            f"{evaluation}: {name} has {task.vocabulary:,} token ids but the models have {data.vocabulary:,}; {remedy}."
        )
    if task.length > length:
        raise DataError(
            f"{evaluation}: examples of {name} have {task.length} tokens but the models take at most {length}; "
            f"give the task the options {{length: {length}}} or less."
        )
    return name, task
