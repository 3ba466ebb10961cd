"""What evaluations of influence share: what the layers of a model read while it reads some tokens."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from basecap.mixers import Mixer
from basecap.models.language_model import LanguageModel
from basecap.ops import Influence

T = TypeVar("T")


def of_layers(model: LanguageModel, tokens_BT: Tensor, take: Callable[[Influence], T]) -> dict[int, T]:
    """Return what `take` makes of the influence of each layer that has one, by the layer's index from 0.

    Args:
        model: in evaluation mode.
        tokens_BT: int64, on the model's device; each row is one sequence.
        take: called once per layer, while the model runs; what it returns is all that is kept of the factors.
    """
    found: dict[int, T] = {}

    def look(mixer: Mixer, inputs: tuple[Tensor, ...]) -> None:
        influence = mixer.influence(inputs[0])
        if influence is not None:
            found[mixer.layer.index] = take(influence)

    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    handles = [mixer.register_forward_pre_hook(look) for mixer in mixers]
    try:
        with torch.no_grad():
            model.hidden(tokens_BT)
    finally:
        for handle in handles:
            handle.remove()
    return found
