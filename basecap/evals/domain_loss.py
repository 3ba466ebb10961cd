"""Loss per domain on held-out documents: both coordinates of the gap."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from basecap.data import DocumentSet, PreparedData
from basecap.data.config import Count
from basecap.evals._contract import Context, EvaluationConfig, Measurement, Outcome, SharedEvaluation, evaluation
from basecap.models.language_model import LanguageModel
from basecap.records.documents import DocumentLosses

#: Shortest padded length. Windows are padded to powers of two from here, so that there are few different shapes.
SHORTEST = 64


@evaluation("domain-loss", unit="nats per token", better="lower")
class DomainLoss(SharedEvaluation[PreparedData]):
    """Loss on every held-out document of every domain, cut into windows of the training length.

    Each token is predicted once, from the tokens before it in its window. The first window of a document starts with
    the end-of-text token, so that the first token of the document is predicted too.
    """

    class Config(EvaluationConfig):
        """Options of domain-loss."""

        split: Literal["validation", "test"] = Field("test", description="split of the documents")
        max_document_tokens: Count | None = Field(
            None, ge=1, description="maximum number of tokens to predict per document, from its start (default: all)"
        )
        tokens_per_batch: Count = Field(32_768, ge=1, le=2**30, description="padded tokens per forward pass")

    config: Config
    needs = "text"
    reduced_by = "data.max_test_tokens or max_document_tokens of domain-loss"

    def check(self, data: PreparedData, length: int) -> None:
        """Raise DataError if a domain has no documents of the split."""
        for domain in data.domains:
            data.documents(self.config.split, domain)

    def tokens_read(self, data: PreparedData, length: int) -> int:
        """Return how many held-out tokens are predicted."""
        sizes = np.concatenate([data.documents(self.config.split, domain).sizes for domain in data.domains])
        most = self.config.max_document_tokens
        return int(np.sum(sizes if most is None else np.minimum(sizes, most)))

    def run(self, model: LanguageModel, context: Context[PreparedData]) -> Outcome:
        """Return the mean loss per token and bits per byte of each domain, and the losses of single documents."""
        measurements, documents = [], {}
        for domain in context.data.domains:
            losses = self._losses(model, context, domain)
            documents[domain] = losses
            measurements += _measure(domain, losses)
        return Outcome(measurements=measurements, documents=documents)

    def join(self, parts: Sequence[Outcome]) -> Outcome:
        """Add up the losses of each document, whose windows may be measured by different processes."""
        measurements, documents = [], {}
        for domain, first in parts[0].documents.items():
            documents[domain] = replace(first, nats=np.sum([part.documents[domain].nats for part in parts], axis=0))
            measurements += _measure(domain, documents[domain])
        return Outcome(measurements=measurements, documents=documents)

    def trial(self, model: LanguageModel, context: Context[PreparedData]) -> None:
        """Compute the losses of the largest batch of windows of any domain, padded to the training length."""
        length = model.config.max_length
        rows = max(1, self.config.tokens_per_batch // length)
        held = [context.data.documents(self.config.split, domain) for domain in context.data.domains]
        start = context.data.tokenizer.end_of_text
        most = self.config.max_document_tokens
        windows = max((list(itertools.islice(_all_windows(part, length, start, most), rows)) for part in held), key=len)
        self._batch_losses(model, context, [window for _, window in windows], length)

    def _losses(self, model: LanguageModel, context: Context[PreparedData], domain: str) -> DocumentLosses:
        documents = context.data.documents(self.config.split, domain)
        start = context.data.tokenizer.end_of_text
        nats = np.zeros(len(documents))
        tokens = np.zeros(len(documents), dtype=np.int64)
        most = self.config.max_document_tokens
        windows: dict[int, list[tuple[int, np.ndarray]]] = {}
        for index, window in _all_windows(documents, model.config.max_length, start, most):
            tokens[index] += len(window) - 1
            padded = _padded_length(len(window) - 1, model.config.max_length)
            windows.setdefault(padded, []).append((index, window))
        batches, done, count = itertools.count(), 0, sum(map(len, windows.values()))
        for length, members in sorted(windows.items()):
            rows = max(1, self.config.tokens_per_batch // length)
            for first in range(0, len(members), rows):
                part = members[first : first + rows]
                context.note(f"evaluating {self.declaration.name}: {domain}, {100 * done / count:.0f} %")
                done += len(part)
                if next(batches) % context.world != context.rank:
                    continue
                summed = self._batch_losses(model, context, [window for _, window in part], length)
                np.add.at(nats, [index for index, _ in part], summed)
        return DocumentLosses(nats=nats, tokens=tokens, bytes=_bytes(documents, tokens), clusters=documents.clusters)

    @staticmethod
    def _batch_losses(
        model: LanguageModel, context: Context[PreparedData], windows: list[np.ndarray], length: int
    ) -> np.ndarray:
        """Return the summed loss of each window in nats, float64."""
        inputs, targets = _batch(windows, length)
        with context.autocast():
            losses = model.token_losses(inputs.to(context.device), targets.to(context.device))
        return losses.double().sum(dim=1).cpu().numpy()


def _all_windows(documents: DocumentSet, length: int, start: int, most: int | None) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (document index, window) for the first `most` tokens of each document."""
    for index in range(len(documents)):
        for window in _windows(documents.tokens(index)[:most], length, start):
            yield index, window


def _bytes(documents: DocumentSet, read: np.ndarray) -> np.ndarray:
    """Return the bytes of each document's first `read` tokens, proportional to its tokens."""
    whole = [(documents.bytes(index), len(documents.tokens(index))) for index in range(len(documents))]
    parts = [round(size * count / max(1, length)) for (size, length), count in zip(whole, read.tolist(), strict=True)]
    return np.array(parts, dtype=np.int64)


def _windows(tokens: np.ndarray, length: int, start: int) -> Iterator[np.ndarray]:
    """Yield windows of at most length + 1 tokens that overlap by one, so that each token is a target once."""
    tokens = np.concatenate([[start], tokens.astype(np.int64)])
    for first in range(0, len(tokens) - 1, length):
        yield tokens[first : first + length + 1]


def _padded_length(length: int, longest: int) -> int:
    return min(longest, max(SHORTEST, 1 << (length - 1).bit_length()))


def _batch(windows: list[np.ndarray], length: int) -> tuple[Tensor, Tensor]:
    inputs = torch.zeros(len(windows), length, dtype=torch.int64)
    targets = torch.full((len(windows), length), -1, dtype=torch.int64)
    for row, window in enumerate(windows):
        inputs[row, : len(window) - 1] = torch.from_numpy(window[:-1])
        targets[row, : len(window) - 1] = torch.from_numpy(window[1:])
    return inputs, targets


def _measure(domain: str, losses: DocumentLosses) -> list[Measurement]:
    """Return ratio estimates over documents, with standard errors over clusters (delta method)."""
    numbers = np.unique(losses.clusters, return_inverse=True)[1]

    def ratio(metric: str, over: np.ndarray, unit: float) -> Measurement:
        value = losses.nats.sum() / over.sum()
        excess = np.bincount(numbers, weights=losses.nats - value * over)
        count = len(excess)
        stderr = math.sqrt(count) * excess.std(ddof=1) / over.sum() * unit if count > 1 else None
        return Measurement(subset=domain, metric=metric, value=value * unit, n=int(losses.tokens.sum()), stderr=stderr)

    return [
        ratio("loss", losses.tokens, 1.0),
        ratio("bits_per_byte", losses.bytes, 1 / math.log(2)),
    ]
