"""A model of ours as one that tasks of lm-evaluation-harness can ask."""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from basecap.data.tokenizer import Tokenizer
from basecap.errors import ConfigError, DataError
from basecap.evals._few_shot.scoring import Scorer

#: New tokens of tasks that do not say how many, as in lm-evaluation-harness.
NEW_TOKENS = 256

#: What helps where prompts do not fit.
REMEDY = "leave the task out, lower shots, or raise data.seq_len"


class AskedModel(TemplateLM):
    """A model of ours as one that tasks ask; without a scorer it only finds out which prompts fit.

    Attributes:
        cut: of each request of the last call, whether the beginning of its prompt was left out to fit the length.
        read: tokens that the model read in the last call, or would read at most.
    """

    def __init__(self, tokenizer: Tokenizer, length: int, scorer: Scorer | None = None):
        """Take the tokenizer, the tokens that the model reads at most, and the model."""
        super().__init__()
        self.cut: list[bool] = []
        self.read = 0
        self._tokens = tokenizer
        self._length = length
        self._scorer = scorer

    @property
    def eot_token_id(self) -> int:
        """End-of-text, which stands before a text without context."""
        return self._tokens.end_of_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the tokens of a text."""
        return self._tokens.encode(string)

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation after its context, and whether greedy decoding gives it."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        before, predicted = super()._encode_pair(context, continuation)
        return before, predicted or self.tok_encode(continuation)  # a merge across the border leaves nothing to predict

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_unused: Any
    ) -> list[tuple[float, bool]]:
        pairs, self.cut = [], []
        for (_, text), before, predicted in requests:
            room = self._length + 1 - len(predicted)
            if room < 1:
                raise self._too_short(f"an answer of {len(predicted)} tokens ({text[:40]!r})")
            self.cut.append(len(before) > room)
            pairs.append((before[-room:], predicted))
        self.read = sum(map(len, {(*before, *predicted[:-1]) for before, predicted in pairs}))
        return [(0.0, False)] * len(pairs) if self._scorer is None else self._scorer.scores(pairs)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in windows of the model's length that predict each token once."""
        self.cut = [False] * len(requests)
        windows, owners = [], []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self._length, context_len=1):
                windows.append(make_disjoint_window(window))
                owners.append(index)
        self.read = sum(len(before) + len(predicted) - 1 for before, predicted in windows)
        if self._scorer is None:
            return [0.0] * len(requests)
        values = [value for value, _ in self._scorer.scores(windows)]
        return np.bincount(owners, values, minlength=len(requests)).tolist()

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy continuation of each prompt up to a stop string or end-of-text, without it."""
        alike: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
        prompts, self.cut, self.read = [], [], 0
        for index, request in enumerate(requests):
            prompt, options = request.args
            new, stops = _generation(options)
            room = self._length + 1 - new  # the last token of an answer is not read
            if room < 1:
                raise self._too_short(f"an answer of up to {new} tokens after a prompt")
            tokens = self.tok_encode(prompt) or [self.eot_token_id]
            self.cut.append(len(tokens) > room)
            prompts.append(tokens[-room:])
            self.read += len(prompts[-1]) + new - 1
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

    def _ends(self, stops: Sequence[str], tokens: list[int]) -> bool:
        return self._text(stops, tokens)[1]

    def _text(self, stops: Sequence[str], tokens: list[int]) -> tuple[str, bool]:
        """Return the text up to the first stop string or end-of-text, and whether there is one."""
        ended = self.eot_token_id in tokens
        text = whole = self._tokens.decode(tokens[: tokens.index(self.eot_token_id)] if ended else tokens)
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
