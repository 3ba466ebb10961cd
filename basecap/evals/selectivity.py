"""How selective a layer is: whether a query reads the value that it asks for rather than those of other pairs."""

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from basecap.data.config import Count
from basecap.data.workload import Workload
from basecap.errors import DataError
from basecap.evals._contract import Context, Evaluation, EvaluationConfig, Measurement, Outcome, evaluation
from basecap.evals._influence import of_layers
from basecap.models.language_model import LanguageModel
from basecap.tasks import NOTHING, Instances, Role, Task, build_task

#: Examples of one forward pass, and factors of one head for all of them, at most: 64 MiB in float32.
ROWS, FACTORS = 32, 2**24
#: What is read of a pair, and how the metrics of it are called.
PARTS = {Role.VALUE: "", Role.KEY: "key_"}


@evaluation("selectivity", unit="share of the mean |factor|; score: (mass - null) / (mass + null)", better="higher")
class Selectivity(Evaluation):
    """Per layer, how much of what a scored position reads are the values (and keys) of its own pair, and of others.

    - `mass`: the share of the row of a scored position that is on the earlier values of its pair, in the mean of
      |factor| over heads or channels (`Influence.mean_size`); the mean over scored positions, then over examples.
    - `null`: the same for another pair of the example, the mean over all of them: what `mass` is expected to be when
      pair numbers are permuted.
    - `score`: (mass - null) / (mass + null) of these means: 0 for a layer that reads all pairs alike, 1 for one that
      reads no pair but its own, -1 for one that reads the others alone. A layer that reads its own pair r times as much
      as another has (r - 1) / (r + 1). 0 where neither is read.

    `key_mass`, `key_null` and `key_score` are those of the keys. Layers are counted from 0, as "layer 3"; one whose
    mixer has no influence is left out. Standard errors are over examples, that of a score to first order.
    """

    class Config(EvaluationConfig):
        """Options of selectivity."""

        task: str = Field("mqar", description="a task with pairs of keys and values, see `basecap list tasks`")
        options: dict[str, Any] = Field({}, description="options of the task, such as {length: 256, pairs: 16}")
        examples: Count = Field(64, ge=1, le=2**20, description="examples of the task")
        seed: int = Field(0, ge=0, lt=2**63, description="of the examples")

    config: Config

    @cached_property
    def _task(self) -> Task:
        return build_task(self.config.task, self.config.options)

    def check(self, data: Workload, length: int) -> None:
        """Raise DataError when the task does not fit the models or has nothing to compare, ConfigError for its name."""
        task, name = self._task, self.config.task
        if task.vocabulary > data.vocabulary:
            over = task.vocabulary - data.vocabulary
            raise DataError(
                f"selectivity: {name} has {task.vocabulary:,} token ids and the models only {data.vocabulary:,}; "
                f"lower its option vocab by {over:,}."
            )
        if task.length > length:
            raise DataError(
                f"selectivity: examples of {name} have {task.length} tokens, more than the training length of "
                f"{length}; set a shorter length in its options."
            )
        found = task.instances(self.config.seed, range(1))
        if not Wanted(found, Role.VALUE).examples.any():
            raise DataError(
                f"selectivity: {name} asks for no value among those of several pairs; choose another task, such as "
                "mqar with 2 pairs or more."
            )

    def run(self, model: LanguageModel, context: Context) -> Outcome:
        """Return mass, null and score of each layer, for values and for keys."""
        step = self._rows()
        reads: dict[tuple[int, Role], list[NDArray[np.float64]]] = defaultdict(list)
        for first in range(0, self.config.examples, step):
            numbers = range(first, min(first + step, self.config.examples))
            for key, found in self._reads(model, context, numbers).items():
                reads[key].append(found)
        return Outcome(
            measurements=[
                measurement
                for (layer, part), found in sorted(reads.items())
                for measurement in measure(f"layer {layer}", PARTS[part], np.concatenate(found))
            ]
        )

    def trial(self, model: LanguageModel, context: Context) -> None:
        """Measure the largest batch of examples."""
        self._reads(model, context, range(self._rows()))

    def _rows(self) -> int:
        return max(1, min(self.config.examples, ROWS, FACTORS // self._task.length**2))

    def _reads(
        self, model: LanguageModel, context: Context, numbers: range
    ) -> Mapping[tuple[int, Role], NDArray[np.float64]]:
        """Return by layer and part of a pair the mass on the own pair and on others, [examples, 2]."""
        found = self._task.instances(self.config.seed, numbers)
        wanted = {part: Wanted(found, part) for part in PARTS}
        with context.autocast():
            sizes = of_layers(
                model,
                torch.from_numpy(found.inputs).to(context.device),
                lambda influence: reads_of(influence.mean_size(), wanted),
            )
        return {(layer, part): reads for layer, parts in sizes.items() for part, reads in parts.items()}


class Wanted:
    """Where the pairs of some examples stand, and which positions ask for which pair.

    Attributes:
        places: float32 [N, P, T], 1 where a token is the wanted part of a pair.
        own: float32 [N, T, P], 1 where a scored position asks for a pair that it can see among others.
        others: float32 [N, T, P], at those positions the pairs that it can see and does not ask for, of sum 1.
        examples: bool [N], whether an example has such a position.
    """

    def __init__(self, found: Instances, part: Role):
        """Take examples and what is read of their pairs, values or keys."""
        count = int(found.pairs.max(initial=NOTHING)) + 1
        numbers = np.arange(count)
        places = (found.pairs[:, None] == numbers[:, None]) & (found.roles[:, None] == part)
        visible = (places.cumsum(axis=2) > 0).swapaxes(1, 2)
        asks = (found.pairs[..., None] == numbers) & (found.groups != NOTHING)[..., None] & visible
        others = (visible & ~asks).sum(axis=2, keepdims=True)
        own = asks & (others > 0)
        shares = (visible & ~asks) * own.any(axis=2, keepdims=True) / np.maximum(others, 1)
        self.places, self.own, self.others = (torch.from_numpy(x).float() for x in (places, own, shares))
        self.examples = own.any(axis=(1, 2))


def reads_of(sizes_NTT: Tensor, wanted: Mapping[Role, Wanted]) -> dict[Role, NDArray[np.float64]]:
    """Return for each part of a pair the mass on the own pair and on another one: [examples, 2], means over positions.

    Args:
        sizes_NTT: |factor| of position s for position t, of any scale; a row without any reads nothing.
        wanted: where each part stands.
    """
    tiny = torch.finfo(sizes_NTT.dtype).tiny
    shares_NTT = sizes_NTT / sizes_NTT.sum(-1, keepdim=True).clamp(min=tiny)
    reads = {}
    for part, found in wanted.items():
        places, own, others = (x.to(shares_NTT) for x in (found.places, found.own, found.others))
        mass_NTP = shares_NTT @ places.mT
        asked_N = own.sum((1, 2)).clamp(min=1)
        means = torch.stack([(mass_NTP * weights).sum((1, 2)) / asked_N for weights in (own, others)], dim=1)
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
