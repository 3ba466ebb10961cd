"""Prompts of different lengths: what is refused, and how they become the tokens of one pass."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from basecap.errors import ConfigError
from basecap.mixers import choose_way, fill_rows
from basecap.models.blocks import BlockCache
from basecap.system.transfers import sent

#: Most tokens of a pass over several prompts.
AT_ONCE = 65_536


def refuse_filled(caches: Sequence[BlockCache]) -> None:
    """Raise ConfigError if the caches have seen tokens."""
    if seen := caches[0].mixer.length:
        raise ConfigError(f"the caches have seen {seen} tokens; prefill new ones, or continue with step.")


def rows_of(at_once: int, reads: Callable[[int], int]) -> Callable[[int], int]:
    """Return how many prompts a pass has, as a function of the tokens of each.

    Args:
        at_once: most tokens in memory, unless one prompt has more.
        reads: how many tokens of a prompt are in memory, of those that it has.
    """
    return lambda count: max(1, at_once // reads(count))


def read_each(
    prompts: Sequence[Tensor],
    caches: list[BlockCache],
    read: Callable[[Tensor, Tensor | None, list[BlockCache]], Tensor],
    device: torch.device,
    *,
    continues: bool,
    rows: Callable[[int], int],
) -> Tensor:
    """Fill empty caches with prompts of any lengths [T] and return what they end with, in their order.

    Args:
        prompts: on any device.
        caches: of a model on `device`.
        read: takes tokens as `padded` returns them, and caches; see `fill_rows`.
        device: of the model.
        continues: whether further tokens can be read into caches that are not empty.
        rows: how many prompts a pass may have.
    """
    lengths = lengths_of(prompts)

    def part_of(places: list[int], starts: list[int], ends: list[int], part: list[BlockCache]) -> Tensor:
        own = [prompts[place][start:end] for place, start, end in zip(places, starts, ends, strict=True)]
        return read(*padded(own, device), part)

    way = choose_way(caches, lengths, continues, rows)
    return fill_rows(caches, lengths, part_of, device, way=way, rows=rows)


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
