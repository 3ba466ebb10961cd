"""Maps of layers are read back as written, the last step of each name."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from basecap.errors import DataError
from basecap.records.maps import Maps, join_layers, read_last, write_maps


def maps(*layers: int, **more) -> Maps:
    """Return maps of made-up numbers for these layers."""
    sizes = np.random.default_rng(layers).random((len(layers), 4, 4)).astype(np.float16)
    largest = np.arange(1, len(layers) + 1, dtype=np.float32)
    return Maps(input="prose, \u00e4", tokens=7, layers=np.array(layers), largest=largest, sizes=sizes, **more)


def assert_equal(found: Maps, expected: Maps) -> None:
    for field in fields(Maps):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(expected, field.name), err_msg=field.name)


def test_maps_are_read_back_with_their_marks(tmp_path: Path):
    marks = {"keys": np.array([1, 3]), "values": np.array([2, 4]), "asked": np.array([[6, 2], [5, 4]])}
    for name, written in (("plain", maps(0, 5)), ("marked", maps(2, **marks))):
        write_maps(tmp_path / "made" / f"{name}-1.npz", written)
        assert_equal(read_last([tmp_path / "made" / f"{name}-1.npz"])[name], written)
    found = read_last([tmp_path / "made" / "plain-1.npz"])["plain"]
    assert (found.sizes.dtype, found.largest.dtype, found.asked.shape) == (np.float16, np.float32, (0, 2))


def test_the_last_step_of_each_name_counts(tmp_path: Path):
    for name, layer in (("a-9", 9), ("a-10", 10), ("b-c-2", 2)):
        write_maps(tmp_path / f"{name}.npz", maps(layer))
    found = read_last(sorted(tmp_path.iterdir()))
    assert {name: one.layers.tolist() for name, one in found.items()} == {"a": [10], "b-c": [2]}
    assert read_last([]) == {}


def test_layers_of_several_processes_become_one():
    parts = [maps(0, 2), maps(), maps(1)]
    found = join_layers(parts)
    assert found.layers.tolist() == [0, 2, 1] and found.largest.tolist() == [1, 2, 1]
    np.testing.assert_array_equal(found.sizes, np.concatenate([part.sizes for part in parts]))
    assert (found.input, found.tokens) == (parts[0].input, 7)


@pytest.mark.parametrize("damage", [lambda content: b"PK", lambda content: content[:-30], lambda content: b""])
def test_a_damaged_file_is_named(tmp_path: Path, damage):
    path = tmp_path / "influence-map-3.npz"
    write_maps(path, maps(0))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"influence-map-3\.npz is damaged \(.*\); remove it\.$"):
        read_last([path])
    np.savez(path, layers=np.arange(2))
    with pytest.raises(DataError, match=r"influence-map-3\.npz is damaged"):
        read_last([path])
    write_maps(path, replace(maps(0, 1), layers=np.arange(3)))
    with pytest.raises(DataError, match=r"is damaged \(its arrays are not those of its layers\)"):
        read_last([path])
