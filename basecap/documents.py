"""Losses of single documents, and the file format for those of one evaluation.

A file is an .npz of the arrays `subsets` and `counts` [S] and `nats`, `tokens`, `bytes`, `clusters` [sum of counts];
files written by earlier versions have no `clusters`.
"""

import io
import zipfile
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from basecap.files import replacing


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


def write_losses(path: Path, losses: dict[str, DocumentLosses]) -> None:
    """Write the losses of each subset to a file; raises DataError when it cannot be written."""
    parts = list(losses.values())
    with replacing(path) as file:
        np.savez_compressed(
            file,
            subsets=np.array(list(losses), dtype=np.str_),
            counts=np.array([len(part.nats) for part in parts], dtype=np.int64),
            nats=np.concatenate([np.empty(0), *(part.nats for part in parts)]),
            tokens=np.concatenate([np.empty(0, np.int64), *(part.tokens for part in parts)]),
            bytes=np.concatenate([np.empty(0, np.int64), *(part.bytes for part in parts)]),
            clusters=np.concatenate([np.empty(0, np.int64), *(part.clusters for part in parts)]),
        )


def read_losses(path: Path) -> dict[str, DocumentLosses]:
    """Return the losses of each subset; raises numpy's and zipfile's errors when the file is missing or damaged."""
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as file:
        arrays = {name.removesuffix(".npy"): _array(file.read(name)) for name in file.namelist()}
    columns = [arrays[name] for name in ("nats", "tokens", "bytes", "clusters") if name in arrays or name != "clusters"]
    ends = np.cumsum(arrays["counts"]).tolist()
    parts = {}
    for name, first, end in zip(arrays["subsets"].tolist(), [0, *ends], ends, strict=False):
        parts[name] = DocumentLosses(*(column[first:end] for column in columns))
    return parts


def _array(content: bytes) -> np.ndarray:
    """Return the array of a .npy file. A study has thousands, and numpy is slow to read their headers."""
    start = 10 + int.from_bytes(content[8:10], "little")
    shape, dtype = _header(content[:start])
    return np.frombuffer(bytearray(content), dtype, offset=start).reshape(shape)


@lru_cache(maxsize=256)
def _header(content: bytes) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and dtype that the header of a .npy file says; raises ValueError for a damaged one."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):  # what numpy writes for every array without a long list of fields
        raise ValueError(f"unknown version {version} of an array")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return shape, dtype
