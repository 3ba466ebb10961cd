"""Shared by the RWKV generations: the token shift and its mixing shares, low-rank maps, initialisers by depth.

Sources: RWKV-4 arXiv 2305.13048, RWKV-5 and RWKV-6 arXiv 2404.05892, RWKV-7 arXiv 2503.14456; constants of the
initialisers from BlinkDL/RWKV-LM. A mixing share here is always that of the previous token (the official RWKV-4 and
RWKV-5 store that of the present one: one minus it).
"""

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from basecap.mixers._contract import Cache, Mixer
from basecap.mixers._parts import token_shift
from basecap.mixers._recipes import Initialiser, ParameterRecipe, Start, constant, values

#: The official trainers: repository and commit.
REPOSITORY = "BlinkDL/RWKV-LM@524481d5099b38d9bc8ef1e89209161b86c8011b"


def depth_ratios(index: int, depth: int) -> tuple[float, float]:
    """Return two ratios for layer `index` of `depth`: one rises from 0 to 1, one falls from 1 to almost 0."""
    return index / max(1, depth - 1), 1.0 - index / depth


def ramp(width: int) -> Tensor:
    """Return [width] float64 from 0 to 1, both included."""
    return torch.arange(width, dtype=torch.float64) / max(1, width - 1)


def mixing_share(hidden: int, power: float, extra: float = 0.0) -> ParameterRecipe:
    """Recipe of a mixing share: 1 - (i / hidden)^power - extra for channel i; never decayed."""
    start = torch.arange(hidden, dtype=torch.float64) / hidden
    less = f" - {extra:.2g}" if extra else ""
    return ParameterRecipe(init=values(1.0 - start**power - extra, f"1 - (i/D)^{power:.3g}{less}"), decay=False)


def scaled_orthogonal(scale: float) -> Initialiser:
    """Orthogonal times scale * sqrt(max(1, rows / columns)); applied to each matrix of a stack."""

    def fill(parameter: Tensor, generator: torch.Generator) -> None:
        rows, columns = parameter.shape[-2:]
        gain = scale * math.sqrt(max(1.0, rows / columns))
        for matrix in parameter.view(-1, rows, columns):
            nn.init.orthogonal_(matrix, gain=gain, generator=generator)

    return Start(f"orthogonal, gain {scale:.4g} sqrt(max(1, rows/columns))", fill)


def shift_delta(x_BTD: Tensor, segments: Tensor | None, last_BD: Tensor | None = None) -> Tensor:
    """Return previous token minus current token, [B, T, D]; the token before the first is `last_BD` or zero.

    `last_BD`, part of the decoding state, is set to the final token.
    """
    previous = token_shift(x_BTD, segments)
    if last_BD is not None and x_BTD.shape[1]:
        previous = torch.cat([last_BD[:, None].to(x_BTD.dtype), x_BTD[:, :-1]], dim=1)
        last_BD.copy_(x_BTD[:, -1])
    return previous - x_BTD


class LowRank(nn.Module):
    """base + act(x @ down) @ up: a low-rank function of the input plus a constant ([..., hidden] -> [..., width])."""

    def __init__(
        self,
        hidden: int,
        rank: int,
        width: int,
        activation: Callable[[Tensor], Tensor] | None = None,
        base: bool = True,
    ):
        super().__init__()
        self.down = nn.Parameter(torch.empty(hidden, rank))
        self.up = nn.Parameter(torch.empty(rank, width))
        self.base = nn.Parameter(torch.empty(width)) if base else None
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dimension."""
        inner = x @ self.down
        out = (inner if self.activation is None else self.activation(inner)) @ self.up
        return out if self.base is None else self.base + out

    def recipe(self, up: Initialiser, base: Initialiser | None = None, lr: float = 1.0) -> dict[str, ParameterRecipe]:
        """Starts at `base` (with learning-rate factor `lr`), because `down` is zero. No weight decay."""
        recipes = {
            "down": ParameterRecipe(init=constant(0.0), decay=False, matrix=True),
            "up": ParameterRecipe(init=up, decay=False, matrix=True),
        }
        if base is not None:
            recipes["base"] = ParameterRecipe(init=base, lr=lr, decay=False)
        return recipes

    def flops(self, length: int) -> float:
        """Floating-point operations over `length` vectors."""
        return 2.0 * length * (self.down.numel() + self.up.numel())


class TimeMix(Mixer):
    """A mixer that sees the token shift of its input and keeps a recurrent state: RWKV of any generation."""

    takes_lengths = True
    continues = True

    @abstractmethod
    def empty_state(self, batch: int) -> Tensor:
        """Return the state before the first token, [batch, ...], in float32 or wider."""

    @abstractmethod
    def mix(
        self,
        x_BTD: Tensor,
        delta_BTD: Tensor,
        state: Tensor | None,
        segments: Tensor | None,
        shared: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return outputs [B, T, D] and the final state.

        Args:
            x_BTD: the input.
            delta_BTD: its token shift: previous minus present token.
            state: the state before the first token; None: as `empty_state`.
            segments: as in `Mixer.forward`.
            shared: as for mixers that set `takes_shared`; empty for others.
        """

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None, shared: dict[str, Tensor] | None = None) -> Tensor:
        """Mix; see `Mixer.forward`."""
        return self.mix(x_BTD, shift_delta(x_BTD, segments), None, segments, {} if shared is None else shared)[0]

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """The state and the last token's input [B, D]; constant in `max_length`."""
        last = next(self.parameters()).new_zeros(batch, self.layer.hidden)
        return Cache(tensors={"last": last, "state": self.empty_state(batch)})

    def step(self, x_B1D: Tensor, cache: Cache, shared: dict[str, Tensor] | None = None) -> Tensor:
        """Mix one more token."""
        return self.prefill(x_B1D, cache, shared)

    def prefill(self, x_BTD: Tensor, cache: Cache, shared: dict[str, Tensor] | None = None) -> Tensor:
        """Mix further tokens chunk by chunk and keep their final state."""
        delta = shift_delta(x_BTD, None, cache.tensors["last"])
        y, state = self.mix(x_BTD, delta, cache.tensors["state"], None, {} if shared is None else shared)
        cache.tensors["state"].copy_(state)
        cache.length += x_BTD.shape[1]
        return y

    def state_bytes(self, length: int) -> int:
        """The state and the last token's input, whatever the length."""
        return self.init_cache(1, length).nbytes


def prefixed(prefix: str, recipes: dict[str, ParameterRecipe]) -> dict[str, ParameterRecipe]:
    """Put `prefix.` before every name."""
    return {f"{prefix}.{name}": recipe for name, recipe in recipes.items()}
