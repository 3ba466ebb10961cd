"""A model of ours as one that tasks of lm-evaluation-harness can ask."""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from basecap.data.tokenizer import Tokenizer
from basecap.errors import ConfigError, DataError
from basecap.evals._few_shot.scoring import Scorer, padded_length

#: New tokens of tasks that do not say how many, as in lm-evaluation-harness.
NEW_TOKENS = 256

#: What helps where prompts do not fit.
REMEDY = "leave the task out, lower shots, or raise data.seq_len"


class AskedModel(LM):
    """A model of ours as one that a task asks; without a scorer it only finds out which prompts fit.

    Attributes:
        cut: by the number of a document, whether the beginning of each of its prompts was left out to fit the length.
        read: tokens that the model has read, or would read at most.
        padded: by the number of a document, these tokens with what each of its sequences is padded with.
    """

    def __init__(
        self, tokenizer: Tokenizer, length: int, scorer: Scorer | None = None, documents: Container[int] | None = None
    ):
        """Take the tokenizer, the tokens that the model reads at most, the model, and the documents that it answers.

        Other documents, of which another process has the answers, get the answer of a model without a scorer.
        """
        super().__init__()
        self.cut: dict[int, list[bool]] = defaultdict(list)
        self.read = 0
        self.padded: Counter[int] = Counter()
        self._tokens = tokenizer
        self._length = length
        self._scorer = scorer
        self._documents = documents

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation after its context, and whether greedy decoding gives it."""
        found, own = [(0.0, False)] * len(requests), self._own(requests)
        pairs, settled = [], functools.cache(self._tokens.settled)  # answers of a question share its context
        sequences = dict[tuple[int, ...], int]()
        for index in own:
            before, predicted = self._pair(settled, *requests[index].args)
            room = self._length + 1 - len(predicted)
            if room < 1:
                raise self._too_short(f"an answer of {len(predicted)} tokens ({requests[index].args[1][:40]!r})")
            self.cut[requests[index].doc_id].append(len(before) > room)
            pairs.append((before[-room:], predicted))
            sequences[*before[-room:], *predicted[:-1]] = requests[index].doc_id
        for sequence, document in sequences.items():
            self._count(document, len(sequence))
        if self._scorer is not None:
            for index, answer in zip(own, self._scorer.scores(pairs), strict=True):
                found[index] = answer
        return found

    def _pair(
        self, settled: Callable[[str], tuple[list[int], str]], context: str, continuation: str
    ) -> tuple[list[int], list[int]]:
        """Return the tokens before and those to predict, of the text as a whole; spaces between them are predicted."""
        start, encode = context.rstrip(), self._tokens.encode
        if not start:
            return [self._tokens.end_of_text], encode(context + continuation)
        tokens, rest = settled(start)
        last = encode(rest)
        predicted = encode(rest + context[len(start) :] + continuation)[len(last) :]
        return tokens + last, predicted or encode(continuation)  # a merge across the border leaves nothing to predict

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return the log-probability of each text, in windows of the model's length that predict each token once."""
        windows, owners = [], list[int]()
        for index in self._own(requests):
            tokens = self._tokens.encode(requests[index].args[0])
            self.cut[requests[index].doc_id].append(False)
            for window in get_rolling_token_windows(tokens, self._tokens.end_of_text, self._length, context_len=1):
                windows.append(make_disjoint_window(window))
                owners.append(index)
        for (before, predicted), owner in zip(windows, owners, strict=True):
            self._count(requests[owner].doc_id, len(before) + len(predicted) - 1)
        if self._scorer is None:
            return [0.0] * len(requests)
        values = [value for value, _ in self._scorer.scores(windows)]
        return np.bincount(np.array(owners, dtype=np.int64), values, minlength=len(requests)).tolist()

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return the greedy continuation of each prompt up to a stop string or end-of-text, without it."""
        alike: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
        prompts = {}
        for index in self._own(requests):
            prompt, options = requests[index].args
            new, stops = _generation(options)
            room = self._length + 1 - new  # the last token of an answer is not read
            if room < 1:
                raise self._too_short(f"an answer of up to {new} tokens after a prompt")
            tokens = self._tokens.encode(prompt) or [self._tokens.end_of_text]
            self.cut[requests[index].doc_id].append(len(tokens) > room)
            prompts[index] = tokens[-room:]
            self._count(requests[index].doc_id, len(prompts[index]) + new - 1)
            alike[new, stops].append(index)
        found = [""] * len(requests)
        if self._scorer is None:
            return found
        for (new, stops), members in alike.items():
            ends = functools.partial(self._ends, stops)
            added = self._scorer.continuations([prompts[one] for one in members], new, ends)
            for index, tokens in zip(members, added, strict=True):
                found[index] = self._text(stops, tokens)[0]
        return found

    def _count(self, document: int, tokens: int) -> None:
        """Add a sequence of so many tokens to what is read for a document."""
        self.read += tokens
        self.padded[document] += padded_length(tokens, self._length)

    def _own(self, requests: Sequence[Instance]) -> list[int]:
        """Return the indices of the requests of the documents that this model answers."""
        return [
            at for at, request in enumerate(requests) if self._documents is None or request.doc_id in self._documents
        ]

    def _ends(self, stops: Sequence[str], tokens: list[int]) -> bool:
        return self._text(stops, tokens)[1]

    def _text(self, stops: Sequence[str], tokens: list[int]) -> tuple[str, bool]:
        """Return the text up to the first stop string or end-of-text, and whether there is one."""
        end = self._tokens.end_of_text
        ended = end in tokens
        text = whole = self._tokens.decode(tokens[: tokens.index(end)] if ended else tokens)
        for stop in stops:
            text = text.split(stop)[0]
        return text, ended or text != whole

    def _too_short(self, what: str) -> DataError:
        return DataError(f"{what} does not fit the {self._length} tokens that models read; {REMEDY}.")


def _generation(options: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Return how many tokens to add and the strings that end an answer; ConfigError for sampled answers."""
    if options.get("do_sample") or float(options.get("temperature") or 0) > 0:
        raise ConfigError("it samples its answers, and few-shot takes the most probable ones; leave the task out.")
    until = options.get("until") or []
    known = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    limits = [options[key] for key in known if options.get(key)]
    return int(limits[0] if limits else NEW_TOKENS), tuple(filter(None, [until] if isinstance(until, str) else until))
