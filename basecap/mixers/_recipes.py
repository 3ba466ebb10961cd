"""How parameters are initialised and trained: initialisers with a description, and recipes."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Initialiser = Callable[[Tensor, torch.Generator], object]

#: How the matrices of a block are initialised; see `matrices`.
Scheme = Literal["gpt-2", "gpt-neox", "plain"]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A layer in its model: model width, index (from 0), number of layers, longest training sequence.

    `canon` has the places of Canon layers in its block, among a, b, c and d.
    `inner` is the width inside the feed-forward layer after it, that of the backbone when None.
    """

    hidden: int
    index: int = 0
    depth: int = 1
    max_length: int = 2048
    canon: str = ""
    inner: int | None = None


@dataclass(frozen=True, kw_only=True)
class ParameterRecipe:
    """How a parameter is initialised and trained: in-place initialiser, learning-rate factor, weight decay or not.

    `decay` is False for gains, biases, decay rates and the like, which `train.other_weight_decay` is for. `matrix` says
    whether Muon trains it, where a study asks for that; None: if it is the weight of a Linear layer. `embedding` says
    whether `train.embedding_weight_decay` is for it; None: if it is the weight of an Embedding layer.
    """

    init: Initialiser
    lr: float = 1.0
    decay: bool = True
    matrix: bool | None = None
    embedding: bool | None = None


@dataclass(frozen=True)
class Start:
    """An initialiser with a description for docs/architectures.md."""

    words: str
    fill: Initialiser

    def __call__(self, parameter: Tensor, generator: torch.Generator) -> None:
        """Set `parameter` in place."""
        self.fill(parameter, generator)


def normal(std: float) -> Initialiser:
    """Gaussian with mean 0."""
    return Start(
        f"normal, std {std:.4g}", lambda parameter, generator: parameter.normal_(0.0, std, generator=generator)
    )


def uniform(low: float, high: float) -> Initialiser:
    """Uniform on [low, high)."""
    words = f"uniform in ±{high:.4g}" if low == -high else f"uniform in [{low:.4g}, {high:.4g})"
    return Start(words, lambda parameter, generator: parameter.uniform_(low, high, generator=generator))


def constant(value: float) -> Initialiser:
    """One value everywhere."""
    return Start(f"{value:.4g}", lambda parameter, generator: parameter.fill_(value))


def values(tensor: Tensor, words: str = "given values") -> Initialiser:
    """The given values, broadcast to the parameter's shape; `words` say which they are."""
    return Start(words, lambda parameter, generator: parameter.copy_(tensor.expand_as(parameter)))


def orthogonal(gain: float = 1.0) -> Initialiser:
    """A (semi-)orthogonal matrix times `gain`."""

    def fill(parameter: Tensor, generator: torch.Generator) -> None:
        nn.init.orthogonal_(parameter, gain=gain, generator=generator)

    return Start(f"orthogonal, gain {gain:.4g}", fill)


def default_recipe(module: nn.Module) -> dict[str, ParameterRecipe]:
    """Recipes for the parameters of the standard layers inside `module`.

    Weights of Linear and Embedding: normal(0.02), with weight decay. Weights of norms: 1, biases: 0, without it. The
    caller adds recipes for other parameters; building a model with a parameter without a recipe is an error.
    """
    recipes = {}
    for prefix, child in module.named_modules():
        for name, _ in child.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if name == "bias" and isinstance(child, nn.Linear | nn.LayerNorm | nn.GroupNorm):
                recipes[full] = ParameterRecipe(init=constant(0.0), decay=False)
            elif isinstance(child, nn.Linear | nn.Embedding):
                recipes[full] = ParameterRecipe(init=normal(0.02))
            elif isinstance(child, nn.RMSNorm | nn.LayerNorm | nn.GroupNorm):
                recipes[full] = ParameterRecipe(init=constant(1.0), decay=False)
    return recipes


def generator_for(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator determined by (seed, name) only."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def make_generic(layers: nn.Module) -> None:
    """Move all parameters off their first values, in place, always by the same numbers.

    At initialisation some output projections are zero and some attention is uniform: nothing could break there.
    """
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            std = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
            drawn = torch.randn(parameter.shape, generator=generator_for(0, f"generic {name}"))
            parameter.add_(std * drawn.to(parameter.device))


def residual_std(layer: LayerSpec) -> float:
    """Standard deviation of a projection into the residual stream: 0.02 / sqrt(number of them), two for each block."""
    return 0.02 / math.sqrt(2 * layer.depth)


def matrices(scheme: Scheme, layer: LayerSpec) -> tuple[ParameterRecipe, ParameterRecipe]:
    """Return the recipes of the matrices of a block: of those that read the residual stream, and that write to it.

    gpt-2: std 0.02, scaled down with depth for those that write (Radford et al. 2019, section 2.3). gpt-neox: std
    sqrt(2 / 5D) and 2 / (L sqrt(D)) (arXiv 2204.06745, section 2.1). plain: std 0.02.
    """
    writing = {"gpt-2": residual_std(layer), "gpt-neox": 2.0 / (layer.depth * math.sqrt(layer.hidden)), "plain": 0.02}
    reading = small_normal() if scheme == "gpt-neox" else normal(0.02)
    return ParameterRecipe(init=reading), ParameterRecipe(init=normal(writing[scheme]))


def small_normal() -> Initialiser:
    """Gaussian of standard deviation sqrt(2 / 5D) for a matrix [..., D] (arXiv 1910.05895, section 2.2)."""

    def fill(parameter: Tensor, generator: torch.Generator) -> None:
        parameter.normal_(0.0, math.sqrt(2.0 / (5.0 * parameter.shape[-1])), generator=generator)

    return Start("normal, std sqrt(2/5D)", fill)
