"""Held-out text in the training text, against a definition in sets of tuples."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from basecap.data import DataConfig, PreparedData, inspect, overlap, prepare
from basecap.data.overlap import covered_shares
from basecap.errors import DataError
from tests.data.conftest import words, write_lines

PAIR = np.array([0, 1], np.int64)
TOKENS = st.lists(st.integers(0, 2), max_size=40).map(lambda tokens: np.array(tokens, np.int64))


def shares(documents: list[np.ndarray], training: list[np.ndarray], n: int) -> list[float]:
    """Return what the definition says."""
    known = {tuple(run[at : at + n]) for run in training for at in range(len(run) - n + 1)}
    found = []
    for document in documents:
        covered = np.zeros(len(document), bool)
        for at in range(len(document) - n + 1):
            covered[at : at + n] |= tuple(document[at : at + n]) in known
        found.append(covered.mean() if len(document) else 0.0)
    return found


@settings(max_examples=60, deadline=None)
@given(documents=st.lists(TOKENS, max_size=6), training=st.lists(TOKENS, max_size=4), n=st.integers(1, 12))
@example(documents=[PAIR], training=[PAIR], n=2)  # the last sequence of a run, in a chunk of its own
def test_shares_are_those_of_the_definition(documents: list, training: list, n: int):
    sizes = np.array([len(document) for document in documents], np.int64)
    with pytest.MonkeyPatch.context() as patch:  # many rounds and chunks
        patch.setattr(overlap, "ROUND", 30)
        patch.setattr(overlap, "CHUNK", 7)
        found = covered_shares(sizes, documents.__getitem__, [run.astype(np.uint16) for run in training], n)
    assert found.tolist() == pytest.approx(shares(documents, training, n))


def prepared(root: Path, **options) -> PreparedData:
    """Return a study in which three of forty held-out documents are mostly training text, and one partly."""
    train = [words("c4", number) for number in range(40)]
    held = [words("c4", 1000 + number) for number in range(10)]
    copies = [f"again {train[0]}", f"{train[1]} more", train[2][20:], f"{train[3][:150]} {words('arxiv', 5)}"]
    for split, texts in (("train", train), ("validation", held), ("test", [*held, *copies])):
        records = [{"text": text, "meta": {"redpajama_set_name": "RedPajamaC4"}} for text in texts]
        write_lines(root / split / "1.jsonl.zst", records)
    config = {"source": "slimpajama", "path": str(root), "tokenizer": "bytes", "seq_len": 32, "train": ["c4"]}
    return prepare(DataConfig(**config, **options), root / "cache")


def test_documents_mostly_in_the_training_text_are_left_out(tmp_path):
    every, some = prepared(tmp_path, overlap=None), prepared(tmp_path)
    held = {data: data.documents("test", "c4") for data in (every, some)}
    texts = {
        data: [data.tokenizer.decode(found.tokens(index)) for index in range(len(found))]
        for data, found in held.items()
    }
    assert len(texts[every]) == 14 and len(texts[some]) == 11 and some.overlap.sequence == 80
    left = [text for text in texts[every] if text not in texts[some]]
    assert [texts[every].index(text) for text in left] == some.overlap.left_out["c4/test"]
    assert sum(text.startswith("again ") or text.endswith(" more") for text in left) == 2
    assert (
        held[some].total_bytes == sum(len(text.encode()) for text in texts[some])
        and held[some].content != held[every].content
    )
    assert some.overlap.shares == every.overlap.shares and 0.15 < some.overlap.shares["c4/test"] < 0.4
    assert some.manifest_hash != every.manifest_hash == prepared(tmp_path, overlap=1.0).manifest_hash
    (row,) = [row for row in inspect(some) if row["split"] == "test"]
    assert row["left out"] == 3 and row["in training text"] == some.overlap.shares["c4/test"]
    again = prepared(tmp_path)  # from the cache
    assert again.overlap == some.overlap and again.manifest_hash == some.manifest_hash


def test_held_out_text_that_is_all_training_text_is_refused(tmp_path):
    texts = [words("c4", number) for number in range(10)]
    for split in ("train", "validation", "test"):
        records = [{"text": text, "meta": {"redpajama_set_name": "RedPajamaC4"}} for text in texts]
        write_lines(tmp_path / split / "1.jsonl", records)
    config = DataConfig(source="slimpajama", path=str(tmp_path), tokenizer="bytes", seq_len=32, train=["c4"])
    with pytest.raises(
        DataError, match=r"no test documents that do not also occur in the training text; raise data\.overl"
    ):
        prepare(config, tmp_path / "cache")
