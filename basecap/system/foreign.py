"""The gate for bytes of files that other programs may have written: regular files, bounded size, bounded expansion."""

import errno
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedReader, FileIO
from pathlib import Path, PurePath
from typing import BinaryIO

from basecap.errors import DataError

#: Bytes that are read or handed on at a time.
CHUNK = 1 << 20

#: Compressed bytes per call of the decompressor. A block of Zstandard takes at least 4 bytes and expands to at most
#: 128 KiB, so that a call returns at most 32 MiB.
SLICE = 1 << 10

#: Text expands less than EXPANSION times. A file that expands more is refused once it has expanded to EXPANDED bytes.
EXPANSION, EXPANDED = 1000, 1 << 26

#: The largest window of Zstandard, that of `zstd --long=31`.
WINDOW = 1 << 31

_KINDS = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))


def open_file(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, for reading.

    Raises:
        DataError: it is a named pipe, a device or a socket, whose content may never end.
        OSError: it cannot be opened, or is a directory.
    """
    return os.fdopen(_opened(path, os.O_RDONLY), "rb")


def open_to_append(path: Path) -> FileIO:
    """Open a regular file for appending and reading, unbuffered; it is created where there is none.

    Raises:
        DataError: it is a link, which may lead out of the directory, or no regular file.
        OSError: it cannot be opened, or is a directory.
    """
    refuse_link(path)
    return FileIO(_opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW), "a+")


def refuse_link(path: Path) -> None:
    """Raise DataError where a file or directory to write to is a link."""
    if path.is_symlink():
        raise DataError(f"{path} is a link, through which nothing is written; replace it by what it leads to.")


def _opened(path: Path, flags: int) -> int:
    """Return the descriptor of a regular file; raises as `open_file` does."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)  # a pipe would wait for its other end
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = next((name for test, name in _KINDS if test(mode)), "a device")
    raise DataError(f"{path} is {kind}; replace it by a regular file.")


def read_file(path: Path, most: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        DataError: it is not a regular file, or has more than `most` bytes.
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read() if size <= most else b""
    if max(size, len(content)) > most:
        raise DataError(f"{path} has {size:,} bytes, and at most {most:,} are read of such a file; remove or split it.")
    return content


def chunks(path: Path) -> Iterator[bytes]:
    """Yield the content of a regular file in chunks of at most CHUNK bytes; raises as `open_file` does."""
    with open_file(path) as file:
        yield from chunks_of(file)


def chunks_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the rest of an open file in chunks of at most CHUNK bytes."""
    while chunk := file.read(CHUNK):
        yield chunk


def decompressed(name: PurePath, stored: Iterable[bytes]) -> Iterator[bytes]:
    """Yield what a file holds in chunks of at most CHUNK bytes, decompressed if its name ends in .zst or .gz.

    Args:
        name: of the file, for messages too.
        stored: its content as it is stored.

    Raises:
        DataError: the file is damaged, incomplete or empty, expands as no text does, or needs more memory than is free.
    """
    expand = {".zst": _from_zstandard, ".gz": _from_gzip}.get(name.suffix)
    content = iter(stored) if expand is None else expand(name, stored)
    for piece in content:
        for start in range(0, len(piece), CHUNK):
            yield piece[start : start + CHUNK]


def refuse_expansion(name: PurePath, compressed: int, expanded: int) -> None:
    """Raise DataError when so many compressed bytes of a file have expanded to so many as no text does."""
    if expanded > max(EXPANDED, EXPANSION * compressed):
        raise DataError(f"{name} expands more than {EXPANSION} times, as no text does; remove it.")


def _from_zstandard(name: PurePath, stored: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the content of one or more frames of Zstandard."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW)
    frame, frames, compressed, expanded = None, 0, 0, 0
    try:
        for piece in _slices(stored):
            if not compressed and len(piece) > 3 and not _is_zstandard(piece):
                raise DataError(f"{name} is not compressed with Zstandard; correct its name or compress it.")
            compressed += len(piece)
            while piece:
                if frame is None:
                    frame, frames = decompressor.decompressobj(), frames + 1
                content = frame.decompress(piece)
                expanded += len(content)
                refuse_expansion(name, compressed, expanded)
                yield content
                piece = frame.unused_data
                if frame.eof:
                    frame = None
    except zstandard.ZstdError as error:
        if "not enough memory" in str(error):
            raise DataError(f"{name} needs more memory to decompress than is free; free memory.") from error
        raise DataError(f"{name} is damaged ({error}); download the file again.") from error
    if frame is not None or not frames:
        raise DataError(f"{name} is incomplete; download the file again.")


def _from_gzip(name: PurePath, stored: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the content of one or more members of gzip, which zeros may follow."""
    member, members, compressed, expanded = None, 0, 0, 0
    try:
        for piece in stored:
            if not compressed and len(piece) > 1 and piece[:2] != b"\x1f\x8b":
                raise DataError(f"{name} is not compressed with gzip; correct its name or compress it.")
            compressed += len(piece)
            more = False  # whether the library holds content of bytes that it has read
            while piece or more:
                if member is None:
                    piece = piece.lstrip(b"\0") if members else piece
                    if not piece:
                        break
                    member, members = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), members + 1
                content = member.decompress(piece, CHUNK)
                expanded += len(content)
                refuse_expansion(name, compressed, expanded)
                yield content
                piece = member.unused_data if member.eof else member.unconsumed_tail
                more = len(content) == CHUNK and not member.eof
                if member.eof:
                    member = None
    except zlib.error as error:
        raise DataError(f"{name} is damaged ({error}); download the file again.") from error
    if member is not None or not members:
        raise DataError(f"{name} is incomplete; download the file again.")


def _is_zstandard(content: bytes) -> bool:
    """Whether content begins with the number of a frame of Zstandard, or of one to skip."""
    number = int.from_bytes(content[:4], "little")
    return number == 0xFD2FB528 or number & ~15 == 0x184D2A50


def _slices(stored: Iterable[bytes]) -> Iterator[bytes]:
    for chunk in stored:
        for start in range(0, len(chunk), SLICE):
            yield chunk[start : start + SLICE]
