"""Tokenizers: text there and back, one end of text, the same description for the same text."""

import json
from base64 import b64encode

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from basecap.data import Tokenizer, _pieces, check_vocabulary
from basecap.data.tokenizer import byte_tokenizer, is_local, train_bpe
from basecap.errors import ConfigError, DataError

TEXTS = ["the river runs under the bridge of stone", "über den Fluss 12345", "a\n\n  b\tc <|endoftext|> d"] * 5
BYTES, BPE = byte_tokenizer(), train_bpe(TEXTS, 300)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_comes_back(text: str):
    for tokenizer in (BYTES, BPE):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= token < tokenizer.vocab_size and token != tokenizer.end_of_text for token in ids)


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_ids_are_the_bytes(text: str):
    assert BYTES.encode(text) == list(text.encode())


def bpe(normalizer: object, pre_tokenizer: object, words: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    """Return a tokenizer of given parts, end of text included."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", *words])}
    model = tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True)
    library = tokenizers.Tokenizer(model)
    if normalizer is not None:
        library.normalizer = normalizer
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    library.add_special_tokens(["</s>"])
    return Tokenizer(library.to_str())


SENTENCE_PIECE = tokenizers.normalizers.Sequence(
    [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
)
WORDS = ["\u2581", "a", "s", "'", "\u2581a", "as", "\u2581\u2581", "\u2581as", "\u2581\u2581\u2581\u2581"]
MERGES = [("\u2581", "a"), ("a", "s"), ("\u2581", "\u2581"), ("\u2581", "as"), ("\u2581\u2581", "\u2581\u2581")]
LLAMA = bpe(SENTENCE_PIECE, None, WORDS, MERGES)


def composed(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that composes characters first, as that of GPT-NeoX."""
    return Tokenizer(json.dumps({**json.loads(tokenizer.description), "normalizer": {"type": "NFC"}}))


@pytest.mark.parametrize("tokenizer", [BPE, BYTES, composed(BPE), LLAMA], ids=["bpe", "bytes", "composed", "llama"])
@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(
            ["a", "s", "'s", " ", "  ", "\n", "\t", "\r", "\x1c", "\x85", "\u180e", "\u2028", "\u2581", "1", "1"]
        )
        | st.sampled_from(
            ["the river", ".", "\u3002", "-", "\u0308", "u\u0308", "\xfc", "\u4e2d", "<|endoftext|>", "</s>"]
        )
        | st.characters(exclude_categories=["Cs"]),
        max_size=40,
    ).map("".join),
    size=st.integers(1, 9),
    known_part=st.integers(0, 40),
)
def test_pieces_have_the_tokens_of_the_whole(tokenizer: Tokenizer, text: str, size: int, known_part: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pieces, "PIECE", size)
        patch.setattr("basecap.data.tokenizer.REPEATED", size)
        ids, known = tokenizer.encode(text), dict[str, np.ndarray]()
        repeated = [tokenizer.encode_repeated(text, known).tolist() for _ in range(2)]
        settled, rest = tokenizer.settled(text[:known_part])
    assert settled + tokenizer.encode(rest + text[known_part:]) == ids
    assert ids == tokenizer._library.encode(text, add_special_tokens=False).ids
    assert repeated == [ids, ids]


def test_a_long_text_is_cut_where_that_changes_nothing(monkeypatch):
    monkeypatch.setattr(_pieces, "PIECE", 5)
    assert list(_pieces.pieces("the river.\n under 'the' bridge", BPE._cuts)) == [
        "the river.",
        "\n under",
        " 'the'",
        " bridge",
    ]
    assert list(_pieces.pieces("the river  under the bridge", LLAMA._cuts)) == ["the river  under", "the bridge"]
    assert list(_pieces.pieces("the river", None)) == ["the river"]


@pytest.mark.parametrize(
    "changed",
    [
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {
            "added_tokens": [
                {"id": 5, "content": "a b", "special": False},
                {"id": 0, "content": "</s>", "special": True},
            ]
        },
        {"model": {"type": "BPE", "dropout": 0.1, "vocab": {"a": 0}, "merges": []}},
    ],
)
def test_tokenizers_that_may_look_across_words_get_whole_texts(changed: dict):
    assert Tokenizer(json.dumps({**json.loads(BPE.description), **changed}))._cuts is None
    across = bpe(SENTENCE_PIECE, None, [*WORDS, "s\u2581"], [*MERGES, ("s", "\u2581")])
    assert LLAMA._cuts is _pieces.PREPENDED and across._cuts is None


LETTERS = "abs'<>/|_eofndtx"


