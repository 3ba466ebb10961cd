"""How selective a layer is: whether a query reads the value that it asks for rather than those of other pairs."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from basecap.data.config import Count
from basecap.data.workload import Workload
from basecap.errors import DataError
from basecap.evals import Context, Evaluation, EvaluationConfig, Measurement, Outcome, evaluation
from basecap.evals._influence import SEED, fitting_task, of_layers
from basecap.models.language_model import LanguageModel
from basecap.tasks import NOTHING, Instances, Ints, Role, Task

#: Examples of one forward pass, and factors of one head for all of them, at most: 64 MiB in float32.
ROWS, FACTORS = 32, 2**24
#: What is read of a pair, and how the metrics of it are called.
PARTS = {Role.VALUE: "", Role.KEY: "key_"}


@evaluation("selectivity", unit="share of the mean |factor|; score: (mass - null) / (mass + null)", better="higher")
class Selectivity(Evaluation[Workload]):
    """Per layer, how much of what a scored position reads are the values (and keys) of its own pair, and of another.

    Each example is read twice: as it is, and with its queries exchanged, so that each asks for the pair that comes
    after the one it asked for. Positions are the same in both, only what is asked differs: a layer that reads by
    position alone, late pairs rather than early ones say, does not seem selective.

    - `mass`: the share of the row of a scored position that is on the earlier values of its pair, in the mean of
      |factor| over heads or channels (`Influence.mean_size`); the mean over scored positions, both readings, examples.
    - `null`: the same for the pair that this position asks for in the other reading.
    - `score`: (mass - null) / (mass + null) of these means: 0 for a layer that reads a pair whether it is asked for or
      not, 1 for one that reads no other, -1 for one that reads others alone. A layer that reads a pair r times as
      much when it is asked for has (r - 1) / (r + 1). 0 where neither is read.

    `key_mass`, `key_null` and `key_score` are those of the keys. Layers are counted from 0, as "layer 3"; one whose
    mixer has no influence is left out. Standard errors are over examples, that of a score to first order.
    """

    class Config(EvaluationConfig):
        """Options of selectivity."""

        task: str | None = Field(
            None, description="see `basecap list tasks`; mqar, or the own task of a study of tasks, when not given"
        )
        options: dict[str, Any] = Field({}, description="options of the task, such as {length: 256, pairs: 16}")
        examples: Count = Field(64, ge=1, le=2**20, description="examples of the task")
        seed: int = Field(SEED, ge=0, lt=2**60, description="of the examples")

    config: Config

    def _task(self, data: Workload, length: int) -> tuple[str, Task]:
        return fitting_task("selectivity", self.config.task, self.config.options, data, length)

    def check(self, data: Workload, length: int) -> None:
        """Raise DataError when the task does not fit the models or has nothing to compare, ConfigError for its name."""
        name, task = self._task(data, length)
        if exchanged(task.instances(self.config.seed, range(1))) is None:
            raise DataError(
                f"selectivity: the queries of {name} cannot be exchanged; choose a task that asks once for each of "
                "several pairs, such as mqar with 2 pairs or more."
            )

    def run(self, model: LanguageModel, context: Context[Workload]) -> Outcome:
        """Return mass, null and score of each layer, for values and for keys."""
        _, task = self._task(context.data, model.config.max_length)
        step = self._rows(task)
        reads: dict[tuple[int, Role], list[NDArray[np.float64]]] = defaultdict(list)
        for first in range(0, self.config.examples, step):
            numbers = range(first, min(first + step, self.config.examples))
            for key, found in self._reads(model, context, task.instances(self.config.seed, numbers)).items():
                reads[key].append(found)
        return Outcome(
            measurements=[
                measurement
                for (layer, part), found in sorted(reads.items())
                for measurement in measure(f"layer {layer}", PARTS[part], np.concatenate(found))
            ]
        )

    def trial(self, model: LanguageModel, context: Context[Workload]) -> None:
        """Measure the largest batch of examples."""
        _, task = self._task(context.data, model.config.max_length)
        self._reads(model, context, task.instances(self.config.seed, range(self._rows(task))))

    def _rows(self, task: Task) -> int:
        return max(1, min(self.config.examples, ROWS, FACTORS // (2 * task.length**2)))

    def _reads(
        self, model: LanguageModel, context: Context[Workload], found: Instances
    ) -> Mapping[tuple[int, Role], NDArray[np.float64]]:
        """Return by layer and part of a pair the mass on the own pair and on another, [examples, 2]."""
        readings = exchanged(found)
        assert readings is not None
        wanted = {part: Wanted(found, part) for part in PARTS}
        with context.autocast():
            sizes = of_layers(
                model,
                torch.from_numpy(readings).to(context.device),
                lambda influence: reads_of(influence.mean_size(), wanted),
            )
        return {(layer, part): reads for layer, parts in sizes.items() for part, reads in parts.items()}


def exchanged(found: Instances) -> Ints | None:
    """Return the inputs, and the inputs with the key of pair p + 1 where pair p was asked for: int64 [2 N, T].

    None where that cannot be: with a single pair, where pairs are not asked for equally often, or by equal tokens.
    """
    count = int(found.pairs.max(initial=NOTHING)) + 1
    queries = (found.roles == Role.QUERY) & (found.pairs != NOTHING)
    rows, places = np.nonzero(queries)
    numbers = found.pairs[rows, places]
    asked = np.bincount(rows * count + numbers, minlength=len(found) * count)
    if count < 2 or asked.min() < 1 or asked.min() != asked.max():
        return None
    order = np.lexsort((places, numbers, rows))
    keys_NPK = places[order].reshape(len(found), count, -1)
    inputs, every = found.inputs.copy(), np.arange(len(found))[:, None, None]
    inputs[every, keys_NPK] = found.inputs[every, np.roll(keys_NPK, -1, axis=1)]
    return None if (inputs == found.inputs).all() else np.concatenate([found.inputs, inputs])


class Wanted:
    """Where the pairs of N examples stand, and which positions ask for which pair in the two readings of `exchanged`.

    Attributes:
        places: float32 [N, P, T], 1 where a token is the wanted part of a pair.
        first: float32 [N, T, P], 1 where a scored position asks for a pair in the first reading.
        second: float32 [N, T, P], the same in the second. Left out of both are positions that cannot see both pairs.
        examples: bool [N], whether an example has a position that is not left out.
    """

    def __init__(self, found: Instances, part: Role):
        """Take examples and what is read of their pairs, values or keys."""
        count = int(found.pairs.max(initial=NOTHING)) + 1
        numbers = np.arange(count)
        places = (found.pairs[:, None] == numbers[:, None]) & (found.roles[:, None] == part)
        visible = (places.cumsum(axis=2) > 0).swapaxes(1, 2)
        first = (found.pairs[..., None] == numbers) & (found.groups != NOTHING)[..., None]
        second = np.roll(first, 1, axis=2)
        both = (first & visible).any(axis=2) & (second & visible).any(axis=2)
        parts = places, first & both[..., None], second & both[..., None]
        self.places, self.first, self.second = (torch.from_numpy(x).float() for x in parts)
        self.examples = both.any(axis=1)


def reads_of(sizes_RTT: Tensor, wanted: Mapping[Role, Wanted]) -> dict[Role, NDArray[np.float64]]:
    """Return for each part of a pair the mass on the own pair and on another: [examples, 2], means over positions.

    Args:
        sizes_RTT: |factor| of position s for position t, of any scale, for the R = 2 N readings of `exchanged`; a row
            without any reads nothing.
        wanted: where each part stands.
    """
    tiny = torch.finfo(sizes_RTT.dtype).tiny
    shares_2NTT = (sizes_RTT / sizes_RTT.sum(-1, keepdim=True).clamp(min=tiny)).unflatten(0, (2, -1))
    reads = {}
    for part, found in wanted.items():
        places, first, second = (x.to(sizes_RTT) for x in (found.places, found.first, found.second))
        before, after = shares_2NTT @ places.mT
        positions_N = first.sum((1, 2)).clamp(min=1)
        own = before * first + after * second
        other = before * second + after * first
        means = torch.stack([mass.sum((1, 2)) / (2 * positions_N) for mass in (own, other)], dim=1)
        reads[part] = means.double().cpu().numpy()[found.examples]
    return reads


def measure(subset: str, prefix: str, reads: NDArray[np.float64]) -> list[Measurement]:
    """Return mass, null and score of [examples, 2] masses on the own pair and on another one; none of no examples."""
    n = len(reads)
    if n == 0:
        return []
    mass, null = reads.mean(axis=0)
    both = mass + null
    score = (mass - null) / both if both > 0 else 0.0
    # To first order, the score moves with an example's masses as this does.
    slopes = 2 * (null * reads[:, 0] - mass * reads[:, 1]) / both**2 if both > 0 else np.zeros(n)
    columns = {"mass": (mass, reads[:, 0]), "null": (null, reads[:, 1]), "score": (score, slopes)}
    return [
        Measurement(
            subset=subset,
            metric=prefix + metric,
            value=float(value),
            n=n,
            stderr=float(column.std(ddof=1) / n**0.5) if n > 1 else None,
        )
        for metric, (value, column) in columns.items()
    ]
