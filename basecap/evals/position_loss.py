"""Loss by position, which shows whether a model uses distant tokens."""

import itertools
from typing import Literal

import numpy as np
from pydantic import Field

from basecap.data import PreparedData
from basecap.data.config import Count
from basecap.errors import DataError
from basecap.evals._contract import Context, EvaluationConfig, Measurement, Outcome, SharedEvaluation, evaluation
from basecap.evals._openings import largest_batch, losses_of, openings
from basecap.evals._statistics import standard_error
from basecap.models.language_model import LanguageModel


@evaluation("position-loss", unit="nats per token", better="lower", axes=("position",))
class PositionLoss(SharedEvaluation[PreparedData]):
    """Mean loss per range of positions, on the first tokens of long enough held-out documents.

    All ranges are measured on the same documents, so that they differ only in the length of the context. Each range
    ends at twice the position of the one before; `position` is the last position of a range, counted from 1.
    """

    class Config(EvaluationConfig):
        """Options of position-loss."""

        split: Literal["validation", "test"] = Field("test", description="split of the documents")
        documents: Count = Field(16, ge=1, le=2**20, description="maximum number of documents per domain")
        length: Count | None = Field(
            None, ge=2, description="tokens per document; shorter documents are skipped (default: the training length)"
        )
        first: Count = Field(256, ge=1, description="tokens of the first range")
        tokens_per_batch: Count = Field(32_768, ge=1, le=2**30, description="tokens per forward pass")

    config: Config
    needs = "text"
    reduced_by = "documents or length of position-loss"

    def check(self, data: PreparedData, length: int) -> None:
        """Raise DataError if no domain has a document that is long enough."""
        wanted = self._length(length)
        if not any(self._rows(data, domain, wanted).size for domain in data.domains):
            raise DataError(
                f"no {self.config.split} document of any domain has {wanted} tokens; lower the length of position-loss."
            )

    def tokens_read(self, data: PreparedData, length: int) -> int:
        """Return how many tokens the documents have."""
        wanted = self._length(length)
        return sum(self._rows(data, domain, wanted).size for domain in data.domains)

    def run(self, model: LanguageModel, context: Context[PreparedData]) -> Outcome:
        """Return the mean loss by range of this process's domains; those without long enough documents are left out."""
        length = self._length(model.config.max_length)
        measurements = []
        for domain in context.data.domains[context.rank :: context.world]:
            rows = self._rows(context.data, domain, length)
            if rows.size:
                losses = losses_of(model, context, rows, self.config.tokens_per_batch)
                measurements += self._measure(domain, losses)
        return Outcome(measurements=measurements)

    def trial(self, model: LanguageModel, context: Context[PreparedData]) -> None:
        """Compute the losses of the largest batch."""
        length, tokens = self._length(model.config.max_length), self.config.tokens_per_batch
        held = [self._rows(context.data, domain, length) for domain in context.data.domains]
        losses_of(model, context, largest_batch(held, tokens), tokens)

    def _length(self, longest: int) -> int:
        return min(self.config.length or longest, longest)

    def _rows(self, data: PreparedData, domain: str, length: int) -> np.ndarray:
        return openings(data, self.config.split, domain, length, self.config.documents)

    def _measure(self, domain: str, losses: np.ndarray) -> list[Measurement]:
        """Return the mean of each range, with its standard error over documents."""
        found = []
        for low, high in itertools.pairwise(edges(losses.shape[1], self.config.first)):
            means = losses[:, low:high].mean(axis=1)
            value, n, place = float(means.mean()), len(means) * (high - low), {"position": float(high)}
            stderr = standard_error(means)
            found.append(Measurement(subset=domain, metric="loss", value=value, n=n, stderr=stderr, axis=place))
        return found


def edges(length: int, first: int) -> list[int]:
    """Return the bounds of the ranges: the first range has `first` tokens, each next one ends at twice the position.

    >>> edges(1024, 256), edges(700, 256), edges(100, 256)
    ([0, 256, 512, 1024], [0, 256, 512, 700], [0, 100])
    """
    found = [0, min(first, length)]
    while found[-1] < length:
        found.append(min(2 * found[-1], length))
    return found
