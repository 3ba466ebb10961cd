"""JSON records, one per line, from plain and Zstandard files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from basecap.data.sources._contract import files_below
from basecap.errors import DataError
from basecap.system.foreign import chunks, decompressed

SUFFIXES = (".jsonl", ".jsonl.zst")

#: Maximum number of bytes of a line, and of a document: more would not fit into memory with its tokens.
LONGEST = 1 << 28


def record_files(directory: Path) -> list[Path]:
    """Return the sorted record files below a directory; raises DataError for a file beside its compressed form."""
    return refuse_pairs([path for path in files_below(directory) if path.name.endswith(SUFFIXES)])


def refuse_pairs(paths: list[Path]) -> list[Path]:
    """Return the paths; raises DataError for a file beside its compressed form, as `zstd --keep` leaves it."""
    for path in {*paths} & {path.with_suffix("") for path in paths if path.suffix == ".zst"}:
        raise DataError(f"{path} is beside {path.name}.zst, so its records would be read twice; remove one of the two.")
    return paths


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file:line, record) for every line that is not blank.

    Raises:
        DataError: the file is truncated or not Zstandard, or a line is too long, not a JSON object or has no text.
    """
    content = decompressed(path) if path.suffix == ".zst" else chunks(path)
    for number, line in _lines(path, content):
        place = f"{path}:{number}"
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


def _lines(path: Path, content: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
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
            raise DataError(
                f"{path}:{number} has more than {LONGEST >> 20} MiB; split the document or remove the line."
            )
    if line := b"".join(pending).strip():
        yield number, line
