"""Token shards: the files that preparation writes.

A shard is a directory of three files, named by the hash of everything it depends on:

    tokens.npy      the tokens of all documents, each followed by end-of-text, uint16 where the vocabulary allows
    documents.npy   a row per document, see DOCUMENT
    shard.json      the groups (domain and split) with their documents, the source's fingerprints, checksums

The documents of a group are sorted by content hash. So a group is a shuffled stream of tokens that can be trained on
directly, and its first documents are a random sample of any size. A shard is written to a temporary directory and
renamed when it is complete.
"""

import json
import os
import shutil
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from basecap.data.hashes import bytes_number, digest, file_digest, text_number
from basecap.data.sources import Document, Split
from basecap.data.tokenizer import Tokenizer
from basecap.errors import DataError
from basecap.system.files import LARGEST, process_name
from basecap.system.foreign import read_file

#: A document: hash of its text, offset and number of its tokens (without end-of-text), UTF-8 bytes, hash of its cluster
#: label (0 without one).
DOCUMENT = np.dtype([("hash", "<u8"), ("start", "<i8"), ("tokens", "<i8"), ("bytes", "<i8"), ("cluster", "<u8")])
FILES = ("tokens.npy", "documents.npy")

#: With a token limit, documents longer than a tenth of the limit are left out, so that at least ten documents fill it.
MIN_DOCUMENTS = 10

#: Tokens to keep per domain and split, None for all. Groups without an entry are dropped.
Limits = Mapping[tuple[str, Split], int | None]


@dataclass(frozen=True)
class TokenRun:
    """Tokens of a shard, sliced like an array without steps. The file is open while it is read: there may be many."""

    path: Path
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        file, dtype, offset = self._layout
        count, offset = max(0, stop - start), offset + (self.start + start) * dtype.itemsize
        tokens = np.fromfile(file, dtype, count, offset=offset)
        if len(tokens) < count:
            raise _damaged(self.path)
        return tokens

    @cached_property
    def _layout(self) -> tuple[str, np.dtype, int]:
        """The file, the dtype of its tokens and the offset of the first: to make a path takes longer than to read."""
        path = self.path / "tokens.npy"
        return str(path), *_layout(path)


@dataclass(frozen=True)
class Group:
    """The documents of one domain and split in one shard: rows `first` to `last` of its documents.npy."""

    path: Path
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def documents(self) -> np.ndarray:
        """The rows of the documents: DOCUMENT [documents], hashes ascending."""
        return np.load(self.path / "documents.npy", mmap_mode="r")[self.first : self.last]

    @property
    def tokens(self) -> TokenRun:
        """All documents, each followed by end-of-text."""
        documents = self.documents
        return TokenRun(
            self.path, int(documents["start"][0]), int(documents["start"][-1] + documents["tokens"][-1] + 1)
        )


class Shard:
    """A shard on disk with verified checksums."""

    def __init__(self, path: Path):
        """Verify the checksums of a shard; raises DataError if it is damaged, OSError if it cannot be read."""
        self.path = path
        try:
            self.about: dict[str, Any] = json.loads(read_file(path / "shard.json", LARGEST))
            intact = self.about.pop("digest") == digest(self.about)
            intact = intact and all(file_digest(path / name) == self.about["checksums"][name] for name in FILES)
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise _damaged(path) from error
        if not intact:
            raise _damaged(path)

    def group(self, domain: str, split: Split) -> Group | None:
        """Return the documents of a domain and split, None if the shard does not hold any."""
        found = self.about["groups"].get(f"{domain}/{split}")
        return Group(self.path, *found["documents"]) if found else None


def write_shard(
    path: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    limits: Limits,
    files: dict[str, str],
    shortest: Mapping[str, int],
) -> None:
    """Tokenise documents and write them as the shard `path`; raises the errors of reading them.

    Unsorted tokens are kept on disk, so that memory holds one document at a time.

    Args:
        path: directory of the shard, created when it is complete.
        documents: the documents; those of groups without an entry in `limits` are skipped, as are empty texts.
        tokenizer: the tokenizer.
        limits: tokens to keep per group.
        files: fingerprints of the source's files, for the manifest.
        shortest: minimum number of tokens of a document, by domain.
    """
    partial = path.with_suffix(f".{process_name()}.partial")
    for left in path.parent.glob(f"{path.stem}.*.partial"):  # of a killed process
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        unsorted = partial / "unsorted"
        with unsorted.open("wb") as file:
            found = _write_unsorted(file, documents, tokenizer, limits, shortest)
        groups = _write_sorted(partial, unsorted, found, limits, tokenizer.dtype)
        unsorted.unlink()
        about = {"groups": groups, "files": files, "checksums": {name: file_digest(partial / name) for name in FILES}}
        (partial / "shard.json").write_text(json.dumps({**about, "digest": digest(about)}), encoding="utf-8")
        try:
            os.replace(partial, path)
        except OSError:
            if not path.is_dir():
                raise
            shutil.rmtree(partial)  # another process has written it, which a network disk showed late
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # the disk may be full
        raise


