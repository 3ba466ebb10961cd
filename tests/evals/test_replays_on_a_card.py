"""Passes of evaluations as CUDA graphs on a GPU: the numbers of passes without, to the bit."""

from dataclasses import replace

import pytest
import torch

from basecap.evals import Context, ReplayedPasses, build_evaluation
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.testing.marks import requires_gpu
from basecap.train.distributed import Processes
from basecap.train.placement import DevicePlacement
from tests.evals._context import LENGTH
from tests.evals.test_replays import EVALUATIONS, numbers
from tests.train._graphs import KINDS

pytestmark = [
    *requires_gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),  # of PyTorch's own compiler
]


@pytest.mark.parametrize("name", KINDS)
def test_replayed_passes_give_the_numbers_of_ordinary_ones_to_the_bit(name: str, context: Context):
    placement = DevicePlacement.choose(torch.device("cuda", 0), Processes(), "auto")
    on_card = replace(context, device=placement.device, autocast=placement.autocast)
    vocab = context.data.tokenizer.vocab_size
    config, said = model_config(name, hidden=64, vocab=vocab, layers=2, max_length=LENGTH), []
    model = LanguageModel(config).initialise(0).to(placement.device).eval()
    model.compile_training()
    evaluations = [build_evaluation(entry) for entry in EVALUATIONS]
    replayed = replace(on_card, replays=ReplayedPasses(model, said.append))
    for seed in range(2):  # the weights change in place, as in training
        model.load_state_dict(LanguageModel(config).initialise(seed).state_dict())
        with torch.no_grad():
            expected = [evaluation.run(model, on_card) for evaluation in evaluations]
            found = [evaluation.run(model, replayed) for evaluation in evaluations]
        assert numbers(found) == numbers(expected)
    assert said == []
