"""Loss by position: each range's mean, over documents that are long enough."""

import itertools
from dataclasses import replace

import pytest
import torch

from basecap.errors import DataError
from basecap.evals._contract import build_evaluation
from basecap.models.language_model import LanguageModel


def test_ranges_are_means_over_the_same_documents(context, model):
    options = {"length": 12, "first": 3, "documents": 4, "tokens_per_batch": 24}
    outcome = build_evaluation({"position-loss": options}).run(model, context)
    assert {item.subset for item in outcome.measurements} == {"prose", "code"}
    documents = context.data.documents("test", "code")
    rows = [documents.tokens(index)[:12] for index in range(len(documents)) if documents.sizes[index] >= 12][:4]
    rows = torch.stack([torch.from_numpy(row) for row in rows])
    start = torch.full((len(rows), 1), context.data.tokenizer.end_of_text)
    with torch.no_grad():
        losses = model.token_losses(torch.cat([start, rows[:, :-1]], dim=1), rows).double()
    found = [item for item in outcome.measurements if item.subset == "code"]
    assert [item.axis["position"] for item in found] == [3, 6, 12]
    for item, (low, high) in zip(found, itertools.pairwise([0, 3, 6, 12]), strict=True):
        means = losses[:, low:high].mean(dim=1)
        assert item.value == pytest.approx(means.mean().item(), rel=1e-5) and item.n == len(rows) * (high - low)
        assert item.stderr == pytest.approx((means.std() / len(rows) ** 0.5).item(), rel=1e-4)


def test_domains_without_long_documents_are_left_out_and_none_is_refused(context, model):
    longest = {domain: int(context.data.documents("test", domain).sizes.max()) for domain in ("prose", "code")}
    assert longest["prose"] != longest["code"]
    wide = max(longest, key=longest.__getitem__)
    long = LanguageModel(model.config.model_copy(update={"max_length": longest[wide]})).initialise(0)
    outcome = build_evaluation("position-loss").run(long, context)
    assert {item.subset for item in outcome.measurements} == {wide}
    assert max(item.axis["position"] for item in outcome.measurements) == longest[wide]
    with pytest.raises(DataError, match="lower the length of position-loss"):
        build_evaluation("position-loss").check(context.data, longest[wide] + 1)


@pytest.mark.parametrize("entry", [{"position-loss": {"length": 12}}, {"influence-entropy": {"length": 16}}])
def test_processes_share_the_domains(entry, context, model):
    evaluation = build_evaluation(entry)
    whole = evaluation.run(model, context).measurements
    parts = [evaluation.run(model, replace(context, rank=rank, world=3)) for rank in range(3)]
    assert max(len(part.measurements) for part in parts) < len(whole)
    assert sorted(map(repr, evaluation.join(parts).measurements)) == sorted(map(repr, whole))
