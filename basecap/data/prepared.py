"""Prepared data: what training and evaluations see."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from basecap.data.config import DataConfig
from basecap.data.hashes import digest
from basecap.data.overlap import Overlap
from basecap.data.shards import DOCUMENT, LEAST_DOCUMENTS, Group, Shard, TokenRun, select
from basecap.data.sources import SPLITS, Split
from basecap.data.stream import TrainStream
from basecap.data.tokenizer import Tokenizer
from basecap.data.workload import Batch, Workload
from basecap.errors import ConfigError, DataError, nearest


class DocumentSet:
    """The documents of one domain and split."""

    def __init__(self, domain: str, groups: Sequence[Group], left_out: Sequence[int] = ()):
        """Take the documents of `groups`, one group after the other, less those numbered in `left_out`, ascending."""
        self.domain = domain
        self._groups = groups
        bounds = np.cumsum([0, *(len(group) for group in groups)])
        numbers = np.array(left_out, np.int64)
        gone = np.split(numbers, np.searchsorted(numbers, bounds[1:-1]))
        self._gone = [numbers - first for numbers, first in zip(gone, bounds[:-1], strict=False)]
        self._firsts = bounds - np.cumsum([0, *(len(numbers) for numbers in self._gone)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def tokens(self, index: int) -> np.ndarray:
        """Return the tokens of a document: int64 [tokens], without end-of-text."""
        document = self._documents[index]
        group = self._groups[int(np.searchsorted(self._firsts, index, side="right")) - 1]
        start = int(document["start"])
        return TokenRun(group.path, start, start + int(document["tokens"]))[:].astype(np.int64)

    def bytes(self, index: int) -> int:
        """Return the length of a document in bytes of UTF-8."""
        return int(self._documents[index]["bytes"])

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each document: int64 [documents], without end-of-text."""
        return self._documents["tokens"]

    @cached_property
    def clusters(self) -> np.ndarray:
        """Number of each document's cluster: int64 [documents], from 0; a document without a label is one alone."""
        labels = self._documents["cluster"]
        numbers = np.unique(labels, return_inverse=True)[1]
        alone = labels == 0
        numbers[alone] = len(labels) + np.arange(alone.sum())
        return np.unique(numbers, return_inverse=True)[1].astype(np.int64)

    @property
    def labelled(self) -> int:
        """Number of documents that have the label of a cluster."""
        return int(np.count_nonzero(self._documents["cluster"]))

    @property
    def runs(self) -> list[TokenRun]:
        """The tokens of all documents, each followed by end-of-text; of a set from which none is left out."""
        return [group.tokens for group in self._groups]

    @property
    def total_tokens(self) -> int:
        """Tokens of all documents, without end-of-text."""
        return sum(int(documents["tokens"].sum()) for documents in self._each())

    @property
    def total_bytes(self) -> int:
        """Bytes of UTF-8 of all documents."""
        return sum(int(documents["bytes"].sum()) for documents in self._each())

    @property
    def content(self) -> str:
        """Sixteen hex digits that change with any document."""
        hasher = hashlib.sha256()
        for documents in self._each():
            hasher.update(documents["hash"].tobytes())
        return hasher.hexdigest()[:16]

    @cached_property
    def _documents(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, DOCUMENT), *self._each()])

    def _each(self) -> Iterator[np.ndarray]:
        """Yield the documents of each group: DOCUMENT [documents]."""
        for group, gone in zip(self._groups, self._gone, strict=True):
            yield np.delete(group.documents, gone) if len(gone) else group.documents


