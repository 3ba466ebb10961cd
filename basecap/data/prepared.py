"""Prepared text: the tokens that training and evaluations read."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from basecap.data.config import DataConfig
from basecap.data.hashes import digest
from basecap.data.overlap import TextOverlap
from basecap.data.shards import DOCUMENT, MIN_DOCUMENTS, Group, Shard, TokenRun, select
from basecap.data.sources import SPLITS, Split
from basecap.data.stream import TrainStream
from basecap.data.tokenizer import Tokenizer
from basecap.data.workload import Batch, Workload
from basecap.errors import ConfigError, DataError, nearest


class DocumentSet:
    """The documents of one domain and split."""

    def __init__(self, domain: str, groups: Sequence[Group], left_out: Sequence[int] = (), once: bool = False):
        """Take the documents of `groups` in order.

        Args:
            domain: their domain.
            groups: the documents.
            left_out: indices of documents to leave out.
            once: leave out `copies` too.
        """
        self.domain = domain
        self._groups = groups
        bounds = np.cumsum([0, *(len(group) for group in groups)])
        numbers = np.union1d(np.array(left_out, np.int64), self.copies if once else [])
        numbers = numbers.astype(np.int64)
        removed = np.split(numbers, np.searchsorted(numbers, bounds[1:-1]))
        self._removed = [numbers - first for numbers, first in zip(removed, bounds[:-1], strict=False)]
        self._firsts = bounds - np.cumsum([0, *(len(numbers) for numbers in self._removed)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @cached_property
    def copies(self) -> np.ndarray:
        """Indices of the documents of all groups whose text an earlier one has: int64 [copies], ascending."""
        hashes = np.concatenate([np.zeros(0, np.uint64), *(group.documents["hash"] for group in self._groups)])
        return np.setdiff1d(np.arange(len(hashes)), np.unique(hashes, return_index=True)[1])

    def tokens(self, index: int) -> np.ndarray:
        """Return the tokens of a document: int64 [tokens], without end-of-text."""
        document = self._documents[index]
        group = self._groups[int(np.searchsorted(self._firsts, index, side="right")) - 1]
        start = int(document["start"])
        return TokenRun(group.path, start, start + int(document["tokens"]))[:].astype(np.int64)

    def bytes(self, index: int) -> int:
        """Return the length of a document in UTF-8 bytes."""
        return int(self._documents[index]["bytes"])

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each document: int64 [documents], without end-of-text."""
        return self._documents["tokens"]

    @cached_property
    def clusters(self) -> np.ndarray:
        """Cluster of each document: int64 [documents], from 0; a document without a label is its own cluster."""
        labels = self._documents["cluster"]
        numbers = np.unique(labels, return_inverse=True)[1]
        alone = labels == 0
        numbers[alone] = len(labels) + np.arange(alone.sum())
        return np.unique(numbers, return_inverse=True)[1].astype(np.int64)

    @property
    def labelled(self) -> int:
        """Number of documents with a cluster label."""
        return int(np.count_nonzero(self._documents["cluster"]))

    @property
    def runs(self) -> list[TokenRun]:
        """The tokens of all documents, each followed by end-of-text; only for a set without left-out documents."""
        return [group.tokens for group in self._groups]

    @property
    def total_tokens(self) -> int:
        """Tokens of all documents, without end-of-text."""
        return sum(int(documents["tokens"].sum()) for documents in self._by_group())

    @property
    def total_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return sum(int(documents["bytes"].sum()) for documents in self._by_group())

    @property
    def content(self) -> str:
        """Hash (sixteen hex digits) of all documents."""
        hasher = hashlib.sha256()
        for documents in self._by_group():
            hasher.update(documents["hash"].tobytes())
        return hasher.hexdigest()[:16]

    @cached_property
    def _documents(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, DOCUMENT), *self._by_group()])

    def _by_group(self) -> Iterator[np.ndarray]:
        """Yield the documents of each group: DOCUMENT [documents]."""
        for group, removed in zip(self._groups, self._removed, strict=True):
            yield np.delete(group.documents, removed) if len(removed) else group.documents


