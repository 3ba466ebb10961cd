"""Losses of the tokens of rows, in passes of few shapes where a model compiles them."""

import itertools
from typing import Any

import torch
from torch import Tensor

from basecap.evals._contract import Context
from basecap.models.language_model import LanguageModel

#: Shortest padded length. Rows are padded to powers of two from here, so that there are few different shapes.
SHORTEST = 64
#: A compiled model reads rows of its longest length, and of the power of two that is at most this share of it.
SHORT = 1 / 4


def padded_lengths(longest: int) -> list[int]:
    """Return the lengths that rows are padded to in models of `longest` tokens, ascending.

    >>> padded_lengths(200)
    [64, 128, 200]
    """
    powers = itertools.takewhile(lambda length: length < longest, (SHORTEST << n for n in itertools.count()))
    return [*powers, longest]


def pass_lengths(model: LanguageModel) -> list[int]:
    """Return the lengths that rows are padded to for a model, ascending: few for one that compiles each shape."""
    longest = model.config.max_length
    lengths = padded_lengths(longest)
    if not model.compiled:
        return lengths
    return [*[length for length in lengths if length <= SHORT * longest][-1:], longest]


def token_losses(
    model: LanguageModel, context: Context[Any], inputs: Tensor, targets: Tensor, tokens_per_pass: int
) -> Tensor:
    """Return the loss of each token in nats, float64 [B, T] on the context's device, zero where the target is negative.

    A compiled model reads passes of one of its lengths, filled up with rows whose losses do not count: every loss
    depends on its own row alone. They are replayed where the context's `replays` serve that model. Rows of other models
    are one pass.

    Args:
        model: on the context's device.
        context: of the evaluation.
        inputs: int64 [B, T] on any device.
        targets: int64 [B, T] on any device.
        tokens_per_pass: padded tokens of a pass of a compiled model.
    """
    count, width = inputs.shape
    longer = [length for length in pass_lengths(model) if length >= width] if model.compiled else []
    if not longer:
        with context.autocast():
            return model.token_losses(inputs.to(context.device), targets.to(context.device)).double()
    rows, found = max(1, tokens_per_pass // longer[0]), []
    replays = context.replays if context.replays is not None and context.replays.serves(model) else None

    def run(batch: Tensor) -> Tensor:
        with context.autocast():
            return model.token_losses(*batch, few_shapes=True)

    for first in range(0, count, rows):
        # Pinned memory, as a copy from other memory would wait for the passes before.
        whole = torch.zeros(2, rows, longer[0], dtype=torch.int64, pin_memory=context.device.type == "cuda")
        whole[1] = -1
        part = slice(first, first + rows)
        own = whole[:, : len(inputs[part]), :width]
        own[0], own[1] = inputs[part], targets[part]
        ran = run(whole.to(context.device, non_blocking=True)) if replays is None else replays.losses(run, whole)
        found.append(ran[: own.shape[1], :width].double())  # a copy, as the next pass may write to the same memory
    return torch.cat(found)
