"""What tasks ask of a model: log-probabilities of given tokens, and the most probable continuations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from basecap.evals._contract import Context
from basecap.evals._deployed import deployed
from basecap.evals._few_shot.shared import Answers, SharedContext, batches_of, kept_tokens
from basecap.mixers import tokens_of_a_pass
from basecap.models.generate import by_length, generate_each
from basecap.models.language_model import Caches, LanguageModel
from basecap.system.transfers import sent

Tokens = Sequence[int]

#: Of predicted tokens: the pair of each, and on the device its log-probability in nats, float64, and whether it is the
#: most probable one. So the host prepares batches while a GPU computes.
Found = tuple[np.ndarray, Tensor, Tensor]

#: Answers that have ended are dropped when at most this share goes on: until then they cost less than a copy.
SHRINK = 0.5

#: Maximum number of logits computed at a time.
LOGITS = 2**25

#: A pass over as many tokens as cost this many passes wastes little of its time, and needs no more memory for less.
ENOUGH = 64

#: Padded lengths are multiples of this, so that there are few different shapes.
STEP = 64


def padded_length(tokens: int, longest: int) -> int:
    """Return the length to which a sequence is padded that is the longest of its batch.

    >>> padded_length(65, 512), padded_length(65, 100)
    (128, 100)
    """
    return min(longest, -(-tokens // STEP) * STEP)


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A model, where it runs, and how many padded tokens it reads per forward pass."""

    model: LanguageModel
    context: Context
    tokens_per_batch: int

    def scores(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Return for each (before, predicted) the log-probability of `predicted`, and whether greedy decoding gives it.

        `before` holds at least one token, both together at most one more than the model's length. Pairs that differ in
        the last token alone, such as the letters of a multiple choice, are read once. The other pairs of one `before`
        share its decoding state where that is cheaper. The rest is padded on the right, which a causal model does not
        see. Log-probabilities are in nats, from logits in float32.
        """
        contexts: dict[tuple[int, ...], list[int]] = {}
        for index, (before, predicted) in enumerate(pairs):
            if predicted:
                contexts.setdefault(tuple(before), []).append(index)
        shared, apart = [], dict[tuple[int, ...], list[int]]()
        for before, indices in contexts.items():
            context = SharedContext(before, indices, [pairs[index][1] for index in indices])
            if context.saves:
                shared.append(context)
                continue
            for index in indices:
                apart.setdefault((*before, *pairs[index][1][:-1]), []).append(index)
        sums, greedy = np.zeros(len(pairs)), np.ones(len(pairs), dtype=bool)
        parts, done = list[Found](), 0
        for part in chain(self._apart(pairs, apart), self._shared(shared)):
            parts.append(part)
            done += len(np.unique(part[0]))
            self.context.note(f"evaluating few-shot: {done:,} of {len(pairs):,} answers")
        if parts:
            each, values, best = zip(*parts, strict=True)
            owners = np.concatenate(each)
            np.add.at(sums, owners, torch.cat(values).cpu().numpy())
            np.logical_and.at(greedy, owners, torch.cat(best).cpu().numpy())
        return [(float(value), bool(best)) for value, best in zip(sums, greedy, strict=True)]

    def _apart(
        self, pairs: Sequence[tuple[Tokens, Tokens]], readers: Mapping[tuple[int, ...], Sequence[int]]
    ) -> Iterator[Found]:
        """Read each sequence of `readers`, with the pairs whose tokens it is, and yield the predictions of a batch."""
        for rows, length in self._batches(sorted(readers, key=len, reverse=True)):
            asked = [(row, len(tokens), index) for row, tokens in enumerate(rows) for index in readers[tokens]]
            owners = np.concatenate([np.full(len(pairs[index][1]), index) for _, _, index in asked])
            yield owners, *self._predictions(rows, length, [(row, end, pairs[index][1]) for row, end, index in asked])

    def _shared(self, contexts: Sequence[SharedContext]) -> Iterator[Found]:
        """Read each context once, then its answers; yield the predictions of a batch."""
        device = self.context.device
        room = min(self.tokens_per_batch, ENOUGH * tokens_of_a_pass(device))
        for part in batches_of(contexts, self.model, room):
            kept = kept_tokens(part, self.model, room, device)
            answers = Answers(part, kept)
            caches = self.model.init_cache(len(part), max(kept) + answers.tokens.shape[1])
            with self.context.autocast():
                self.model.prefill_each(answers.prompts, caches, hidden=True)
                states = self._at_once(answers, caches) if self.model.continues else self._in_turn(answers, caches)
            yield answers.indices, *self._targets(states, sent(answers.targets, device))

    def _at_once(self, answers: Answers, caches: Caches) -> Tensor:
        """Read the answers in one pass; return the activations that predict each of their tokens, [predicted, D]."""
        owner, tokens, row, place = (
            sent(part, self.context.device) for part in (answers.owner, answers.tokens, answers.row, answers.place)
        )
        return self.model.further(tokens, caches, owner)[row, place]

    def _in_turn(self, answers: Answers, caches: Caches) -> Tensor:
        """Read the answers token by token; return what `_at_once` does."""
        owner, tokens = (sent(part, self.context.device) for part in (answers.owner, answers.tokens))
        caches, states = [cache.take(owner) for cache in caches], []
        for place in range(tokens.shape[1]):
            going = answers.going(place)
            if going <= SHRINK * len(tokens):
                caches = [cache.take(torch.arange(going, device=tokens.device)) for cache in caches]
                tokens = tokens[:going]
            states.append(self.model.step(tokens[:, place, None], caches, hidden=True)[:going])
        return torch.cat(states)

    def continuations(
        self, prompts: Sequence[Tokens], tokens: int, ends: Callable[[list[int]], bool]
    ) -> list[list[int]]:
        """Return the `tokens` most probable next tokens of each prompt, fewer if `ends` is true of those so far.

        Prompts of any lengths are continued together, by what `deployed` returns.
        """
        found: dict[int, list[int]] = {}
        for part in by_length([len(prompt) + tokens for prompt in prompts], self.tokens_per_batch):
            starts = [torch.tensor(prompts[index], device=self.context.device) for index in part]
            found |= dict(zip(part, generate_each(self._writer, starts, tokens, ends=[ends] * len(part)), strict=True))
            self.context.note(f"evaluating few-shot: {len(found):,} of {len(prompts):,} continuations")
        return [found[index] for index in range(len(prompts))]

    @cached_property
    def _writer(self) -> LanguageModel:
        return deployed(self.model, self.context)

    def trial(self, most: int | None = None) -> None:
        """Compute a batch of sequences of the model's length, the log-probability of every token.

        It is the largest batch of sequences that have at most `most` padded tokens; None: any number.
        """
        length = self.model.config.max_length
        rows = self.tokens_per_batch // length
        rows = max(1, rows if most is None else min(rows, -(-most // length)))
        self._predictions([(0,) * length] * rows, length, [(row, length, [0] * length) for row in range(rows)])

    def _batches(self, rows: Sequence[tuple[int, ...]]) -> Iterator[tuple[Sequence[tuple[int, ...]], int]]:
        """Yield (rows, padded length); the longest rows come first."""
        first = 0
        while first < len(rows):
            length = padded_length(len(rows[first]), self.model.config.max_length)
            part = rows[first : first + max(1, self.tokens_per_batch // length)]
            yield part, length
            first += len(part)

    def _predictions(
        self, rows: Sequence[tuple[int, ...]], length: int, asked: Sequence[tuple[int, int, Tokens]]
    ) -> tuple[Tensor, Tensor]:
        """Return what `_targets` does of each predicted token.

        Args:
            rows: what is read.
            length: to which they are padded.
            asked: (row, tokens read, predicted tokens); the last predicted token follows what is read.
        """
        inputs, device = torch.zeros(len(rows), length, dtype=torch.int64), self.context.device
        for number, row in enumerate(rows):
            inputs[number, : len(row)] = torch.tensor(row)
        places = [(row, end - len(tokens) + at) for row, end, tokens in asked for at in range(len(tokens))]
        row, position = sent(torch.tensor(places).T, device)
        targets = torch.tensor([token for _, _, tokens in asked for token in tokens])
        with self.context.autocast():
            hidden = self.model.hidden(sent(inputs, device))[row, position]
        return self._targets(hidden, sent(targets, device))

    def _targets(self, hidden_ND: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each target, float64, and whether it is the most probable token."""
        head = self.model.head_weight.float()
        step = max(1, LOGITS // len(head))
        parts = [
            _of_targets(nn.functional.linear(states.float(), head), wanted)
            for states, wanted in zip(hidden_ND.split(step), targets_N.split(step), strict=True)
        ]
        found, best = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return found, best


def _of_targets(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    values = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return values.double(), logits.argmax(-1) == targets
