"""Selectivity of each layer: whether a query reads the value of its own pair rather than those of other pairs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from basecap.data.config import Count
from basecap.data.task_data import TaskData
from basecap.data.workload import Workload
from basecap.errors import DataError
from basecap.evals._contract import Context, EvaluationConfig, Measurement, Outcome, SharedEvaluation, evaluation
from basecap.evals._hiding import right_answers
from basecap.evals._influence import SEED, fitting_task, map_layers, normalised
from basecap.evals._signed import ratio, signed_reads, signed_score
from basecap.evals._statistics import standard_error
from basecap.models.language_model import LanguageModel
from basecap.ops import Influence
from basecap.tasks import NOTHING, Instances, Ints, Role, Task

#: Maximum number of examples per forward pass, and of factors per head for all of them (64 MiB in float32).
ROWS, FACTORS = 32, 2**24
#: Parts of a pair, with the prefix of their metrics.
PARTS = {Role.VALUE: "", Role.KEY: "key_"}
#: The unit of scores.
SCORE = "from -1 to 1"
#: Samples of an outcome besides those of the parts.
NEED, SIGNED = "need", "signed"


@evaluation("selectivity", unit="share", better="neither")
class Selectivity(SharedEvaluation[Workload]):
    """How much each layer reads the pair that is queried, and how much another pair.

    Both are shares of what a scored position reads, on the values and on the keys of a pair. The model reads each
    example twice: as it is, and with its queries exchanged, so that each query asks for the next pair. Only the queries
    differ, not the positions: a layer that reads by position, for example always late pairs, does not appear selective.

    - `mass`: the share of a scored position's row on the earlier values of its pair, in the mean of |factor| over heads
      or channels (`Influence.mean_size`), averaged over scored positions, both readings and examples.
    - `null`: the same for the pair that the position queries in the other reading.
    - `score`: (mass - null) / (mass + null) of these means: 0 if queries do not change how much a pair is read, 1 if
      only the queried pair is read, -1 if only other pairs are read. If a pair is read r times as much when it is
      queried, (r - 1) / (r + 1). 0 if neither is read.

    - `need`: the share of right tokens that is lost if the layer's mixer cannot see the queried pair at the scored
      positions, compared with hiding another pair from it (see `right_answers`). 1 if all answers depend on what this
      layer reads of the queried pair, 0 if none does. A model that gives any value at random, whatever is queried,
      reaches 1 / (pairs - 1): read it where the model recalls.

    - `signed_score`: the score of factors with their signs, at the distance from the values where the layer reads
      pairs (see `signed_score`); `lag` is that distance in tokens. Equal to `score` for attention that reads values at
      their own positions. A state-space layer behind a short convolution may read a pair one token later, and with a
      sign that only the queried pair has in all examples, where |factor| is alike for all pairs.

    A layer can have a score near 0 and a large need: the mean of |factor| leaves out gates, signs and differences
    between channels.

    `key_mass`, `key_null` and `key_score` are the same for the keys. Layers are counted from 0, as in "layer 3"; those
    without `influence` have `need` alone. Standard errors are over examples, to first order for a score.
    """

    class Config(EvaluationConfig):
        """Options of selectivity."""

        task: str | None = Field(
            None, description="task of the examples (`basecap list tasks`; default: the task of the run, or mqar)"
        )
        options: dict[str, Any] = Field({}, description="options of the task, such as {length: 256, pairs: 16}")
        examples: Count = Field(64, ge=1, le=2**20, description="number of examples")
        seed: int = Field(SEED, ge=0, lt=2**60, description="seed of the examples")

    config: Config

    def _task(self, data: Workload, length: int) -> tuple[str, Task]:
        return fitting_task("selectivity", self.config.task, self.config.options, data, length)

    def check(self, data: Workload, length: int) -> None:
        """Raise DataError if the task does not fit the models or cannot be compared, ConfigError if it is invalid."""
        if isinstance(data, TaskData) and data.readout != "each":
            raise DataError(
                f"selectivity: the answers to {data.task} are all decoded from the last position, not read by the "
                "position that asks; remove it from evals."
            )
        name, task = self._task(data, length)
        if exchanged(task.instances(self.config.seed, range(1))) is None:
            raise DataError(
                f"selectivity: the queries of {name} cannot be exchanged; choose a task that queries each of several "
                "pairs once, such as mqar with 2 pairs or more."
            )

    def run(self, model: LanguageModel, context: Context[Workload]) -> Outcome:
        """Return need, signed score, and mass, null and score for values and for keys, of each layer.

        They are those of this process's examples, whose values `join` puts together.
        """
        _, task = self._task(context.data, model.config.max_length)
        step, share = self._rows(task), context.share(self.config.examples)
        found: dict[tuple[str, int], list[np.ndarray]] = defaultdict(list)
        for first in share[::step]:
            examples = task.instances(self.config.seed, range(first, min(first + step, share.stop)))
            for layer, (parts, with_signs) in self._reads(model, context, examples).items():
                found[SIGNED, layer].append(with_signs)
                for part, reads in parts.items():
                    found[PARTS[part], layer].append(reads)
            with context.autocast():
                for layer, right in right_answers(model, examples, context.device).items():
                    found[NEED, layer].append(right[:, 1] - right[:, 0])
        return _outcome({key: np.concatenate(batches) for key, batches in found.items()})

    def join(self, parts: Sequence[Outcome]) -> Outcome:
        """Measure the examples of all processes."""
        keys = dict.fromkeys(key for part in parts for key in part.samples)
        return _outcome({key: np.concatenate([part.samples[key] for part in parts if part.samples]) for key in keys})

    def trial(self, model: LanguageModel, context: Context[Workload]) -> None:
        """Measure the largest batch of examples."""
        _, task = self._task(context.data, model.config.max_length)
        examples = task.instances(self.config.seed, range(self._rows(task)))
        self._reads(model, context, examples)
        with context.autocast():
            right_answers(model, examples, context.device)

    def _rows(self, task: Task) -> int:
        return max(1, min(self.config.examples, ROWS, FACTORS // (2 * task.length**2)))

    def _reads(
        self, model: LanguageModel, context: Context[Workload], found: Instances
    ) -> Mapping[int, tuple[dict[Role, NDArray[np.float64]], NDArray[np.float32]]]:
        """Return what each layer reads: by part of a pair the masses of `reads_of`, and those of `signed_reads`."""
        readings = exchanged(found)
        assert readings is not None
        masks = {part: PairMasks(found, part) for part in PARTS}
        values = masks[Role.VALUE]

        def reduce(influence: Influence) -> tuple[dict[Role, NDArray[np.float64]], NDArray[np.float32]]:
            sizes = influence.mean_size()
            signed = signed_reads(influence, sizes, values.places, values.first, values.second)
            return reads_of(sizes, masks), signed[values.examples]

        with context.autocast():
            return map_layers(model, torch.from_numpy(readings).to(context.device), reduce)


def _outcome(samples: Mapping[tuple[str, int], np.ndarray]) -> Outcome:
    """Return the numbers of examples, in the order of the report's figures: what says most about a layer first.

    `samples` are the values of each example by NEED, SIGNED or the prefix of a part, and by layer.
    """
    measurements = []
    for kind in (NEED, SIGNED, *PARTS.values()):
        for layer in sorted(layer for held, layer in samples if held == kind):
            subset, values = f"layer {layer}", samples[kind, layer]
            if kind == NEED:
                measurements += [mean_of(subset, "need", values)] if len(values) else []
            elif kind == SIGNED:
                measurements += measure_signed(subset, values)
            else:
                measurements += measure(subset, kind, values)
    return Outcome(measurements=measurements, samples=samples)


def exchanged(found: Instances) -> Ints | None:
    """Return the inputs, followed by the inputs with queries for pair p + 1 instead of pair p: int64 [2 N, T].

    Returns None if there is a single pair, pairs are not queried equally often, or the queries are equal tokens.
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


