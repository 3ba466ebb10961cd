"""Hashes, used to name stored files and to order and split documents."""

import hashlib
import json
from pathlib import Path
from typing import Any

from basecap.system.foreign import open_file


def digest(content: Any) -> str:
    """Return a hash (sixteen hex digits) of JSON-like content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a regular file's content in hex; raises DataError for another, OSError."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_number(text: str) -> int:
    """Return 64 bits of the SHA-256 of a text in UTF-8."""
    return bytes_number(text.encode("utf-8", errors="replace"))


def bytes_number(content: bytes) -> int:
    """Return 64 bits of the SHA-256 of `content`."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")
