"""Pieces of a long text whose tokens, one piece after the other, are those of the whole text.

Two kinds of tokenizers have such pieces; with any other a text stays whole:

- Byte-level ones that split at the pattern of GPT-2. No match of it goes on from a character that is not white space to
  one that is, it looks ahead over white space only, and never back. So the text may be cut before a space or newline
  that follows a letter, digit or punctuation.
- Those of Llama 2 and Mistral, which write each space as "\u2581" and one more in front of the text, and merge across
  words if the vocabulary lets them. Where no token has "\u2581" after another character, none is merged across a single
  space, and the "\u2581" in front of the next piece stands for that space.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

#: Characters of a piece, or as many more as there are to the next place to cut.
PIECE = 1 << 16

#: What stands for a space in vocabularies of SentencePiece.
SPACE = "\u2581"


class Cuts(NamedTuple):
    """Where a text may be cut: `pattern` begins there, and the next piece `skipped` characters later."""

    pattern: re.Pattern[str]
    skipped: int


#: Left of a cut are letters, digits and punctuation of ASCII, Chinese and Japanese: white space to no library.
BYTE_LEVEL = Cuts(re.compile(r"(?<=[\w!-~\u3001-\u301f\uff01-\uff5e])[ \n]"), 0)
PREPENDED = Cuts(re.compile(rf"(?<=[^\s{SPACE}]) (?=[^\s{SPACE}])"), 1)


def pieces(text: str, cuts: Cuts | None) -> Iterator[str]:
    """Yield a text in pieces, the whole where it may not be cut."""
    start = 0
    while cuts is not None and (found := cuts.pattern.search(text, start + PIECE)):
        yield text[start : found.start()]
        start = found.start() + cuts.skipped
    yield text[start:] if start else text


def cuts_of(content: dict[str, Any]) -> Cuts | None:
    """Return where a tokenizer, given by the content of its tokenizer.json, lets a text be cut; None for nowhere."""
    matched = [token for token in content["added_tokens"] if not token.get("special")]  # special ones never are
    if any(token.get("lstrip") or token.get("rstrip") or re.search(r"\S\s", token["content"]) for token in matched):
        return None
    model, before, normalizer = content["model"], content.get("pre_tokenizer"), content.get("normalizer")
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    if before is None:
        return PREPENDED if normalizer == _PREPENDING and _merges_no_words(model) else None
    plain = normalizer is None or normalizer == {"type": "NFC"}
    byte_level = before.get("type") == "ByteLevel" and before.get("use_regex", True)
    return BYTE_LEVEL if plain and byte_level and not before.get("add_prefix_space") else None


_PREPENDING = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ],
}


def _merges_no_words(model: dict[str, Any]) -> bool:
    """Whether no token of a vocabulary has a space after another character, and words are not looked up whole."""
    odd = any(model.get(key) for key in ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"))
    return (
        not odd
        and SPACE in model["vocab"]
        and not any(re.search(f"[^{SPACE}]{SPACE}", token) for token in model["vocab"])
    )
