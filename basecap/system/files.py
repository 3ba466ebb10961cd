"""Read files with clear errors; write them atomically."""

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from basecap.errors import DataError
from basecap.system.foreign import open_file, open_to_append, read_file

logger = logging.getLogger("basecap.files")

#: Version of the format of a study's files.
SCHEMA = 1
#: Files whose torn last row was said.
_TORN: set[Path] = set()


#: Maximum number of bytes of a file that is read as a whole.
LARGEST = 1 << 30
#: End of the names of files that are not yet complete.
PARTIAL = ".partial"
#: Bytes at the end of a file in which its last rows are looked for.
TAIL = 1 << 16


def read(path: Path, most: int = LARGEST) -> bytes | None:
    """Return the content of a regular file, None when it does not exist.

    Raises:
        DataError: it cannot be read, is not a regular file, or has more than `most` bytes.
    """
    try:
        return read_file(path, most)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file but a torn last one; raises DataError when another row is damaged."""
    rows = []
    for number, line in enumerate(_whole_lines(path).split(b"\n")[:-1], start=1):
        try:
            row = from_json(line)
        except ValueError as error:
            raise DataError(f"{path}:{number} is not JSON; remove that line.") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number} is not a JSON object; remove that line.")
        rows.append(row)
    return rows


def read_array(path: Path) -> bytes:
    """Return these rows as one JSON array, unchecked: reading that is faster than row by row."""
    return b"[" + _whole_lines(path)[:-1].replace(b"\n", b",") + b"]"


def read_last_lines(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the last whole rows of a .jsonl file, at most `count` and those in its last `TAIL` bytes; [] without it.

    Rows that are damaged are left out.
    """
    rows = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        for line in file.read(TAIL).split(b"\n")[-count - 1 : -1]:
            with contextlib.suppress(ValueError):
                row = from_json(line)
                rows += [row] if isinstance(row, dict) else []
    return rows


def _whole_lines(path: Path) -> bytes:
    """Return the lines of a .jsonl file without the last one where that is torn, which a warning says once.

    The process was killed, or the machine lost power, while it was written: it has no end, or is not JSON.
    """
    content = read(path) or b""
    end = content.rfind(b"\n") + 1
    start = content.rfind(b"\n", 0, max(0, end - 1)) + 1
    try:
        from_json(content[start:end] or b"0")
    except ValueError:
        end = start
    if end < len(content) and path not in _TORN:
        _TORN.add(path)
        logger.warning("%s: the last row is incomplete and left out; it was being written when its run ended.", path)
    return content[:end]


def entries(directory: Path) -> list[Path]:
    """Return the sorted paths in a directory, [] when it does not exist; raises DataError when it cannot be read."""
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        if not directory.is_file():
            return []
        raise DataError(f"{directory} is a file; give a directory.") from error
    except OSError as error:
        raise _unreadable(directory, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read ({error.strerror or error}); fix that and run again.")


#: What free disk space solves: a full disk, a full quota, a file that may not grow.
FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is exceeded",
    errno.EFBIG: "the disk is full",
}


def write_error(error: Exception) -> str:
    """Return why something could not be written and what to do, without a full stop.

    >>> write_error(OSError(28, "No space left on device")), write_error(OSError(13, "Permission denied"))
    ('the disk is full; free disk space', 'Permission denied; fix that')
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is None:  # safetensors has the number in the text
        named = re.search(r"\(os error (\d+)\)", str(error))
        number = int(named[1]) if named else None
    if number in FULL:
        return f"{FULL[number]}; free disk space"
    return f"{getattr(error, 'strerror', None) or error}; fix that"


@contextlib.contextmanager
def writing(path: Path, other: str = "another directory") -> Iterator[None]:
    """Create the directory of `path` and turn an OSError of the block into a DataError.

    Args:
        path: the file to write.
        other: the alternative that the error message suggests.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if path.parent.is_symlink() and not path.parent.exists():
            raise DataError(f"cannot write {path}: {path.parent} is a broken link; fix it or give {other}.") from error
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise DataError(f"cannot write {path}: {path.parent} is not a directory; give {other}.") from error
        raise DataError(f"cannot write {path}: {write_error(error)} or give {other}.") from error


def fsync_files(directory: Path) -> None:
    """Flush all files below a directory to the disk, so that they survive a crash of the machine; raises OSError.

    A network disk may report only here that it is full. What another thread renames meanwhile is left out.
    """
    for folder, _, names in os.walk(directory):
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())


def share_mode(directory: Path, like: str) -> None:
    """Give the files of a directory the mode of one of them: those of safetensors are for their owner alone."""
    for path in filter(Path.is_file, directory.iterdir()):
        with contextlib.suppress(OSError):  # a file system without modes
            shutil.copymode(directory / like, path)


