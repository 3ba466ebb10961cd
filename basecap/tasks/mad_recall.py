"""MAD's recall tasks: in-context, noisy and fuzzy.

Defined by arXiv 2403.17844. As coded in athms/mad-lab at 0f49a45, mad/data/instances.py
(`generate_in_context_recall_instance`, `generate_noisy_in_context_recall_instance`,
`generate_fuzzy_in_context_recall_instance`) with configs/tasks, queries at every repeated key (`multi_query`).
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from pydantic import Field

from basecap.errors import ConfigError
from basecap.tasks._contract import Answers, Cell, Task, TaskConfig, task
from basecap.tasks._draws import ExampleDraws, Ints, first_of_each
from basecap.tasks._instances import NOTHING, Canvas, Role
from basecap.tasks._recall import need_tokens

_SOURCE = "arXiv 2403.17844"


class MadRecallConfig(TaskConfig):
    """Options of the three tasks."""

    length: int = Field(128, ge=8, le=2**20, description="tokens of an example, including the last value")
    vocab: int = Field(16, ge=4, le=2**16, description="number of token ids: keys, values, then noise or padding")
    every: bool = Field(False, description="train every next token, as MAD does; only answers are scored")


def suite_cells(base: Cell, changes: dict[str, tuple[int | float, ...]]) -> tuple[Cell, ...]:
    """Return the baseline and every variation of a single axis, as in MAD's suite."""
    return (base, *({**base, axis: value} for axis, values in changes.items() for value in values))


class InContextConfig(MadRecallConfig):
    """Options of in-context and noisy recall."""

    noise: float = Field(0.0, ge=0, lt=1, description="share of slots with two noise tokens instead of a pair")
    noise_vocab: int = Field(0, ge=0, le=2**16, description="number of noise token ids, at the end of vocab")


