"""How much longer text may become in a tokenizer: a short tokenizer.json can ask for more memory than there is.

The `tokenizers` library ends the process when it finds no memory, so the bound is computed before it sees any text.
"""

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from basecap.errors import ConfigError

#: The most characters that one may become; the normalizers in use stay below 100.
MOST = 1000

#: Characters that one may become at most, by normalizers that have no content of their own: in compatibility forms 18
#: (U+FDFA), in canonical ones 4; a byte is a character to ByteLevel; Bert also puts spaces around Chinese characters.
FIXED = {"NFKC": 18, "NFKD": 18, "NFC": 3, "NFD": 4, "Lowercase": 3, "ByteLevel": 4, "BertNormalizer": 36}


def refuse_growth(content: Mapping[str, Any]) -> None:
    """Raise ConfigError for a tokenizer (the content of its tokenizer.json) that may make text MOST times as long."""
    for what in ("normalizer", "decoder"):
        growth = 1.0
        for step in _steps(content.get(what)):
            growth *= _growth(step)
        if growth > MOST:
            raise ConfigError(
                f"the {what} of the tokenizer may make text {growth:.3g} times as long, more than {MOST:,}; give "
                "another tokenizer with --set data.tokenizer=FILE."
            )


def _steps(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or decoder in order."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
    for inner in part.get("normalizers", part.get("decoders", ())):
        yield from _steps(inner)


def _growth(step: Mapping[str, Any]) -> float:
    """Return the most characters that one may become in a step."""
    own: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "Replace": _of_replacement,
        "Prepend": lambda step: 1 + len(step["prepend"]),
        "Precompiled": _of_table,
    }
    return own[step["type"]](step) if step["type"] in own else FIXED.get(step["type"], 1)


def _of_replacement(step: Mapping[str, Any]) -> float:
    """Return the growth by a replacement of each match of a string or of a regular expression."""
    pattern, longer = step["pattern"], len(step["content"])
    width = len(pattern["String"]) if "String" in pattern else _least_width(pattern["Regex"])
    return max(1.0, longer / width) if width else 1.0 + longer


def _least_width(pattern: str) -> int:
    """Return the fewest characters that a regular expression matches, 0 where Python does not know its syntax."""
    try:
        return re._parser.parse(pattern).getwidth()[0]  # type: ignore[attr-defined]
    except (re.error, OverflowError, RecursionError):
        return 0


def _of_table(step: Mapping[str, Any]) -> float:
    """Return the growth by a table of SentencePiece: its size in four bytes, a trie, and the texts that it leads to."""
    table = base64.b64decode(step["precompiled_charsmap"] or "")
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(1.0, *(float(len(text.decode("utf-8", "replace"))) for text in texts))
