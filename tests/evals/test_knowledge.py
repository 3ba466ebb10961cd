"""Knowledge capacity: models whose bits are known."""

import contextlib
import math

import pytest
import torch

from basecap.data.task_config import TaskSection
from basecap.data.task_data import TaskData
from basecap.errors import DataError
from basecap.evals import Context, build_evaluation
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel

#: 32 people out of 64 names, with facts of 2 + 4 bits; two people fit into an example.
OPTIONS = {"names": [8, 8], "values": [4, 16]}
CELL = {"length": 13, "people": 32}


def data() -> TaskData:
    return TaskData(TaskSection(train=("capo",), options=OPTIONS, cells=(CELL,), held_out=40), "capo")


def numbers(workload: TaskData, losses=None) -> tuple[dict[str, float], int]:
    """Return the numbers of a model whose losses are `losses(targets)` in bits, and its parameters."""
    config = model_config("transformer++", hidden=16, vocab=workload.vocabulary, layers=1, max_length=13)
    model = LanguageModel(config).initialise(0).eval()
    if losses is not None:
        model.token_losses = lambda inputs, targets: torch.where(targets < 0, 0.0, losses(targets) * math.log(2))
    context = Context(data=workload, device=torch.device("cpu"), autocast=contextlib.nullcontext)
    outcome = build_evaluation("knowledge").run(model, context)
    assert {item.subset for item in outcome.measurements} == {"capo"}
    count = sum(parameter.numel() for parameter in model.parameters())
    return {item.metric: item.value for item in outcome.measurements}, count


def test_a_model_that_knows_everything_reaches_the_most():
    # Of the names only which of 32 people comes next is open, and that is not counted: 5 bits, over two tokens.
    found, parameters = numbers(data(), lambda targets: torch.where(targets < 16, 2.5, 0.0))
    assert found["name_loss"] == pytest.approx(5) and found["fact_loss"] == 0
    assert found["bits_per_parameter"] == pytest.approx(32 * (6 - 5 + 6) / parameters)
    assert found["most_bits_per_parameter"] == pytest.approx(found["bits_per_parameter"])


def test_a_model_that_knows_no_more_than_what_is_possible_has_no_bits():
    bits = torch.tensor([3.0] * 16 + [2.0] * 4 + [4.0] * 16)
    found, _ = numbers(data(), lambda targets: bits[targets.clamp(min=0)])
    assert found["name_loss"] == pytest.approx(6) and found["fact_loss"] == pytest.approx(6)
    assert found["bits_per_parameter"] == pytest.approx(0, abs=1e-6)


def test_losses_are_those_of_the_model():
    found, parameters = numbers(data())
    expected = 4 * math.log2(16 + 20 + 2)  # an untrained model takes all tokens for about equally likely
    assert found["name_loss"] + found["fact_loss"] == pytest.approx(expected, rel=0.02)
    bits = 32 * (12 - found["name_loss"] - found["fact_loss"]) / parameters
    assert found["bits_per_parameter"] == pytest.approx(bits)


def test_a_study_without_facts_is_refused():
    workload = TaskData(
        TaskSection(train=("mqar",), options={"vocab": 32}, cells=({"length": 16, "pairs": 2},)), "mqar"
    )
    with pytest.raises(DataError, match="knowledge: mqar has no facts to know, which a task such as capo has"):
        build_evaluation("knowledge").check(workload, 16)
    assert build_evaluation("knowledge").tokens_read(data(), 13) == 40 * 13
