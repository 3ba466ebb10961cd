"""Cuts a long text into pieces that can be tokenised separately without changing any token.

Two kinds of tokenizers allow this; with any other a text is not cut:

- Byte-level tokenizers that split at GPT-2's pattern. No match of the pattern continues from a non-space character to
  white space, and the pattern looks ahead over white space only and never back. So a text can be cut before a space or
  newline that follows a letter, digit or punctuation.
- Tokenizers of Llama 2 and Mistral, which write each space as "\u2581", add one in front of the text, and may merge
  across words. If no token of the vocabulary has "\u2581" after another character, nothing is merged across a single
  space, and the "\u2581" added in front of the next piece replaces that space.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

#: Minimum number of characters of a piece; it ends at the next possible cut.
PIECE = 1 << 16

#: The character for a space in SentencePiece vocabularies.
SPACE = "\u2581"


class Cuts(NamedTuple):
    """Where a text can be cut: before a match of `pattern`. The next piece starts `skipped` characters later."""

    pattern: re.Pattern[str]
    skipped: int


#: A cut follows a letter, digit or punctuation of ASCII, Chinese or Japanese, which no library treats as white space.
BYTE_LEVEL = Cuts(re.compile(r"(?<=[\w!-~\u3001-\u301f\uff01-\uff5e])[ \n]"), 0)
PREPENDED = Cuts(re.compile(rf"(?<=[^\s{SPACE}]) (?=[^\s{SPACE}])"), 1)


def pieces(text: str, cuts: Cuts | None, least: int | None = None) -> Iterator[str]:
    """Yield the pieces of a text, each of at least `least` characters (default: PIECE); the whole text without cuts."""
    start, least = 0, PIECE if least is None else least
    while cuts is not None and (found := cuts.pattern.search(text, start + least)):
        yield text[start : found.start()]
        start = found.start() + cuts.skipped
    yield text[start:] if start else text


def last_cut(text: str, cuts: Cuts | None) -> tuple[str, str]:
    """Return a text up to its last possible cut, and from there on; empty and the whole text without a cut."""
    found = None if cuts is None else max(cuts.pattern.finditer(text), key=re.Match.start, default=None)
    if cuts is None or found is None:
        return "", text
    return text[: found.start()], text[found.start() + cuts.skipped :]


def cuts_of(content: dict[str, Any]) -> Cuts | None:
    """Return where a tokenizer (the content of its tokenizer.json) allows cuts, None if nowhere."""
    matched = matched_tokens(content)
    if any(re.search(r"\S\s", token["content"]) or any(map(token.get, _LOOKING)) for token in matched):
        return None
    model, before, normalizer = content["model"], content.get("pre_tokenizer"), content.get("normalizer")
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    if before is None:
        one_section = normalizer == _PREPENDING and not matched  # a space is added after every matched token
        return PREPENDED if one_section and _merges_no_words(model) else None
    plain = normalizer is None or normalizer == {"type": "NFC"}
    byte_level = before.get("type") == "ByteLevel" and before.get("use_regex", True)
    return BYTE_LEVEL if plain and byte_level and not before.get("add_prefix_space") else None


def matched_tokens(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens of a tokenizer that are found in text; special ones never are."""
    return [token for token in content["added_tokens"] if not token.get("special")]


#: Options of an added token that depend on what is beside it.
_LOOKING = ("lstrip", "rstrip", "single_word")

_PREPENDING = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ],
}


def _merges_no_words(model: dict[str, Any]) -> bool:
    """Whether no token of a vocabulary has a space after another character, and words are not looked up as a whole."""
    odd = any(model.get(key) for key in ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"))
    return (
        not odd
        and SPACE in model["vocab"]
        and not any(re.search(f"[^{SPACE}]{SPACE}", token) for token in model["vocab"])
    )
