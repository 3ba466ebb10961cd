"""The audit of a trained model's layers as records."""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from basecap.data.task_config import TaskSection
from basecap.data.task_data import TaskData
from basecap.errors import DataError
from basecap.evals import build_evaluation
from basecap.evals.audit import held_out
from basecap.mixers.attention import Attention
from basecap.models.audit import ROWS, audit, audit_untrained, layer_inputs
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.records.audits import METRICS, untrained
from tests.evals._context import LENGTH


def test_each_layer_has_the_numbers_of_its_audit_untrained_and_trained(context):
    vocab = context.data.tokenizer.vocab_size
    config = model_config("transformer++", hidden=16, vocab=vocab, layers=2, max_length=LENGTH)
    model = LanguageModel(config).initialise(0).eval()
    evaluation = build_evaluation({"audit": {"length": 24}})
    with torch.no_grad():
        outcome = evaluation.run(model, context)
        second = evaluation.run(model, replace(context, rank=1, world=2))
    found = {(item.subset, item.metric): item.value for item in outcome.measurements}
    rows = torch.from_numpy(held_out(context.data, 24))
    mixer, x = layer_inputs(model, rows)[1]
    one, form = audit(mixer, x, ""), audit_untrained(mixer, 24, "")
    expected = {metric: getattr(one, metric) for metric in METRICS}
    expected |= {untrained(metric): getattr(form, metric) for metric in METRICS}
    assert {metric: found["layer 1", metric] for metric in expected} == expected
    assert len(found) == 16 and found["layer 0", "selection"] != found["layer 1", "selection"]
    assert found["layer 0", "untrained_visibility"] == 1
    assert {item.subset for item in second.measurements} == {"layer 1"}
    assert evaluation.tokens_read(context.data, LENGTH) == 2 * ROWS * 24


class Broken(Attention):
    """Attention that cannot be audited."""

    def influence(self, x_BTD):
        return super().influence(x_BTD[..., 1:])


def test_layers_that_cannot_be_audited_are_left_out(context, register):
    vocab = context.data.tokenizer.vocab_size
    config = model_config(register(Broken), hidden=16, vocab=vocab, layers=1, max_length=LENGTH)
    outcome = build_evaluation("audit").run(LanguageModel(config).initialise(0).eval(), context)
    assert outcome.measurements == []


def test_its_sequences_are_held_out_text_or_examples_of_the_task(context):
    rows = held_out(context.data, LENGTH)
    first = context.data.documents("test", "prose").tokens(0)
    assert rows.shape == (12, LENGTH) and (rows[0][: len(first)] == first[:LENGTH]).all()
    section = TaskSection(train=("mqar",), options={"vocab": 32, "length": 64, "pairs": 4})
    assert held_out(TaskData(section, "mqar"), 24).shape == (12, 24)


def test_too_little_text_is_refused_before_training(context):
    data = copy(context.data)
    documents = data.documents("test", "prose")
    data.documents = lambda split, domain: _First(documents)
    with pytest.raises(DataError, match="tokens, too few to audit a model; an audit needs 192 or more"):
        build_evaluation("audit").check(data, LENGTH)


class _First:
    """The first 100 tokens of a set at most."""

    def __init__(self, documents):
        self.sizes, self._tokens = np.array([100]), documents.tokens(0)[:100]

    def __len__(self):
        return 1

    def tokens(self, index):
        return self._tokens
