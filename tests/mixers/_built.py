"""Mixers to compare: every parameter is off its start, as zeros and ones hide mistakes."""

from typing import TypeVar

import torch
from torch import Tensor

from basecap.mixers import ARCHITECTURES, LayerSpec, Mixer, initialise

M = TypeVar("M", bound=Mixer)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal float64 values."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moved(mixer: M, size: float) -> M:
    """Return the mixer in float64, initialised and with normal values of this size added to its parameters."""
    initialise(mixer.double(), mixer.recipe(), 0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return mixer


def built(name: str, hidden: int, size: float, **options: object) -> Mixer:
    """Return the mixer of an architecture's first layer, see `moved`."""
    choice = ARCHITECTURES.get(name).layers[0]
    return moved(choice.mixer(choice.configure(hidden, options), LayerSpec(hidden=hidden)), size)
