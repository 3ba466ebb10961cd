"""What evaluations of influence share: a task that fits the models, and what layers read while a model reads."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from basecap.data.task_data import TaskData
from basecap.data.workload import Workload
from basecap.errors import DataError
from basecap.mixers import Mixer
from basecap.models.language_model import LanguageModel
from basecap.ops import Influence
from basecap.tasks import Task, build_task

T = TypeVar("T")


def of_layers(model: LanguageModel, tokens_BT: Tensor, take: Callable[[Influence], T]) -> dict[int, T]:
    """Return what `take` makes of the influence of each layer that has one, by the layer's index from 0.

    Args:
        model: in evaluation mode.
        tokens_BT: int64, on the model's device; each row is one sequence.
        take: called once per layer, while the model runs; what it returns is all that is kept of the factors.
    """
    found: dict[int, T] = {}

    def look(mixer: Mixer, inputs: tuple[Tensor, ...]) -> None:
        influence = mixer.influence(inputs[0])
        if influence is not None:
            found[mixer.layer.index] = take(influence)

    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    handles = [mixer.register_forward_pre_hook(look) for mixer in mixers]
    try:
        with torch.no_grad():
            model.hidden(tokens_BT)
    finally:
        for handle in handles:
            handle.remove()
    return found


#: Seed of the examples when none is given, one that no study trains with by default.
SEED = 2**31


def fitting_task(
    evaluation: str, name: str | None, options: Mapping[str, Any], data: Workload, length: int
) -> tuple[str, Task]:
    """Return name and task that models of a workload's vocabulary and `length` tokens can read.

    Without a name it is the task that the models are trained on, or mqar where that is text. A task of the study has
    the study's options and its largest cell there, unless `options` say otherwise.

    Raises:
        ConfigError: an unknown name or option.
        DataError: more token ids or tokens than the models take; names the `evaluation`.
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
            f"{evaluation}: {name} has {task.vocabulary:,} token ids and the models only {data.vocabulary:,}; {remedy}."
        )
    if task.length > length:
        raise DataError(
            f"{evaluation}: examples of {name} have {task.length} tokens, more than the {length} it can take here; "
            f"give the task the options {{length: {length}}} or less."
        )
    return name, task
