"""JSON records, one per line, from plain and Zstandard files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from basecap.data.sources._contract import files_below
from basecap.errors import DataError

CHUNK = 1 << 20
SUFFIXES = (".jsonl", ".jsonl.zst")


def record_files(directory: Path) -> list[Path]:
    """Return the sorted record files below a directory."""
    return [path for path in files_below(directory) if path.name.endswith(SUFFIXES)]


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file:line, record) for every line that is not blank.

    Raises:
        DataError: the file is truncated or not Zstandard, or a line is not a JSON object or has no text.
    """
    chunks = _decompressed(path) if path.suffix == ".zst" else _plain(path)
    for number, line in enumerate(_lines(chunks), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place} is not JSON ({error}); fix or remove the line.") from error
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise DataError(f'{place} has no text; every line must be an object with a string "text".')
        yield place, record


def keys_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the dotted keys of a record's single values, except the text.

    >>> keys_of({"text": "...", "meta": {"repo": "a/b"}, "url": ""})
    ('meta.repo', 'url')
    """
    found: list[str] = []
    for key, value in record.items():
        if isinstance(value, Mapping):
            found += [f"{key}.{below}" for below in keys_of(value)]
        elif key != "text":
            found.append(key)
    return tuple(found)


def _plain(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def _decompressed(path: Path) -> Iterator[bytes]:
    """Yield the content of a .zst file of one or more frames; raises DataError when the last frame is incomplete."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor()
    frame = None
    try:
        for chunk in _plain(path):
            while chunk:
                frame = frame or decompressor.decompressobj()
                yield frame.decompress(chunk)
                chunk = frame.unused_data
                if frame.eof:
                    frame = None
    except zstandard.ZstdError as error:
        raise DataError(f"{path} is damaged ({error}); download the file again.") from error
    if frame is not None:
        raise DataError(f"{path} is incomplete; download the file again.")


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    pending: list[bytes] = []  # parts of a line, which may span many chunks
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        pending.append(first)
        for line in others:
            yield b"".join(pending)
            pending = [line]
    if any(pending):
        yield b"".join(pending)
