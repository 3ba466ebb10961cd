"""Loss on text that stands in the context already: whether a model of text copies from its context."""

import math
from typing import Literal

import numpy as np
from pydantic import Field

from basecap.data import PreparedData
from basecap.data.config import Count
from basecap.errors import DataError
from basecap.evals._contract import Context, EvaluationConfig, Measurement, Outcome, SharedEvaluation, evaluation
from basecap.evals._openings import largest_batch, losses_of, openings
from basecap.models.language_model import LanguageModel


@evaluation("copying", unit="share", better="higher")
class ContextCopying(SharedEvaluation[PreparedData]):
    """Share of the loss that vanishes when the start of a held-out document is read a second time.

    The tokens stand in the context twice in a row. A model that finds the first copy and reads on from it predicts the
    second one almost without loss (a share of 1); one that does not look back predicts it no better (0).
    """

    class Config(EvaluationConfig):
        """Options of copying."""

        split: Literal["validation", "test"] = Field("test", description="split of the documents")
        documents: Count = Field(64, ge=2, le=2**20, description="maximum number of documents per domain")
        length: Count = Field(256, ge=2, description="tokens that are repeated, at most half of the training length")
        tokens_per_batch: Count = Field(32_768, ge=1, le=2**30, description="tokens per forward pass")

    config: Config
    needs = "text"
    reduced_by = "documents or length of copying"

    def check(self, data: PreparedData, length: int) -> None:
        """Raise DataError if a domain has fewer than two documents that are long enough."""
        wanted = self._length(length)
        for domain in data.domains:
            if len(self._rows(data, domain, wanted)) < 2:
                raise DataError(
                    f"domain {domain!r} has fewer than two {self.config.split} documents of {wanted} tokens; lower the "
                    "length of copying."
                )

    def tokens_read(self, data: PreparedData, length: int) -> int:
        """Return how many tokens the documents have, read twice."""
        wanted = self._length(length)
        return sum(2 * self._rows(data, domain, wanted).size for domain in data.domains)

    def run(self, model: LanguageModel, context: Context[PreparedData]) -> Outcome:
        """Return the share of this process's domains, with its standard error over documents."""
        length = self._length(model.config.max_length)
        measurements = []
        for domain in context.data.domains[context.rank :: context.world]:
            rows = self._rows(context.data, domain, length)
            losses = losses_of(model, context, np.tile(rows, 2), self.config.tokens_per_batch)
            measurements.append(_measure(domain, losses.reshape(len(rows), 2, length).mean(axis=2), length))
        return Outcome(measurements=measurements)

    def trial(self, model: LanguageModel, context: Context[PreparedData]) -> None:
        """Compute the losses of one batch."""
        length, tokens = self._length(model.config.max_length), self.config.tokens_per_batch
        losses_of(model, context, largest_batch(2 * length, tokens), tokens)

    def _length(self, longest: int) -> int:
        return min(self.config.length, longest // 2)

    def _rows(self, data: PreparedData, domain: str, length: int) -> np.ndarray:
        return openings(data, self.config.split, domain, length, self.config.documents)


def _measure(domain: str, losses: np.ndarray, length: int) -> Measurement:
    """Return 1 - second / first, a ratio of means over documents, with its standard error (delta method)."""
    first, second = losses.T
    ratio = second.mean() / first.mean()
    stderr = (second - ratio * first).std(ddof=1) / first.mean() / math.sqrt(len(losses))
    return Measurement(
        subset=domain, metric="copying", value=float(1 - ratio), n=len(losses) * length, stderr=float(stderr)
    )
