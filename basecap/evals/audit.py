"""How far back each layer of a trained model reads, by what, and whether it can select any one position."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from basecap.data import PreparedData
from basecap.data.config import Count
from basecap.data.task_data import TaskData
from basecap.data.workload import Workload
from basecap.errors import ConfigError, DataError
from basecap.evals._contract import Context, EvaluationConfig, Measurement, Outcome, SharedEvaluation, evaluation
from basecap.mixers import Mixer
from basecap.models.audit import LENGTH, ROWS, SEQUENCES, audit, audit_untrained, layer_inputs
from basecap.models.language_model import LanguageModel
from basecap.records.audits import EVALUATION, METRICS, Audit, untrained
from basecap.records.evaluation_points import At

#: Tokens below which sequences are too short to say how a layer reads.
SHORTEST = 16
#: Seed of the examples of a task; no study trains with it by default.
EXAMPLES = 2**31


@evaluation(EVALUATION, unit="share", better="neither")
class LayerAudit(SharedEvaluation[Workload]):
    """How each layer reads the past, as `basecap audit RUN`: visibility, relation, selection and its null.

    `untrained_visibility` and so on are the same numbers of the layer's form: generic parameters, normal inputs, the
    same width and options. Layers of the same form have the same ones. Layers that cannot be audited are left out.
    """

    class Config(EvaluationConfig):
        """Options of audit."""

        at: At = Field("end", description="evaluation points to run at: every, end, or a list of tokens")
        length: Count = Field(
            LENGTH, ge=SHORTEST, le=4096, description="tokens per sequence, at most those of training"
        )

    config: Config
    reduced_by = "length of audit"

    def __init__(self, config: Config):
        """Take the options; the audits of forms are kept in memory."""
        super().__init__(config)
        self._forms: dict[tuple[type[Mixer], str, int], Audit] = {}

    def check(self, data: Workload, length: int) -> None:
        """Raise DataError if the test split of the first training domain is too short."""
        held_out(data, min(self.config.length, length))

    def most_tokens(self, length: int) -> int:
        """Return how many tokens each mixer reads, trained and untrained, those of the search counted three times."""
        return 2 * ROWS * min(self.config.length, length)

    def run(self, model: LanguageModel, context: Context[Workload]) -> Outcome:
        """Return the numbers of this process's layers."""
        measurements = []
        for index, (mixer, x) in list(self._inputs(model, context).items())[context.rank :: context.world]:
            layer = f"layer {index}"
            context.note(f"evaluating {self.declaration.name}, {layer}")
            try:
                trained, form = audit(mixer, x, layer), self._form(mixer, x.shape[1], layer)
            except ConfigError:  # it has no influence and cannot be derived either
                continue
            numbers = {name: getattr(trained, name) for name in METRICS}
            numbers |= {untrained(name): getattr(form, name) for name in METRICS}
            measurements += [
                Measurement(subset=layer, metric=name, value=value, n=SEQUENCES)
                for name, value in numbers.items()
                if value is not None
            ]
        return Outcome(measurements=measurements)

    def trial(self, model: LanguageModel, context: Context[Workload]) -> None:
        """Read the sequences."""
        self._inputs(model, context)

    def _inputs(self, model: LanguageModel, context: Context[Workload]) -> dict[int, tuple[Mixer, torch.Tensor]]:
        rows = held_out(context.data, min(self.config.length, model.config.max_length))
        return layer_inputs(model, torch.from_numpy(rows).to(context.device))

    def _form(self, mixer: Mixer, length: int, layer: str) -> Audit:
        """Return the audit of a layer without what it has learned, that of the first layer of its kind and options."""
        key = type(mixer), f"{mixer.config} {replace(mixer.layer, index=0)}", length
        if key not in self._forms:
            self._forms[key] = audit_untrained(mixer, length, layer)
        return self._forms[key]


def held_out(
    data: Workload, length: int, read: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None
) -> NDArray[np.int64]:
    """Return sequences of at most `length` tokens to audit a model on: int64 [2 * SEQUENCES, T].

    They are those of the test split of the first training domain, one document after the other, or examples of the
    training task in its largest cell.

    Args:
        data: of the model.
        length: the longest sequence.
        read: maps the tokens of a document to those of the model, where these are others.

    Raises:
        DataError: the test split is too short.
    """
    if isinstance(data, TaskData):
        cell = max(data.cells, key=lambda task: tuple(task.cell.values()))
        return cell.instances(EXAMPLES, range(2 * SEQUENCES)).inputs[:, :length]
    assert isinstance(data, PreparedData)
    documents = data.documents("test", data.train_domains[0])
    wanted = 2 * SEQUENCES * length
    count = int(np.searchsorted(documents.sizes.cumsum(), wanted)) + 1
    parts = [documents.tokens(index) for index in range(min(count, len(documents)))]
    tokens = np.concatenate(parts if read is None else [*map(read, parts)])[:wanted].astype(np.int64)
    size = len(tokens) // (2 * SEQUENCES)
    if size < SHORTEST:
        raise DataError(
            f"the test split of {data.train_domains[0]} has {len(tokens)} tokens, too few to audit a model; "
            f"an audit needs {2 * SEQUENCES * SHORTEST} or more."
        )
    return tokens[: 2 * SEQUENCES * size].reshape(-1, size)
