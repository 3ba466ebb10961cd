"""The proof that a batch of prompts of different lengths decodes as each prompt alone."""

from collections.abc import Iterator

import torch
from torch import Tensor

from basecap.mixers import Cache, Way, fill_rows
from basecap.testing._harness import Check, Harness, Layers

#: Steps after the prompts: more than three windows or chunks of `Mixer.tiny`.
STEPS = 50
#: Which row of the harness each prompt begins.
ROWS = [0, 1, 0, 1]


@torch.no_grad()
def unequal_prompts(harness: Harness) -> Iterator[Check]:
    """Prompts of different lengths in one batch, then steps, give the outputs of forward for each."""
    expected = each_from(harness.y, harness.length)
    yield _unequal(harness, expected, way_of(harness.layers, harness.length))
    if all(mixer.continues for mixer in harness.layers.mixers):
        found = decode_each(harness.layers, harness.x, harness.length, "pieces", at_once=True)
        broken = (
            f"{harness.place('prefill')} after prompts of {_lengths(harness.length)} tokens in one batch differs from "
            "forward; leave out continues, or read cache.start, the position of each sequence"
        )
        yield harness.same("unequal prompts, then the rest", found, expected, broken)


def _unequal(harness: Harness, expected: Tensor, way: Way) -> Check:
    """Return the check of prompts read in `way`, or of prompts that are not padded where that fails too."""
    found = decode_each(harness.layers, harness.x, harness.length, way)
    if way == "by length":
        return harness.same("unequal prompts", found, expected, unequal_broken(harness))
    padded = harness.same("unequal prompts", found, expected, _padded_broken(harness))
    plain = padded if padded.passed else _unequal(harness, expected, "by length")
    return padded if plain.passed else plain


def unequal_broken(harness: Harness) -> str:
    """Return what is wrong when prompts of different lengths decode wrongly, for the author of the mixer."""
    advice = "leave out takes_lengths, or read cache.start, the position of each sequence, instead of cache.length"
    return (
        f"{harness.place('step')} gives another output for prompts of {_lengths(harness.length)} tokens in one batch "
        f"than for each alone{f'; {advice}' if harness.choice.mixer.takes_lengths else ''}"
    )


def _padded_broken(harness: Harness) -> str:
    return (
        f"prompts of {_lengths(harness.length)} tokens in one batch, padded on the right, decode otherwise than each "
        f"alone; {harness.place('init_cache')} must not declare by_position where a tensor is about the last tokens"
    )


def way_of(layers: Layers, length: int) -> Way:
    """Return how `decode_each` may read the prompts: padded if the caches allow it."""
    return "padded" if all(cache.by_position for cache in layers.init_cache(1, _room(length))) else "by length"


def decode_each(layers: Layers, x_BTD: Tensor, length: int, way: Way, at_once: bool = False) -> Tensor:
    """Return the outputs at the last token of each prompt, read in `way`, and at those after it, [4, 1 + steps, D].

    What follows is read one by one, or at once. Prompts are padded with other inputs, not with zeros.
    """
    lengths, x = _lengths(length), x_BTD[ROWS]
    steps = _steps(length)
    caches = layers.init_cache(len(lengths), _room(length))

    def read(rows: list[int], starts: list[int], ends: list[int], part: list[Cache]) -> Tensor:
        counts = torch.tensor(ends, device=x.device) - torch.tensor(starts, device=x.device)
        own = [
            torch.cat([x[row, start:end], -x[row, end:]]) for row, start, end in zip(rows, starts, ends, strict=True)
        ]
        most = int(counts.max())
        y = layers.prefill(torch.stack([one[:most] for one in own]), part)
        return y[torch.arange(len(rows), device=x.device), counts - 1, None]

    outputs = [fill_rows(caches, lengths, read, x.device, way=way)]
    row, start = torch.arange(len(x), device=x.device), torch.tensor(lengths, device=x.device)
    if at_once:
        outputs.append(layers.prefill(x[row[:, None], start[:, None] + torch.arange(steps, device=x.device)], caches))
    else:
        outputs += [layers.step(x[row, start + step, None], caches) for step in range(steps)]
    return torch.cat(outputs, dim=1)


def each_from(y_BTD: Tensor, length: int) -> Tensor:
    """Return the part of forward's output that `decode_each` has."""
    steps = _steps(length)
    return torch.stack([y_BTD[row, n - 1 : n + steps] for row, n in zip(ROWS, _lengths(length), strict=True)])


def _lengths(length: int) -> list[int]:
    """Return the lengths of the prompts, two of them equal."""
    return [1, length // 3, length // 3, length // 2]


def _room(length: int) -> int:
    return max(_lengths(length)) + _steps(length)


def _steps(length: int) -> int:
    return min(STEPS, length - length // 2)
