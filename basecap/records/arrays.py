"""Arrays in .npz files, which may come from others."""

import math
import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from basecap.system.foreign import open_file

#: Maximum number of bytes of the arrays in a file; that of a large study has some megabytes.
LARGEST = 1 << 28


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file.

    Raises:
        DataError: it is not a regular file.
        OSError: it cannot be read.
        ValueError, EOFError, zipfile.BadZipFile, zlib.error: it is damaged, or its arrays have more than LARGEST bytes.
    """
    with open_file(path) as raw:
        with zipfile.ZipFile(raw) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > LARGEST:
                raise ValueError(f"its arrays have more than {LARGEST:,} bytes")
            for member in members:
                with archive.open(member) as file:
                    _refuse_other_size(file, member.file_size)
        raw.seek(0)
        with np.load(raw, allow_pickle=False) as arrays:
            return dict(arrays)


def _refuse_other_size(file: IO[bytes], size: int) -> None:
    """Raise ValueError where the header of an .npy file of `size` bytes describes more, which numpy would allocate."""
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array has a format that basecap does not write")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if math.prod(shape) * dtype.itemsize > size:
        raise ValueError("an array is shorter than its header says")
