"""The passkey task: whose prompts it asks, and what counts as an answer."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from basecap.data.tokenizer import byte_tokenizer
from basecap.errors import ConfigError, DataError
from basecap.evals import _needles, build_evaluation, passkey
from basecap.evals._deployed import deployed
from basecap.evals._needles import Prompts, Words, fingerprint
from basecap.models.config import model_config
from basecap.models.generate import generate
from basecap.models.language_model import LanguageModel

#: A study of bytes has room for 5 lines in this length.
OPTIONS = {"lengths": [900, 1500], "samples": 6, "answer": 8, "batch": 2, "tokens_per_batch": 1000}


@pytest.mark.parametrize(
    ("dialect", "count", "expected"),
    [
        # NVIDIA/RULER c3f5e3b: niah.py --max_seq_length LENGTH --tokens_to_generate 128 --num_samples 12
        # --type_haystack noise --type_needle_k words --type_needle_v numbers, and the template of prepare.py.
        ("ruler", 12, {1500: "872ee7e81052700a", 4096: "272774db65eedaa1"}),
        # lm_eval 0.4.13: simple_evaluate(tasks=["niah_single_1"], metadata={"max_seq_lengths": [1500, 4096]}).
        ("harness", 500, {1500: "ceb309daf75c2904", 4096: "efb12f21b59a1920"}),
    ],
)
def test_prompts_are_token_by_token_those_of_the_program(dialect, count, expected):
    """Both programs ran once, with the bytes of a text as tokens; the hashes are those of their prompts."""
    prompts = Prompts(dialect=dialect, tokenizer=byte_tokenizer(), answer=128)
    made = [*prompts.of_lengths([*expected], count, _needles.SEEDS[dialect])]
    assert [fingerprint(samples) for samples in made] == [*expected.values()]
    assert all(len(sample.tokens) + 128 <= prompts.longest(1500) for sample in made[0])


def test_words_are_sorted_as_in_one_list():
    adjectives, nouns = ["well", "well-made", "odd", "a"], ["made-cup", "cup", "zoo", "cup"]
    whole = sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})
    assert [*Words(adjectives, nouns)] == whole and "well-made-cup" in whole


def test_each_part_of_the_text_holds_as_many_numbers():
    prompts = Prompts(dialect="ruler", tokenizer=byte_tokenizer(), answer=8, depths=4)
    (made,) = prompts.of_lengths([3000], 12, 0)
    assert [int(4 * sample.depth) for sample in made] == 3 * [0, 1, 2, 3]
    assert len({sample.depth for sample in made}) > 6


def answer(made, known, model, prompts, new, ends, at_once):
    """Write the number of each prompt whose depth is `known`, after some other tokens."""
    assert len(prompts) <= 3 and at_once == 1000
    found = []
    for row, end in zip(prompts, ends, strict=True):
        sample = next(sample for sample in made if sample.tokens.tolist() == row.tolist())
        found.append(list(f" {sample.number}".encode() if known(sample.depth) else b" 1234567"))
        assert end(found[-1]) == known(sample.depth) and not end(found[-1][1:])
    return found


@pytest.mark.parametrize("name", ["transformer++", "top1-chunk-exact", "rwkv-7", "mamba-2"])
def test_each_answer_is_that_of_its_prompt_alone(context, monkeypatch, name):
    """Of batches of different lengths, whose rows end at different tokens: half of them at the first look."""
    model = LanguageModel(model_config(name, hidden=16, vocab=257, layers=1, max_length=48)).initialise(0)
    evaluation, found, looks = build_evaluation({"passkey": OPTIONS}), {}, []
    samples = [one for part in evaluation._samples(context.data.tokenizer, 48).values() for one in part]
    monkeypatch.setattr(passkey, "_found", lambda _, number, new: found.setdefault(number, new) is None)
    early = {sample.number for sample in samples[::2]}
    monkeypatch.setattr(
        passkey, "_settled", lambda _, number, new: looks.append(len(new)) or (number in early and len(new) == 2)
    )
    evaluation.run(model, context)
    assert set(looks) == {*range(1, 9)}
    for sample in samples:
        alone = generate(model, torch.from_numpy(sample.tokens.astype(np.int64))[None], 8)[0].tolist()
        assert found[sample.number] == alone[: 2 if sample.number in early else 8]


def test_accuracy_is_the_share_of_numbers_in_the_answers(context, model, monkeypatch):
    found = build_evaluation({"passkey": OPTIONS | {"samples": 40}})
    assert found.tokens_read(context.data, 48) == 40 * 2400
    made = [sample for part in found._samples(context.data.tokenizer, 48).values() for sample in part]
    monkeypatch.setattr(passkey, "generate_each", partial(answer, made, lambda depth: depth < 0.5))
    measured = found.run(model, context).measurements
    near = [np.mean([sample.depth < 0.5 for sample in part]) for part in (made[:40], made[40:])]
    whole = [item for item in measured if item.subset == "S-NIAH"]
    assert [(item.axis, item.n, item.value) for item in whole] == [
        ({"length": length}, 40, pytest.approx(share)) for length, share in zip((900, 1500), near, strict=True)
    ]
    assert whole[0].data.startswith("ruler prompts ") and " wonderwords 3" in whole[0].data
    parts = {item.subset: item for item in measured if item.axis == {"length": 1500, "depth": item.axis.get("depth")}}
    assert parts["depth 40 to 50 %"].value == 1 and parts["depth 50 to 60 %"].value == 0
    assert parts["depth 50 to 60 %"].axis["depth"] == pytest.approx(0.55)
    assert sum(item.n for item in parts.values()) == 40
    shares = [found.run(model, replace(context, rank=rank, world=3)) for rank in range(3)]
    assert found.join(shares).measurements == measured and not shares[0].measurements


def test_a_number_after_the_end_of_the_text_does_not_count(context):
    text, end = list(b"the number is 7654321"), context.data.tokenizer.end_of_text
    new = [[*text, end], [*text[:-7], end, *text[-7:]], [end, *text]]
    assert [passkey._found(context.data.tokenizer, "7654321", one) for one in new] == [True, False, False]
    # Nothing can change after the number or the end: an answer that has one of them ends at the next look.
    settled = partial(passkey._settled, context.data.tokenizer, "7654321")
    assert not settled(text[:-5]) and not settled(text) and not settled([*text, *b"00"])
    assert settled([*text, *b"000"]) and settled([*text[:-7], end, 0]) and settled([end, *text, 0, 0])


def test_a_model_that_never_learned_finds_nothing_and_its_error_is_not_zero(context, model):
    found = build_evaluation({"passkey": OPTIONS | {"lengths": [900], "samples": 3}})
    found.check(context.data, 48)
    found.trial(model, context)
    for item in found.run(model, context).measurements:
        assert item.value == 0 and 0.1 < item.stderr < 0.25


def test_what_cannot_be_asked_is_refused(context, monkeypatch):
    def build(**options):
        return build_evaluation({"passkey": OPTIONS | options})

    with pytest.raises(ConfigError, match="name each length once"):
        build(lengths=[900, 900])
    with pytest.raises(ConfigError, match=r"'lengths.0' of evaluation 'passkey' cannot be -5: it should be greater"):
        build(lengths=[-5])
    with pytest.raises(ConfigError, match="passkey: 8 tokens have no room for a prompt and an answer of 8; raise"):
        build(lengths=[8])
    with pytest.raises(DataError, match="models read 48 tokens, fewer than the 4,096 of its shortest prompts"):
        build(lengths=None).check_tokens(None, 48)  # before text is prepared
    with pytest.raises(DataError, match=r"a prompt of 5 lines has \d+ tokens, so .* longer than 700; raise lengths"):
        build(lengths=[900, 700]).check(context.data, 48)
    config = model_config("transformer++ absolute", hidden=16, vocab=257, layers=1, max_length=1499)
    learned = LanguageModel(config).initialise(0)
    with pytest.raises(
        ConfigError, match="a sequence may have 1,500 tokens, and this model has parameters for 1,499 positions"
    ):
        build().trial(learned, context)
    monkeypatch.setattr(_needles, "find_spec", lambda name: None if name == "wonderwords" else find_spec(name))
    _needles.words.cache_clear()
    assert build().missing() == (_needles.LACKS,)
    with pytest.raises(ConfigError, match="needs the word list of wonderwords"):
        build().refuse_missing()


def test_a_model_that_trains_in_16_bits_answers_as_a_copy_in_16_bits(context, model):
    low = deployed(model, replace(context, autocast=partial(torch.autocast, "cpu", torch.bfloat16)))
    assert {parameter.dtype for parameter in low.parameters()} == {torch.bfloat16}
    assert deployed(model, context) is model and model.embedding.weight.dtype == torch.float32
    torch.testing.assert_close(low.embedding.weight.float(), model.embedding.weight, rtol=2**-8, atol=0)
