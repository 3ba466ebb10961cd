"""Loss per domain: every token predicted once, each document's losses its own."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from basecap.data import DataConfig, DocumentSet, prepare
from basecap.errors import ConfigError, DataError
from basecap.evals import Context, build_evaluation
from basecap.evals._passes import pass_lengths
from basecap.evals._token_classes import token_classes
from basecap.evals.domain_loss import _bytes, windows_of
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.records.token_classes import CLASSES, COPIED, MISLED, NEW, loss_metric
from basecap.testing.trained_model import find_leaks
from tests.evals._context import LENGTH


@pytest.mark.parametrize("count", [0, 1, 47, 48, 49, 200])
def test_windows_predict_every_token_once(count: int):
    tokens = np.arange(1, count + 1)
    windows = list(windows_of(tokens, LENGTH, start=0))
    assert all(2 <= len(window) <= LENGTH + 1 for window in windows)
    assert np.concatenate([window[1:] for window in windows] or [tokens]).tolist() == tokens.tolist()


@pytest.mark.parametrize(("longest", "few"), [(2048, [512, 2048]), (1500, [256, 1500]), (255, [255]), (48, [48])])
def test_padded_lengths_are_few_and_fewer_where_each_is_compiled(model: LanguageModel, longest: int, few: list[int]):
    own = LanguageModel(model.config.model_copy(update={"max_length": longest}))
    assert pass_lengths(own) == [*(2**n for n in range(6, 11) if 2**n < longest), longest]
    own.compiled = True
    assert pass_lengths(own) == few


@pytest.mark.parametrize("tokens_per_batch", [1, 100_000])
def test_losses_are_those_of_each_document_alone(context: Context, model: LanguageModel, tokens_per_batch: int):
    evaluation = build_evaluation({"domain-loss": {"tokens_per_batch": tokens_per_batch}})
    outcome = evaluation.run(model, context)
    for domain in ("prose", "code"):
        documents = context.data.documents("test", domain)
        losses = outcome.documents[domain]
        assert len(losses.nats) == len(documents) > 0
        for index in range(len(documents)):
            tokens = torch.from_numpy(documents.tokens(index))
            row = torch.cat([torch.tensor([context.data.tokenizer.end_of_text]), tokens])[None]
            expected = sum(
                model.token_losses(
                    row[:, at : at + LENGTH][:, : row.shape[1] - 1 - at], row[:, at + 1 : at + LENGTH + 1]
                ).sum()
                for at in range(0, len(tokens), LENGTH)
            )
            assert losses.nats[index] == pytest.approx(float(expected), rel=1e-4)
            assert losses.tokens[index] == len(tokens) and losses.bytes[index] == documents.bytes(index)


def test_the_beginning_of_a_document_stands_for_it(context: Context, model: LanguageModel):
    """Losses of as many tokens as are asked for, each the same as where the document is read whole."""
    short = build_evaluation({"domain-loss": {"max_document_tokens": LENGTH}}).run(model, context).documents["prose"]
    whole = build_evaluation("domain-loss").run(model, context).documents["prose"]
    assert (short.tokens == np.minimum(whole.tokens, LENGTH)).all() and (whole.tokens > LENGTH).any()
    expected = model.token_losses(*_first_window(context, 0)).double().sum().item()
    assert short.nats[0] == pytest.approx(expected, rel=1e-6)
    assert (short.bytes == short.tokens).all()  # the tokens are bytes


def _first_window(context: Context, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.from_numpy(context.data.documents("test", "prose").tokens(index)[:LENGTH].astype(np.int64))
    return torch.cat([torch.tensor([context.data.tokenizer.end_of_text]), tokens[:-1]])[None], tokens[None]


def test_measurements_sum_up_the_documents(context: Context, model: LanguageModel):
    outcome = build_evaluation("domain-loss").run(model, context)
    found = {(item.subset, item.metric): item for item in outcome.measurements}
    metrics = ("loss", "bits_per_byte", *map(loss_metric, CLASSES))
    assert set(found) == {(domain, metric) for domain in ("prose", "code") for metric in metrics}
    for domain, losses in outcome.documents.items():
        loss, bits = found[domain, "loss"], found[domain, "bits_per_byte"]
        assert loss.value == pytest.approx(losses.nats.sum() / losses.tokens.sum())
        assert bits.value == pytest.approx(losses.nats.sum() / losses.bytes.sum() / math.log(2))
        assert loss.n == losses.tokens.sum() and 0 < loss.stderr < loss.value
        classes = [found[domain, loss_metric(name)] for name in CLASSES]
        assert sum(part.n for part in classes) == loss.n
        assert sum(part.n * part.value for part in classes) == pytest.approx(loss.n * loss.value)


def classes_by_the_definition(window: list[int], ngram: int) -> list[str]:
    found = []
    for place in range(1, len(window)):
        before = window[max(0, place - ngram) : place]
        after = [window[end] for end in range(ngram, place) if window[end - ngram : end] == before]
        found.append(NEW if len(before) < ngram or not after else COPIED if window[place] in after else MISLED)
    return found


@pytest.mark.parametrize("ngram", [1, 2, 5])
def test_classes_of_tokens_are_those_of_the_definition(ngram: int):
    generator = np.random.default_rng(ngram)
    windows = [generator.integers(0, 3, size=size) for size in (1, 2, 5, 60, 40)]
    found = [[CLASSES[number] for number in own] for own in token_classes(windows, ngram)]
    assert found == [classes_by_the_definition(window.tolist(), ngram) for window in windows]
    assert {name for own in found for name in own} == {*CLASSES}
    large = [window + 2**40 for window in windows]  # numbers of n-grams are made small
    assert [[CLASSES[number] for number in own] for own in token_classes(large, ngram)] == found


def test_the_loss_of_a_class_is_that_of_its_tokens(context: Context, model: LanguageModel):
    evaluation = build_evaluation({"domain-loss": {"max_document_tokens": LENGTH, "ngram": 1}})
    found = {(item.subset, item.metric): item for item in evaluation.run(model, context).measurements}
    documents, nats = context.data.documents("test", "prose"), {name: [] for name in CLASSES}
    for index in range(len(documents)):
        inputs, targets = _first_window(context, index)
        names = classes_by_the_definition([inputs[0, 0].item(), *targets[0].tolist()], 1)
        for name, loss in zip(names, model.token_losses(inputs, targets)[0].tolist(), strict=True):
            nats[name].append(loss)
    for name, losses in nats.items():
        item = found["prose", loss_metric(name)]
        assert item.n == len(losses) and item.value == pytest.approx(np.mean(losses), rel=1e-5)


def test_bits_per_byte_are_those_of_the_tokens_read(tmp_path):
    """Documents that begin with one byte per token and end with many."""
    for domain in ("x", "y"):
        (tmp_path / domain).mkdir()
        for number in range(40):
            start = "".join("abcdefgh"[(number * 7 + place * place) % 8] for place in range(64))
            (tmp_path / domain / f"{number}.txt").write_text(start + " repeated" * (60 + number))
    config = DataConfig(
        source="text", path=str(tmp_path), vocab=265, seq_len=48, train=("x",), ood=("y",), overlap=None, workers=1
    )
    data = prepare(config, tmp_path / "cache")
    documents = data.documents("test", "y")
    read = np.minimum(documents.sizes, 40)
    found = _bytes(documents, read, data.tokenizer)
    texts = [data.tokenizer.decode(documents.tokens(index)[:40].tolist()) for index in range(len(documents))]
    assert found.tolist() == [len(text.encode()) for text in texts]
    proportional = [documents.bytes(index) * 40 / size for index, size in enumerate(documents.sizes)]
    assert (found < np.array(proportional) / 1.5).all()


def test_a_compiled_model_compiles_each_length_once_and_has_the_same_losses(context, model, monkeypatch):
    monkeypatch.setattr("basecap.evals._passes.SHORTEST", 8)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    evaluations = [build_evaluation({name: {"tokens_per_batch": 96}}) for name in ("domain-loss", "copying")]
    sizes = {"vocab": model.config.vocab, "max_length": model.config.max_length}
    own = LanguageModel(model_config("transformer++", hidden=16, layers=3, **sizes)).initialise(0).eval()
    plain = [evaluation.run(own, context) for evaluation in evaluations]
    own.compile_training()
    frames = torch._dynamo.utils.counters["frames"]
    begun = frames["ok"]
    with torch.no_grad():
        evaluations[0].trial(own, context)
    before = frames["ok"]
    compiled = [evaluation.run(own, context) for evaluation in evaluations]
    tested = find_leaks(own, evaluations[0], context, 0, whole=False)
    assert tested.leaks == "" and [length for _, length in tested.shapes] == pass_lengths(own)
    # the code of all blocks, and the loss, for each of two lengths
    assert before == begun + 4 and frames["ok"] == before
    for found, expected in zip(compiled, plain, strict=True):
        values = [[measurement.value for measurement in outcome.measurements] for outcome in (found, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-5)


@pytest.mark.parametrize("name", ["domain-loss", "copying"])
def test_a_compiled_model_reads_full_passes_of_all_domains(context, model, name, monkeypatch):
    evaluation = build_evaluation({name: {"tokens_per_batch": 5 * LENGTH}})
    plain, used, compute = evaluation.run(model, context), [], model.token_losses

    def watched(tokens: torch.Tensor, targets: torch.Tensor, few_shapes: bool) -> torch.Tensor:
        used.append(int((targets >= 0).any(1).sum()))
        return compute(tokens, targets, few_shapes=few_shapes)

    monkeypatch.setattr(model, "token_losses", watched)
    monkeypatch.setattr(model, "compiled", True)
    found = evaluation.run(model, context)
    assert {*used[:-1]} == {5} and used[-1] <= 5
    assert [(one.subset, one.metric, one.n) for one in found.measurements] == [
        (one.subset, one.metric, one.n) for one in plain.measurements
    ]
    values = [[one.value for one in outcome.measurements] for outcome in (found, plain)]
    assert values[0] == pytest.approx(values[1], abs=1e-5)
    for domain, losses in plain.documents.items():
        np.testing.assert_allclose(found.documents[domain].nats, losses.nats, rtol=1e-5)


def test_documents_are_read_once(context: Context, model: LanguageModel, monkeypatch):
    evaluation = build_evaluation("domain-loss")
    first = evaluation.run(model, context)
    monkeypatch.setattr(DocumentSet, "tokens", lambda documents, index: pytest.fail("read again"))
    assert evaluation.run(model, context).measurements == first.measurements


def test_standard_error_is_that_of_repeated_samples():
    from basecap.evals.domain_loss import _measure
    from basecap.records.documents import DocumentLosses

    generator = np.random.default_rng(0)

    def sample() -> tuple[float, float]:
        tokens = generator.integers(20, 400, size=200)
        nats = tokens * (3.0 + 0.5 * generator.standard_normal(200))
        loss = _measure("x", DocumentLosses(nats=nats, tokens=tokens, bytes=4 * tokens))[0]
        return loss.value, loss.stderr

    values, errors = np.array([sample() for _ in range(400)]).T
    assert errors.mean() == pytest.approx(values.std(), rel=0.1)


def test_standard_error_counts_clusters():
    from basecap.evals.domain_loss import _measure
    from basecap.records.documents import DocumentLosses

    generator = np.random.default_rng(1)
    tokens, nats = generator.integers(20, 400, size=50), generator.random(50)
    once = _measure("x", DocumentLosses(nats=nats, tokens=tokens, bytes=tokens))[0]
    copies = DocumentLosses(*(np.repeat(part, 4) for part in (nats, tokens, tokens, np.arange(50))))
    assert _measure("x", copies)[0].stderr == pytest.approx(once.stderr)
    single = DocumentLosses(nats, tokens, tokens, np.zeros(50, int))
    assert _measure("x", single)[0].stderr is None


def test_unknown_options_are_named():
    with pytest.raises(ConfigError, match="split"):
        build_evaluation({"domain-loss": {"splitt": "test"}})
    with pytest.raises(ConfigError, match="split"):
        build_evaluation({"domain-loss": {"split": "train"}})


def test_ngrams_too_long_to_occur_twice_are_refused(context: Context):
    build_evaluation("domain-loss").check(context.data, 2)
    with pytest.raises(DataError, match="lower its ngram below 48"):
        build_evaluation({"domain-loss": {"ngram": 48}}).check(context.data, LENGTH)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_the_windows_and_join_their_losses(context: Context, model: LanguageModel, world: int):
    evaluation = build_evaluation({"domain-loss": {"tokens_per_batch": 64}})  # the windows of a document are shared
    whole = evaluation.run(model, context)
    parts = [evaluation.run(model, replace(context, rank=rank, world=world)) for rank in range(world)]
    joined = evaluation.join(parts)
    for domain, losses in whole.documents.items():
        np.testing.assert_allclose(joined.documents[domain].nats, losses.nats, rtol=1e-12)
        assert max(part.documents[domain].nats.sum() for part in parts) < 0.6 * losses.nats.sum()
    assert [(found.metric, found.n) for found in joined.measurements] == [
        (found.metric, found.n) for found in whole.measurements
    ]
    assert [found.value for found in joined.measurements] == pytest.approx(
        [found.value for found in whole.measurements], rel=1e-12
    )
