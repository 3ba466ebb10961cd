"""The share of the loss that vanishes at the second reading."""

import pytest
import torch

from basecap.errors import DataError
from basecap.evals import build_evaluation

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


def test_a_domain_of_short_documents_is_refused(context):
    longest = max(int(context.data.documents("test", domain).sizes.max()) for domain in ("prose", "code"))
    with pytest.raises(DataError, match="lower the length of copying"):
        build_evaluation({"copying": {"length": longest + 1}}).check(context.data, 4 * longest)