class PreparedData(Workload):
    """The opened token shards of a study.

    Attributes:
        vocabulary: number of token ids of the tokenizer.
        length: tokens of a training sequence.
        tokenizer: the tokenizer of the tokens.
        train: the training tokens.
        pass_tokens: their number, with an end-of-text token after each document.
        train_domains: names of the domains that are trained on and tested.
        ood_domains: names of the domains that are only tested.
        manifest: the source's files with their hashes, the tokenizer, and the content of each domain and split.
        sets: all documents by (domain, split); copies of a held-out document count once.
        manifest_hash: hash of the manifest, the same for the same text and options on any machine.
        overlap: how much of the held-out text occurs in the training text, None before that is measured.
        remark: a remark about the text for readers of the results, one line without a full stop, or None.
        shards: the directories of its shards.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        shards: Sequence[Shard],
        limits: Mapping[tuple[str, Split], int | None],
        overlap: TextOverlap | None = None,
        remark: str | None = None,
    ):
        """Combine shards; raises DataError when a domain has too little text."""
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
        self.shards = tuple(shard.path for shard in shards)
        left_out = overlap.left_out if overlap else {}
        self.sets = {
            (domain, split): DocumentSet(
                domain,
                found,
                left_out.get(f"{domain}/{split}", ()),
                once=overlap is not None and split != "train",  # the overlap is measured on all documents
            )
            for (domain, split), found in groups.items()
        }
        self._check(config)
        self.train = TrainStream({domain: self.sets[domain, "train"].runs for domain in config.train}, config.weights)
        self.pass_tokens = self.train.tokens
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

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of all domains, those that are trained on first."""
        return (*self.train_domains, *self.ood_domains)

    def batch(self, seed: int, step: int, batch: int, rank: int = 0, world: int = 1) -> Batch:
        """Return windows of the training tokens, see `Workload.batch`; every token of a window has a target."""
        import torch  # here, because processes that prepare text import this module and do not need torch

        rows = self.train.batch(seed, step, batch, self.length, rank, world).numpy()
        # NumPy copies them, as torch would start its threads at each step for a copy to a GPU.
        return Batch(*(torch.from_numpy(np.ascontiguousarray(part)) for part in (rows[:, :-1], rows[:, 1:])))

    def overlap_rows(self) -> list[dict[str, Any]]:
        """Return per domain the share of its test text that occurs in the training text, and documents left out."""
        if self.overlap is None:
            return []
        return [
            {
                "domain": domain,
                "share": self.overlap.shares[f"{domain}/test"],
                "left_out": len(self.overlap.left_out[f"{domain}/test"]),
            }
            for domain in self.domains
        ]

    def documents(self, split: Split, domain: str) -> DocumentSet:
        """Return the documents of a domain and split.

        Raises:
            ConfigError: the domain or the split is unknown.
            DataError: it has no documents.
        """
        domains = self.domains
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
        """The validation and test documents by (domain, split)."""
        return {(domain, split): found for (domain, split), found in self.sets.items() if split != "train"}

    def _check(self, config: DataConfig) -> None:
        for (domain, split), found in self.sets.items():
            if split != "validation" and not found:
                limit, few = config.max_train_tokens if split == "train" else config.max_test_tokens, ";"
                if limit:
                    most = f"{limit // MIN_DOCUMENTS} tokens, a {MIN_DOCUMENTS}th of data.max_{split}_tokens"
                    few = f" of at most {most} = {limit}; raise it,"
                if self.overlap and self.overlap.left_out.get(f"{domain}/{split}"):
                    few = f" that do not also occur in the training text; raise data.overlap = {config.overlap},"
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

    Held-out rows have the share of the tokens that occur in the training text, the number of documents left out for
    that reason, the number of copies of other documents, which are left out too, the number of clusters, and the number
    of documents without a cluster label.
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
                "copies": len(found.copies) if held_out else None,
                "left out": len(prepared.overlap.left_out[place]) if prepared.overlap and held_out else None,
                "clusters": len(np.unique(found.clusters)) if held_out and labelled else None,
                "without cluster": len(found) - found.labelled if held_out and labelled else None,
            }
        )
    return rows