class PairMasks:
    """Masks of the pairs of N examples, and of the positions that query each pair in the two readings of `exchanged`.

    Attributes:
        places: float32 [N, P, T], 1 where a token is the given part of a pair.
        first: float32 [N, T, P], 1 where a scored position queries a pair in the first reading.
        second: float32 [N, T, P], the same in the second reading. Positions that cannot see both pairs are 0 in both.
        examples: bool [N], whether an example has a position that can see both pairs.
    """

    def __init__(self, found: Instances, part: Role):
        """Take examples and the part of their pairs, values or keys."""
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


def reads_of(sizes_RTT: Tensor, masks: Mapping[Role, PairMasks]) -> dict[Role, NDArray[np.float64]]:
    """Return the mass on the own and on the other pair, [examples, 2], averaged over positions, by part of a pair.

    Args:
        sizes_RTT: |factor| of position s for position t, at any scale, for the R = 2 N readings of `exchanged`; a row
            of zeros reads nothing.
        masks: the masks of each part.
    """
    shares_2NTT = normalised(sizes_RTT).unflatten(0, (2, -1))
    reads = {}
    for part, found in masks.items():
        places, first, second = (x.to(sizes_RTT) for x in (found.places, found.first, found.second))
        before, after = shares_2NTT @ places.mT
        positions_N = first.sum((1, 2)).clamp(min=1)
        own = before * first + after * second
        other = before * second + after * first
        means = torch.stack([mass.sum((1, 2)) / (2 * positions_N) for mass in (own, other)], dim=1)
        reads[part] = means.double().cpu().numpy()[found.examples]
    return reads


def measure(subset: str, prefix: str, reads: NDArray[np.float64]) -> list[Measurement]:
    """Return mass, null and score of `reads` [examples, 2]; an empty list without examples."""
    n = len(reads)
    if n == 0:
        return []
    mass, null = reads.mean(axis=0)
    both = mass + null
    score = (mass - null) / both if both > 0 else 0.0
    # first-order change of the score with the masses of an example
    slopes = 2 * (null * reads[:, 0] - mass * reads[:, 1]) / both**2 if both > 0 else np.zeros(n)
    columns = {"mass": (mass, reads[:, 0]), "null": (null, reads[:, 1]), "score": (score, slopes)}
    return [
        Measurement(
            subset=subset,
            metric=prefix + metric,
            value=float(value),
            n=n,
            stderr=standard_error(column),
            unit=SCORE if metric == "score" else None,
        )
        for metric, (value, column) in columns.items()
    ]


def measure_signed(subset: str, reads: NDArray[np.float32]) -> list[Measurement]:
    """Return the signed score of `signed_reads` and its lag; an empty list below two examples."""
    found = signed_score(reads)
    if found is None:
        return []
    parts, lag = found
    score, error = ratio(parts)
    return [
        Measurement(subset=subset, metric="signed_score", value=score, n=len(parts), stderr=error, unit=SCORE),
        Measurement(subset=subset, metric="lag", value=float(lag), n=len(parts), unit="tokens"),
    ]


def mean_of(subset: str, metric: str, column: NDArray[np.float64]) -> Measurement:
    """Return the mean of [examples] values with its standard error."""
    value, stderr = float(column.mean()), standard_error(column)
    return Measurement(subset=subset, metric=metric, value=value, n=len(column), stderr=stderr)
