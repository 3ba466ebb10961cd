"""Attention-like matrices of the layers of one model on one input, and the file that holds them.

A file is an .npz of the arrays `input` (text), `tokens`, `layers` [L], `largest` [L] and `sizes` [L, S, S].
"""

import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from basecap.errors import DataError
from basecap.files import replacing


@dataclass(frozen=True, kw_only=True)
class Maps:
    """What each layer reads: the mean of |factor| over its heads or channels.

    Attributes:
        input: what the model read, in words.
        tokens: how many tokens that was, T.
        layers: indices of the layers from 0, int64 [L].
        largest: the largest element of each layer's matrix, float32 [L].
        sizes: the matrices as shares of their largest element, float16 [L, S, S]; rows read, columns are read. Each
            element is the mean of a square of ceil(T / S) tokens.
    """

    input: str
    tokens: int
    layers: np.ndarray
    largest: np.ndarray
    sizes: np.ndarray


def write_maps(path: Path, maps: Maps) -> None:
    """Store maps; raises DataError when the file cannot be written."""
    with replacing(path) as file:
        np.savez_compressed(
            file,
            input=np.array(maps.input),
            tokens=np.array(maps.tokens),
            layers=maps.layers.astype(np.int64),
            largest=maps.largest.astype(np.float32),
            sizes=maps.sizes.astype(np.float16),
        )


def read_last(paths: Iterable[Path]) -> dict[str, Maps]:
    """Return what the last file of each name holds, of files called NAME-STEP.npz; raises DataError for damage."""
    last: dict[str, tuple[int, Path]] = {}
    for path in paths:
        name, _, step = path.stem.rpartition("-")
        last[name] = max(last.get(name, (-1, path)), (int(step), path))
    return {name: _read(path) for name, (_, path) in sorted(last.items())}


def _read(path: Path) -> Maps:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("layers", "largest", "sizes")}
            return Maps(input=str(file["input"]), tokens=int(file["tokens"]), **arrays)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}); remove it.") from error
