"""A model without numbers: what it is made of."""

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from basecap.models.config import ModelConfig
from basecap.models.language_model import LanguageModel


class _NoDraws(TorchFunctionMode):
    """Skips the random values that modules of PyTorch draw when they are built."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (nn.init.kaiming_uniform_, nn.init.uniform_):
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def outline(config: ModelConfig) -> LanguageModel:
    """Build a model on the meta device, to count parameters, FLOPs and state; raises ConfigError."""
    with torch.device("meta"), _NoDraws():
        return LanguageModel(config)
