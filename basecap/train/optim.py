"""AdamW with a group per learning-rate factor and weight decay, by the recipes; or Muon for matrices, AdamW."""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from basecap.errors import ConfigError
from basecap.mixers import ParameterRecipe
from basecap.models.language_model import LanguageModel
from basecap.train.config import TrainConfig


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimisers that step as one; groups and state are shared with them."""

    def __init__(self, matrices: torch.optim.Optimizer, rest: torch.optim.Optimizer):
        super().__init__([*matrices.param_groups, *rest.param_groups], {})
        self._parts = (matrices, rest)
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters; there is no closure."""
        for part in self._parts:
            part.step()


def build_optimiser(
    model: LanguageModel, recipes: Mapping[str, ParameterRecipe], config: TrainConfig
) -> torch.optim.Optimizer:
    """Return the optimiser; each group has a `factor`, by which `set_learning_rate` multiplies the rate.

    Raises:
        ConfigError: Muon is asked for and this version of PyTorch lacks it, or a mixer has no matrix.
    """
    matrices = hidden_matrices(model, recipes, config)
    given = dict(model.named_parameters())
    rest = torch.optim.AdamW(
        _groups(model, {name: x for name, x in given.items() if name not in matrices}, recipes, config),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=next(model.parameters()).is_cuda,
    )
    if not matrices:
        return rest
    own = {name: x for name, x in given.items() if name in matrices}
    # Its updates get the size of AdamW's (arXiv 2502.16982, section 2.2): learning rates and weight decays carry over.
    muon = torch.optim.Muon(_groups(model, own, recipes, config), lr=config.lr, adjust_lr_fn="match_rms_adamw")
    return MuonAndAdamW(muon, rest)


def hidden_matrices(
    model: LanguageModel, recipes: Mapping[str, ParameterRecipe], config: TrainConfig
) -> frozenset[str]:
    """Return the names of the parameters that Muon trains: of the blocks those whose recipe says they are matrices.

    Where it does not say, weights of Linear layers are. Without Muon there are none.

    Raises:
        ConfigError: see `build_optimiser`, or a recipe calls something a matrix that is none.
    """
    if config.optimiser != "muon":
        return frozenset()
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f"train.optimiser = muon needs torch 2.9 or newer, not {torch.__version__}; install that, or use adamw."
        )
    linear = {f"{prefix}.weight" for prefix, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = set()
    for name, parameter in model.named_parameters():
        said = recipes[name].matrix
        if not name.startswith("blocks.") or not (name in linear if said is None else said):
            continue
        if parameter.ndim != 2:
            raise ConfigError(
                f"the recipe of {name!r} calls it a matrix, but its shape is {list(parameter.shape)}; leave out "
                "matrix=True."
            )
        found.add(name)
    for index, block in enumerate(model.blocks):
        if not any(name.startswith(f"blocks.{index}.mixer.") for name in found):
            raise ConfigError(
                f"the recipe of mixer {type(block.mixer).__name__} names no matrix, and Muon trains matrices; give one "
                "matrix=True, or use train.optimiser = adamw."
            )
    return frozenset(found)


def moments_count(model: LanguageModel, config: TrainConfig) -> int:
    """Return how many numbers the optimiser keeps: two for each parameter, one for a matrix of Muon; ConfigError."""
    if config.optimiser != "muon":
        return 2 * model.parameters_count()
    matrices = hidden_matrices(model, model.recipe(), config)
    return sum((1 if name in matrices else 2) * x.numel() for name, x in model.named_parameters())


def _groups(
    model: LanguageModel,
    parameters: Mapping[str, nn.Parameter],
    recipes: Mapping[str, ParameterRecipe],
    config: TrainConfig,
) -> list[dict[str, Any]]:
    embeddings = {f"{prefix}.weight" for prefix, module in model.named_modules() if isinstance(module, nn.Embedding)}
    groups: dict[tuple[float, bool, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in parameters.items():
        recipe = recipes[name]
        decay = _weight_decay(recipe, name in embeddings, config)
        groups[recipe.lr, recipe.decay, decay].append(parameter)
    return [
        {"params": members, "factor": factor, "weight_decay": decay}
        for (factor, _, decay), members in sorted(groups.items(), key=lambda item: item[0])
    ]


def _weight_decay(recipe: ParameterRecipe, is_embedding: bool, config: TrainConfig) -> float:
    """Return the weight decay of a parameter, `is_embedding` where its recipe does not say."""
    if not recipe.decay:
        return config.other_weight_decay
    if config.embedding_weight_decay is not None and (is_embedding if recipe.embedding is None else recipe.embedding):
        return config.embedding_weight_decay
    return config.weight_decay


def clip_gradients(model: nn.Module, config: TrainConfig) -> Tensor:
    """Clip the gradients in place (`clip`, `clip_by`); return their norm before clipping, a scalar."""
    parameters = list(model.parameters())
    by_norm = config.clip_by == "norm"
    norm = nn.utils.clip_grad_norm_(parameters, config.clip if by_norm else math.inf)
    if not by_norm:
        nn.utils.clip_grad_value_(parameters, config.clip)
    return norm


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set every group's learning rate to its factor times `rate`; of fused updates, which run on a GPU, in float32.

    CUDA graphs read a rate from a tensor of that dtype, and an update without them is to give the same bits.
    """
    for group in optimiser.param_groups:
        own = rate * group["factor"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = float(np.float32(own)) if group.get("fused") else own


def can_be_captured(optimiser: torch.optim.Optimizer) -> bool:
    """Whether an update can be a CUDA graph: that of AdamW can, Muon reads its learning rate on the CPU."""
    return all("capturable" in group for group in optimiser.param_groups)


def hold_learning_rates(optimiser: torch.optim.Optimizer) -> None:
    """Keep the learning rates in tensors beside the parameters, where a CUDA graph reads them."""
    for group in optimiser.param_groups:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=group["params"][0].device)


@contextlib.contextmanager
def capturable(optimiser: torch.optim.Optimizer) -> Iterator[None]:
    """Let the optimiser's update be captured, which PyTorch refuses, and warns of outside a capture, by a flag."""
    for group in optimiser.param_groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in optimiser.param_groups:
            group["capturable"] = False
