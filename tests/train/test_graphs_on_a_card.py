"""CUDA graphs of training steps on a GPU: the losses of steps without them, to the bit where kernels repeat theirs."""

import pytest
import torch

from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.system.cuda_graph import GraphPool
from basecap.testing.marks import requires_gpu
from basecap.train.deterministic import deterministic
from tests._architectures import distinct_names
from tests.train._graphs import KINDS, STEP, read_back, small, trainer_of
from tests.train.conftest import config

pytestmark = [
    *requires_gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),  # of PyTorch's own compiler
]


def on_card(name: str, path, wanted: bool | str, evaluate=lambda model, step, tokens: None, **options) -> list:
    """Train a tiny model on a GPU; return losses and norms, and what is recorded of graphs."""
    model = LanguageModel(model_config(name, hidden=64, vocab=31, layers=2, max_length=64)).initialise(0)
    trainer = trainer_of(model, path, "cuda", **({"micro_batch": 2, "cuda_graphs": wanted} | options))
    trainer.run("test", evaluate)
    rows = [(row["train_loss"], row["grad_norm"]) for row in trainer.records.metrics()]
    return [rows, trainer.graphs.record if trainer.graphs else None]


def twice(name: str, path, **options) -> tuple[list, list]:
    """Train without graphs and with them, deterministically."""
    found = []
    for wanted in (False, "auto"):
        with deterministic(config(cuda_graphs=wanted, deterministic=True, **options), torch.device("cuda")):
            found.append(on_card(name, path / str(wanted), wanted, **options))
    return found[0], found[1]


@pytest.mark.parametrize("name", distinct_names())
def test_training_with_graphs_gives_the_bits_of_training_without(name: str, tmp_path):
    without, found = twice(name, tmp_path)
    assert found == [without[0], "step"]


@pytest.mark.parametrize("options", [{"optimiser": "muon"}, {"checkpointing": True}], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_so_does_training_with_options(name: str, options: dict, tmp_path):
    without, found = twice(name, tmp_path, **options)
    assert found == [without[0], "gradients" if "optimiser" in options else "step"]


def test_a_resumed_run_with_graphs_is_exact(tmp_path):
    options = {"checkpoint_every": 7 * STEP, "eval_every": 5 * STEP}

    def stop(model, step, tokens):
        if step == 15:
            raise KeyError

    with deterministic(config(deterministic=True), torch.device("cuda")):
        straight = on_card("transformer++", tmp_path / "straight", False, **options)
        with pytest.raises(KeyError):
            on_card("transformer++", tmp_path / "resumed", "auto", stop, **options)
        resumed = on_card("transformer++", tmp_path / "resumed", "auto", **options)
    assert resumed == [straight[0], "step"]


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # it was made in the failed capture
@pytest.mark.parametrize("watched", [True, False])
def test_what_cannot_be_captured_goes_on_and_later_runs_have_graphs(
    watched: bool, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    """Without `watched` the capture itself fails, and leaves PyTorch as it was."""
    if not watched:
        monkeypatch.setattr(GraphPool, "rehearse", lambda self, run: (run(), 0))
    trainer = trainer_of(small(), tmp_path / "reading", "cuda", cuda_graphs="auto", compile=False)
    trainer.model.blocks[0].mixer.register_forward_hook(read_back)
    words: list[str] = []
    trainer.run("test", lambda model, step, tokens: None, words.append)
    assert len(trainer.records.metrics()) == 20
    assert len([line for line in words if "steps are not CUDA graphs" in line]) == 1
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert on_card("transformer++", tmp_path / "next", True)[1] == "step"
