"""A sound mixer that tests break in one place each, and what the conformance suite says of it."""

import torch
from torch import nn

from basecap.mixers import Cache, Mixer
from basecap.testing._harness import CheckReport
from basecap.testing.check_mixer import check_mixer


class RunningMean(Mixer):
    """The mean of all inputs so far, projected."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.out = nn.Linear(layer.hidden, layer.hidden, bias=False)

    def forward(self, x_BTD, segments=None):
        return self.out(self._means(x_BTD, segments))

    def _means(self, x_BTD, segments):
        keep = torch.ones(x_BTD.shape[1], x_BTD.shape[1], dtype=x_BTD.dtype).tril()
        if segments is not None:
            keep = keep * (segments[:, :, None] == segments[:, None, :])
        return (keep / keep.sum(-1, keepdim=True)) @ x_BTD

    def init_cache(self, batch, max_length):
        return Cache(tensors={"sum": self.out.weight.new_zeros(batch, 1, self.layer.hidden)})

    def step(self, x_B1D, cache):
        cache.tensors["sum"] += x_B1D
        cache.length += 1
        return self.out(cache.tensors["sum"] / cache.length)

    def flops(self, length):
        return 2.0 * length * self.layer.hidden**2 + length * (length + 1) * self.layer.hidden

    def state_bytes(self, length):
        return self.layer.hidden * self.out.weight.element_size()


def checked(name: str) -> CheckReport:
    """Check on short sequences, in float64 alone."""
    return check_mixer(name, length=32, longest=0, dtypes=())


def failures(report: CheckReport) -> dict[str, str]:
    """Return the messages of the failed checks by name."""
    return {check.name: check.message for check in report.failures}
