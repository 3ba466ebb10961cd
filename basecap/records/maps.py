"""Attention-like matrices of the layers of one model on one input, and the file format for them.

A file is an .npz of the arrays `input` (text), `tokens`, `layers` [L], `largest` [L], `sizes` [L, S, S], `keys` [K],
`values` [V] and `asked` [A, 2].
"""

import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from basecap.errors import DataError
from basecap.records.arrays import read_arrays
from basecap.system.files import replacing


@dataclass(frozen=True, kw_only=True)
class Maps:
    """How much each position of each layer reads from each other one: the mean of |factor| over heads or channels.

    Attributes:
        input: description of the input.
        tokens: number of tokens of the input, T.
        layers: indices of the layers from 0, int64 [L].
        largest: the largest element of each layer's matrix, float32 [L].
        sizes: the matrices divided by their largest element, float16 [L, S, S]; rows are the positions that read,
            columns the positions that are read. Each element is the mean over a square of ceil(T / S) tokens.
        keys, values: positions of the key and value tokens of an example of a task, int64; empty for a text.
        asked: positions that have to give a value, each with the position of that value's token, int64 [A, 2].
    """

    input: str
    tokens: int
    layers: np.ndarray
    largest: np.ndarray
    sizes: np.ndarray
    keys: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    values: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    asked: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))


def join_layers(parts: Sequence[Maps]) -> Maps:
    """Return the maps of one input that were computed for different layers, in the given order, as one."""
    return replace(
        parts[0],
        layers=np.concatenate([part.layers for part in parts]),
        largest=np.concatenate([part.largest for part in parts]),
        sizes=np.concatenate([part.sizes for part in parts]),
    )


#: Arrays that mark positions.
MARKS = ("keys", "values", "asked")


def write_maps(path: Path, maps: Maps) -> None:
    """Write maps to a file; raises DataError when it cannot be written."""
    with replacing(path) as file:
        np.savez_compressed(
            file,
            input=np.array(maps.input),
            tokens=np.array(maps.tokens),
            layers=maps.layers.astype(np.int64),
            largest=maps.largest.astype(np.float32),
            sizes=maps.sizes.astype(np.float16),
            **{name: getattr(maps, name).astype(np.int64) for name in MARKS},
        )


def read_last(paths: Iterable[Path]) -> dict[str, Maps]:
    """Return the maps of the largest STEP of each NAME in files NAME-STEP.npz; raises DataError for a damaged file."""
    last: dict[str, tuple[int, Path]] = {}
    for path in paths:
        name, _, step = path.stem.rpartition("-")
        last[name] = max(last.get(name, (-1, path)), (int(step), path))
    return {name: _read(path) for name, (_, path) in sorted(last.items())}


def _read(path: Path) -> Maps:
    try:
        file = read_arrays(path)
        arrays = {name: file[name] for name in ("layers", "largest", "sizes", *MARKS)}
        count, size = len(arrays["layers"]), arrays["sizes"].shape[-1]
        if arrays["sizes"].shape != (count, size, size) or arrays["largest"].shape != (count,):
            raise ValueError("its arrays are not those of its layers")
        return Maps(input=str(file["input"]), tokens=int(file["tokens"]), **arrays)
    except (OSError, ValueError, KeyError, IndexError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}); remove it.") from error
