"""Shards: what is written is read, limits keep the smallest hashes, damage is seen."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basecap.data.hashes import text_number
from basecap.data.shards import MIN_DOCUMENTS, Group, Shard, select, token_counts, write_shard
from basecap.data.sources import Document
from basecap.data.tokenizer import Tokenizer, byte_tokenizer
from basecap.errors import DataError

BYTES = byte_tokenizer()
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def write(path: Path, texts: list[str], limit: int | None = None, tokenizer: Tokenizer = BYTES) -> Shard:
    documents = [Document(domain, "train", text) for text in texts for domain in ("a", "b")]
    write_shard(path, documents, tokenizer, {("a", "train"): limit}, {"file": "hash"}, {})
    return Shard(path)


def texts_of(group: Group) -> list[str]:
    pieces = "".join(chr(token) for token in group.tokens[:].tolist()).split(chr(256))
    assert pieces.pop() == ""
    return [piece.encode("latin-1").decode() for piece in pieces]


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(TEXT, max_size=10))
def test_documents_read_back_in_the_order_of_their_hashes(tmp_path_factory, texts: list[str]):
    shard = write(tmp_path_factory.mktemp("shards") / "one", texts)
    wanted = sorted((text for text in texts if text.strip()), key=text_number)
    group = shard.group("a", "train")
    found = [] if group is None else texts_of(group)
    assert [text_number(text) for text in found] == [text_number(text) for text in wanted]
    assert sorted(found) == sorted(wanted)
    assert shard.group("b", "train") is None and shard.about["files"] == {"file": "hash"}
    if group is not None:
        assert group.documents["bytes"].tolist() == [len(text.encode()) for text in found]
        assert group.tokens[:].dtype == np.uint16 and (group.tokens[:] == 256).sum() == len(found)
        assert len(group) == len(found) and len(group.tokens) == len(group.tokens[:])


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(TEXT.filter(str.strip), min_size=1, max_size=30, unique=True),
    limit=st.integers(1, 300),
    cut=st.integers(0, 30),
)
def test_a_limit_keeps_the_same_documents_however_they_are_cut(tmp_path_factory, texts, limit: int, cut: int):
    root = tmp_path_factory.mktemp("shards")
    kept, total = [], 0
    for text in sorted(texts, key=text_number):
        size = len(text.encode()) + 1
        if size * MIN_DOCUMENTS > limit:
            continue
        total += size
        if total > limit:
            break
        kept.append(text)
    shards = [write(root / "one", texts[:cut], limit), write(root / "two", texts[cut:], limit)]
    groups = select([group for shard in shards if (group := shard.group("a", "train"))], limit)
    assert sorted(text for group in groups for text in texts_of(group)) == sorted(kept)


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path):
    group = write(tmp_path / "one", ["a\ud800b"]).group("a", "train")
    assert texts_of(group) == ["a?b"]


def test_a_large_vocabulary_takes_32_bits(tmp_path):
    large = byte_tokenizer()
    large.vocab_size = 70_000
    assert write(tmp_path / "one", ["text"], tokenizer=large).group("a", "train").tokens[:].dtype == np.uint32


def test_counts_are_read_without_the_tokens(tmp_path):
    write(tmp_path / "one", ["abc", "de"])
    (tmp_path / "one" / "tokens.npy").unlink()
    assert token_counts(tmp_path / "one") == {"a/train": 7}


@pytest.mark.parametrize("name", ["tokens.npy", "documents.npy", "shard.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_seen(tmp_path, name: str, damage: str):
    write(tmp_path / "one", ["some text", "more text"])
    path = tmp_path / "one" / name
    content = path.read_bytes()
    path.unlink()
    if damage == "flip":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="one is damaged; remove that directory and run again"):
        Shard(tmp_path / "one")


def test_what_a_killed_process_left_is_replaced(tmp_path):
    (tmp_path / "one.host-1.partial").mkdir()
    (tmp_path / "one.host-1.partial" / "rest").write_text("x")
    write(tmp_path / "one", ["text"])
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["documents.npy", "one", "shard.json", "tokens.npy"]
