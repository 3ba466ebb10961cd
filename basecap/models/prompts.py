"""Prompts of different lengths: what is refused, and how they become the tokens of one pass."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from basecap.errors import ConfigError
from basecap.models.blocks import BlockCache
from basecap.system.transfers import sent


def refuse_filled(caches: Sequence[BlockCache]) -> None:
    """Raise ConfigError if the caches have seen tokens."""
    if seen := caches[0].mixer.length:
        raise ConfigError(f"the caches have seen {seen} tokens; prefill new ones, or continue with step.")


def lengths_of(prompts: Sequence[Tensor]) -> list[int]:
    """Return the number of tokens of each prompt [T]; raises ConfigError for one without tokens."""
    lengths = [len(prompt) for prompt in prompts]
    if 0 in lengths:
        raise ConfigError(f"prompt {lengths.index(0)} is empty; give prompts with at least one token.")
    return lengths


def padded(rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return rows of tokens padded on the right, [B, T], and where each ends, int64 [B]; None if none is padded."""
    lengths = [len(row) for row in rows]
    last_B = None if len(set(lengths)) == 1 else sent(torch.tensor(lengths) - 1, device)
    return sent(pad_sequence([*rows], batch_first=True), device), last_B


def ends_of(x_BTD: Tensor, last_B: Tensor | None) -> Tensor:
    """Return the activations of the last token of each row, [B, D], from what `padded` returns."""
    if last_B is None:
        return x_BTD[:, -1]
    return x_BTD[torch.arange(len(last_B), device=last_B.device), last_B]
