"""CUDA graphs of the training step: the numbers of a step without one, and nothing in it that a graph would freeze."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from basecap.errors import ConfigError
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.testing.marks import requires_gpu
from basecap.train.distributed import Processes
from basecap.train.graphs import GradientGraphs
from basecap.train.loop import DevicePlacement, Trainer
from tests._architectures import distinct_names
from tests.train.conftest import UnevenStream, config


def trainer_of(model, path, device="cpu", **options) -> Trainer:
    placement = DevicePlacement.choose(torch.device(device), Processes(), "auto")
    return Trainer(model, config(**options), 0, workload=UnevenStream(), records=RunRecords(path), placement=placement)


def capture(run):
    """Stand in for a CUDA graph: run once, as a warm-up does, and replay by running again."""
    run()
    return run


def test_graphs_give_the_loss_and_the_gradients_of_the_step(model, tmp_path):
    trainer = trainer_of(model, tmp_path, micro_batch=2)
    batches = [UnevenStream(length).batch(0, step, 4) for step, length in enumerate([16, 8, 16])]
    found = []
    for graphs in (None, GradientGraphs(trainer._backward, capture)):
        trainer.graphs = graphs
        for batch in batches:
            loss = trainer._accumulate(batch)
            found.append([loss, *(parameter.grad.clone() for parameter in model.parameters())])
    torch.testing.assert_close(found[3:], found[:3], rtol=0, atol=0)


def test_a_step_that_cannot_be_captured_says_what_to_do(model):
    def refuse(run):
        raise RuntimeError("operation not permitted when stream is capturing.\nSearch for more.")

    rows = UnevenStream().batch(0, 0, 4)
    graphs = GradientGraphs(lambda batch, share: share, refuse)
    with pytest.raises(ConfigError, match=r"\(operation not permitted.*capturing\); set train.cuda_graphs=false"):
        graphs.prepare(rows, torch.ones(()))


@pytest.mark.parametrize("name", distinct_names())
def test_no_training_step_reads_numbers_back(name: str):
    with FakeTensorMode():
        model = LanguageModel(model_config(name, hidden=32, vocab=31, layers=2, max_length=64))
        tokens = torch.zeros((2, 16), dtype=torch.int64)
        model(tokens, tokens).backward()
        assert model.embedding.weight.grad is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")  # of PyTorch's own compiler
@pytest.mark.parametrize("name", [pytest.param(name, marks=requires_gpu) for name in distinct_names()])
def test_training_with_graphs_is_training_without(name: str, tmp_path):
    losses = []
    for graphs in (False, True):
        model = LanguageModel(model_config(name, hidden=64, vocab=31, layers=2, max_length=64)).initialise(0)
        records = tmp_path / str(graphs)
        trainer = trainer_of(model, records, "cuda", cuda_graphs=graphs, micro_batch=2)
        trainer.run("test", lambda model, step, tokens: None)
        losses.append([(row["train_loss"], row["grad_norm"]) for row in trainer.records.metrics()])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=1e-3)  # some kernels add in any order
