"""The gate for foreign bytes: what is no regular file, too large, or expands without end is refused in one sentence."""

import gzip
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard

from basecap.errors import DataError
from basecap.system import foreign
from basecap.system.files import append_lines
from basecap.system.foreign import chunks, decompressed, open_file, open_to_append, read_file


def content_of(path: Path) -> Iterator[bytes]:
    return decompressed(path, chunks(path))


def test_a_regular_file_and_a_link_to_one_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"some content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link"):
        assert read_file(tmp_path / name, 12) == b"".join(chunks(tmp_path / name)) == b"some content"
    with pytest.raises(DataError, match=r"file has 12 bytes, and at most 11 are read of such a file; remove or split"):
        read_file(tmp_path / "file", 11)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "gone")
    with pytest.raises(IsADirectoryError):
        open_file(tmp_path)


@pytest.mark.timeout(20)
def test_what_may_never_end_is_refused_at_once(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, kind in (("pipe", "a named pipe"), ("device", "a device")):
        with pytest.raises(DataError, match=rf"{name} is {kind}; replace it by a regular file\.$"):
            read_file(tmp_path / name, 100)
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        with pytest.raises((DataError, OSError), match=r"socket|No such device"):
            open_file(Path("socket"))


@pytest.mark.timeout(20)
def test_nothing_is_written_through_a_link_or_into_a_pipe(tmp_path):
    (tmp_path / "kept").write_bytes(b"kept")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("link", "is a link, through which nothing is written"), ("pipe", "is a named pipe")):
        with pytest.raises(DataError, match=f"{name} {words}"):
            open_to_append(tmp_path / name)
        with pytest.raises(DataError, match=f"{name} {words}"):
            append_lines(tmp_path / name, [{"step": 1}])
    assert (tmp_path / "kept").read_bytes() == b"kept"


def test_a_wide_window_and_frames_between_others_are_read(tmp_path):
    options = zstandard.ZstdCompressionParameters.from_level(3, window_log=31, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=options).compressobj()
    wide = stream.compress(b"wide ") + stream.flush()
    skippable = (0x184D2A50).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    (tmp_path / "file.zst").write_bytes(skippable + wide + zstandard.compress(b"and usual"))
    assert b"".join(content_of(tmp_path / "file.zst")) == b"wide and usual"


def test_members_of_gzip_follow_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign, "CHUNK", 64)
    path = tmp_path / "file.gz"
    for size in (63, 64, 65, 5000):
        path.write_bytes(gzip.compress(b"a" * size) + gzip.compress(b"") + gzip.compress(b"b") + bytes(200))
        assert b"".join(content_of(path)) == b"a" * size + b"b"
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(DataError, match=r"file.gz is damaged \(.*\); download the file again\.$"):
        list(content_of(path))


@pytest.mark.parametrize(("ending", "compress"), [("zst", zstandard.compress), ("gz", gzip.compress)])
def test_content_that_expands_as_no_text_does_is_refused(tmp_path, monkeypatch, ending: str, compress: Callable):
    path = tmp_path / f"file.{ending}"
    path.write_bytes(compress(b"\n" * 3_000_000))
    assert sum(map(len, content_of(path))) == 3_000_000
    for name in ("EXPANDED", "EXPANSION"):
        monkeypatch.setattr(foreign, name, 1 << 5)
    with pytest.raises(DataError, match=r"expands more than 32 times, as no text does; remove it\.$"):
        sum(map(len, content_of(path)))
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"is incomplete; download the file again\.$"):
        list(content_of(path))
