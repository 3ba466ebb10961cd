"""What the mixers of a model read during a forward pass."""

from collections.abc import Callable

import torch
from torch import Tensor

from basecap.mixers import Mixer
from basecap.models.language_model import LanguageModel


def visit_mixers(model: LanguageModel, tokens_BT: Tensor, visit: Callable[[Mixer, Tensor], None]) -> None:
    """Call `visit` with each mixer and what it reads, [B, T, D], before it runs.

    Args:
        model: in evaluation mode.
        tokens_BT: int64, on the model's device.
        visit: called in the order of the layers, without gradients.
    """
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    handles = [mixer.register_forward_pre_hook(lambda mixer, given: visit(mixer, given[0])) for mixer in mixers]
    try:
        with torch.no_grad():
            model.hidden(tokens_BT)
    finally:
        for handle in handles:
            handle.remove()
