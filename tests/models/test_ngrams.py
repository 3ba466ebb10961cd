"""Embeddings of n-grams: each position reads the row of its last tokens, also in decoding."""

from dataclasses import replace

import pytest
import torch

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES
from basecap.models import LanguageModel, model_config
from basecap.models.ngrams import FACTOR, ROWS, SHIFT, NgramEmbedding
from basecap.models.outline import outline
from basecap.plan.runs import model_of
from basecap.study.architectures import ArchitectureEntry
from basecap.study.config import load_study

VOCAB, ORDER = 300, 3


def built() -> NgramEmbedding:
    """Return an embedding whose row r holds the number r."""
    made = NgramEmbedding(ORDER, 1)
    with torch.no_grad():
        made.table.weight.copy_(torch.arange(ROWS)[:, None])
    return made


def row_of(ngram: list[int]) -> int:
    """The hash in Python's integers, which have no end: a word of 64 bits is what remains of them."""
    hashed = 0
    for token in ngram:
        hashed = ((hashed + token) * FACTOR + 2**63) % 2**64 - 2**63
        hashed ^= hashed >> SHIFT
    return hashed % ROWS


@pytest.mark.parametrize(
    ("length", "vocab", "dtype"), [(1, VOCAB, torch.int64), (2, 2**31, torch.int64), (7, VOCAB, torch.int32)]
)
def test_each_position_reads_the_row_of_its_last_tokens(length, vocab, dtype):
    tokens = torch.randint(vocab, (2, length), dtype=dtype, generator=torch.Generator().manual_seed(0))
    found = built()(tokens)[..., 0].long().tolist()
    for row, own in zip(tokens.tolist(), found, strict=True):
        codes = [0] * (ORDER - 1) + [token + 1 for token in row]
        assert own == [row_of(codes[place : place + ORDER]) for place in range(length)]


def test_no_ngram_reaches_into_another_document():
    first, second = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[9]])
    segments = torch.tensor([[0, 0, 0, 0, 1]])
    packed = built()(torch.cat((first, second), 1), segments)
    torch.testing.assert_close(packed, torch.cat((built()(first), built()(second)), 1))


def test_ngrams_spread_over_the_table():
    """Of 20,000 different ones in 32,768 rows, chance leaves 45.7 % of the rows used."""
    pairs = torch.cartesian_prod(torch.arange(200), torch.arange(100))
    rows = built()(pairs)[:, 1, 0].long()
    assert abs(len(rows.unique()) / ROWS - 0.457) < 0.02


def test_decoding_reads_the_same_rows_in_pieces_and_steps():
    model = LanguageModel(model_config("transformer++ ngram", hidden=32, vocab=VOCAB, layers=2)).initialise(0)
    tokens = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = model.logits(tokens)
    caches = model.init_cache(2, 12)
    torch.testing.assert_close(model.prefill(tokens[:, :4], caches), expected[:, 3])
    order = torch.tensor([1, 0, 1])
    hidden = model.further(tokens[order, 4:9], caches, order)  # the caches stay as they are
    torch.testing.assert_close(torch.nn.functional.linear(hidden, model.head_weight), expected[order, 4:9])
    for place in range(4, 12):
        torch.testing.assert_close(model.step(tokens[:, place : place + 1], caches), expected[:, place])


def test_prompts_of_other_lengths_and_orders_keep_their_own_tokens():
    model = LanguageModel(model_config("transformer++ ngram", hidden=32, vocab=VOCAB, layers=2)).initialise(0)
    rows = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 2, 5)]
    caches = model.init_cache(3, 12)
    model.prefill_each(rows, caches)
    order = torch.tensor([2, 0, 1])
    caches, rows = [cache.take(order) for cache in caches], [rows[place] for place in order.tolist()]
    found = model.step(torch.tensor([[1], [2], [3]]), caches)
    for row, token, own in zip(rows, (1, 2, 3), found, strict=True):
        alone = model.logits(torch.cat((row, torch.tensor([token])))[None])[0, -1]
        torch.testing.assert_close(own, alone)


def test_its_state_and_its_parameters_are_counted():
    plain, more = (
        LanguageModel(model_config(use, hidden=32, vocab=VOCAB, layers=2))
        for use in ("transformer++", "transformer++ ngram")
    )
    assert more.state_bytes(10) - plain.state_bytes(10) == 5 * 8
    assert more.parameters_count() - plain.parameters_count() == 32 * ROWS
    kept = more.init_cache(1, 10)[0].mixer.tensors["ngram"]
    assert kept.nbytes == 5 * 8


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register an architecture with n-grams of two tokens for one test; return its name."""
    other = replace(ARCHITECTURES.get("transformer++ ngram"), name="pairs", ngram=2)
    monkeypatch.setitem(ARCHITECTURES._entries, "pairs", other)
    return "pairs"


@pytest.mark.parametrize("use", ["transformer++", "transformer++ ngram"])
def test_one_layer_of_a_pattern_gives_the_model_its_ngrams(use):
    entry = ArchitectureEntry(name="x", use=use, layers=["based", "transformer++ ngram"])
    assert model_of(load_study("limited-mini"), entry, VOCAB).ngram == 6


@pytest.mark.parametrize(
    ("use", "layers", "refused"),
    [
        ("transformer++ ngram", ["based"], r"have its n-grams; list one of them, or use 'transformer\+\+' for"),
        ("transformer++ canon", ["based"], "layers replace all layers of .* have its Canon layers; "),
        ("transformer++", ["transformer++ ngram", "pairs"], r"ask for 2 \(pairs\) and 6 \(transformer\+\+ ngram\)"),
    ],
)
def test_ngrams_of_two_lengths_or_lost_ones_are_refused(use, layers, refused, pairs):
    with pytest.raises(ConfigError, match=refused):
        outline(model_of(load_study("limited-mini"), ArchitectureEntry(name="x", use=use, layers=layers), VOCAB))
