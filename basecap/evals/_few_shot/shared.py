"""Answers to one context, such as the choices of a question: the context is read once, and its state copied."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from basecap.mixers import choose_way, tokens_of_a_pass
from basecap.models.language_model import LanguageModel

#: A token read alone costs as much as this many tokens read with their neighbours.
STEP_COST = 2

#: Maximum bytes of decoding state in a batch.
STATE = 2**31


@dataclass(frozen=True)
class SharedContext:
    """A context and its answers.

    Attributes:
        before: tokens of the context.
        indices: of the answers, among all that is asked.
        answers: their tokens, at least one each.
    """

    before: Sequence[int]
    indices: Sequence[int]
    answers: Sequence[Sequence[int]]

    @property
    def saves(self) -> bool:
        """Whether reading the context once saves more than reading the answers token by token costs."""
        read = {tuple(answer[:-1]) for answer in self.answers}
        stepped = sum(len(answer) - 1 for answer in self.answers)
        return (len(read) - 1) * len(self.before) > (STEP_COST - 1) * stepped

    @property
    def longest(self) -> int:
        """Tokens of the longest answer."""
        return max(map(len, self.answers))


def batches_of(contexts: Sequence[SharedContext], model: LanguageModel, room: int) -> Iterator[list[SharedContext]]:
    """Yield batches of contexts, those of the longest first.

    A batch is one context, or its contexts have at most `room` padded tokens, its answers too, and its state at most
    `STATE` bytes: that of the contexts, or where answers are read token by token that of the answers.
    """
    state_bytes = functools.cache(model.state_bytes)
    part, rows, width = list[SharedContext](), 0, 0
    for context in sorted(contexts, key=lambda context: -len(context.before)):
        longest = len((*part[:1], context)[0].before)
        rows, width = rows + len(context.answers), max(width, context.longest)
        held = len(part) + 1 if model.continues else rows
        fits = max((len(part) + 1) * longest, rows * width) <= room and held * state_bytes(longest + width) <= STATE
        if part and not (fits and longest - 1 + width <= model.config.max_length):
            yield part
            part, rows, width = [], len(context.answers), context.longest
        part.append(context)
    if part:
        yield part


class Answers:
    """The answers of a batch of contexts, each after the last tokens of its context, which are read with it.

    Attributes:
        prompts: what is read of each context before, int64 [T] each.
        owner: int64 [answers], the context of each.
        tokens: int64 [answers, T], padded; those of the most tokens first.
        row: int64 [predicted], in which answer a token is predicted.
        place: int64 [predicted], ascending: after which of its tokens.
        targets: int64 [predicted].
        indices: of the answer of each predicted token, int64 [predicted].
    """

    def __init__(self, contexts: Sequence[SharedContext], kept: Sequence[int]):
        """Take a batch, and how many tokens of each context are read before its answers, fewer than all."""
        self.prompts = [torch.tensor(context.before[:count]) for context, count in zip(contexts, kept, strict=True)]
        answers = [
            (owner, index, (*contexts[owner].before[count:], *answer), len(answer))
            for owner, count in enumerate(kept)
            for index, answer in zip(contexts[owner].indices, contexts[owner].answers, strict=True)
        ]
        answers.sort(key=lambda answer: -len(answer[2]))
        predicted = sorted(
            (place - 1, row, tokens[place], index)
            for row, (_, index, tokens, count) in enumerate(answers)
            for place in range(len(tokens) - count, len(tokens))
        )
        width = len(answers[0][2]) - 1
        self.owner = torch.tensor([owner for owner, *_ in answers])
        self.tokens = torch.tensor([[*tokens[:-1], *[0] * (width + 1 - len(tokens))] for _, _, tokens, _ in answers])
        self.place, self.row, self.targets, indices = torch.tensor(predicted).T.contiguous()
        self.indices: np.ndarray = indices.numpy()

    def going(self, place: int) -> int:
        """Return how many answers, the first ones, have a token to predict at `place`, if none is before the last."""
        return int((self.place == place).sum())


def kept_tokens(contexts: Sequence[SharedContext], model: LanguageModel, room: int, device: torch.device) -> list[int]:
    """Return how many tokens of each context are read before its answers.

    The last one is read with them. Where contexts of different lengths take several passes, more may be: the rest of
    each context beyond the shortest one is read up to a multiple of a power of two, the one that costs least.

    Args:
        contexts: a batch.
        model: that reads them.
        room: most padded tokens of the answers with what is read with them.
        device: of the model.
    """
    lengths = [len(context.before) - 1 for context in contexts]
    longest, rows = max(context.longest for context in contexts), sum(len(context.answers) for context in contexts)
    most = min(model.config.max_length, room // rows)
    if not model.continues or _padded(model, lengths, max(lengths) + longest):
        return lengths
    shortest, best, least = min(lengths), lengths, float("inf")
    for power in range((max(lengths) - shortest).bit_length() + 1):
        kept = [shortest + ((length - shortest) >> power << power) for length in lengths]
        width = max(length - count for length, count in zip(lengths, kept, strict=True)) + longest
        passes = functools.reduce(int.__or__, (count - shortest for count in kept)).bit_count()
        cost = passes * tokens_of_a_pass(device) + sum(kept) + rows * width
        if cost < least and (power == 0 or (width <= most and max(kept) + width <= model.config.max_length)):
            best, least = kept, cost
    return best


def _padded(model: LanguageModel, lengths: Sequence[int], room: int) -> bool:
    """Return whether contexts of these lengths are read in one pass, as padding is not seen."""
    return choose_way(model.init_cache(1, room), lengths, model.continues) == "padded"
