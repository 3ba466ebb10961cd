"""Loss on text that stands in the context already: whether a model of text copies from its context."""

import math
from typing import Literal

import numpy as np
from pydantic import Field

from basecap.data import PreparedData
from basecap.data.config import Count
from basecap.errors import DataError
from basecap.evals._contract import Context, EvaluationConfig, Measurement, Outcome, SharedEvaluation, evaluation
from basecap.evals._openings import largest_batch, losses_of, losses_of_each, openings
from basecap.models.language_model import LanguageModel

#: Tokens that are repeated, where documents and training sequences are long enough, and the fewest without an option.
LENGTH, SHORTEST = 256, 16
#: Documents of a domain that must be long enough, unless it has fewer: else all domains repeat shorter openings.
ENOUGH = 8


@evaluation("copying", unit="share", better="higher")
class ContextCopying(SharedEvaluation[PreparedData]):
    """Share of the loss that vanishes when the start of a held-out document is read a second time.

    The tokens stand in the context twice in a row. A model that finds the first copy and reads on from it predicts the
    second one almost without loss (a share of 1); one that does not look back predicts it no better (0).

    With 32 documents of 256 tokens in each of five domains, the standard error of the mean over domains is 0.1 % where
    a model of 30M parameters copies 2 % and 0.5 % where it copies 31 % (records of limited-zoo, trained to 300M
    tokens); a run of 60M tokens then reads 1.6M tokens at its 20 evaluation points.
    """

    class Config(EvaluationConfig):
        """Options of copying."""

        split: Literal["validation", "test"] = Field("test", description="split of the documents")
        documents: Count = Field(32, ge=2, le=2**20, description="maximum number of documents per domain")
        length: Count | None = Field(
            None,
            ge=2,
            description="tokens that are repeated, at most half of the training length (default: 256, or a power of "
            "two below where documents are shorter)",
        )
        tokens_per_batch: Count = Field(32_768, ge=1, le=2**30, description="tokens per forward pass")

    config: Config
    needs = "text"
    reduced_by = "documents or length of copying"

    def __init__(self, config: Config):
        """Take the options; the documents are read at the first evaluation point and kept in memory."""
        super().__init__(config)
        self._rows: dict[tuple[str, int], dict[str, np.ndarray]] = {}

    def check(self, data: PreparedData, length: int) -> None:
        """Raise DataError if `length` is given and a domain has fewer than two documents that are long enough."""
        if self.config.length is None:
            return
        wanted = min(self.config.length, length // 2)
        for domain, rows in self._openings(data, length).items():
            if len(rows) < 2:
                raise DataError(
                    f"domain {domain!r} has fewer than two {self.config.split} documents of {wanted} tokens; lower the "
                    "length of copying."
                )

    def tokens_read(self, data: PreparedData, length: int) -> int:
        """Return how many tokens the documents have, read twice."""
        return sum(2 * rows.size for rows in self._openings(data, length).values())

    def run(self, model: LanguageModel, context: Context[PreparedData]) -> Outcome:
        """Return the share of this process's domains, with its standard error over documents.

        Domains with fewer than two documents that are long enough are left out.
        """
        held = self._openings(context.data, model.config.max_length)
        domains = [domain for domain in context.data.domains if len(held[domain]) > 1][context.rank :: context.world]
        twice = [np.tile(held[domain], 2) for domain in domains]
        measurements = []
        for domain, losses in zip(
            domains, losses_of_each(model, context, twice, self.config.tokens_per_batch), strict=True
        ):
            halves = losses.reshape(len(losses), 2, -1)
            measurements.append(_measure(domain, halves.mean(axis=2), halves.shape[2]))
        return Outcome(measurements=measurements)

    def trial(self, model: LanguageModel, context: Context[PreparedData]) -> None:
        """Compute the losses of the largest batch."""
        held = self._openings(context.data, model.config.max_length).values()
        if read := [np.tile(rows, 2) for rows in held if len(rows) > 1]:
            tokens = self.config.tokens_per_batch
            losses_of(model, context, largest_batch(read, tokens), tokens)

    def _openings(self, data: PreparedData, longest: int) -> dict[str, np.ndarray]:
        """Return the start of each domain's documents for models of `longest` tokens: int64 [documents, length]."""
        key = data.manifest_hash, longest
        if key not in self._rows:
            length, most = _length(self.config, data, longest), self.config.documents
            self._rows[key] = {
                domain: openings(data, self.config.split, domain, length, most) for domain in data.domains
            }
        return self._rows[key]


def _length(config: ContextCopying.Config, data: PreparedData, longest: int) -> int:
    """Return the tokens to repeat for models of `longest` tokens."""
    length = min(config.length or LENGTH, longest // 2)
    sizes = [data.documents(config.split, domain).sizes for domain in data.domains]

    def few(own: np.ndarray) -> bool:
        return int(np.count_nonzero(own >= length)) < min(ENOUGH, len(own))

    while config.length is None and length >= 2 * SHORTEST and any(map(few, sizes)):
        length //= 2
    return length


def _measure(domain: str, losses: np.ndarray, length: int) -> Measurement:
    """Return 1 - second / first, a ratio of means over documents, with its standard error (delta method)."""
    first, second = losses.T
    ratio = second.mean() / first.mean()
    stderr = (second - ratio * first).std(ddof=1) / first.mean() / math.sqrt(len(losses))
    return Measurement(
        subset=domain, metric="copying", value=float(1 - ratio), n=len(losses) * length, stderr=float(stderr)
    )
