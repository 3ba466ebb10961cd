"""The share of the loss that vanishes at the second reading."""

from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from basecap.errors import DataError
from basecap.evals import build_evaluation
from basecap.evals.copying import ContextCopying, _length

OPTIONS = {"length": 12, "documents": 5, "tokens_per_batch": 48}


def rows_of(context, domain):
    documents = context.data.documents("test", domain)
    long_enough = [index for index in range(len(documents)) if documents.sizes[index] >= 12][:5]
    return torch.stack([torch.from_numpy(documents.tokens(index)[:12]).long() for index in long_enough])


def test_the_share_is_that_of_the_two_readings(context, model):
    outcome = build_evaluation({"copying": OPTIONS}).run(model, context)
    rows = rows_of(context, "code")
    start = torch.full((len(rows), 1), context.data.tokenizer.end_of_text)
    with torch.no_grad():
        losses = model.token_losses(torch.cat([start, rows, rows[:, :-1]], dim=1), rows.repeat(1, 2)).double()
    first, second = losses[:, :12].mean(dim=1), losses[:, 12:].mean(dim=1)
    found = {item.subset: item for item in outcome.measurements}
    assert set(found) == {"prose", "code"}
    assert found["code"].value == pytest.approx(1 - (second.mean() / first.mean()).item(), abs=1e-5)
    ratios = torch.stack([1 - (second.sum() - second[i]) / (first.sum() - first[i]) for i in range(len(rows))])
    jackknife = ((len(rows) - 1) / len(rows) * (ratios - ratios.mean()).square().sum()).sqrt().item()
    assert found["code"].stderr == pytest.approx(jackknife, rel=0.2)


@pytest.mark.parametrize("tokens", [72, 32_768])
@pytest.mark.parametrize("name", ["copying", "position-loss"])
def test_a_trial_reads_the_largest_batch(context, model, monkeypatch, name, tokens):
    shapes, own = [], model.token_losses
    monkeypatch.setattr(model, "token_losses", lambda x, y: shapes.append(tuple(x.shape)) or own(x, y))
    evaluation = build_evaluation({name: {"length": 12, "documents": 5, "tokens_per_batch": tokens}})
    evaluation.run(model, context)
    read, shapes[:] = max(shapes), []
    evaluation.trial(model, context)
    assert shapes == [read]


def test_a_model_that_copies_has_a_share_near_one(context, model, monkeypatch):
    def losses(inputs, targets):
        seen = inputs.shape[1] // 2
        found = torch.full(targets.shape, 3.0)
        found[:, seen:] = torch.where(targets[:, seen:] == targets[:, :seen], 0.03, 3.0)
        return found

    monkeypatch.setattr(model, "token_losses", losses)
    outcome = build_evaluation({"copying": OPTIONS}).run(model, context)
    assert {round(item.value, 6) for item in outcome.measurements} == {0.99}


def test_it_repeats_at_most_half_of_the_training_length(context, model):
    outcome = build_evaluation({"copying": {"documents": 3, "length": 1000}}).run(model, context)
    assert {item.n for item in outcome.measurements} == {3 * model.config.max_length // 2}


@pytest.mark.parametrize(
    ("sizes", "longest", "expected"),
    [
        ([300] * 9, 2048, 256),
        ([70] * 9 + [300], 2048, 64),
        ([300] * 3, 2048, 256),
        ([300] * 9, 128, 64),
        ([4], 2048, 16),
    ],
)
def test_without_a_length_short_documents_repeat_less(sizes, longest, expected):
    by_domain = {"prose": SimpleNamespace(sizes=np.full(20, 1000)), "code": SimpleNamespace(sizes=np.array(sizes))}
    data = SimpleNamespace(domains=tuple(by_domain), documents=lambda split, domain: by_domain[domain])
    assert _length(ContextCopying.Config(), data, longest) == expected


def test_a_domain_without_two_documents_has_no_share(context, model):
    one = replace(context, data=copy(context.data))
    one.data.manifest_hash = "another"
    documents = context.data.documents("test", "code")
    alone = next(index for index in range(len(documents)) if documents.sizes[index] >= 24)
    one.data.sets = context.data.sets | {("code", "test"): _One(documents, alone)}
    evaluation = build_evaluation("copying")
    evaluation.check(one.data, 48)
    assert {item.subset for item in evaluation.run(model, one).measurements} == {"prose"}


class _One:
    """One document of a set."""

    def __init__(self, documents, index):
        self.sizes, self._read = documents.sizes[index : index + 1], lambda: documents.tokens(index)

    def __len__(self):
        return 1

    def tokens(self, index):
        return self._read()


def test_a_domain_of_short_documents_is_refused(context):
    longest = max(int(context.data.documents("test", domain).sizes.max()) for domain in ("prose", "code"))
    with pytest.raises(DataError, match="lower the length of copying"):
        build_evaluation({"copying": {"length": longest + 1}}).check(context.data, 4 * longest)
