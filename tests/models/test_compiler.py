"""Compiled code is shared by models of one configuration, and forgotten for another."""

from contextlib import nullcontext
from functools import partial

import torch

from basecap.bench.contenders import ATTENTIONS, with_attention
from basecap.models import _compiler
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.ops import recorded


def compiled_by(hidden: int, seed: int = 0) -> int:
    """Return how many functions the first pass of a new model compiles."""
    model = LanguageModel(model_config("transformer++", hidden=hidden, vocab=19, layers=1, max_length=8))
    model.initialise(seed).compile_training()
    tokens, frames = torch.arange(16).view(2, 8), torch._dynamo.utils.counters["frames"]
    before = frames["ok"]
    model(tokens, tokens)
    return frames["ok"] - before


def test_models_of_one_configuration_share_compiled_code(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    _compiler.reset_compiler()
    shared = [compiled_by(16, seed) for seed in range(_compiler.MOST_SHARING)]
    assert shared == [2] + [0] * (_compiler.MOST_SHARING - 1)  # the block and the loss
    assert compiled_by(16) == 2  # what some model cannot share does not add up for ever
    assert compiled_by(32) == 2 and compiled_by(32) == 0
    _compiler.reset_compiler()
    assert _compiler._sharing == []


def test_models_on_different_attention_share_no_compiled_code(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(
        "basecap.bench.contenders.sdpa_kernel", lambda chosen: nullcontext()
    )  # which a CPU does not have
    _compiler.reset_compiler()
    rows = [with_attention(attention, lambda: {"compiled": compiled_by(16)}) for attention in (*ATTENTIONS, None)]
    assert [row["compiled"] for row in rows] == [2, 2, 2] and compiled_by(16) == 0


def test_ops_of_shared_code_are_noted_for_each_model(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    _compiler.reset_compiler()
    found = []
    for hidden, seed in ((16, 0), (16, 1), (32, 0)):
        with recorded() as ops:
            compiled_by(hidden, seed)
        found.append(ops)
    assert found[0].keys() >= {"linear_cross_entropy"} and found == [found[0]] * 3
    _compiler.reset_compiler()
    with recorded() as ops:
        _compiler.reset_compiler(object())
    assert ops == {}
