"""Prepared data: what training and evaluations see."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from basecap.data.config import DataConfig
from basecap.data.hashes import digest
from basecap.data.shards import DOCUMENT, LEAST_DOCUMENTS, Group, Shard, TokenRun, select
from basecap.data.sources._contract import SPLITS, Split
from basecap.data.stream import TrainStream
from basecap.data.tokenizer import Tokenizer
from basecap.errors import ConfigError, DataError, nearest


class DocumentSet:
    """The documents of one domain and split."""

    def __init__(self, domain: str, groups: Sequence[Group]):
        self.domain = domain
        self._groups = groups
        self._firsts = np.cumsum([0, *(len(group) for group in groups)])

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
    def total_tokens(self) -> int:
        """Tokens of all documents, without end-of-text."""
        return sum(int(group.documents["tokens"].sum()) for group in self._groups)

    @property
    def total_bytes(self) -> int:
        """Bytes of UTF-8 of all documents."""
        return sum(int(group.documents["bytes"].sum()) for group in self._groups)

    @property
    def content(self) -> str:
        """Sixteen hex digits that change with any document."""
        hasher = hashlib.sha256()
        for group in self._groups:
            hasher.update(group.documents["hash"].tobytes())
        return hasher.hexdigest()[:16]

    @cached_property
    def _documents(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, DOCUMENT), *(group.documents for group in self._groups)])


class PreparedData:
    """Token shards of a study, opened.

    Attributes:
        tokenizer: what made the tokens.
        train: the training batches.
        train_domains: names of the domains that are trained on (and tested).
        ood_domains: names of the domains that are only tested.
        manifest: the source's files with their hashes, the tokenizer, and what each domain and split holds.
        sets: all documents by (domain, split).
        manifest_hash: sixteen hex digits of the manifest; the same for the same text and options on any machine.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, shards: Sequence[Shard], limits: Mapping):
        """Put shards together; raises DataError when a domain has too little text."""
        self.tokenizer = tokenizer
        self.train_domains = config.train
        self.ood_domains = config.ood
        groups = {
            (domain, split): select([group for shard in shards if (group := shard.group(domain, split))], limit)
            for (domain, split), limit in limits.items()
        }
        self.sets = {(domain, split): DocumentSet(domain, found) for (domain, split), found in groups.items()}
        self._check(config)
        streams = {domain: [group.tokens for group in groups[domain, "train"]] for domain in config.train}
        self.train = TrainStream(streams, config.weights)
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
                if config.min_ood_tokens and domain in config.ood:
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
    """Return one row per domain and split: what it holds, and how many clusters where it is held out."""
    rows = []
    for (domain, split), found in prepared.sets.items():
        held_out = split != "train"
        rows.append(
            {
                "domain": domain,
                "role": "train" if domain in prepared.train_domains else "ood",
                "split": split,
                "documents": len(found),
                "tokens": found.total_tokens,
                "bytes": found.total_bytes,
                "bytes per token": found.total_bytes / max(1, found.total_tokens),
                "clusters": len(np.unique(found.clusters)) if held_out else None,
                "without cluster": len(found) - found.labelled if held_out else None,
            }
        )
    return rows
