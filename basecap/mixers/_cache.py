"""The decoding state of a layer, and a step for sequences of different lengths."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.system.transfers import sent

#: Tokens that cost about as much as another pass, on a CPU and elsewhere, and so the most padding of a pass.
PADDING, PADDING_ON_CPU = 2_048, 64

#: How prompts of different lengths are read, see `fill_rows`.
Way = Literal["padded", "pieces", "by length"]
#: Which prompts a pass reads, and how many tokens of each.
Pass = tuple[list[int], list[int]]
#: Takes how many tokens of each prompt a pass reads, and returns how many prompts it may have, at least one.
Rows = Callable[[int], int]


@dataclass(kw_only=True)
class Cache:
    """The decoding state of one layer: named tensors (batch first) and the number of tokens so far.

    Attributes:
        tensors: the state; a tensor that is expanded along the batch is shared by all sequences.
        length: tokens so far in every sequence; where they differ, at least those of the longest one.
        lengths: int64 [B], the tokens so far in each sequence where these may differ, else None. `step_rows`, the
            caller of `step`, adds 1 to them after it.
        by_position: whether every tensor has one place for each position, or for a block of them. Places after the
            tokens of a sequence are then not read before they are written again, so that `prefill` may fill an empty
            cache with prompts that are padded on the right.
    """

    tensors: dict[str, Tensor]
    length: int = 0
    lengths: Tensor | None = None
    by_position: bool = False

    @property
    def start(self) -> "int | Tensor":
        """The position of the next token: `length`, or int64 [B, 1] where sequences differ."""
        return self.length if self.lengths is None else self.lengths[:, None]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def keep_last(self, name: str, state: Tensor) -> None:
        """Add a tensor that is about the last tokens, such as the inputs of a short convolution."""
        self.tensors[name], self.by_position = state, False

    def rows(self, start: int, end: int) -> "Cache":
        """Return a view of the state of sequences `start` to `end`."""
        tensors = {name: tensor[start:end] for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, lengths=None if self.lengths is None else self.lengths[start:end])

    def write(self, part: "Cache", start: int) -> None:
        """Copy the state `part` to the sequences from `start`, and its number of tokens."""
        for name, tensor in part.tensors.items():
            kept = self.tensors[name][start : start + len(tensor)]
            if kept.data_ptr() != tensor.data_ptr():
                kept.copy_(tensor)
        self.length = part.length

    def take(self, rows: Tensor) -> "Cache":
        """Return a copy of the state of the sequences `rows`, int64 indices in any order, some of them repeated."""
        tensors = {
            name: tensor[:1].expand(len(rows), *tensor.shape[1:]) if _is_shared(tensor) else tensor[rows]
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=tensors, lengths=None if self.lengths is None else self.lengths[rows])

    def put(self, part: "Cache", rows: Tensor) -> None:
        """Copy the tensors of `part` to the sequences `rows`, int64 indices without repetition; no lengths.

        Raises:
            ConfigError: a tensor of `part` has another shape than it was made with.
        """
        for name, tensor in part.tensors.items():
            kept = self.tensors[name]
            if kept.shape[1:] != tensor.shape[1:]:
                raise ConfigError(
                    f"the decoding state {name!r} changes its shape from {list(kept.shape[1:])} to "
                    f"{list(tensor.shape[1:])} for each sequence; sequences of different lengths need one shape, so "
                    "write into the tensor of init_cache."
                )
            if not _is_shared(kept):
                kept[rows] = tensor.to(kept.dtype)

    def set_lengths(self, lengths_B: Tensor, longest: int) -> None:
        """Set how many tokens each sequence has so far, int64 [B], and the largest of these numbers."""
        self.length, self.lengths = longest, lengths_B


def _is_shared(tensor: Tensor) -> bool:
    return len(tensor) > 1 and tensor.stride(0) == 0


def step_rows(layer: Any, x_B1D: Tensor, cache: Cache, shared: dict[str, Tensor] | None = None) -> Tensor:
    """Return `layer.step(x, cache)` for sequences that may have different lengths, `cache.lengths`.

    A layer that does not declare `takes_lengths` steps once for each length, with the sequences that have it and a
    cache as it knows them.

    Args:
        layer: a mixer, or the other half of a block.
        x_B1D: the next token of each sequence.
        cache: updated in place.
        shared: third argument of `step`, for mixers that declare `takes_shared`.

    Raises:
        ConfigError: lengths differ, and the state of a layer without `takes_lengths` changes its shape.
    """
    extra = () if shared is None else (shared,)
    if cache.lengths is None:
        return layer.step(x_B1D, cache, *extra)
    if getattr(layer, "takes_lengths", False):
        y_B1D: Tensor = layer.step(x_B1D, cache, *extra)
    else:
        y_B1D = _step_by_length(layer, x_B1D, cache, cache.lengths, shared)
        cache.length += 1
    cache.lengths = cache.lengths + 1
    return y_B1D


def _step_by_length(
    layer: Any, x_B1D: Tensor, cache: Cache, lengths_B: Tensor, shared: dict[str, Tensor] | None
) -> Tensor:
    lengths, device = lengths_B.tolist(), lengths_B.device
    groups, outputs, stored = _by_length(lengths), [], list[dict[str, Tensor]]()
    for group in groups:
        rows = torch.tensor(group, device=device)
        part = cache.take(rows)
        part.length, part.lengths = lengths[group[0]], None
        own = {name: value[rows] for name, value in (shared or {}).items()}
        outputs.append(layer.step(x_B1D[rows], part, *(() if shared is None else (own,))))
        stored.append(own)
        cache.put(part, rows)
    order = _order(groups, device)
    if shared is not None:
        shared.update({name: torch.cat([own[name] for own in stored])[order] for name in stored[0]})
    return torch.cat(outputs)[order]


def tokens_of_a_pass(device: torch.device) -> int:
    """Return how many tokens cost about as much as another pass."""
    return PADDING_ON_CPU if device.type == "cpu" else PADDING


def every_row(count: int) -> int:
    """Let a pass have any number of prompts; see `Rows`."""
    return sys.maxsize


def choose_way(caches: Sequence[Any], lengths: Sequence[int], continues: bool, rows: Rows = every_row) -> Way:
    """Return how to read prompts of these lengths, see `fill_rows`: padded if all caches allow it, else in few passes.

    Args:
        caches: of a model's layers or blocks.
        lengths: tokens of each prompt.
        continues: whether further tokens can be read into caches that are not empty.
        rows: how many prompts a pass may have.
    """
    if len(set(lengths)) > 1 and all(cache.by_position for cache in caches):
        return "padded"
    return "pieces" if continues and len(_pieces(lengths, rows)) < len(_by_length(lengths, rows)) else "by length"


def fill_rows(
    caches: Sequence[Any],
    lengths: Sequence[int],
    read: Callable[[list[int], list[int], list[int], list[Any]], Tensor],
    device: torch.device,
    *,
    way: Way,
    rows: Rows = every_row,
) -> Tensor:
    """Fill empty caches with prompts of different lengths and return what they end with, in the order of `lengths`.

    - "padded": prompts of similar lengths are read together, padded on the right. The caches must be `by_position`.
    - "pieces": all prompts are, none padded: first as many tokens as the shortest one has, then what the others have
      more, in powers of two, the largest first. These are few passes for any number of lengths.
    - "by length": those of one length are.

    Args:
        caches: of a model's layers or blocks, with `take`, `put` and `set_lengths`.
        lengths: tokens of each prompt, at least 1.
        read: takes the indices of prompts, where to begin and where to end in each, and caches of their own, which are
            empty where it begins at 0; returns a tensor [prompts, ...] of the last tokens.
        device: of the caches.
        way: as above.
        rows: how many prompts a pass may have.
    """
    done, last = [0] * len(lengths), torch.empty(0)
    for places, counts in _passes(lengths, way, device, rows):
        index, starts = sent(torch.tensor(places), device), [done[row] for row in places]
        alone = len(places) == len(lengths)
        part = [*caches] if alone else [cache.take(index) for cache in caches]
        if any(starts):
            _set_lengths(part, starts, device)
        for row, count in zip(places, counts, strict=True):
            done[row] += count
        ends = read(places, starts, [done[row] for row in places], part)
        if not alone:
            for cache, own in zip(caches, part, strict=True):
                cache.put(own, index)
        last = last if len(last) else ends.new_empty(len(lengths), *ends.shape[1:])
        last[index] = ends
    if len(set(lengths)) > 1:
        _set_lengths(caches, lengths, device)
    return last


def _set_lengths(caches: Sequence[Any], lengths: Sequence[int], device: torch.device) -> None:
    lengths_B = sent(torch.tensor(lengths), device)
    for cache in caches:
        cache.set_lengths(lengths_B, max(lengths))


def _passes(lengths: Sequence[int], way: Way, device: torch.device, rows: Rows) -> list[Pass]:
    if way == "pieces":
        return _pieces(lengths, rows)
    groups = _by_length(lengths, rows) if way == "by length" else _similar(lengths, device, rows)
    return [(group, [lengths[row] for row in group]) for group in groups]


def _pieces(lengths: Sequence[int], rows: Rows) -> list[Pass]:
    """Return passes over pieces of prompts."""
    shortest, passes = min(lengths), [([*range(len(lengths))], min(lengths))]
    for power in reversed(range((max(lengths) - shortest).bit_length())):
        passes.append(([row for row, length in enumerate(lengths) if (length - shortest) >> power & 1], 1 << power))
    return [(part, [count] * len(part)) for group, count in passes for part in _parts(group, rows(count))]


def _parts(group: list[int], most: int) -> list[list[int]]:
    return [group[first : first + most] for first in range(0, len(group), most)]


def _similar(lengths: Sequence[int], device: torch.device, rows: Rows) -> list[list[int]]:
    """Return the indices of similar lengths together, as many as a pass may have, with little padding.

    They are in ascending order, so that all of them together are the whole batch.
    """
    allowed, groups, padding = tokens_of_a_pass(device), list[list[int]](), 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest = lengths[groups[-1][0]] if groups else 0
        padding += longest - lengths[row]
        if groups and padding <= allowed and len(groups[-1]) < rows(longest):
            groups[-1].append(row)
        else:
            groups.append([row])
            padding = 0
    return [sorted(group) for group in groups]


def _by_length(lengths: Sequence[int], rows: Rows = every_row) -> list[list[int]]:
    """Return the indices of equal lengths together, as many as a pass may have."""
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        groups.setdefault(length, []).append(row)
    return [part for length, group in groups.items() for part in _parts(group, rows(length))]


def _order(groups: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the indices that bring sequences from the order of `groups` into their own."""
    return torch.tensor([row for group in groups for row in group], device=device).argsort()