def llama() -> tokenizers.Tokenizer:
    """Return a BPE with bytes for unknown characters, and a space in front of the text, as that of Llama 2."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *LETTERS, "\u2581a", "as"]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [("\u2581", "a"), ("a", "s")]
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    library.normalizer = SENTENCE_PIECE
    parts = tokenizers.decoders
    library.decoder = parts.Sequence(
        [parts.Replace("\u2581", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)]
    )
    return library


def unigram() -> tokenizers.Tokenizer:
    """Return a Unigram model, as that of T5; its vocabulary has the name of the end of text."""
    scored = [("<unk>", 0.0), ("</s>", 0.0), ("\u2581", -2.0), *((letter, -3.0) for letter in LETTERS)]
    scored += [("\u2581a", -2.5), ("as", -2.5), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    library = tokenizers.Tokenizer(tokenizers.models.Unigram(scored, unk_id=0, byte_fallback=True))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    parts = tokenizers.decoders
    library.decoder = parts.Sequence([parts.ByteFallback(), parts.Metaspace()])
    return library


def byte_level() -> tokenizers.Tokenizer:
    """Return a byte-level BPE, as that of GPT-2, which merges the name of the end of text."""
    vocabulary = {word: number for number, word in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    merges, name = [], "<"
    for letter in "/s>":
        merges.append((name, letter))
        name += letter
        vocabulary[name] = len(vocabulary)
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    return library


@pytest.mark.parametrize("special", [True, False], ids=["special-end", "ordinary-end"])
@pytest.mark.parametrize("added", [(), ("<tok>", "abs")], ids=["", "added"])
@pytest.mark.parametrize("make", [byte_level, llama, unigram])
def test_tokenizers_of_every_shape(make, added: tuple[str, ...], special: bool, monkeypatch):
    """Text there and back, pieces equal to the whole, no end of text from text, spaces kept in a continuation."""
    library = make()
    end = tokenizers.AddedToken("</s>", special=special, normalized=False)
    (library.add_special_tokens if special else library.add_tokens)([end])
    library.add_tokens([tokenizers.AddedToken(name, special=False, normalized=False) for name in added])
    tokenizer = Tokenizer(library.to_str())
    texts = ["a as  b's", "as</s> a</s></s>", "</s>", "a\u00fc\u4e2d b\n", "", "<tok> b c</s>abs as <tok>a"]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.end_of_text not in ids and ids == tokenizer.encode_document(text).tolist()
        with monkeypatch.context() as patch:
            patch.setattr(_pieces, "PIECE", 1)
            assert tokenizer.encode(text) == ids
        if make is byte_level or not added or "<tok>" not in text:  # spaces are added after a token in text
            assert tokenizer.decode(ids) == text
    before, after = tokenizer.encode("a as"), tokenizer.encode("a as a b")
    assert tokenizer.continued("a as", after[len(before) :]) == "a as a b"
    assert tokenizer.continued("a as", []) == "a as" and tokenizer.continued("", before) == "a as"


@pytest.mark.parametrize("make", [byte_level, llama, unigram, lambda: tokenizers.Tokenizer.from_str(BPE.description)])
def test_the_bytes_of_the_first_tokens_are_those_of_their_text(make):
    library = make()
    library.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(library.to_str())
    for text in ("as a  b", "a" * 9 + "\u00fc\u4e2d\n as" * 3, "\u4e2d"):
        ids = tokenizer.encode_document(text)
        whole = len(text.encode())
        found = [tokenizer.bytes_of_first(count, ids, whole) for count in range(1, len(ids) + 1)]
        assert found[-1] == whole and found == sorted(found)
        for count, size in enumerate(found, 1):
            part = tokenizer.decode(ids[:count].tolist())
            assert part.endswith("\ufffd") or size == len(part.encode())
    assert [tokenizer.bytes_of_first(count, ids, 6) for count in (1, len(ids))] == [6 * found[0] // 3, 6]  # scaled


def test_an_end_of_text_in_the_vocabulary_is_spelled():
    tokenizer = unigram()
    tokenizer.add_special_tokens(["</s>"])
    read = Tokenizer(tokenizer.to_str())
    assert [tokenizer.id_to_token(token) for token in read.encode("a</s>a")] == ["\u2581a", *"</s>", "a"]


def test_sizes_and_ends():
    assert (BYTES.vocab_size, BYTES.end_of_text) == (257, 256)
    assert BPE.vocab_size == 300 and BPE.decode([BPE.end_of_text]) == "<|endoftext|>"
    assert len(BPE.encode(TEXTS[0])) < len(TEXTS[0])
    assert BPE.end_of_text not in BPE.encode("a <|endoftext|> written in a text")


def test_training_is_deterministic():
    assert train_bpe(iter(TEXTS), 300).fingerprint == BPE.fingerprint
    assert train_bpe(TEXTS, 290).fingerprint != BPE.fingerprint


def test_a_description_reads_back(tmp_path):
    (tmp_path / "tokenizer.json").write_text(BPE.description, encoding="utf-8")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.fingerprint == BPE.fingerprint and loaded.encode(TEXTS[1]) == BPE.encode(TEXTS[1])


def test_a_hugging_face_tokenizer_keeps_its_ids(tmp_path):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "the": 1, "river": 2}, unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.add_special_tokens(["<pad>", "</s>"])
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", library.token_to_id("</s>"))]
    )
    library.enable_truncation(1)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (5, 4)
    assert tokenizer.encode("the river the") == [1, 2, 1]


def test_what_is_no_tokenizer_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.load(path)
    byte_level = json.loads(BYTES.description)
    odd = json.dumps(byte_level | {"pre_tokenizer": "ByteLevel"})
    for content in ("{", "[" * 100_000, "[]", "{}", '{"model": {"vocab": {}}, "added_tokens": 3}', odd):
        path.write_text(content)
        with pytest.raises(ConfigError, match="is not a valid tokenizer"):
            Tokenizer.load(path)
    path.write_text(json.dumps(byte_level | {"added_tokens": []}))
    with pytest.raises(ConfigError, match="end-of-text"):
        Tokenizer.load(path)
    end = byte_level["added_tokens"][0]
    replace = {"type": "Replace", "pattern": {"String": ""}, "content": "x"}  # the library panics
    for changed, words in [
        ({"model": byte_level["model"] | {"type": "of a later version"}}, r"cannot use .*; install the version that"),
        ({"normalizer": replace}, "library cannot use this tokenizer"),
        ({"added_tokens": [end | {"id": 400}]}, r"another id than the tokenizer.json \(400\); correct the ids"),
    ]:
        path.write_text(json.dumps(byte_level | changed))
        with pytest.raises(ConfigError, match=words):
            Tokenizer.load(path).decode(Tokenizer.load(path).encode("ab"))
    path.write_text(json.dumps(byte_level | {"added_tokens": [end | {"id": 2**30}]}))
    with pytest.raises(ConfigError, match="is not a valid tokenizer"):
        Tokenizer.load(path)
    monkeypatch.setattr("basecap.data.tokenizer.LARGEST_FILE", 1000)
    with pytest.raises(DataError, match="at most 1,000 are read of such a file"):
        Tokenizer.load(path)


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}
SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
#: A table of SentencePiece with an empty trie, which leads to texts of at most 18 characters.
TABLE = {"type": "Precompiled", "precompiled_charsmap": b64encode(bytes(4) + b"one\0" + b"x" * 18).decode()}


@pytest.mark.parametrize(
    ("part", "steps", "grows"),
    [
        ("normalizer", [REPLACE] * 4, None),
        ("normalizer", [TABLE, *[SPACES] * 20, {"type": "Prepend", "prepend": "\u2581"}, {"type": "NFC"}], None),
        ("normalizer", [REPLACE] * 5, "1.02e+03"),
        ("decoder", [REPLACE | {"pattern": {"Regex": "a*"}}] * 5, "3.12e+03"),
        ("normalizer", [{"type": "Sequence", "normalizers": [TABLE] * 2}, REPLACE], "1.3e+03"),
        ("normalizer", [REPLACE | {"pattern": {"Regex": r"\p{L}"}, "content": "a" * 1000}], "1e+03"),
    ],
)
def test_a_tokenizer_that_multiplies_text_is_refused(part, steps, grows):
    """The library ends the process when a text takes more memory than there is."""
    content = json.dumps(json.loads(BYTES.description) | {part: {"type": "Sequence", f"{part}s": steps}})
    said = ""
    try:
        Tokenizer(content)
    except ConfigError as error:
        said = str(error).partition(", more than 1,000; give")[0]
    assert said == (f"the {part} of the tokenizer may make text {grows} times as long" if grows else "")


def test_a_hub_that_gives_nothing_is_said_in_one_sentence(monkeypatch):
    def fails(*_):
        raise FileNotFoundError("An error happened. Please check your connection.")

    monkeypatch.setattr("basecap.system.hub.unreachable", lambda: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fails)
    with pytest.raises(ConfigError, match=r"\(FileNotFoundError\); give a .* --set data\.tokenizer=FILE") as told:
        Tokenizer.from_hub("some/model")
    assert "connection" not in str(told.value)


def test_what_needs_no_network(tmp_path):
    (tmp_path / "tokenizer.json").write_text(BYTES.description, encoding="utf-8")
    assert [is_local(name) for name in ("bpe", "bytes", str(tmp_path))] == [True] * 3
    assert [is_local(name) for name in ("some/model-that-nobody-has", "a/b/c")] == [False] * 2


def test_a_model_with_too_few_ids_is_refused():
    check_vocabulary(257, BYTES)
    check_vocabulary(512, BYTES)
    with pytest.raises(ConfigError, match=r"256 token ids but the tokenizer has 257; set model\.vocab"):
        check_vocabulary(256, BYTES)
