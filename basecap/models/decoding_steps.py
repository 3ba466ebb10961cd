"""The steps that write text, from Python or as a CUDA graph: few sequences wait for Python to launch small kernels."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from basecap.models.language_model import Caches, LanguageModel
from basecap.system.cuda_graph import capture

#: Takes logits [B, vocab] and a number from 0 to 1 for each row; returns the tokens [B].
Choose = Callable[[Tensor, Tensor], Tensor]
Capture = Callable[[Callable[[], object]], Callable[[], None]]

#: Steps that must follow for a capture, which takes as long as a few of them, to be worth it.
LEAST = 32
#: Tokens of the smallest room, see `GraphSteps`.
SMALLEST = 256

logger = logging.getLogger("basecap.study")


class Lengths(NamedTuple):
    """How many tokens sequences have: int64 [B], those of the longest, and how many it can have."""

    each_B: Tensor
    longest: int
    most: int


class Steps(Protocol):
    """Steps of a model on caches, which hold what was read so far."""

    def __call__(self, chosen_B: Tensor, draws_B: Tensor) -> Tensor:
        """Read one more token of each sequence, int64 [B], and return the next ones, chosen with the draws [B]."""

    def take(self, rows: Tensor) -> "Steps":
        """Return the steps of the sequences `rows`, int64 indices."""

    def drops(self, going: int, rows: int) -> bool:
        """Whether to `take` the sequences that go on, `going` of `rows`."""


def steps_of(model: LanguageModel, caches: Caches, choose: Choose, lengths: Lengths) -> Steps:
    """Return how to write: as a CUDA graph on a GPU where that is possible and worth it, else from Python.

    Logs once, in one sentence, why a model on a GPU has no graph.

    Args:
        model: any language model.
        caches: of sequences that have at least one token each.
        choose: the next tokens.
        lengths: tokens in the caches; `most` is at most their capacity.
    """
    if not _on_gpu(model) or lengths.most - lengths.longest < LEAST:
        return PythonSteps(model, caches, choose)
    if (reason := refusal(model)) is not None:
        _from_python(reason)
        return PythonSteps(model, caches, choose)
    return GraphSteps(model, caches, choose, lengths)


def _on_gpu(model: LanguageModel) -> bool:
    return model.embedding.weight.is_cuda


def refusal(model: LanguageModel) -> str | None:
    """Return why no step of this model can be a CUDA graph, or None."""
    parts = [part for block in model._blocks for part in (block.mixer, block.feed_forward) if part is not None]
    for part in parts:
        if not getattr(part, "takes_lengths", False):
            return f"{type(part).__name__} does not take sequences of different lengths (takes_lengths)"
    return None


@cache
def _from_python(reason: str) -> None:
    logger.warning("Text is written from Python, more slowly than as a CUDA graph, because %s.", reason)


class PythonSteps:
    """Steps that are launched from Python."""

    def __init__(self, model: LanguageModel, caches: Caches, choose: Choose):
        self._model, self._caches, self._choose = model, caches, choose

    def __call__(self, chosen_B: Tensor, draws_B: Tensor) -> Tensor:
        """Step; see `Steps`."""
        return self._choose(self._model.step(chosen_B[:, None], self._caches), draws_B)

    def take(self, rows: Tensor) -> "PythonSteps":
        """Return the steps of some sequences; see `Steps`."""
        return PythonSteps(self._model, [own.take(rows) for own in self._caches], self._choose)

    def drops(self, going: int, rows: int) -> bool:
        """Whether any sequence has ended: each costs time."""
        return going < rows


class GraphSteps:
    """Steps that are replayed from a CUDA graph, whose kernels have the sizes and places of its capture.

    The graph reads the number of tokens of each sequence from a tensor, `Cache.lengths`. Attention reads a room of the
    caches that has at least these tokens, behind a mask. When it is full, the next graph has twice the room.
    The first step of each room runs from Python: it compiles, tunes and allocates.
    """

    def __init__(
        self, model: LanguageModel, caches: Caches, choose: Choose, lengths: Lengths, capture: Capture = capture
    ):
        """Take what `steps_of` does; `capture` returns the replay of what it is given, without running it."""
        self._model, self._caches, self._choose, self._capture = model, caches, choose, capture
        self._longest, self._most = lengths.longest, lengths.most
        self._lengths_B = lengths.each_B.clone()
        self._chosen_B, self._draws_B = torch.empty_like(self._lengths_B), self._lengths_B.double()
        self._room, self._started = 0, False
        self._replay: Callable[[], None] | None = None
        self._captures = True

    def __call__(self, chosen_B: Tensor, draws_B: Tensor) -> Tensor:
        """Step; see `Steps`. What it returns is valid until the next call."""
        self._chosen_B.copy_(chosen_B)
        self._draws_B.copy_(draws_B)
        self._enter_room()
        if self._replay is None and self._started and self._captures:
            self._try_capture()
        if self._replay is None:
            before = _places(self._caches)
            self._step()
            if self._captures and _places(self._caches) != before:
                self._give_up("a layer puts new tensors into its decoding state instead of writing into those it has")
        else:
            self._replay()
        self._started = True
        self._longest += 1
        return self._chosen_B

    def take(self, rows: Tensor) -> "GraphSteps":
        """Return the steps of some sequences; see `Steps`."""
        self._set_lengths(self._longest)
        lengths = Lengths(self._lengths_B[rows], self._longest, self._most)
        taken = GraphSteps(self._model, [own.take(rows) for own in self._caches], self._choose, lengths, self._capture)
        taken._captures = self._captures
        return taken

    @property
    def captured(self) -> bool:
        """Whether the last step was a graph."""
        return self._replay is not None

    def drops(self, going: int, rows: int) -> bool:
        """Whether half of the sequences have ended: a new graph costs more than a few sequences."""
        return 2 * going <= rows

    def _enter_room(self) -> None:
        """Choose the room of the next step, and drop the graph of a smaller one."""
        if self._longest < self._room:
            return
        self._room = min(self._most, max(SMALLEST, 1 << (self._longest + LEAST).bit_length()))
        self._replay, self._started = None, False

    def _try_capture(self) -> None:
        with torch.cuda.device(self._lengths_B.device) if self._lengths_B.is_cuda else nullcontext():
            try:
                self._replay = self._capture(self._step)
            except RuntimeError as error:
                self._give_up(f"its step cannot be captured ({str(error).splitlines()[0].rstrip('.')})")

    def _give_up(self, reason: str) -> None:
        self._captures = False
        _from_python(reason)

    def _step(self) -> None:
        self._set_lengths(self._room - 1)
        logits_BV = self._model.step(self._chosen_B[:, None], self._caches)
        self._chosen_B.copy_(self._choose(logits_BV, self._draws_B))
        self._lengths_B.add_(1)

    def _set_lengths(self, longest: int) -> None:
        for own in self._caches:
            own.set_lengths(self._lengths_B, longest)


def _places(caches: Caches) -> list[int]:
    """Return where the tensors of the caches are."""
    parts = [part for own in caches for part in (own.mixer, own.feed_forward)]
    return [tensor.data_ptr() for part in parts for tensor in part.tensors.values()]
