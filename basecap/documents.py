"""Losses of single documents, and the file format for those of one evaluation.

A file is an .npz of the arrays `subsets` and `counts` [S] and `nats`, `tokens`, `bytes`, `clusters` [sum of counts];
files written by earlier versions have no `clusters`.
"""

from dataclasses import dataclass, field
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
    """Return the losses of each subset; raises numpy's errors when the file is missing or damaged."""
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        ends = np.cumsum(file["counts"])[:-1]
        names = ("nats", "tokens", "bytes", "clusters") if "clusters" in file else ("nats", "tokens", "bytes")
        columns = [np.split(file[name], ends) for name in names]
        subsets = [str(name) for name in file["subsets"]]
    return {name: DocumentLosses(*parts) for name, *parts in zip(subsets, *columns, strict=True)}
