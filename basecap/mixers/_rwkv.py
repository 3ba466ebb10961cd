"""What the RWKV generations share: the token shift and its mixing shares, low-rank maps, initialisers by depth.

Sources: RWKV-4 arXiv 2305.13048, RWKV-5 and RWKV-6 arXiv 2404.05892, RWKV-7 arXiv 2503.14456; constants of the
initialisers from BlinkDL/RWKV-LM. A mixing share here is always that of the previous token (the official RWKV-4 and
RWKV-5 store that of the present one: one minus it).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from basecap.mixers._contract import Initialiser, ParameterRecipe, constant, values
from basecap.mixers._parts import token_shift


def depth_ratios(index: int, depth: int) -> tuple[float, float]:
    """Return how deep layer `index` of `depth` lies: rising from 0 to 1, and falling from 1 to almost 0."""
    return index / max(1, depth - 1), 1.0 - index / depth


def ramp(width: int) -> Tensor:
    """Return [width] float64: 0 to 1, the end included."""
    return torch.arange(width, dtype=torch.float64) / max(1, width - 1)


def share(hidden: int, power: float, extra: float = 0.0) -> ParameterRecipe:
    """Recipe of a mixing share: 1 - (i / hidden)^power - extra for channel i; never decayed."""
    start = torch.arange(hidden, dtype=torch.float64) / hidden
    return ParameterRecipe(init=values(1.0 - start**power - extra), decay=False)


def decay_speed(width: int, rise: float) -> Tensor:
    """Return [width] initial log(-log decay) of RWKV-5 and RWKV-6 for a layer at `rise` in 0..1 of the depth."""
    return -6.0 + 5.0 * ramp(width) ** (0.7 + 1.3 * rise)


def first_bonus(width: int, rise: float) -> Tensor:
    """Return [width], the initial weight of the present token in RWKV-5 and RWKV-6."""
    zigzag = ((torch.arange(width) + 1) % 3 - 1) * 0.1
    return rise * (1.0 - ramp(width)) + zigzag


def scaled_orthogonal(scale: float) -> Initialiser:
    """Orthogonal times scale * sqrt(max(1, rows / columns)); a stack of matrices one by one."""

    def initialise(parameter: Tensor, generator: torch.Generator) -> None:
        rows, columns = parameter.shape[-2:]
        gain = scale * math.sqrt(max(1.0, rows / columns))
        for matrix in parameter.view(-1, rows, columns):
            nn.init.orthogonal_(matrix, gain=gain, generator=generator)

    return initialise


def head_scale(index: int, depth: int) -> ParameterRecipe:
    """Recipe of the group norm's gain: ((1 + index) / depth)^0.7, so that deeper layers speak louder."""
    return ParameterRecipe(init=constant(((1 + index) / depth) ** 0.7), decay=False)


def shift(x_BTD: Tensor, segments: Tensor | None, last_BD: Tensor | None = None) -> Tensor:
    """Return previous token minus present token, [B, T, D]; before the first token stands `last_BD`, else zero.

    `last_BD`, the state of decoding, moves on to the final token.
    """
    previous = token_shift(x_BTD, segments)
    if last_BD is not None and x_BTD.shape[1]:
        previous = torch.cat([last_BD[:, None].to(x_BTD.dtype), x_BTD[:, :-1]], dim=1)
        last_BD.copy_(x_BTD[:, -1])
    return previous - x_BTD


class LowRank(nn.Module):
    """base + act(x @ down) @ up: a vector that depends on the data a little ([..., hidden] -> [..., width])."""

    def __init__(self, hidden: int, rank: int, width: int, activation: Callable[[Tensor], Tensor] | None):
        super().__init__()
        self.down = nn.Parameter(torch.empty(hidden, rank))
        self.up = nn.Parameter(torch.empty(rank, width))
        self.base = nn.Parameter(torch.empty(width))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dimension."""
        inner = x @ self.down
        return self.base + (inner if self.activation is None else self.activation(inner)) @ self.up

    def recipe(self, base: Tensor, up: Initialiser, lr: float = 1.0) -> dict[str, ParameterRecipe]:
        """Start at `base` (whose learning-rate factor is `lr`): down is zero. Nothing decays."""
        return {
            "down": ParameterRecipe(init=constant(0.0), decay=False),
            "up": ParameterRecipe(init=up, decay=False),
            "base": ParameterRecipe(init=values(base), lr=lr, decay=False),
        }


def prefixed(prefix: str, recipes: dict[str, Any]) -> dict[str, Any]:
    """Put `prefix.` before every name."""
    return {f"{prefix}.{name}": recipe for name, recipe in recipes.items()}
