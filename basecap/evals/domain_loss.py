"""Loss per domain on held-out documents: both coordinates of the gap."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from basecap.data import DocumentSet, PreparedData, Tokenizer
from basecap.data.config import Count
from basecap.errors import DataError
from basecap.evals._contract import Context, EvaluationConfig, Measurement, Outcome, SharedEvaluation, evaluation
from basecap.evals._passes import pass_lengths, token_losses
from basecap.evals._token_classes import ngram_of, token_classes
from basecap.models.language_model import LanguageModel
from basecap.records.documents import DocumentLosses
from basecap.records.token_classes import CLASSES, loss_metric
from basecap.system.transfers import sent


@dataclass(frozen=True)
class _Window:
    """A window of a document, one of `_HeldOut`: its tokens int32 [T + 1]; all but the first have a class, int8 [T]."""

    document: int
    tokens: np.ndarray
    classes: np.ndarray


@dataclass(frozen=True)
class _HeldOut:
    """The documents of domains: windows in batches of one padded length, and what does not depend on a model.

    By domain, `counts` int64 [documents, classes] are the tokens of each class; `nats` of `documents` are zero. Windows
    count the documents of all domains one after the other.
    """

    documents: dict[str, DocumentLosses]
    counts: dict[str, np.ndarray]
    batches: list[tuple[int, list[_Window]]]


@evaluation("domain-loss", unit="nats per token", better="lower")
class DomainLoss(SharedEvaluation[PreparedData]):
    """Loss on every held-out document of every domain, cut into windows of the training length.

    Each token is predicted once, from the tokens before it in its window. The first window of a document starts with
    the end-of-text token, so that the first token of the document is predicted too.

    The loss is also kept by class of token (`basecap.records.token_classes`): whether the `ngram` tokens before it
    occur earlier in the window, and were followed by it. Classes depend on the text alone, not on the model.
    """

    class Config(EvaluationConfig):
        """Options of domain-loss."""

        split: Literal["validation", "test"] = Field("test", description="split of the documents")
        max_document_tokens: Count | None = Field(
            None, ge=1, description="maximum number of tokens to predict per document, from its start (default: all)"
        )
        tokens_per_batch: Count = Field(32_768, ge=1, le=2**30, description="padded tokens per forward pass")
        ngram: Count | None = Field(
            None,
            ge=1,
            description="tokens that must occur earlier for a copy to predict the next one (default: 2, of bytes 8)",
        )

    config: Config
    needs = "text"
    reduced_by = "data.max_test_tokens or max_document_tokens of domain-loss"

    def __init__(self, config: Config):
        """Take the options; the documents are read at the first evaluation point and kept in memory."""
        super().__init__(config)
        self._windows: dict[tuple[str, str, int], tuple[DocumentLosses, np.ndarray, list[_Window]]] = {}
        self._held: dict[tuple[str, tuple[str, ...], int, tuple[int, ...]], _HeldOut] = {}

    def check(self, data: PreparedData, length: int) -> None:
        """Raise DataError if a domain has no documents of the split, or no token can be in a class but "new"."""
        for domain in data.domains:
            data.documents(self.config.split, domain)
        if self.config.ngram is not None and self.config.ngram >= length:
            raise DataError(
                f"domain-loss: in sequences of {length} tokens no {self.config.ngram} tokens occur a second time "
                f"before a third; lower its ngram below {length}."
            )

    def tokens_read(self, data: PreparedData, length: int) -> int:
        """Return how many held-out tokens are predicted."""
        sizes = np.concatenate([data.documents(self.config.split, domain).sizes for domain in data.domains])
        most = self.config.max_document_tokens
        return int(np.sum(sizes if most is None else np.minimum(sizes, most)))

    def run(self, model: LanguageModel, context: Context[PreparedData]) -> Outcome:
        """Return the mean loss per token, in all and by class, and bits per byte of each domain; documents' losses."""
        domains = context.data.domains
        # Passes of a compiled model are always full, so they read windows of all domains.
        groups = [domains] if model.compiled else [(domain,) for domain in domains]
        nats, counts = dict[str, np.ndarray](), dict[str, np.ndarray]()
        documents = dict[str, DocumentLosses]()
        for group in groups:
            held = self._held_out(group, context.data, model.config.max_length, pass_lengths(model))
            nats |= self._nats(model, context, held)
            counts |= held.counts
            documents |= held.documents
        return _outcome(nats, counts, documents)

    def join(self, parts: Sequence[Outcome]) -> Outcome:
        """Add up the losses of each document, whose windows may be measured by different processes."""
        counts = {domain: parts[0].samples[domain, "counts"] for domain in parts[0].documents}
        nats = {domain: np.sum([part.samples[domain, "nats"] for part in parts], axis=0) for domain in counts}
        return _outcome(nats, counts, parts[0].documents)

    def trial(self, model: LanguageModel, context: Context[PreparedData]) -> None:
        """Compute the losses of the largest batch of windows of any domain, padded to the training length.

        A compiled model reads a batch of each of its lengths, so that all are compiled.
        """
        length = model.config.max_length
        rows = max(1, self.config.tokens_per_batch // length)
        held = [context.data.documents(self.config.split, domain) for domain in context.data.domains]
        start = context.data.tokenizer.end_of_text
        most = self.config.max_document_tokens
        cut = [list(itertools.islice(_all_windows(part, length, start, most), rows)) for part in held]
        for padded in pass_lengths(model) if model.compiled else (length,):
            begun = [tokens[: padded + 1] for _, tokens in max(cut, key=len)]
            windows = [_Window(0, tokens, np.zeros(len(tokens) - 1, np.int8)) for tokens in begun]
            self._losses(model, context, windows, padded)

    def batches(self, model: LanguageModel, data: PreparedData) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets, int64 [B, T], -1 in padding: a batch of each shape in each domain."""
        length, lengths = model.config.max_length, pass_lengths(model)
        for domain in data.domains:
            shapes = set()
            for padded, windows in self._held_out((domain,), data, length, lengths).batches:
                if (padded, len(windows)) not in shapes:
                    shapes.add((padded, len(windows)))
                    yield _batch(windows, padded)[:2]

    def _held_out(self, domains: tuple[str, ...], data: PreparedData, length: int, padded: Sequence[int]) -> _HeldOut:
        """Return the documents of domains in batches for models of `length` tokens, padded to one of `padded`."""
        key = data.manifest_hash, domains, length, tuple(padded)
        if key not in self._held:
            losses, counts = dict[str, DocumentLosses](), dict[str, np.ndarray]()
            windows, first = list[_Window](), 0
            for domain in domains:
                losses[domain], counts[domain], own = self._read(domain, data, length)
                windows += [replace(window, document=first + window.document) for window in own]
                first += len(losses[domain].tokens)
            batches = _batches(windows, padded, self.config.tokens_per_batch)
            self._held[key] = _HeldOut(losses, counts, batches)
        return self._held[key]

    def _read(self, domain: str, data: PreparedData, length: int) -> tuple[DocumentLosses, np.ndarray, list[_Window]]:
        """Return what `_counted` does of the documents of a domain, and their windows of `length` tokens."""
        key = data.manifest_hash, domain, length
        if key not in self._windows:
            documents, most = data.documents(self.config.split, domain), self.config.max_document_tokens
            found = list(_all_windows(documents, length, data.tokenizer.end_of_text, most))
            classes = token_classes([tokens for _, tokens in found], ngram_of(self.config.ngram, data, length))
            windows = [_Window(index, tokens, own) for (index, tokens), own in zip(found, classes, strict=True)]
            self._windows[key] = *_counted(documents, windows, data.tokenizer), windows
        return self._windows[key]

    def _nats(self, model: LanguageModel, context: Context[PreparedData], held: _HeldOut) -> dict[str, np.ndarray]:
        """Return by domain the summed loss in nats of each document, in all and by class: [documents, 1 + classes].

        Losses stay on the device until the end, so that the host prepares batches while it computes.
        """
        sizes, rows, found = [len(part.tokens) for part in held.documents.values()], [], []
        nats, words = np.zeros((sum(sizes), 1 + len(CLASSES))), f"evaluating {self.declaration.name}: "
        words += f"{next(iter(held.documents))}, " if len(sizes) == 1 else ""
        for number, (length, windows) in enumerate(held.batches):
            context.note(f"{words}{100 * number / len(held.batches):.0f} %")
            if number % context.world == context.rank:
                found.append(self._losses(model, context, windows, length))
                rows += [window.document for window in windows]
        if found:
            np.add.at(nats, rows, torch.cat(found).cpu().numpy())
        return dict(zip(held.documents, np.split(nats, np.cumsum(sizes)[:-1]), strict=True))

    def _losses(
        self, model: LanguageModel, context: Context[PreparedData], windows: Sequence[_Window], length: int
    ) -> Tensor:
        """Return the summed loss of each window, in all and by class, in nats: float64 [windows, 1 + classes]."""
        inputs, targets, classes = _batch(windows, length)
        losses = token_losses(model, context, inputs, targets, self.config.tokens_per_batch)
        classes = sent(classes, context.device)
        parts = [losses.where(classes == number, 0.0) for number in range(len(CLASSES))]
        return torch.stack([part.sum(dim=1) for part in (losses, *parts)], dim=1)


def _counted(
    documents: DocumentSet, windows: Sequence[_Window], tokenizer: Tokenizer
) -> tuple[DocumentLosses, np.ndarray]:
    """Return the documents with their tokens and bytes in windows, and those tokens by class [documents, classes]."""
    tokens = np.zeros(len(documents), np.int64)
    counts = np.zeros((len(documents), len(CLASSES)), np.int64)
    for window in windows:
        tokens[window.document] += len(window.classes)
        counts[window.document] += np.bincount(window.classes, minlength=len(CLASSES))
    read = _bytes(documents, tokens, tokenizer)
    return DocumentLosses(np.zeros(len(documents)), tokens, read, documents.clusters), counts


def _batches(
    windows: Sequence[_Window], lengths: Sequence[int], tokens_per_batch: int
) -> list[tuple[int, list[_Window]]]:
    """Return windows in batches of one of the padded `lengths`, shorter ones first."""
    by_length: dict[int, list[_Window]] = {}
    for window in windows:
        by_length.setdefault(lengths[bisect_left(lengths, len(window.classes))], []).append(window)
    batches = []
    for length, members in sorted(by_length.items()):
        rows = max(1, tokens_per_batch // length)
        batches += [(length, members[first : first + rows]) for first in range(0, len(members), rows)]
    return batches


def _all_windows(documents: DocumentSet, length: int, start: int, most: int | None) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (document index, window) for the first `most` tokens of each document."""
    for index in range(len(documents)):
        for window in windows_of(documents.tokens(index)[:most], length, start):
            yield index, window


def _bytes(documents: DocumentSet, read: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return the bytes of each document's first `read` tokens: int64 [documents]."""
    found = np.array([documents.bytes(index) for index in range(len(documents))], np.int64)
    for index in np.flatnonzero(read < documents.sizes).tolist():
        found[index] = tokenizer.bytes_of_first(int(read[index]), documents.tokens(index), int(found[index]))
    return found


def windows_of(tokens: np.ndarray, length: int, start: int) -> Iterator[np.ndarray]:
    """Yield windows, int32, of at most length + 1 tokens that overlap by one, so that each token is a target once.

    The first begins with the token `start`.
    """
    tokens = np.concatenate([[start], tokens]).astype(np.int32)
    for first in range(0, len(tokens) - 1, length):
        yield tokens[first : first + length + 1]


def _batch(windows: Sequence[_Window], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs and targets, int64, and classes, int8, of windows padded to `length`: [windows, length]."""
    inputs = np.zeros((len(windows), length), np.int64)
    targets = np.full((len(windows), length), -1, np.int64)
    classes = np.full((len(windows), length), len(CLASSES), np.int8)
    for row, window in enumerate(windows):
        size = len(window.tokens) - 1
        inputs[row, :size], targets[row, :size] = window.tokens[:-1], window.tokens[1:]
        classes[row, :size] = window.classes
    return torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(classes)


def _outcome(
    nats: dict[str, np.ndarray], counts: dict[str, np.ndarray], documents: dict[str, DocumentLosses]
) -> Outcome:
    """Return the numbers of domains from `nats` [documents, 1 + classes] and `counts` [documents, classes]."""
    measurements, losses = [], {}
    samples: dict[tuple[str, str], np.ndarray] = {}
    for domain, found in nats.items():
        losses[domain] = replace(documents[domain], nats=found[:, 0].copy())
        measurements += _measure(domain, losses[domain])
        measurements += _measure_classes(domain, found[:, 1:], counts[domain], documents[domain].clusters)
        samples |= {(domain, "nats"): found, (domain, "counts"): counts[domain]}
    return Outcome(measurements=measurements, documents=losses, samples=samples)


def _measure(domain: str, losses: DocumentLosses) -> list[Measurement]:
    """Return loss and bits per byte of a domain."""
    tokens, nats, clusters = int(losses.tokens.sum()), losses.nats, losses.clusters
    value, stderr = _ratio(nats, losses.tokens, clusters)
    bits, bits_stderr = _ratio(nats, losses.bytes, clusters, unit=1 / math.log(2))
    return [
        Measurement(subset=domain, metric="loss", value=value, n=tokens, stderr=stderr),
        Measurement(subset=domain, metric="bits_per_byte", value=bits, n=tokens, stderr=bits_stderr),
    ]


def _measure_classes(domain: str, nats: np.ndarray, counts: np.ndarray, clusters: np.ndarray) -> list[Measurement]:
    """Return the loss of each class that a domain has, from nats and tokens of each document [documents, classes]."""
    measurements = []
    for name, own, tokens in zip(CLASSES, nats.T, counts.T, strict=True):
        if tokens.any():
            value, stderr = _ratio(own, tokens, clusters)
            measurements.append(
                Measurement(subset=domain, metric=loss_metric(name), value=value, n=int(tokens.sum()), stderr=stderr)
            )
    return measurements


def _ratio(nats: np.ndarray, over: np.ndarray, clusters: np.ndarray, unit: float = 1.0) -> tuple[float, float | None]:
    """Return a ratio of sums over documents, with its standard error over clusters (delta method), times `unit`."""
    value = nats.sum() / over.sum()
    excess = np.bincount(np.unique(clusters, return_inverse=True)[1], weights=nats - value * over)
    count = len(excess)
    stderr = math.sqrt(count) * excess.std(ddof=1) / over.sum() * unit if count > 1 else None
    return value * unit, stderr
