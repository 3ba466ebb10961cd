"""AdamW with one parameter group per (learning-rate factor, weight decay) of the recipes."""

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from basecap.mixers import ParameterRecipe
from basecap.train.config import TrainConfig


def build_optimiser(model: nn.Module, recipes: Mapping[str, ParameterRecipe], config: TrainConfig) -> torch.optim.AdamW:
    """Return the optimiser; each group has a `factor`, by which `set_learning_rate` multiplies the rate."""
    groups: dict[tuple[float, bool], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        groups[recipes[name].lr, recipes[name].decay].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": members, "factor": factor, "weight_decay": config.weight_decay if decay else 0.0}
            for (factor, decay), members in sorted(groups.items(), key=lambda item: item[0])
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=next(model.parameters()).is_cuda,
    )


def clip_gradients(model: nn.Module, config: TrainConfig) -> Tensor:
    """Clip the gradients in place (`clip`, `clip_by`); return their norm before clipping, a scalar."""
    parameters = list(model.parameters())
    by_norm = config.clip_by == "norm"
    norm = nn.utils.clip_grad_norm_(parameters, config.clip if by_norm else math.inf)
    if not by_norm:
        nn.utils.clip_grad_value_(parameters, config.clip)
    return norm


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set every group's learning rate to its factor times `rate`."""
    for group in optimiser.param_groups:
        group["lr"] = rate * group["factor"]
