"""Files: read with one sentence where that fails, written whole or not at all."""

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from basecap.errors import DataError

#: Version of the format of a study's files.
SCHEMA = 1


def read(path: Path) -> bytes | None:
    """Return the content of a file, None when there is no such file; raises DataError where it cannot be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file, without what follows the last newline: a kill cut it off; raises DataError."""
    rows = []
    for number, line in enumerate((read(path) or b"").split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number} is not JSON; remove that line.") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number} is not a JSON object; remove that line.")
        rows.append(row)
    return rows


#: Values that a YAML text holds at most, each alias counted as what it stands for.
LARGEST_YAML = 100_000


class _Loader(yaml.SafeLoader):
    """Refuses what YAML's own loader takes: a key that stands twice, aliases that stand for millions of values."""

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            self._size(node, {})
        return node

    def _size(self, node: yaml.Node, known: dict[int, int]) -> int:
        """Return how many values a node holds; raises MarkedYAMLError for too many and for one that holds itself."""
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) not in known:
            known[id(node)] = LARGEST_YAML + 1  # while it is counted: too many where it holds itself
            children = [child for pair in node.value for child in (pair if isinstance(pair, tuple) else (pair,))]
            size = 1 + sum(self._size(child, known) for child in children)
            if size > LARGEST_YAML:
                problem = f"its aliases stand for more than {LARGEST_YAML:,} values"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
            known[id(node)] = size
        return known[id(node)]

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark
                    )
                seen.add((key.tag, key.value))
        return node


def parse_yaml(text: str | bytes) -> Any:
    """Return what a text in YAML holds; raises ValueError of words that say why it is not, as "is not valid YAML"."""
    try:
        return yaml.load(text if isinstance(text, str) else text.decode("utf-8"), _Loader)
    except UnicodeDecodeError as error:
        raise ValueError("is not text in UTF-8") from error
    except Exception as error:  # a date or number that is none fails in Python's way, deep nesting in another
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        reason = str(getattr(error, "problem", None) or error).partition("\n")[0]
        raise ValueError(f"is not valid YAML{where} ({reason})") from error


def entries(directory: Path) -> list[Path]:
    """Return what a directory holds, sorted, nothing without it; raises DataError where it cannot be read."""
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
    return DataError(f"{path} cannot be read ({error.strerror or error}); mend that and run again.")


@contextlib.contextmanager
def writing(path: Path, other: str = "another directory with --out") -> Iterator[None]:
    """Make the directory of `path`; a full or forbidden disk is a DataError of one sentence.

    Args:
        path: the file that is written.
        other: what the sentence says to give instead.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}; make room or give {other}.") from error


def fsync_files(directory: Path) -> None:
    """Have the disk hold all files below a directory, so that they outlast a machine that goes down; raises OSError.

    A disk across the network may say only here that it is full.
    """
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path, other: str = "another directory with --out") -> Iterator[Any]:
    """Open a file beside `path` for bytes and rename it to `path` when all went well; raises DataError as `writing`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with writing(path, other):
            with partial.open("wb") as file:
                yield file
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # what went wrong has been said
            partial.unlink(missing_ok=True)


def safe_name(name: str) -> str:
    """Return a file name for `name`: itself where that is safe, else its readable part and a hash.

    >>> safe_name("transformer++")
    'transformer++'
    >>> safe_name("transformer++ window")
    'transformer++_window-539d50'
    """
    safe = re.sub(r"[^A-Za-z0-9+,=._-]+", "_", name).lstrip(".")[:80]
    if safe == name and safe:
        return name
    return f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def plain(value: Any) -> Any:
    """Return `value` as JSON knows it: numpy scalars and tuples as numbers and lists, non-finite as None."""
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
    """Return rows as lines of strict JSON, each with its newline."""
    return b"".join(json.dumps(plain(row), allow_nan=False).encode() + b"\n" for row in rows)


def append_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append rows to a .jsonl file; raises DataError when it cannot be written."""
    with writing(path), path.open("ab") as file:
        file.write(encode_lines(rows))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file by `content` as strict JSON, with the schema; raises DataError when it cannot be written."""
    text = json.dumps({"schema": SCHEMA, **plain(content)}, indent=1, allow_nan=False, ensure_ascii=False)
    with replacing(path) as file:
        file.write(text.encode() + b"\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a file that `write_json` wrote, None when there is no such file."""
    text = read(path)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON; restore or remove it.") from error
    return without_schema(content, path)


def without_schema(content: Any, path: Path) -> dict[str, Any]:
    """Return `content` without its `schema`; raises DataError when this version cannot read it."""
    found = content.pop("schema", None) if isinstance(content, dict) else None
    if found is None:
        raise DataError(f"{path} was not written by basecap; give another directory.")
    if found != SCHEMA:
        raise DataError(
            f"{path} has schema {found}, this version of basecap reads {SCHEMA}; use the one that wrote it."
        )
    return content