@task(
    "mad-in-context-recall",
    source=_SOURCE,
    summary="alternating keys and values; recall the value of a repeated key",
    variants={
        "mad-noisy-recall": (
            "mad-in-context-recall with noise between the pairs",
            {"vocab": 32, "noise_vocab": 16, "noise": 0.2},
        )
    },
)
class InContextRecall(Task):
    """Keys are drawn from the first half of the tokens that are no noise, each with a value of the second half.

    An example of `length` tokens gives length - 1 inputs, because the last value is only a target. Modes do not differ.
    """

    Config = InContextConfig
    axes = ("length", "vocab", "noise")

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.config.vocab

    @property
    def length(self) -> int:
        """Number of positions of an input."""
        return self.config.length - 1

    def check(self) -> None:
        """Raise ConfigError for an odd length, or noise without noise tokens."""
        c = self.config
        if c.length % 2:
            raise ConfigError(f"pairs need an even length, not {c.length}; set length to {c.length + 1}.")
        need_tokens(2, c.vocab - c.noise_vocab, "keys and values", c.vocab)
        if c.noise and not c.noise_vocab:
            raise ConfigError(f"noise {c.noise} needs noise tokens; set noise_vocab to 1 or more.")

    def grid(self) -> tuple[Cell, ...]:
        """Return the baseline and variations of MAD's suite, except those of the number of training examples."""
        lengths = (256, 512, 1024)
        if self.config.noise:
            base: Cell = {"length": 128, "vocab": 32, "noise": 0.2}
            return suite_cells(base, {"vocab": (48, 80, 144), "length": lengths, "noise": (0.4, 0.6, 0.8)})
        return suite_cells({"length": 128, "vocab": 16, "noise": 0.0}, {"vocab": (32, 64, 128), "length": lengths})

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        slots, own = c.length // 2, c.vocab - c.noise_vocab
        keys = draws.below("keys", slots, own // 2)
        noisy = draws.uniform("noisy", slots) < c.noise
        rows = np.arange(draws.size)
        noisy[rows, draws.below("spared", 1, slots - 1)[:, 0]] = False
        noisy[:, -1] = False
        present = np.zeros((draws.size, own // 2), dtype=bool)
        shown, places = np.nonzero(~noisy[:, :-1])
        present[shown, keys[shown, places]] = True
        keys[:, -1] = np.where(present, draws.bits("probe", own // 2) >> np.uint64(1), 0).argmax(axis=1)
        values = own // 2 + draws.below_of("values", keys, own - own // 2)
        queried = ~first_of_each(np.where(noisy, own + np.arange(slots), keys)) & ~noisy
        tokens = np.stack([keys, values], axis=2)
        if c.noise:
            noise = own + draws.below("noise", 2 * slots, c.noise_vocab)
            tokens = np.where(noisy[:, :, None], noise.reshape(tokens.shape), tokens)
        flat = tokens.reshape(draws.size, c.length)
        canvas.inputs[:] = flat[:, :-1]
        made = canvas.made
        made.roles[:, 0::2] = np.select([noisy, queried], [Role.NOISE, Role.QUERY], Role.KEY)
        made.roles[:, 1::2] = np.where(noisy, Role.NOISE, Role.VALUE)[:, :-1]
        made.pairs[:, 0::2] = np.where(noisy, NOTHING, keys)
        made.pairs[:, 1::2] = made.pairs[:, 0:-1:2]
        if c.every:
            made.targets[:] = flat[:, 1:]
        else:
            made.targets[:, 0::2] = np.where(queried, values, NOTHING)
        made.groups[:, 0::2] = np.where(queried, np.arange(slots), NOTHING)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the tokens after the queried key in earlier slots."""
        tokens = inputs.tolist()
        return {
            place: frozenset(tokens[slot + 1] for slot in range(0, place, 2) if tokens[slot] == tokens[place])
            for place in asked.tolist()
        }


class FuzzyConfig(MadRecallConfig):
    """Options of fuzzy recall."""

    key_tokens: int = Field(3, ge=1, le=8, description="tokens of the longest keys")
    value_tokens: int = Field(3, ge=1, le=8, description="tokens of the longest values")
    keys: Literal["longest", "any"] = Field(
        "longest", description="lengths of keys: longest, as in MAD's tests, or any, as in its training"
    )


@task("mad-fuzzy-recall", source=_SOURCE, summary="mad-in-context-recall with keys and values of several tokens")
class FuzzyRecall(Task):
    """Keys and values are sequences of distinct tokens from two disjoint sets; recall the value of a repeated key.

    The last pair is a key that is put in at a random place before. As coded that place may lie behind all other pairs,
    and the key is then never shown with its value; in clean mode it always is.
    """

    Config = FuzzyConfig
    axes = ("length", "vocab")

    @property
    def vocabulary(self) -> int:
        """Number of token ids; the last is padding at the start."""
        return self.config.vocab

    @property
    def _sizes(self) -> tuple[int, int]:
        """Number of tokens for keys and for values."""
        keys = (self.config.vocab - 1) // 2
        return keys, self.config.vocab - 1 - keys

    def check(self) -> None:
        """Raise ConfigError if there are too few tokens for words, or the length has no room for an earlier pair."""
        c = self.config
        keys, values = self._sizes
        longest = c.key_tokens + c.value_tokens
        for part, words, needed in (("keys", keys, c.key_tokens), ("values", values, c.value_tokens)):
            if words < needed:
                need = f"{part} of {needed} tokens"
                raise ConfigError(f"a vocabulary of {c.vocab} is too small for {need}: it has {words}; raise vocab.")
        if (keys + 1) ** c.key_tokens > 2**31:
            raise ConfigError(f"keys of {c.key_tokens} tokens out of {keys} are too many to number; lower vocab.")
        if c.length < 3 * longest:
            raise ConfigError(
                f"length {c.length} is too short for pairs of {longest} tokens; set {3 * longest} or more."
            )

    def grid(self) -> tuple[Cell, ...]:
        """Return the baseline and variations of MAD's suite, except those of the number of training examples."""
        return suite_cells({"length": 128, "vocab": 16}, {"vocab": (32, 64, 128), "length": (256, 512, 1024)})

    def _enough_words(self, draws: ExampleDraws) -> tuple[Ints, Ints, Ints]:
        """Return `_words` for a number of pairs that fills the length."""
        c = self.config
        shortest = c.key_tokens if c.keys == "longest" else 1
        count = 8 + int(
            2.3 * c.length / (shortest + c.key_tokens + 1 + c.value_tokens)
        )  # of the mean length, and spare
        while True:
            words, codes, lengths = self._words(draws, count)
            if lengths[:, 1:].sum(axis=1).min() >= c.length:
                return words, codes, lengths
            count *= 2

    def _words(self, draws: ExampleDraws, count: int) -> tuple[Ints, Ints, Ints]:
        """Return the words of `count` pairs, the last pair first; a pair does not depend on `count`.

        Returns:
            Tokens of keys, then of values [N, S, key_tokens + value_tokens], -1 behind the end of either; the numbers
            of the keys [N, S]; and the pairs' lengths [N, S].
        """
        c = self.config
        keys, values = self._sizes
        shortest = c.key_tokens if c.keys == "longest" else 1
        size = shortest + draws.below("key sizes", count, c.key_tokens - shortest + 1)
        key = _word(c.key_tokens, keys, lambda part, left: draws.below(f"key {part}", count, left))
        key[np.arange(c.key_tokens) >= size[:, :, None]] = NOTHING
        codes = (key + 1) @ ((keys + 1) ** np.arange(c.key_tokens))
        size_v = 1 + draws.below_of("value sizes", codes, c.value_tokens)
        value = keys + _word(c.value_tokens, values, lambda part, left: draws.below_of(f"value {part}", codes, left))
        value[np.arange(c.value_tokens) >= size_v[:, :, None]] = NOTHING
        return np.concatenate([key, value], axis=2, dtype=np.int32, casting="unsafe"), codes, size + size_v

    def _order(self, draws: ExampleDraws, codes: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """Return the order of the pairs [N, S + 1], the last pair 0 put in between and at the end, and their starts.

        Pairs that are cut off start at -1; the last one starts at its place in the row without padding.
        """
        c = self.config
        longest = c.key_tokens + c.value_tokens
        limit = c.length - lengths[:, :1] - longest  # pairs start before it, the last pair apart
        if c.mode == "clean":
            room = limit - longest + 1
        else:
            room = c.length - 2 * lengths[:, :1]
        place = (draws.uniform("place", 1) * room).astype(np.int64)
        others = np.cumsum(lengths[:, 1:], axis=1) - lengths[:, 1:]  # where pairs start without the one put in
        slot = (others < place).sum(axis=1, keepdims=True)
        numbers = np.arange(codes.shape[1])[None]
        early = ((codes[:, 1:] == codes[:, :1]) & (numbers[:, :-1] < slot)).any(axis=1, keepdims=True)
        reached = np.take_along_axis(others, np.minimum(slot, others.shape[1] - 1), axis=1) < limit
        slot = np.where(early | ~reached, codes.shape[1], slot)  # the key stands there already, or is never shown
        order = np.where(numbers < slot, numbers + 1, np.where(numbers == slot, 0, numbers))
        order = np.minimum(order, codes.shape[1] - 1)
        taken = np.take_along_axis(lengths, order, axis=1)
        starts = np.cumsum(taken, axis=1) - taken
        ends = np.where(starts < limit, starts + taken, 0).max(axis=1, keepdims=True)
        starts = np.where(starts < limit, starts, NOTHING)
        return np.concatenate([order, np.zeros_like(slot)], axis=1), np.concatenate([starts, ends], axis=1)

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        words, codes, lengths = self._enough_words(draws)
        order, starts = self._order(draws, codes, lengths)
        codes = np.take_along_axis(codes, order, axis=1)
        kept = starts != NOTHING
        queried = ~first_of_each(np.where(kept, codes, 2**31 + np.arange(order.shape[1]))) & kept
        queried[:, -1] = True
        words = words[np.arange(draws.size)[:, None], order]
        # the tokens of a row, in their order, fill it to its end
        source = np.flatnonzero((words != NOTHING) & kept[:, :, None])
        pair = source // words.shape[2]
        wide = (draws.size, c.length + 1)
        there = np.arange(wide[1]) >= c.length + 1 - starts[:, -1:] - lengths[:, :1]
        asking, is_key = queried.ravel()[pair], source - pair * words.shape[2] < c.key_tokens

        def spread(values: Ints, empty: int) -> Ints:
            array = np.full(wide, empty, dtype=values.dtype)
            array[there] = values
            return array

        made = canvas.made
        tokens = spread(words.ravel()[source], c.vocab - 1)
        made.inputs[:] = tokens[:, :-1]
        made.pairs[:] = spread(codes.ravel()[pair], NOTHING)[:, :-1]
        roles = np.where(is_key, np.where(asking, Role.QUERY, Role.KEY), Role.VALUE)
        made.roles[:] = spread(roles, Role.FILLER)[:, :-1]
        made.groups[:] = spread(np.where(asking & ~is_key, pair % order.shape[1], NOTHING), NOTHING)[:, 1:]
        made.targets[:] = tokens[:, 1:] if c.every else np.where(made.groups != NOTHING, tokens[:, 1:], NOTHING)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the next tokens of the values after the queried key in earlier pairs."""
        keys, _ = self._sizes
        answers: Answers = {}
        seen: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        key: list[int] = []
        value: list[int] = []
        wanted = set(asked.tolist())
        for place, token in enumerate(inputs.tolist()):
            if token == self.config.vocab - 1:
                continue
            if token < keys and value:
                seen.setdefault(tuple(key), set()).add(tuple(value))
                key, value = [], []
            (key if token < keys else value).append(token)
            if place in wanted:
                known = seen.get(tuple(key), set())
                answers[place] = frozenset(one[len(value)] for one in known if len(one) > len(value))
        return answers


def _word(length: int, size: int, draw: Callable[[int, int], Ints]) -> Ints:
    """Return words of distinct numbers of range(size): int64 [N, S, length].

    draw(part, left) gives numbers of range(left), [N, S]: which of the numbers that are left comes next.
    """
    word: list[Ints] = []
    ascending: list[Ints] = []
    for part in range(length):
        token = draw(part, size - part)
        for earlier in ascending:
            token += token >= earlier
        word.append(token)
        for place, earlier in enumerate(ascending):
            ascending[place], token = np.minimum(earlier, token), np.maximum(earlier, token)
        ascending.append(token)
    return np.stack(word, axis=2)
