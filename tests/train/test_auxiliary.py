"""Losses that a mixer adds to training: counted once whatever trains, logged by name, part of no other loss."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES, Architecture, LayerChoice, ParameterRecipe, normal
from basecap.mixers.attention import Attention
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.testing.check_mixer import check_mixer
from basecap.train.distributed import Processes, processes
from basecap.train.loop import DevicePlacement, Trainer
from tests.forks import pair
from tests.train.conftest import BATCH, LENGTH, VOCAB, UnevenStream, config


class Probed(Attention):
    """A probe learns to tell the norm of the input; what it reads learns nothing of it."""

    weight = 0.5

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.probe = nn.Linear(layer.hidden, 1)

    @property
    def auxiliary(self):
        return {"probe": self.weight}

    def forward(self, x_BTD, segments=None, losses=None):
        if losses is not None:
            x = x_BTD.detach()
            losses["probe"] = (self.probe(x)[..., 0] - x.norm(dim=-1) + x[..., 0]).square().mean()
        return super().forward(x_BTD, segments)

    def recipe(self):
        return {
            **super().recipe(),
            **{f"probe.{name}": ParameterRecipe(init=normal(0.1)) for name in ("weight", "bias")},
        }


class Silent(Probed):
    def forward(self, x_BTD, segments=None, losses=None):
        return super().forward(x_BTD, segments)


@pytest.fixture
def register(monkeypatch):
    ARCHITECTURES.names()  # else the plain mixers' files, imported later, would go with the test

    def add(mixer):
        monkeypatch.setitem(ARCHITECTURES._entries, "probed", entry(mixer))

    add(Probed)
    return add


def entry(mixer) -> Architecture:
    return Architecture(name="probed", layers=(LayerChoice(mixer=mixer),), backbone="gpt", summary="", paper="")


def build(**options) -> LanguageModel:
    sizes = {"hidden": 32, "vocab": VOCAB, "layers": 2, "max_length": LENGTH}
    return LanguageModel(model_config("probed", **sizes), **options).initialise(0)


def trained(path, group=None, **options) -> Trainer:
    placement = DevicePlacement.choose(torch.device("cpu"), group or Processes(), "fp32")
    given = {"tokens": 3 * BATCH * LENGTH, "clip": 1e9, **options}
    stored = RunRecords(path)
    trainer = Trainer(build(), config(**given), 0, workload=UnevenStream(), records=stored, placement=placement)
    trainer.run("probed", lambda model, step, tokens: None)
    return trainer


def rows(path) -> list[dict]:
    return [{key: row[key] for key in ("train_loss", "probe_loss", "grad_norm")} for row in RunRecords(path).metrics()]


def test_it_is_logged_by_name_and_weighted_in_the_gradient(register):
    model, batch = build(), UnevenStream().batch(0, 0, BATCH)
    assert model.auxiliary_losses == ["probe"]
    plain = model(*batch.parts)
    loss, weighted, (probe,) = model(*batch.parts, auxiliary=True)
    assert torch.equal(loss, plain) and not probe.requires_grad
    assert math.isclose(weighted.item(), 2 * 0.5 * probe.item(), rel_tol=1e-6)  # of two layers, and their mean
    names, parameters = zip(*model.named_parameters(), strict=True)
    reached = torch.autograd.grad(weighted, parameters, allow_unused=True)
    assert {name for name, grad in zip(names, reached, strict=True) if grad is not None} == {
        f"blocks.{index}.mixer.probe.{part}" for index in (0, 1) for part in ("weight", "bias")
    }


def test_neither_the_training_loss_nor_an_evaluation_has_it(register, tmp_path, monkeypatch):
    one = trained(tmp_path / "one")
    monkeypatch.setattr(Probed, "weight", 100.0)
    other = trained(tmp_path / "other")
    assert [row["train_loss"] for row in rows(tmp_path / "one")] == [r["train_loss"] for r in rows(tmp_path / "other")]
    assert all(row["probe_loss"] > 0 for row in rows(tmp_path / "one"))
    batch = UnevenStream().batch(1, 0, BATCH)
    losses = [trainer.model.token_losses(*batch.parts) for trainer in (one, other)]
    assert torch.equal(*losses)
    assert not torch.equal(*(trainer.model.blocks[0].mixer.probe.weight for trainer in (one, other)))


@pytest.mark.parametrize("how", ["recomputed", "selective", "compiled and recomputed", "compiled inside"])
def test_it_counts_once(how, register, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    batch, found = UnevenStream().batch(0, 0, BATCH), []
    for changed in (False, True):
        recomputed = "selective" if how == "selective" else "recomputed" in how
        model = build(checkpointing=recomputed if changed else False)
        if changed and "compiled" in how:
            model.compile_inside() if "inside" in how else model.compile_training()
        loss, weighted, each = model(*batch.parts, auxiliary=True)
        (loss + weighted).backward()
        found.append([loss, weighted, each, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{"micro_batch": 1}, {"micro_batch": 2, "cuda_graphs": False}])
def test_micro_batches_add_up(options, register, tmp_path):
    trained(tmp_path / "whole")
    trained(tmp_path / "parts", **options)
    for whole, parts in zip(rows(tmp_path / "whole"), rows(tmp_path / "parts"), strict=True):
        assert parts == pytest.approx(whole, rel=1e-4)


def together(path) -> None:
    ARCHITECTURES.names()
    ARCHITECTURES._entries["probed"] = entry(Probed)  # in a process of its own
    with processes(torch.device("cpu")) as group:
        trained(path / "copies", group)
        trained(path / "parts", group, parallel="fsdp", micro_batch=1)


def test_two_processes_train_as_one(register, tmp_path):
    pair(together, tmp_path, output=tmp_path / "output", seconds=200)
    trained(tmp_path / "one")
    for name in ("copies", "parts"):
        for one, two in zip(rows(tmp_path / "one"), rows(tmp_path / name), strict=True):
            assert two == pytest.approx(one, rel=1e-4), name


def test_check_knows_the_parameters_that_it_teaches(register):
    check_mixer("probed", length=32, longest=0, dtypes=()).raise_failures()
    register(Silent)
    with pytest.raises(ConfigError, match=r"declares the auxiliary losses \['probe'\], but forward gave \[\]\."):
        build()(*UnevenStream().batch(0, 0, BATCH).parts, auxiliary=True)
    failed = check_mixer("probed", length=32, longest=0, dtypes=()).failures
    assert any("declares the auxiliary losses" in check.message for check in failed)
