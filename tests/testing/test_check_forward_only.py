"""What the conformance suite says of a mixer without decoding of its own."""

import torch

from basecap.mixers import ForwardOnly
from basecap.testing.check_mixer import check_mixer
from tests.testing._running_mean import RunningMean, checked, failures


class Recomputes(ForwardOnly):
    """The running mean without decoding of its own, and without parameters."""

    def forward(self, x_BTD, segments=None):
        return RunningMean._means(self, x_BTD, segments)

    def flops(self, length):
        return length * (length + 1) * self.layer.hidden


class ForgetsABoundary(Recomputes):
    """Starts no new document at one position."""

    def forward(self, x_BTD, segments=None):
        y = super().forward(x_BTD, segments)
        if segments is None:
            return y
        missed = (segments != segments.roll(1, 1)) & (torch.arange(x_BTD.shape[1]) == 19)
        return y + missed[..., None] * x_BTD.roll(1, 1)


def test_a_document_that_begins_at_any_position_is_tested(register):
    found = failures(checked(register(ForgetsABoundary)))
    assert list(found) == ["packed segments", "packed gradients"]
    assert "mixes packed documents" in found["packed segments"]


def test_a_mixer_of_a_forward_alone_decodes(register):
    report = check_mixer(register(Recomputes), length=32, longest=40)
    report.raise_failures()
    names = {check.name for check in report.checks}
    assert {"decode", "prefill 16, then decode", "state bytes at 320, torch.bfloat16"} <= names