def _write_unsorted(
    file: BinaryIO,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    limits: Limits,
    shortest: Mapping[str, int],
) -> dict[tuple[str, Split], np.ndarray]:
    """Write the tokens of documents in the given order, each followed by end-of-text.

    Returns:
        DOCUMENT [documents] by group; `start` counts from the start of the file.
    """
    found: dict[tuple[str, Split], array[int]] = {}
    end = np.array([tokenizer.end_of_text], tokenizer.dtype).tobytes()
    start = 0
    for document in documents:
        group = (document.domain, document.split)
        if group not in limits or not document.text.strip():
            continue
        raw = document.text.encode("utf-8", errors="replace")  # JSON may contain half of a surrogate pair
        tokens = tokenizer.encode_document(raw.decode("utf-8"))
        limit, size = limits[group], len(tokens) + 1
        if size <= shortest.get(document.domain, 0) or (limit is not None and size * MIN_DOCUMENTS > limit):
            continue
        cluster = 0 if document.cluster is None else text_number(document.cluster)
        found.setdefault(group, array("Q")).extend((bytes_number(raw), start, len(tokens), len(raw), cluster))
        file.write(tokens.tobytes())
        file.write(end)
        start += size
    return {group: np.frombuffer(rows, "<u8").view(DOCUMENT) for group, rows in found.items()}


def _write_sorted(
    directory: Path,
    unsorted: Path,
    found: dict[tuple[str, Split], np.ndarray],
    limits: Limits,
    dtype: np.dtype,
) -> dict[str, dict[str, Any]]:
    """Write tokens.npy and documents.npy, sorted by group and hash; return the groups of shard.json."""
    kept = {group: _kept(found[group], limits[group]) for group in sorted(found)}
    groups: dict[str, dict[str, Any]] = {}
    first = end = 0
    sorted_documents = [np.zeros(0, DOCUMENT)]
    with (directory / "tokens.npy").open("wb") as file, unsorted.open("rb") as tokens:
        _write_header(file, dtype, sum(int((members["tokens"] + 1).sum()) for members in kept.values()))
        for group, members in kept.items():
            ends = end + np.cumsum(members["tokens"] + 1)
            for start, size in zip(members["start"].tolist(), members["tokens"].tolist(), strict=True):
                tokens.seek(start * dtype.itemsize)
                file.write(tokens.read((size + 1) * dtype.itemsize))
            if len(members):
                groups["/".join(group)] = {"documents": (first, first + len(members)), "tokens": int(ends[-1]) - end}
                members["start"] = ends - members["tokens"] - 1
                sorted_documents.append(members)
                first, end = first + len(members), int(ends[-1])
    every = np.concatenate(sorted_documents)
    with (directory / "documents.npy").open("wb") as file:
        _write_header(file, DOCUMENT, len(every))
        file.write(every.tobytes())
    return groups


def _write_header(file: BinaryIO, dtype: np.dtype, count: int) -> None:
    """Write the header of an .npy file. `np.save` would not report a full disk."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)


@lru_cache(maxsize=4096)
def _layout(path: Path) -> tuple[np.dtype, int]:
    """Return the dtype of a shard's .npy file and the offset of its data, which take longer to parse than a row."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        _, _, dtype = np.lib.format.read_array_header_1_0(file)
        return dtype, file.tell()


def token_counts(path: Path) -> dict[str, int]:
    """Return the number of tokens per "domain/split" of a shard, including end-of-text tokens."""
    groups = json.loads(read_file(path / "shard.json", LARGEST))["groups"]
    return {name: group["tokens"] for name, group in groups.items()}


def _kept(members: np.ndarray, limit: int | None) -> np.ndarray:
    """Return the documents that `select` needs, sorted by hash: all that fit into the limit, and one more."""
    members = members[np.argsort(members["hash"], kind="stable")]
    if limit is None:
        return members
    return members[: 1 + int(np.searchsorted(np.cumsum(members["tokens"] + 1), limit, "right"))]


def select(groups: list[Group], limit: int | None) -> list[Group]:
    """Return the groups, cut to the documents with the smallest hashes that together fit into `limit` tokens."""
    if limit is None or not groups:
        return groups
    documents = [group.documents for group in groups]
    hashes = np.concatenate([held["hash"] for held in documents])
    order = np.argsort(hashes)
    totals = np.cumsum(np.concatenate([held["tokens"] + 1 for held in documents])[order])
    fitting = int(np.searchsorted(totals, limit, side="right"))
    if fitting == len(order):
        return groups
    counts = [int(np.searchsorted(held["hash"], hashes[order[fitting]])) for held in documents]
    return [replace(group, last=group.first + n) for group, n in zip(groups, counts, strict=True) if n]


def _damaged(path: Path) -> DataError:
    return DataError(f"token shard {path} is damaged; remove that directory and run again.")
