"""Attention-like matrices of each layer of a model on one input (arXiv 2410.15678, figure 4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from basecap.data import PreparedData
from basecap.data.config import Count
from basecap.data.workload import Workload
from basecap.errors import ConfigError, DataError, nearest
from basecap.evals._contract import Context, EvaluationConfig, Measurement, Outcome, SharedEvaluation, evaluation
from basecap.evals._influence import SEED, fitting_task, map_layers
from basecap.models.language_model import LanguageModel
from basecap.ops import Influence
from basecap.options import configured
from basecap.records.maps import Maps, join_layers
from basecap.tasks import NOTHING, Instances, Role

#: Maximum number of tokens of an input, and of rows and columns of a stored matrix.
LONGEST, SIDE = 1024, 256
#: Maximum number of inputs of one evaluation: a report holds all their matrices.
INPUTS = 8


@dataclass(frozen=True, kw_only=True)
class Input:
    """What a model reads: a description, tokens int64 [T], and the example that they are, if the input is a task."""

    description: str
    tokens: np.ndarray
    example: Instances | None = None

    def marks(self) -> dict[str, np.ndarray]:
        """Return the positions of keys and values and the queried values (see `Maps`); nothing for a text."""
        if self.example is None:
            return {}
        roles, pairs, groups = (getattr(self.example, name)[0] for name in ("roles", "pairs", "groups"))
        values = np.nonzero(roles == Role.VALUE)[0]
        asked = [
            (t, s)
            for t in np.nonzero((groups != NOTHING) & (pairs != NOTHING))[0]
            for s in values[(pairs[values] == pairs[t]) & (values <= t)][:1]
        ]
        return {
            "keys": np.nonzero(roles == Role.KEY)[0],
            "values": values,
            "asked": np.array(asked, np.int64).reshape(-1, 2),
        }


@evaluation("influence-map", unit="tokens", better="neither")
class InfluenceMap(SharedEvaluation[Workload]):
    """The mean of |factor| over heads or channels of each layer: a matrix of reading by read positions.

    The input is a text, an example of a task, or the start of a held-out document of the first training domain. Layers
    without `influence` are left out. `distance` is how far back a layer reads: the mean of t - s, weighted by the
    matrix within each row t. Layers are counted from 0, as in "layer 3"; with several inputs, the description of the
    input follows.
    """

    class Config(EvaluationConfig):
        """Options of influence-map."""

        text: str | None = Field(None, description="text to read (default: a held-out document)")
        task: str | None = Field(
            None, description="task of the example to read (`basecap list tasks`; default: the task of the run)"
        )
        options: dict[str, Any] = Field({}, description="options of the task, such as {length: 256, pairs: 16}")
        number: Count = Field(0, ge=0, lt=2**31, description="number of the document or example, from 0")
        seed: int = Field(SEED, ge=0, lt=2**60, description="seed of the task's examples")
        length: Count = Field(256, ge=2, le=LONGEST, description="maximum number of tokens; the rest is cut off")
        inputs: tuple[dict[str, Any], ...] = Field(
            (),
            max_length=INPUTS,
            description="several inputs instead of one: the options that each of them changes, such as "
            "[{task: mqar}, {task: mqar-last, options: {pairs: 4}}]",
        )

        @field_validator("task")
        @classmethod
        def _one_input(cls, value: str | None, info: ValidationInfo) -> str | None:
            if value is not None and info.data.get("text") is not None:
                raise ValueError("cannot be combined with text; give one of them")
            return value

        @field_validator("inputs")
        @classmethod
        def _inputs_are_known(cls, value: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
            known = [
                name for name in cls.model_fields if name not in EvaluationConfig.model_fields and name != "inputs"
            ]
            for key in (key for entry in value for key in entry):
                if key not in known:
                    raise ConfigError(f"unknown option {key!r} of an input of influence-map: {nearest(key, known)}")
            return value

    config: Config

    def check(self, data: Workload, length: int) -> None:
        """Raise DataError if models of `length` tokens cannot read an input, ConfigError for an invalid task."""
        self._inputs(data, length)

    def tokens_read(self, data: Workload, length: int) -> int:
        """Return how many tokens the inputs have."""
        return sum(len(read.tokens) for read in self._inputs(data, length))

    def run(self, model: LanguageModel, context: Context[Workload]) -> Outcome:
        """Return each input's matrix and distance in this process's layers; raises DataError as `check` does."""
        inputs, own = self._inputs(context.data, model.config.max_length), context.share(model.config.depth)
        measurements, maps = [], []
        for read in inputs:
            with context.autocast():
                found = map_layers(model, torch.from_numpy(read.tokens)[None].to(context.device), _picture, own)
            if not found:
                continue
            layers, after, n = sorted(found), f", {read.description}" if len(inputs) > 1 else "", len(read.tokens)
            measurements += [
                Measurement(subset=f"layer {layer}{after}", metric="distance", value=found[layer][2], n=n)
                for layer in layers
            ]
            maps.append(
                Maps(
                    input=read.description,
                    tokens=n,
                    layers=np.array(layers),
                    largest=np.array([found[layer][1] for layer in layers]),
                    sizes=np.stack([found[layer][0] for layer in layers]),
                    **read.marks(),
                )
            )
        return Outcome(measurements=measurements, maps=tuple(maps))

    def join(self, parts: Sequence[Outcome]) -> Outcome:
        """Put the layers of all processes together, input by input."""
        rest = [iter(part.measurements) for part in parts if part.maps]
        measurements, maps = [], []
        for same in zip(*(part.maps for part in parts if part.maps), strict=True):
            maps.append(join_layers(same))
            measurements += [next(found) for part, found in zip(same, rest, strict=True) for _ in part.layers]
        return Outcome(measurements=measurements, maps=tuple(maps))

    def trial(self, model: LanguageModel, context: Context[Workload]) -> None:
        """Compute the matrices."""
        self.run(model, context)

    def _inputs(self, data: Workload, longest: int) -> list[Input]:
        """Return the inputs; raises ConfigError and DataError as `check` does."""
        own = self.config.model_dump(exclude={"inputs"})
        found = []
        for entry in self.config.inputs or ({},):
            options = {**own, **entry}
            if isinstance(options["options"], dict):
                options["options"] = own["options"] | options["options"]
            found.append(_read(configured(self.Config, options, "an input of influence-map"), data, longest))
        return found


def _read(c: InfluenceMap.Config, data: Workload, longest: int) -> Input:
    """Return one input."""
    most = min(c.length, longest)
    if c.task is not None or not isinstance(data, PreparedData):
        if c.text is not None:
            raise DataError("influence-map: a study of tasks has no tokenizer; leave out text, or give a task.")
        name, task = fitting_task("influence-map", c.task, c.options, data, min(longest, LONGEST))
        example = task.instances(c.seed, [c.number])
        cell = "".join(f", {axis} {value:g}" for axis, value in task.cell.items())
        return Input(description=f"{name}{cell}, example {c.number}", tokens=example.inputs[0], example=example)
    if c.text is not None:
        description, tokens = f"{c.text[:40]!r}", np.array(data.tokenizer.encode(c.text), np.int64)
    else:
        domain = data.train_domains[0]
        documents = data.documents("test", domain)
        if c.number >= len(documents):
            raise DataError(f"influence-map: {domain} has {len(documents)} held-out documents; lower number.")
        description, tokens = f"{domain}, held-out document {c.number}", documents.tokens(c.number)
    if len(tokens) < 2:
        raise DataError(f"influence-map: {description} has fewer than 2 tokens; give a longer text or another number.")
    return Input(description=description, tokens=tokens[:most])


def _picture(influence: Influence) -> tuple[np.ndarray, float, float]:
    """Return the matrix divided by its largest element, float16 [S, S], that element, and the mean distance."""
    sizes_TT = influence.mean_size()[0].float()
    T = len(sizes_TT)
    small_SS = F.avg_pool2d(sizes_TT[None], -(-T // SIDE), ceil_mode=True)[0]
    largest = small_SS.max()
    shares = small_SS / largest.clamp(min=torch.finfo(largest.dtype).tiny)
    return shares.half().cpu().numpy(), largest.item(), _distance(sizes_TT)


def _distance(sizes_TT: Tensor) -> float:
    """Return the mean of t - s, weighted by the elements of each row that is not zero."""
    t = torch.arange(len(sizes_TT), device=sizes_TT.device)
    totals = sizes_TT.sum(1)
    far = (sizes_TT * (t[:, None] - t)).sum(1)[totals > 0] / totals[totals > 0]
    return far.mean().item() if len(far) else 0.0