def process_name() -> str:
    """Return the host and number of this process, for names of files that are this process's alone."""
    return f"{safe_name(socket.gethostname())}-{os.getpid()}"


def remove_partial(directory: Path) -> None:
    """Remove what `replacing` left below a directory, which this process alone writes to, when another was killed."""
    for path in directory.rglob(f".*{PARTIAL}"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path, other: str = "another directory") -> Iterator[Any]:
    """Open a temporary binary file, renamed to `path` if the block succeeds; raises DataError as `writing` does."""
    partial = path.with_name(f".{path.name}.{process_name()}{PARTIAL}")
    try:
        with writing(path, other):
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # else a crash of the machine may leave an empty file under the new name
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # the first error is already raised
            partial.unlink(missing_ok=True)


def move_directory(path: Path, target: Path) -> None:
    """Rename a directory, also to another disk: `target` is whole as soon as it exists. Raises OSError."""
    try:
        path.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        partial = target.parent / ".partial"  # may be there from a killed process
        shutil.rmtree(partial, ignore_errors=True)
        try:
            shutil.copytree(path, partial / target.name)
            fsync_files(partial)
            (partial / target.name).rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(path)


def real_path(path: Path) -> Path:
    """Return the absolute path without links. A link to itself stays, which Path.resolve of Python 3.12 refuses."""
    return Path(os.path.realpath(path))


def safe_name(name: str) -> str:
    """Return a file name for `name`: the name itself if it is safe, else its readable part and a hash.

    >>> safe_name("transformer++")
    'transformer++'
    >>> safe_name("transformer++ window")
    'transformer++_window-539d50'
    """
    safe = re.sub(r"[^A-Za-z0-9+,=._-]+", "_", name).lstrip(".")[:80]
    if safe == name and safe:
        return name
    return f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return a file name for each name, of letters, digits and "+._-"; where two would be alike, each has a hash.

    >>> plain_names(["cells-a,b", "gaps"])
    {'cells-a,b': 'cells-a-b', 'gaps': 'gaps'}
    """
    found = {name: re.sub(r"[^A-Za-z0-9+._]+", "-", name).strip(".-")[:80] for name in names}
    alike = Counter(short.casefold() for short in found.values())
    return {
        name: short
        if short and alike[short.casefold()] == 1
        else f"{short}-{hashlib.sha256(name.encode()).hexdigest()[:6]}".lstrip("-")
        for name, short in found.items()
    }


def plain(value: Any) -> Any:
    """Convert `value` to JSON types: numpy scalars to numbers, arrays and tuples to lists, non-finite to None."""
    import numpy as np  # here, because lists of studies need no numbers and come at once

    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value


def encode_lines(rows: Iterable[dict[str, Any]]) -> bytes:
    """Encode rows as lines of strict JSON."""
    return b"".join(json.dumps(plain(row), allow_nan=False).encode() + b"\n" for row in rows)


def append_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append all rows to a .jsonl file or none, after a part of a row that a killed process left is removed.

    Raises:
        DataError: the file cannot be written.
    """
    content = encode_lines(rows)
    with writing(path), open_to_append(path) as file:
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            end = (read(path) or b"").rfind(b"\n") + 1
    append(path, content, end)


def append(path: Path, content: bytes, end: int) -> None:
    """Write all of `content` from byte `end` of a file on, or nothing; what follows `end` is removed.

    Raises:
        DataError: the file cannot be written.
    """
    with writing(path), open_to_append(path) as file:
        if file.seek(0, os.SEEK_END) > end:
            file.truncate(end)
        if file.write(content) != len(content):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` and the schema version as strict JSON; raises DataError when the file cannot be written."""
    text = to_json({"schema": SCHEMA, **content}, indent=1, inf_nan_mode="null", fallback=plain)
    with replacing(path) as file:
        file.write(text + b"\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a file written by `write_json`, None when it does not exist; raises DataError."""
    text = read(path)
    if text is None:
        return None
    try:
        content = from_json(text)
    except ValueError as error:
        raise DataError(f"{path} is not JSON; restore or remove it.") from error
    return without_schema(content, path)


def without_schema(content: Any, path: Path) -> dict[str, Any]:
    """Return `content` without its `schema`; raises DataError when this version of basecap cannot read it."""
    found = content.pop("schema", None) if isinstance(content, dict) else None
    if found is None:
        raise DataError(f"{path} was not written by basecap; give another directory.")
    if found != SCHEMA:
        raise DataError(
            f"{path} has schema {found}, this version of basecap reads {SCHEMA}; use the version that wrote it."
        )
    return content
