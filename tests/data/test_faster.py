"""gigatoken: the ids of `tokenizers`, or it is not used."""

import pickle
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from basecap.data import DataConfig, Tokenizer, _faster, preparation, prepare
from basecap.data._faster import ODD, first_difference
from tests.data.test_tokenizer import BPE, BYTES, byte_level, llama, unigram

pytest.importorskip("gigatoken")
FAST = Tokenizer(BPE.description)
assert FAST.use_gigatoken([]) is None


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_its_ids_are_those_of_tokenizers(text: str):
    assert FAST.faster and not BPE.faster and pickle.loads(pickle.dumps(FAST)).faster
    for some in (text, text * 40, f"{text}<|endoftext|>{text}"):
        ids = FAST.encode_document(some)
        assert ids.dtype == BPE.dtype and np.array_equal(ids, BPE.encode_document(some))


@pytest.mark.parametrize("make", [byte_level, llama, unigram])
def test_tokenizers_that_it_cannot_read_or_reads_otherwise_stay_with_tokenizers(make):
    library = make()
    library.add_special_tokens(["</s>"])
    library.add_tokens([tokenizers.AddedToken("abs", special=False, normalized=False)])
    description = library.to_str()
    tokenizer, plain = Tokenizer(description), Tokenizer(description)
    tokenizer.use_gigatoken(["as abs </s> a"])
    assert first_difference(tokenizer.encode_document, plain.encode_document, [*ODD, "abs a</s>as"]) is None
    assert not (tokenizer.faster and make is unigram)


def test_bytes_need_no_library():
    assert BYTES.use_gigatoken(iter(())) is None and not BYTES.faster


def test_an_encoder_that_differs_is_refused(monkeypatch, options, tmp_path, capsys):
    monkeypatch.setattr(_faster, "CHARACTERS", 10_000)
    monkeypatch.setattr(
        "basecap.data.tokenizer.encoder",
        lambda description: lambda text: np.array(BPE.encode(text.replace("river", "lake")), np.uint32),
    )
    config = DataConfig(**{**options, "tokenizer": "bpe", "vocab": 300})
    prepared = prepare(config, tmp_path)
    assert not prepared.tokenizer.faster
    message = capsys.readouterr().err
    assert "gigatoken gives other ids than tokenizers for '" in message and "is encoded with tokenizers." in message


def test_preparation_writes_the_same_with_it_and_without(options, tmp_path, monkeypatch):
    config = DataConfig(**{**options, "tokenizer": "bpe", "vocab": 300})
    used = []
    compare = Tokenizer.use_gigatoken
    monkeypatch.setattr(
        preparation.Tokenizer, "use_gigatoken", lambda self, texts: (compare(self, texts), used.append(self.faster))[0]
    )
    with_it = prepare(config, tmp_path / "with").manifest
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    _faster.encoder.cache_clear()
    without = prepare(config, tmp_path / "without").manifest
    _faster.encoder.cache_clear()
    assert used == [True, False] and with_it == without
    shards = [{path.name for path in (tmp_path / name / "shards").iterdir()} for name in ("with", "without")]
    assert shards[0] == shards[1]
