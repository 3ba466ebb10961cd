"""The proof that a batch of prompts of different lengths decodes as each prompt alone."""

from collections.abc import Iterator

import torch
from torch import Tensor

from basecap.mixers import Cache, fill_rows
from basecap.testing._harness import Check, Harness, Layers

#: Steps after the prompts: more than three windows or chunks of `Mixer.tiny`.
STEPS = 50
#: Which row of the harness each prompt begins.
ROWS = [0, 1, 0, 1]


@torch.no_grad()
def unequal_prompts(harness: Harness) -> Iterator[Check]:
    """Prompts of different lengths in one batch, then steps, give the outputs of forward for each."""
    found = decode_each(harness.layers, harness.x, harness.length)
    expected = each_from(harness.y, harness.length)
    yield harness.same("unequal prompts", found, expected, unequal_broken(harness))
    if all(mixer.continues for mixer in harness.layers.mixers):
        found = decode_each(harness.layers, harness.x, harness.length, at_once=True)
        broken = (
            f"{harness.place('prefill')} after prompts of {_lengths(harness.length)} tokens in one batch differs from "
            "forward; leave out continues, or read cache.start, the position of each sequence"
        )
        yield harness.same("unequal prompts, then the rest", found, expected, broken)


def unequal_broken(harness: Harness) -> str:
    """Return what is wrong when prompts of different lengths decode wrongly, for the author of the mixer."""
    advice = "leave out takes_lengths, or read cache.start, the position of each sequence, instead of cache.length"
    return (
        f"{harness.place('step')} gives another output for prompts of {_lengths(harness.length)} tokens in one batch "
        f"than for each alone{f'; {advice}' if harness.choice.mixer.takes_lengths else ''}"
    )


def decode_each(layers: Layers, x_BTD: Tensor, length: int, at_once: bool = False) -> Tensor:
    """Return the outputs at the last token of each prompt and at those after it.

    The prompts are read length by length and what follows one by one, or in pieces and what follows at once.

    The outputs are [4, 1 + steps, D].
    """
    lengths, x = _lengths(length), x_BTD[ROWS]
    steps = _steps(length)
    caches = layers.init_cache(len(lengths), max(lengths) + steps)

    def read(rows: list[int], starts: list[int], count: int, part: list[Cache]) -> Tensor:
        own = torch.stack([x[row, start : start + count] for row, start in zip(rows, starts, strict=True)])
        return layers.prefill(own, part)[:, -1:]

    outputs = [fill_rows(caches, lengths, read, x.device, pieces=at_once)]
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


def _steps(length: int) -> int:
    return min(STEPS, length - length // 2)
