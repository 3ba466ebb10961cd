"""The bigram model against its formula, token by token."""

import math
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from basecap.data import DataConfig, bigram_loss, prepare
from tests.small_study import write_text


def test_loss_is_that_of_the_formula(tmp_path):
    text = str(write_text(tmp_path / "text", documents=80, words=100))
    config = DataConfig(source="text", path=text, tokenizer="bytes", seq_len=32, train=("prose",), ood=("code",))
    data = prepare(config, tmp_path / "cache")

    after: dict[int, Counter] = defaultdict(Counter)
    single: Counter = Counter()
    for row in data.train.batch(0, 0, data.train.tokens // 32, 32).tolist():
        for a, b in pairwise(row):
            after[a][b] += 1
            single[b] += 1
    size, total = data.tokenizer.vocab_size, single.total()

    nats = []
    documents = data.documents("test", "prose")
    for index in range(len(documents)):
        tokens = [data.tokenizer.end_of_text, *documents.tokens(index).tolist()]
        for a, b in pairwise(tokens):
            unigram = (single[b] + 1) / (total + size)
            kinds = max(1, len(after[a]))
            nats.append(-math.log((after[a][b] + kinds * unigram) / (after[a].total() + kinds)))
    assert len(documents) > 0
    assert bigram_loss(data, 32) == pytest.approx(sum(nats) / len(nats))
    assert 0.5 < bigram_loss(data, 32) < math.log(size)
