"""Answers to one context, such as the choices of a question: the context is read once, and its state copied."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from basecap.models.language_model import Caches, LanguageModel

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
        """Tokens of the longest answer that the model reads."""
        return max(map(len, self.answers)) - 1


def batches_of(contexts: Sequence[SharedContext], model: LanguageModel, room: int) -> Iterator[list[SharedContext]]:
    """Yield batches of contexts, those of the longest first.

    Padded to its longest, a batch has at most `room` tokens, its state at most `STATE` bytes, unless it is one context.
    """
    part: list[SharedContext] = []
    for context in sorted(contexts, key=lambda context: -len(context.before)):
        rows = sum(len(one.answers) for one in (*part, context))
        length = len((*part, context)[0].before) + max(one.longest for one in (*part, context))
        fits = rows * length <= room and rows * model.state_bytes(length) <= STATE
        if part and not (fits and length <= model.config.max_length):
            yield part
            part = []
        part.append(context)
    if part:
        yield part


class Answers:
    """The answers of a batch of contexts, the longest first.

    Attributes:
        prompts: the tokens of each context.
        owner: int64 [answers], the context of each.
        steps: tokens of the longest answer.
    """

    def __init__(self, contexts: Sequence[SharedContext], device: torch.device):
        self.prompts = [torch.tensor(context.before, device=device) for context in contexts]
        rows = [
            (place, index, answer)
            for place, context in enumerate(contexts)
            for index, answer in zip(context.indices, context.answers, strict=True)
        ]
        rows.sort(key=lambda row: -len(row[2]))
        self.owner = torch.tensor([place for place, _, _ in rows], device=device)
        self.steps = len(rows[0][2])
        self._indices = np.array([index for _, index, _ in rows])
        self._lengths = [len(answer) for _, _, answer in rows]
        padded = [[*answer, *[0] * (self.steps - len(answer))] for _, _, answer in rows]
        self._tokens = torch.tensor(padded, device=device)

    def init_cache(self, model: LanguageModel) -> Caches:
        """Return empty decoding states of the contexts, with room for the longest and its answer."""
        return model.init_cache(len(self.prompts), max(map(len, self.prompts)) + self.steps - 1)

    def going(self, step: int) -> int:
        """Return how many answers, the first ones, have a token at `step`."""
        return sum(length > step for length in self._lengths)

    def tokens(self, step: int) -> Tensor:
        """Return the tokens of all answers at `step`: int64 [answers], 0 after the end of an answer."""
        return self._tokens[:, step]

    def owners(self) -> np.ndarray:
        """Return the index of the answer of each predicted token, step by step."""
        return np.concatenate([self._indices[: self.going(step)] for step in range(self.steps)])
