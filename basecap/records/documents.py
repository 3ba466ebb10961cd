"""Losses of single documents, and the file format for those of an evaluation at all its points.

A file grows by blocks, each a header (`HEAD`: kind, step, size and checksum of the rest) and its content. A block of
`DOCUMENTS` describes documents: a line of JSON with `schema`, `subsets` and `counts` [S], then the arrays `tokens`,
`bytes` and `clusters` [sum of counts], int64. A block of `NATS` holds the losses at a step of the documents described
last, float64. The last block of a step counts. A block that a killed process left unfinished is last, and ignored.

Archived records may have a file per step, an .npz of these arrays. They are read too, and never written.
"""

import contextlib
import hashlib
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from basecap.errors import DataError
from basecap.records.arrays import read_arrays
from basecap.system.files import append, read, replacing
from basecap.system.foreign import open_file

#: Version of the format.
SCHEMA = 1
#: Maximum number of bytes of a file.
LARGEST = 1 << 33
#: What reading a damaged file raises.
DAMAGED = (
    OSError, ValueError, KeyError, IndexError, TypeError, ArithmeticError, EOFError, RecursionError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
#: The header of a block, and what kinds there are.
HEAD = struct.Struct("<4sqII")
DOCUMENTS, NATS = b"docs", b"nats"
#: Of each file that this process has appended to: its state afterwards, and the digest of the documents described last.
_APPENDED: dict[Path, tuple[tuple[int, int, int], bytes]] = {}


@dataclass(frozen=True)
class DocumentLosses:
    """Losses of single documents in a fixed order; each array is [documents].

    Attributes:
        nats: summed nats, float64.
        tokens: predicted tokens, int64.
        bytes: length of the text in UTF-8 bytes, int64.
        clusters: number of each document's cluster, int64; by default every document is its own cluster.
    """

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray
    clusters: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        if len(self.clusters) == 0:
            object.__setattr__(self, "clusters", np.arange(len(self.tokens)))


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of all subsets, one subset after the other: where each lies, and the arrays [N]."""

    subsets: dict[str, slice]
    tokens: np.ndarray
    bytes: np.ndarray
    clusters: np.ndarray


@dataclass(frozen=True)
class History:
    """Losses of the same documents at P evaluation points: their steps, and the summed nats [P, N]."""

    documents: Documents
    steps: list[int]
    nats: np.ndarray


def append_losses(path: Path, step: int, losses: dict[str, DocumentLosses]) -> None:
    """Append the losses at a step, and the documents where they are others than before: all or nothing.

    Of what another process wrote, the headers are read, and the last block of each kind.

    Raises:
        DataError: the file cannot be written or is damaged.
    """
    parts = list(losses.values())
    head = {"schema": SCHEMA, "subsets": list(losses), "counts": [len(part.nats) for part in parts]}
    columns = [getattr(part, name).astype("<i8") for name in ("tokens", "bytes", "clusters") for part in parts]
    documents = json.dumps(head).encode() + b"\n" + b"".join(column.tobytes() for column in columns)
    nats = b"".join(part.nats.astype("<f8").tobytes() for part in parts)
    digest = hashlib.sha256(documents).digest()
    with _naming_damage(path):
        end, described = _end(path)
    new = b"" if described == digest else _block(DOCUMENTS, 0, documents)
    append(path, new + _block(NATS, step, nats), end)
    _APPENDED[path] = _state(path), digest


def read_losses(path: Path, steps: Iterable[int]) -> list[History]:
    """Return the losses at `steps`, from a file and from those of single steps beside it.

    Raises:
        DataError: losses of a step are missing, or a file is damaged.
    """
    wanted = {*steps}
    with _naming_damage(path):
        found = list(_read(path, wanted))
    missing = sorted(wanted.difference(*(history.steps for history in found)))
    return [*(_read_step(path, step) for step in missing), *found]


def forget_losses(path: Path, step: int) -> None:
    """Remove the losses at `step` and later from a file that `append_losses` wrote.

    Raises:
        DataError: the file is damaged.
    """
    content = read(path, LARGEST) or b""
    if not content.startswith(DOCUMENTS):
        return
    with _naming_damage(path):
        blocks = list(_blocks(content))
    kept = [block for block in blocks if block.kind == DOCUMENTS or block.step < step]
    if not any(block.kind == NATS for block in kept):
        path.unlink()
    elif len(kept) < len(blocks):
        with replacing(path) as file:
            file.write(b"".join(_block(block.kind, block.step, block.content) for block in kept))


def _run(path: Path) -> Path:
    return path.parent.parent


@contextlib.contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGED as error:
        raise DataError(f"{path} is damaged ({error}); remove {_run(path)} to train it again.") from error


class _Head(NamedTuple):
    """What the header of a block says, and from where to where its content lies in the file."""

    kind: bytes
    step: int
    start: int
    end: int
    checksum: int


@dataclass(frozen=True)
class _Block:
    kind: bytes
    step: int
    content: memoryview
    end: int


def _block(kind: bytes, step: int, content: bytes | memoryview) -> bytes:
    return HEAD.pack(kind, step, len(content), zlib.crc32(content)) + content


def _heads(size: int, part: Callable[[int, int], bytes | memoryview]) -> Iterator[_Head]:
    """Yield the headers of the finished blocks of a file; raises ValueError where there is none.

    Args:
        size: of the file in bytes.
        part: returns its content between two places.
    """
    end = 0
    while size - end >= HEAD.size:
        kind, step, length, checksum = HEAD.unpack(part(end, end + HEAD.size))
        start, end = end + HEAD.size, end + HEAD.size + length
        if kind not in (DOCUMENTS, NATS):
            raise ValueError("a block has no header")
        if end > size:
            return
        yield _Head(kind, step, start, end, checksum)


def _checked(head: _Head, content: bytes | memoryview) -> _Block:
    """Return a block; raises ValueError where its content is damaged."""
    if zlib.crc32(content) != head.checksum:
        raise ValueError(f"a checksum of step {head.step} is wrong")
    return _Block(head.kind, head.step, memoryview(content), head.end)


def _blocks(content: bytes) -> Iterator[_Block]:
    """Yield the finished blocks of a file; raises ValueError for a damaged one."""
    whole = memoryview(content)
    for head in _heads(len(content), lambda start, end: whole[start:end]):
        yield _checked(head, whole[head.start : head.end])


def _state(path: Path) -> tuple[int, int, int]:
    """Return size, inode and time of a file, which change with its content."""
    found = path.stat()
    return found.st_size, found.st_ino, found.st_mtime_ns


def _end(path: Path) -> tuple[int, bytes]:
    """Return where the finished blocks of a file end, and the digest of the documents described last, b"" without any.

    Raises ValueError where what this process did not write itself is damaged.
    """
    if not path.exists():
        return 0, b""
    state, described = _APPENDED.get(path, (None, b""))
    if state == _state(path):
        return state[0], described
    last = _last_blocks(path)
    described = hashlib.sha256(last[DOCUMENTS].content).digest() if DOCUMENTS in last else b""
    return max((block.end for block in last.values()), default=0), described


def _last_blocks(path: Path) -> dict[bytes, _Block]:
    """Return the last finished block of each kind in a file; raises ValueError for a damaged one."""
    with open_file(path) as file:

        def part(start: int, end: int) -> bytes:
            return os.pread(file.fileno(), end - start, start)

        last = {head.kind: head for head in _heads(os.fstat(file.fileno()).st_size, part)}
        return {kind: _checked(head, part(head.start, head.end)) for kind, head in last.items()}


def _read(path: Path, wanted: Collection[int]) -> Iterator[History]:
    described: list[Documents] = []
    last: dict[int, tuple[int, np.ndarray]] = {}
    for block in _blocks(read(path, LARGEST) or b""):
        if block.kind == DOCUMENTS:
            described.append(_documents(block.content))
        elif block.step in wanted:
            nats = np.frombuffer(block.content, "<f8")
            last[block.step] = len(described) - 1, _matching(described[-1], nats)
    for index, documents in enumerate(described):
        own = {step: nats for step, (subset_index, nats) in last.items() if subset_index == index}
        if own:
            yield History(documents, [*own], np.stack([*own.values()]))


def _documents(content: memoryview) -> Documents:
    head, _, rest = bytes(content).partition(b"\n")
    described = json.loads(head)
    if described["schema"] != SCHEMA:
        raise ValueError(f"it has schema {described['schema']}, this version of basecap reads {SCHEMA}")
    return _described(described["subsets"], described["counts"], *np.frombuffer(rest, "<i8").reshape(3, -1))


def _described(subsets: Sequence[str], counts: Sequence[int], *columns: np.ndarray) -> Documents:
    """Return the documents of subsets with their tokens, bytes and clusters; raises ValueError for other counts."""
    ends = np.cumsum([0, *counts], dtype=int).tolist()
    if min(counts, default=0) < 0 or len(subsets) != len(counts) or any(len(column) != ends[-1] for column in columns):
        raise ValueError("its counts are not those of its documents")
    return Documents({name: slice(*ends[at : at + 2]) for at, name in enumerate(subsets)}, *columns)


def _matching(documents: Documents, nats: np.ndarray) -> np.ndarray:
    """Return losses; raises ValueError where they are not those of the documents."""
    if nats.shape != documents.tokens.shape:
        raise ValueError(f"it has losses of {nats.size} documents, and describes {len(documents.tokens)}")
    return nats


def _read_step(path: Path, step: int) -> History:
    """Return the losses of a file of one step; raises DataError when there is none."""
    file = path.with_name(f"{path.stem}-{step}.npz")
    if not file.exists():
        raise DataError(f"{path} lacks the losses at step {step}; remove {_run(path)} to train it again.")
    with _naming_damage(file):
        arrays = read_arrays(file)
        columns = (arrays[name] for name in ("tokens", "bytes", "clusters"))
        documents = _described(arrays["subsets"].tolist(), arrays["counts"].tolist(), *columns)
        return History(documents, [step], _matching(documents, arrays["nats"])[None])
