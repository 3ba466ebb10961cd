"""Files are replaced whole, appended whole or not at all, and every damage is named."""

import errno
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from basecap.errors import DataError
from basecap.system.files import (
    append,
    append_lines,
    encode_lines,
    entries,
    move_directory,
    plain,
    plain_names,
    read,
    read_array,
    read_json,
    read_lines,
    real_path,
    replacing,
    safe_name,
    write_error,
    write_json,
    writing,
)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes, as on a full disk."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_a_file_that_is_not_there_is_none_and_one_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"here")
    assert read(tmp_path / "file") == b"here"
    assert read(tmp_path / "gone") is None and read(tmp_path / "file" / "below") is None
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory\); fix that and run again\.$"):
        read(tmp_path)


def test_entries_are_sorted_and_a_missing_directory_is_empty(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / name).touch()
    assert [path.name for path in entries(tmp_path)] == ["a", "b", "c"]
    assert entries(tmp_path / "gone") == entries(tmp_path / "a" / "below") == []
    with pytest.raises(DataError, match=r"a is a file; give a directory\.$"):
        entries(tmp_path / "a")


@pytest.mark.parametrize("torn", [b'{"step": 3', b"\0\0\0\0", b'{"step"\0\0\0\n', b'{"ste\n'])
def test_a_torn_last_line_is_left_out_and_said_once(tmp_path, torn: bytes, caplog):
    path = tmp_path / "rows.jsonl"
    assert read_lines(path) == [] and read_array(path) == b"[]"
    whole = b'{"step": 1}\n{"step": 2}\n'
    path.write_bytes(whole)
    assert read_lines(path) == [{"step": 1}, {"step": 2}] and not caplog.messages
    path.write_bytes(whole + torn)
    assert read_lines(path) == [{"step": 1}, {"step": 2}]
    assert read_array(path) == b'[{"step": 1},{"step": 2}]'
    said = f"{path}: the last row is incomplete and left out; it was being written when its run ended."
    assert caplog.messages == [said]
    path.write_bytes(torn)
    assert read_lines(path) == [] and read_array(path) == b"[]"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "is not JSON"),
        ("", "is not JSON"),
        *((line, "is not a JSON object") for line in ("5", "[]", "null")),
    ],
)
def test_a_damaged_line_is_named_by_its_number(tmp_path, line: str, words: str):
    (tmp_path / "rows.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(DataError, match=rf"rows\.jsonl:2 {words}; remove that line\.$"):
        read_lines(tmp_path / "rows.jsonl")


def test_rows_are_appended_after_a_torn_one_is_removed(tmp_path):
    path = tmp_path / "made" / "rows.jsonl"
    append_lines(path, [{"step": 1}])
    with path.open("ab") as file:
        file.write(b'{"step": 2, "tok')  # killed
    append_lines(path, [{"step": 3}, {"step": 4}])
    assert read_lines(path) == [{"step": 1}, {"step": 3}, {"step": 4}]
    path.write_bytes(b'{"torn')
    append_lines(path, [{"step": 5}])
    assert path.read_bytes() == b'{"step": 5}\n'


def test_rows_that_do_not_fit_leave_the_file_as_it_was(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_lines(path, [{"step": 1}])
    held = path.read_bytes()
    message = r"cannot write .*rows\.jsonl: the disk is full; free disk space or give another directory\.$"
    with files_of_at_most(len(held) + 20), pytest.raises(DataError, match=message):
        append_lines(path, [{"step": 2}, {"step": 3}])
    assert path.read_bytes() == held


def test_content_is_appended_from_a_place_on(tmp_path):
    path = tmp_path / "blocks"
    append(path, b"whole", 0)
    append(path, b" and new", 5)
    append(path, b"!", 9)
    assert path.read_bytes() == b"whole and!"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "made" / "file"
    with replacing(path) as file:
        file.write(b"one")
        assert not path.exists()
    before = path.stat().st_ino
    with replacing(path) as file:
        file.write(b"two")
        file.flush()
        assert path.read_bytes() == b"one"
    assert path.read_bytes() == b"two" and path.stat().st_ino != before
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"three")
        raise ZeroDivisionError
    assert path.read_bytes() == b"two" and list(path.parent.iterdir()) == [path]


def test_a_full_disk_keeps_the_file_that_was_to_be_replaced(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    message = r"cannot write .*file: the disk is full; free disk space or give another place\.$"
    with files_of_at_most(1000), pytest.raises(DataError, match=message), replacing(path, "another place") as file:
        file.write(bytes(5000))
    assert path.read_bytes() == b"one" and list(tmp_path.iterdir()) == [path]

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(DataError, match="the disk is full"), replacing(path) as file:
        file.write(b"two")
    assert path.read_bytes() == b"one" and list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"file/below: \S+file is not a directory; give another directory\.$"):
        append_lines(tmp_path / "file" / "below", [])
    broken = pytest.raises(DataError, match=r"link/file: .*link is a broken link; fix it or give a disk\.$")
    with broken, writing(tmp_path / "link" / "file", "a disk"):
        pass


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EDQUOT, "Quota"), "the disk quota is exceeded; free disk space"),
        (OSError(errno.EFBIG, "Large"), "the disk is full; free disk space"),
        (RuntimeError("I/O error: no space (os error 28)"), "the disk is full; free disk space"),
        (RuntimeError("odd"), "odd; fix that"),
    ],
)
def test_what_keeps_a_file_from_being_written_is_said(error: Exception, words: str):
    assert write_error(error) == words


