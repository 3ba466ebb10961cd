"""Hashes: the names of what is kept, the order and the split of documents."""

import hashlib
import json
from pathlib import Path
from typing import Any


def digest(content: Any) -> str:
    """Return sixteen hex digits that change with anything in JSON-like content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_number(text: str) -> int:
    """Return 64 bits of the SHA-256 of a text in UTF-8."""
    return bytes_number(text.encode("utf-8", errors="replace"))


def bytes_number(content: bytes) -> int:
    """Return 64 bits of the SHA-256 of some bytes."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")
