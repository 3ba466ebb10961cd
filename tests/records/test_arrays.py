"""Arrays are read back as written; files that would take much memory are refused."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from basecap.records import arrays
from basecap.records.arrays import read_arrays


def test_arrays_are_read_back(tmp_path: Path):
    path = tmp_path / "file.npz"
    written = {"a": np.arange(6).reshape(2, 3), "b": np.array("text"), "c": np.zeros((0, 4), np.float16)}
    np.savez_compressed(path, **written)
    found = read_arrays(path)
    assert found.keys() == written.keys()
    for name, array in written.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_arrays_that_are_large_and_headers_that_lie_are_refused(tmp_path: Path, monkeypatch):
    path = tmp_path / "file.npz"
    np.savez_compressed(path, zeros=np.zeros(1 << 20, np.uint8))
    assert path.stat().st_size < 10_000 and len(read_arrays(path)["zeros"]) == 1 << 20
    monkeypatch.setattr(arrays, "LARGEST", 1 << 19)
    with pytest.raises(ValueError, match="its arrays have more than 524,288 bytes"):
        read_arrays(path)
    header = io.BytesIO()
    described = {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)}
    np.lib.format.write_array_header_1_0(header, described)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", header.getvalue() + bytes(8))
    with pytest.raises(ValueError, match="an array is shorter than its header says"):
        read_arrays(path)
