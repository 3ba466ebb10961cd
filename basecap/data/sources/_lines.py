"""Records: JSON, one per line, in plain, Zstandard and gzip files, and rows of Parquet files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from basecap.data.sources import _parquet
from basecap.data.sources._contract import files_below
from basecap.errors import DataError
from basecap.system.foreign import chunks_of, decompressed, open_file

#: Endings of files of records, and how messages list them.
SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".json.gz", ".parquet")
ENDINGS = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"

#: Maximum number of bytes of a line, and of a document: more would not fit into memory with its tokens.
LONGEST = 1 << 28


def record_files(directory: Path) -> list[Path]:
    """Return the sorted record files below a directory; raises DataError for a file beside another form of it."""
    return refuse_pairs([path for path in files_below(directory) if path.name.endswith(SUFFIXES)], SUFFIXES)


def refuse_pairs(paths: list[Path], endings: Sequence[str]) -> list[Path]:
    """Return the paths; raises DataError for two that differ in their endings only, as `zstd --keep` leaves them."""
    seen: dict[Path, Path] = {}
    for path in sorted(paths):
        ending = max((end for end in endings if path.name.endswith(end)), key=len, default="")
        first = seen.setdefault(path.with_name(path.name.removesuffix(ending)), path)
        if first != path:
            what = f"{first} is beside {path.name}, so its records would be read twice"
            raise DataError(f"{what}; remove one of the two.")
    return paths


def read_records(path: Path, keys: Sequence[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file:line, record) for each record of a file, see `records_of`; raises OSError too."""
    with open_file(path) as file:
        yield from records_of(path, file, keys)


def records_of(
    name: PurePath, file: BinaryIO, keys: Sequence[str] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file:line, record) for every line that is not blank, or (file:row, record) for every row.

    Args:
        name: of the file; its ending says what it holds.
        file: the open file.
        keys: the dotted keys of a record that will be used beside its text; all if None.

    Raises:
        ConfigError: the library that it needs is not installed.
        DataError: the file is damaged, or a line is too long, not a JSON object or has no text.
    """
    if name.suffix == ".parquet":
        for number, record in enumerate(_parquet.rows(name, file, keys), 1):
            if record["text"] is None:
                raise DataError(f'{name}:{number} has no text; every row must have a string in the column "text".')
            if len(record["text"]) > LONGEST:
                raise _too_long(f"{name}:{number}")
            yield f"{name}:{number}", record
        return
    for number, line in _lines(name, decompressed(name, chunks_of(file))):
        place = f"{name}:{number}"
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            raise DataError(f"{place} is not text in UTF-8 ({error.reason}); convert the file to UTF-8.") from error
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
        elif key != "text" and not isinstance(value, list):
            found.append(key)
    return tuple(found)


def _lines(name: PurePath, content: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) for every line that is not blank; memory holds one chunk and one line."""
    number, pending, held = 1, list[bytes](), 0  # parts of a line, which may span many chunks
    for chunk in content:
        if not held and not chunk.strip():  # counted, as a list of a million blank lines takes long
            number += chunk.count(b"\n")
            continue
        *ended, last = chunk.split(b"\n")
        for part in ended:
            line = b"".join([*pending, part])
            if line.strip():
                yield number, line
            number, held = number + 1, 0
            pending.clear()
        pending.append(last)
        held += len(last)
        if held > LONGEST:
            raise _too_long(f"{name}:{number}")
    if line := b"".join(pending).strip():
        yield number, line


def _too_long(place: str) -> DataError:
    return DataError(f"{place} has more than {LONGEST >> 20} MiB; split the document or remove it.")