def test_json_is_strict_and_read_back(tmp_path):
    path = tmp_path / "made" / "content.json"
    assert read_json(path) is None
    content = {"loss": float("nan"), "count": np.int64(3), "values": np.array([1.5, np.inf]), "path": Path("a/b")}
    write_json(path, content)
    assert read_json(path) == {"loss": None, "count": 3, "values": [1.5, None], "path": "a/b"}
    assert path.read_text().startswith('{\n "schema": 1,\n') and path.read_text().endswith("}\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON; restore or remove it"),
        ("5", "was not written by basecap; give another directory"),
        ("[]", "was not written by basecap; give another directory"),
        ("{}", "was not written by basecap; give another directory"),
        ('{"schema": 7}', "has schema 7, this version of basecap reads 1; use the version that wrote it"),
    ],
)
def test_json_that_this_version_did_not_write_is_named(tmp_path, text: str, words: str):
    (tmp_path / "content.json").write_text(text)
    with pytest.raises(DataError, match=rf"content\.json {words}\.$"):
        read_json(tmp_path / "content.json")


def test_values_become_json_types_at_any_depth():
    assert plain({1: (np.float32(0.5), [np.nan, Path("a")]), "b": np.arange(2)}) == {
        "1": [0.5, [None, "a"]],
        "b": [0, 1],
    }
    assert encode_lines([{"a": np.int8(1)}, {"b": -np.inf}]) == b'{"a": 1}\n{"b": null}\n'


def rename_on_one_disk(rename: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
    """Return a Path.rename for which whatever is below `there` is on another disk."""

    def renamed(this: Path, other: Path) -> Path:
        if ("there" in this.parts) != ("there" in other.parts):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(this, other)

    return renamed


def test_a_directory_moves_to_another_disk_and_is_whole_there(tmp_path, monkeypatch):
    path, target = tmp_path / "here" / "run", tmp_path / "there" / "run"
    monkeypatch.setattr(Path, "rename", rename_on_one_disk(Path.rename))
    (path / "weights").mkdir(parents=True)
    (path / "weights" / "file").write_text("1")
    (target.parent / ".partial" / "run" / "weights").mkdir(parents=True)  # a killed process left it
    move_directory(path, target)
    assert [found.relative_to(target.parent).as_posix() for found in sorted(target.parent.rglob("*"))] == [
        "run",
        "run/weights",
        "run/weights/file",
    ]
    assert not path.exists()


def test_a_directory_that_cannot_be_moved_stays(tmp_path, monkeypatch):
    path, target = tmp_path / "here" / "run", tmp_path / "there" / "run"
    path.mkdir(parents=True)
    (path / "file").write_bytes(bytes(2000))
    target.parent.mkdir()
    (tmp_path / "taken" / "file").mkdir(parents=True)
    with pytest.raises(OSError, match="not empty"):
        move_directory(path, tmp_path / "taken")
    monkeypatch.setattr(Path, "rename", rename_on_one_disk(Path.rename))
    with files_of_at_most(1000), pytest.raises(OSError, match="too large"):
        move_directory(path, target)
    assert (path / "file").read_bytes() == bytes(2000) and list(target.parent.iterdir()) == []


def test_names_that_are_no_file_names_stay_inside_and_apart():
    names = ["../evil", "/etc/passwd", "a b", "a/b", "a_b", ".hidden", "", "ä", "x" * 300]
    found = [safe_name(name) for name in names]
    assert len(set(found)) == len(names) and safe_name("a_b") == "a_b"
    assert all(os.sep not in name and not name.startswith(".") and 0 < len(name) < 100 for name in found)


def test_names_of_figures_are_plain_and_apart():
    names = ["gaps", "cells-a,b,c", "cells-a-b,c", "A b", "a/b", "mix {chunk: 32, mode: 'exact'}", "", "ä", "x" * 300]
    found = plain_names(names)
    assert [*found] == names and len({short.casefold() for short in found.values()}) == len(names)
    assert found["gaps"] == "gaps" and found[names[5]] == "mix-chunk-32-mode-exact"
    assert all(re.fullmatch(r"[A-Za-z0-9+_-][A-Za-z0-9+._-]{0,99}", short) for short in found.values()), found
    assert found["a/b"] == plain_names(names[3:5])["a/b"] != plain_names(["a/b"])["a/b"] == "a-b"


def test_a_link_to_itself_is_a_path(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "link").symlink_to(tmp_path)
    assert real_path(tmp_path / "loop").name == "loop"
    assert real_path(tmp_path / "link" / "file") == real_path(tmp_path) / "file"
