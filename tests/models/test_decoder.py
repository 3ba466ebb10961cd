"""Models that decode all answers from the last position: MAD's definition, loss, sizes, and what they refuse."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from basecap.errors import ConfigError
from basecap.models import BACKBONES
from basecap.models.config import ModelConfig, model_config
from basecap.models.decoder import Decoder
from basecap.models.generate import generate
from basecap.models.language_model import LanguageModel
from basecap.tasks import Readout

VOCAB, HIDDEN = 13, 32


def small(readout: Readout = "each", **changes) -> LanguageModel:
    """Return an initialised small model in double precision."""
    config = model_config("transformer++", hidden=HIDDEN, vocab=VOCAB, layers=2, max_length=32, **changes)
    return LanguageModel(config.model_copy(update={"readout": readout})).initialise(0).double()


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


def code(position: int, channel: int, hidden: int) -> float:
    """Return a sinusoidal code: sines in the first half of the channels, cosines of the same angles in the second."""
    half = hidden // 2
    if channel >= 2 * half:
        return 0.0
    angle = position / 10_000 ** (channel % half / (half - 1))
    return math.sin(angle) if channel < half else math.cos(angle)


def decoded(model: LanguageModel, last_D: torch.Tensor, position: int) -> torch.Tensor:
    """Return the logits [vocab] of one position, as MAD's paper and code define them."""
    x = last_D + torch.tensor([code(position, channel, len(last_D)) for channel in range(len(last_D))])
    first_norm, first, _, second_norm, second, _ = model.decoder.layers
    for norm, linear in ((first_norm, first), (second_norm, second)):
        x = linear.weight @ norm(x) + linear.bias
        x = x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return model.head_weight @ model.norm(x)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("backbone", BACKBONES.names())
@torch.no_grad()
def test_answers_and_loss_are_those_of_the_definition(backbone: str, tied: bool):
    model = small("last", backbone=backbone, tied=tied)
    for parameter in model.decoder.parameters():  # biases and norms do not start as they train
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    encoder = small(backbone=backbone, tied=tied)
    encoder.norm = torch.nn.Identity()
    batch = tokens(2, 6)
    last = encoder.hidden(batch)[:, -1]
    expected = torch.stack([torch.stack([decoded(model, row, position) for position in range(6)]) for row in last])
    torch.testing.assert_close(model.logits(batch), expected, rtol=1e-5, atol=1e-6)  # codes are of float32
    targets = batch.clone()
    targets[1, 2] = -1
    losses = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
    torch.testing.assert_close(model(batch, targets), losses.sum() / 11, rtol=1e-5, atol=1e-6, check_dtype=False)
    found = model.token_losses(batch, targets)
    torch.testing.assert_close(found.flatten(), losses, rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("hidden", [2, 7])
def test_a_width_that_is_small_or_odd(hidden: int):
    layer = Decoder(hidden, torch.nn.Identity)
    x = torch.randn(3, 4, hidden)
    assert layer(x).shape == x.shape and layer(x).isfinite().all()
    assert torch.equal(layer(x), layer(x[:, -1:].expand_as(x)))


def test_parameters_and_flops_are_counted_and_the_rest_of_the_model_starts_as_without():
    model, plain = small("last"), small()
    added = 2 * (HIDDEN**2 + 2 * HIDDEN)  # matrix, bias and norm of each layer
    assert model.parameters_count() == plain.parameters_count() + added
    with FlopCounterMode(display=False) as counter:
        model.decoder(torch.zeros(1, 9, HIDDEN, dtype=torch.float64))
    assert model.flops(9) == plain.flops(9) + counter.get_total_flops()
    assert model.training_flops(9) == plain.training_flops(9) + 3 * counter.get_total_flops()
    own = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(own.pop(name), parameter), name
    assert all(name.startswith("decoder.layers.") for name in own)
    recipe = model.recipe()
    assert {name: recipe[name].decay for name in own} == {name: own[name].dim() == 2 for name in own}
    matrices = [parameter for parameter in own.values() if parameter.dim() == 2]
    assert [parameter.std().item() for parameter in matrices] == pytest.approx([0.02] * 2, rel=0.1)


def test_the_configuration_of_other_models_is_recorded_as_before():
    config = model_config("transformer++", hidden=32, vocab=VOCAB, layers=2)
    assert [*config.model_dump()] == ["hidden", "vocab", "depth", "backbone", "layers", "tied", "max_length"]
    decoding = config.model_copy(update={"readout": "last"})
    assert decoding.model_dump(mode="json") == config.model_dump(mode="json") | {"readout": "last"}
    for one in (config, decoding):
        assert ModelConfig.model_validate_json(one.model_dump_json()) == one


def test_such_a_model_does_not_generate_and_takes_no_packed_sequences():
    model, batch = small("last"), tokens(2, 6)
    with pytest.raises(ConfigError, match="decodes its answers from the last position does not predict next tokens"):
        generate(model, batch, 3)
    with pytest.raises(ConfigError, match="a model with a decoder reads one sequence per row; leave out segments"):
        model(batch, batch, torch.zeros_like(batch))
