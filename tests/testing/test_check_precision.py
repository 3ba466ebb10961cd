"""What the conformance suite says of a mixer that loses precision."""

import pytest
import torch
from torch import nn

from basecap.mixers import ARCHITECTURES, ForwardOnly
from basecap.testing._harness import Harness
from basecap.testing._precision import Lower
from basecap.testing.check_mixer import check_mixer
from tests.testing._running_mean import RunningMean, failures


class LosesPrecision(RunningMean):
    def forward(self, x_BTD, segments=None):
        return super().forward(x_BTD, segments) * (1.001 if x_BTD.dtype == torch.float32 else 1)


def test_a_loss_of_precision_is_found_with_its_usual_cause(register):
    found = failures(check_mixer(register(LosesPrecision), length=32, longest=0, dtypes=(torch.float32,)))
    assert "differs too much from float64; look for differences of large numbers" in found["forward in float32"]


class ForgetsKeys(ForwardOnly):
    """Softmax attention with a forget gate of 64 * (w x + b) at each key, whose bias the softmax cancels."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.qkv = nn.Linear(layer.hidden, 3 * layer.hidden, bias=False)
        self.gate = nn.Linear(layer.hidden, 2)

    def forward(self, x_BTD, segments=None):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, -1))
        keep = torch.ones(x_BTD.shape[1], x_BTD.shape[1], dtype=torch.bool).tril()
        if segments is not None:
            keep = keep & (segments[:, None, :, None] == segments[:, None, None, :])
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        scores = (q @ k.mT).to(wide) / q.shape[-1] ** 0.5 + 64 * self.gate_of(x_BTD).to(wide).mT[:, :, None]
        weights = scores.masked_fill(~keep, -torch.inf).softmax(-1).to(v.dtype)
        return (weights @ v).transpose(1, 2).flatten(2)

    def gate_of(self, x_BTD):
        return self.gate(x_BTD)

    def flops(self, length):
        return 2.0 * length * (3 * self.layer.hidden**2 + 2 * self.layer.hidden) + 4.0 * length**2 * self.layer.hidden


class ForgetsKeysWrongly(ForgetsKeys):
    def gate_of(self, x_BTD):
        noise = 1e-3 * (self.gate.bias - self.gate.bias.detach()) if x_BTD.dtype == torch.float32 else 0
        return self.gate(x_BTD) + noise * x_BTD[..., :1]


def test_a_gradient_of_zero_is_known_to_the_precision_of_the_terms_that_cancel(register):
    """Its float32 error is some 15 times what the size of the other gradients allows."""
    assert failures(check_mixer(register(ForgetsKeys), length=32, longest=0)) == {}
    found = failures(check_mixer(register(ForgetsKeysWrongly), length=32, longest=0, dtypes=(torch.float32,)))
    assert list(found) == ["gradients in float32"]
    assert "gate.bias in float32 is more than the rounding of terms that cancel" in found["gradients in float32"]


@pytest.mark.parametrize("length", [40, 48])
def test_gradients_of_two_numbers_are_allowed_what_several_roundings_change(length):
    """Here one draw of all roundings changes the gradient of the step size's bias a seventh as much as others do."""
    name, cpu = "mamba-3 mimo", torch.device("cpu")
    harness = Harness(ARCHITECTURES.get(name).layers[0], name, 64, length, cpu, {})
    (check,) = Lower(harness, torch.bfloat16, cpu).gradients()
    assert check.passed, check.message
