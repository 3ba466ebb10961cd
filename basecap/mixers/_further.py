"""Further tokens of sequences whose keys and values are kept by position: in turn, or at once among all tokens."""

import torch
from torch import Tensor

from basecap.mixers._contract import Cache

#: Tokens that attend at once in the time of a step, on a CPU and elsewhere, where calls are slow.
TOKENS_OF_A_STEP, TOKENS_OF_A_STEP_ON_CPU = 64, 8


class Further:
    """Places of further tokens among all tokens of a cache, from before these are stored.

    A causal mixer attends from them at once as `forward` does from all tokens. Other queries are zero, and their
    outputs are dropped.
    """

    def __init__(self, cache: Cache, x_BTD: Tensor):
        B, T, _ = x_BTD.shape
        self.length = cache.length + T
        self._row = torch.arange(B, device=x_BTD.device)[:, None]
        self._place = cache.start + torch.arange(T, device=x_BTD.device)

    @staticmethod
    def at_once(cache: Cache, x_BTD: Tensor) -> bool:
        """Return whether that takes less time than steps: for at most `TOKENS_OF_A_STEP` tokens for each new one."""
        T, tokens = x_BTD.shape[1], TOKENS_OF_A_STEP_ON_CPU if x_BTD.device.type == "cpu" else TOKENS_OF_A_STEP
        return T > 1 and cache.length + T <= tokens * T

    def spread(self, x: Tensor) -> Tensor:
        """Return [B, length, ...]: further tokens [B, T, ...] in their places, 0 elsewhere."""
        whole = x.new_zeros(len(x), self.length, *x.shape[2:])
        whole[self._row, self._place] = x
        return whole

    def pick(self, whole: Tensor) -> Tensor:
        """Return [B, T, ...], what is in the places of the further tokens."""
        return whole[self._row, self._place]