class PreparedData(Workload):
    """Token shards of a study, opened.

    Attributes:
        vocabulary: number of token ids of the tokenizer.
        length: tokens of a training sequence.
        tokenizer: what made the tokens.
        train: the training tokens.
        train_domains: names of the domains that are trained on (and tested).
        ood_domains: names of the domains that are only tested.
        manifest: the source's files with their hashes, the tokenizer, and what each domain and split holds.
        sets: all documents by (domain, split).
        manifest_hash: sixteen hex digits of the manifest; the same for the same text and options on any machine.
        overlap: how much of the held-out text stands in the training text, None while that is not known.
        remark: what a reader of the results has to know of the text, one line without a full stop; None for nothing.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        shards: Sequence[Shard],
        limits: Mapping[tuple[str, Split], int | None],
        overlap: Overlap | None = None,
        remark: str | None = None,
    ):
        """Put shards together; raises DataError when a domain has too little text."""
        self.tokenizer = tokenizer
        self.vocabulary = tokenizer.vocab_size
        self.length = config.seq_len
        self.train_domains = config.train
        self.ood_domains = config.ood
        groups = {
            (domain, split): select([group for shard in shards if (group := shard.group(domain, split))], limit)
            for (domain, split), limit in limits.items()
        }
        self.overlap = overlap
        self.remark = remark
        left_out = overlap.left_out if overlap else {}
        self.sets = {
            (domain, split): DocumentSet(domain, found, left_out.get(f"{domain}/{split}", ()))
            for (domain, split), found in groups.items()
        }
        self._check(config)
        self.train = TrainStream({domain: self.sets[domain, "train"].runs for domain in config.train}, config.weights)
        self.manifest: dict[str, Any] = {
            "source": config.source,
            "tokenizer": tokenizer.fingerprint,
            "files": dict(sorted(item for shard in shards for item in shard.about["files"].items())),
            "documents": {
                f"{domain}/{split}": {"documents": len(found), "tokens": found.total_tokens, "content": found.content}
                for (domain, split), found in sorted(self.sets.items())
            },
        }
        self.manifest_hash = digest(self.manifest)

    def batch(self, seed: int, step: int, batch: int, rank: int = 0, world: int = 1) -> Batch:
        """Return windows of the training tokens, see `Workload.batch`; every token of a window has a target."""
        rows = self.train.batch(seed, step, batch, self.length, rank, world)
        return Batch(rows[:, :-1], rows[:, 1:])

    def overlap_rows(self) -> list[dict[str, Any]]:
        """Return by domain the share of its test text that stands in the training text, and documents left out."""
        if self.overlap is None:
            return []
        return [
            {
                "domain": domain,
                "share": self.overlap.shares[f"{domain}/test"],
                "left_out": len(self.overlap.left_out[f"{domain}/test"]),
            }
            for domain in (*self.train_domains, *self.ood_domains)
        ]

    def documents(self, split: Split, domain: str) -> DocumentSet:
        """Return the documents of a domain and split; raises ConfigError for unknown names, DataError for none."""
        domains = (*self.train_domains, *self.ood_domains)
        if domain not in domains:
            raise ConfigError(f"the data has no domain {domain!r}: {nearest(domain, domains)}")
        if split not in SPLITS:
            raise ConfigError(f"unknown split {split!r}: {nearest(split, SPLITS)}")
        found = self.sets.get((domain, split))
        if not found:
            raise DataError(f"domain {domain!r} has no {split} documents; choose another split or add text.")
        return found

    @property
    def held_out(self) -> dict[tuple[str, Split], DocumentSet]:
        """The documents of validation and test by (domain, split)."""
        return {(domain, split): found for (domain, split), found in self.sets.items() if split != "train"}

    def _check(self, config: DataConfig) -> None:
        for (domain, split), found in self.sets.items():
            if split != "validation" and not found:
                limit = config.max_train_tokens if split == "train" else config.max_test_tokens
                few = f" of at most {limit // LEAST_DOCUMENTS} tokens; raise data.max_{split}_tokens," if limit else ";"
                if self.overlap and self.overlap.left_out.get(f"{domain}/{split}"):
                    few = f" that do not stand in the training text; raise data.overlap = {config.overlap},"
                elif config.min_ood_tokens and domain in config.ood:
                    few = f" of at least {config.min_ood_tokens} tokens; lower data.min_ood_tokens,"
                raise DataError(f"domain {domain!r} has no {split} documents{few} add text or leave the domain out.")
        for domain in (*config.train, *config.ood):
            splits = ("train",) if domain in config.train else SPLITS[1:]
            held = sum(self.sets[domain, split].total_tokens for split in splits)
            if held < config.seq_len:
                raise DataError(
                    f"data.seq_len = {config.seq_len} is longer than the whole text of domain {domain!r} "
                    f"({held} tokens for {' and '.join(splits)}); lower it or add text."
                )


def inspect(prepared: PreparedData) -> list[dict[str, Any]]:
    """Return one row per domain and split.

    Held-out rows say what share of the tokens stands in the training text, how many documents are left out for that,
    how many clusters the documents form and how many of them have no label of a cluster.
    """
    rows, labelled = [], any(found.labelled for found in prepared.held_out.values())
    for (domain, split), found in prepared.sets.items():
        held_out, place = split != "train", f"{domain}/{split}"
        rows.append(
            {
                "domain": domain,
                "role": "train" if domain in prepared.train_domains else "ood",
                "split": split,
                "documents": len(found),
                "tokens": found.total_tokens,
                "bytes": found.total_bytes,
                "bytes per token": found.total_bytes / max(1, found.total_tokens),
                "in training text": prepared.overlap.shares[place] if prepared.overlap and held_out else None,
                "left out": len(prepared.overlap.left_out[place]) if prepared.overlap and held_out else None,
                "clusters": len(np.unique(found.clusters)) if held_out and labelled else None,
                "without cluster": len(found) - found.labelled if held_out and labelled else None,
            }
        )
    return rows
