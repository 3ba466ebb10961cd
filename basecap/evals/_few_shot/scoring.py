"""What tasks ask of a model: log-probabilities of given tokens, and the most probable continuations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from basecap.evals._contract import Context
from basecap.evals._few_shot.shared import Answers, SharedContext, batches_of
from basecap.models.generate import by_length, generate_each
from basecap.models.language_model import Caches, LanguageModel

Tokens = Sequence[int]

#: Of predicted tokens: the pair of each, its log-probability in nats, whether it is the most probable one.
Found = tuple[np.ndarray, np.ndarray, np.ndarray]

#: Answers that have ended are dropped when at most this share goes on: until then they cost less than a copy.
SHRINK = 0.5

#: Maximum number of logits computed at a time.
LOGITS = 2**25

#: Padded lengths are multiples of this, so that there are few different shapes.
STEP = 64


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
        done = 0
        for owners, found, best in chain(self._apart(pairs, apart), self._shared(shared)):
            np.add.at(sums, owners, found)
            np.logical_and.at(greedy, owners, best)
            done += len(np.unique(owners))
            self.context.note(f"evaluating few-shot: {done:,} of {len(pairs):,} answers")
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
        """Read each context once, then its answers token by token; yield the predictions of a batch."""
        for part in batches_of(contexts, self.model, self.tokens_per_batch):
            answers = Answers(part, self.context.device)
            with self.context.autocast():
                hidden = self.model.prefill_each(answers.prompts, caches := answers.init_cache(self.model), hidden=True)
            hidden, caches = hidden[answers.owner], [cache.take(answers.owner) for cache in caches]
            found = [self._targets(hidden, answers.tokens(0))]
            if self.model.continues and answers.steps > 1:
                found.append(self._continued(answers, caches))
            for step in range(1, 1 if self.model.continues else answers.steps):
                going = answers.going(step)
                if going <= SHRINK * len(hidden):
                    caches = [cache.take(torch.arange(going, device=hidden.device)) for cache in caches]
                    hidden = hidden[:going]
                with self.context.autocast():
                    hidden = self.model.step(answers.tokens(step - 1)[: len(hidden), None], caches, hidden=True)
                found.append(self._targets(hidden[:going], answers.tokens(step)[:going]))
            values, best = (np.concatenate(columns) for columns in zip(*found, strict=True))
            yield answers.owners(), values, best

    def _continued(self, answers: Answers, caches: Caches) -> tuple[np.ndarray, np.ndarray]:
        """Read the answers at once; return what `_targets` does for their second and later tokens."""
        steps = range(1, answers.steps)
        with self.context.autocast():
            hidden = self.model.further(torch.stack([answers.tokens(step - 1) for step in steps], dim=1), caches)
        states = [hidden[: answers.going(step), step - 1] for step in steps]
        wanted = [answers.tokens(step)[: answers.going(step)] for step in steps]
        return self._targets(torch.cat(states), torch.cat(wanted))

    def continuations(
        self, prompts: Sequence[Tokens], tokens: int, ends: Callable[[list[int]], bool]
    ) -> list[list[int]]:
        """Return the `tokens` most probable next tokens of each prompt, fewer if `ends` is true of those so far.

        Prompts of any lengths are continued together, in the precision of `basecap generate`.
        """
        found: dict[int, list[int]] = {}
        for part in by_length([len(prompt) + tokens for prompt in prompts], self.tokens_per_batch):
            starts = [torch.tensor(prompts[index], device=self.context.device) for index in part]
            found |= dict(zip(part, generate_each(self.model, starts, tokens, ends=ends), strict=True))
            self.context.note(f"evaluating few-shot: {len(found):,} of {len(prompts):,} continuations")
        return [found[index] for index in range(len(prompts))]

    def trial(self) -> None:
        """Compute the largest batch: the log-probability of every token of sequences of the model's length."""
        length = self.model.config.max_length
        rows = max(1, self.tokens_per_batch // length)
        self._predictions([(0,) * length] * rows, length, [(row, length, [0] * length) for row in range(rows)])

    def _batches(self, rows: Sequence[tuple[int, ...]]) -> Iterator[tuple[Sequence[tuple[int, ...]], int]]:
        """Yield (rows, padded length); the longest rows come first."""
        first = 0
        while first < len(rows):
            length = min(self.model.config.max_length, -(-len(rows[first]) // STEP) * STEP)
            part = rows[first : first + max(1, self.tokens_per_batch // length)]
            yield part, length
            first += len(part)

    def _predictions(
        self, rows: Sequence[tuple[int, ...]], length: int, asked: Sequence[tuple[int, int, Tokens]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probability of each predicted token, float64, and whether it is the most probable one.

        Args:
            rows: what is read.
            length: to which they are padded.
            asked: (row, tokens read, predicted tokens); the last predicted token follows what is read.
        """
        inputs, device = torch.zeros(len(rows), length, dtype=torch.int64), self.context.device
        for number, row in enumerate(rows):
            inputs[number, : len(row)] = torch.tensor(row)
        places = [(row, end - len(tokens) + at) for row, end, tokens in asked for at in range(len(tokens))]
        row, position = torch.tensor(places, device=device).T
        targets = torch.tensor([token for _, _, tokens in asked for token in tokens], device=device)
        with self.context.autocast():
            hidden = self.model.hidden(inputs.to(device))[row, position]
        return self._targets(hidden, targets)

    def _targets(self, hidden_ND: Tensor, targets_N: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probability of each target, float64, and whether it is the most probable token."""
        head = self.model.head_weight.float()
        step = max(1, LOGITS // len(head))
        parts = [
            _of_targets(nn.functional.linear(states.float(), head), wanted)
            for states, wanted in zip(hidden_ND.split(step), targets_N.split(step), strict=True)
        ]
        found, best = (torch.cat(columns).cpu().numpy() for columns in zip(*parts, strict=True))
        return found, best


def _of_targets(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    values = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return values.double(), logits.argmax(-1) == targets
