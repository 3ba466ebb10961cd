"""Retrieval from a long context: a number that stands once in a text of up to 100,000 tokens (Table 3, 2505.18522)."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator

from basecap.data import PreparedData
from basecap.data.config import Count
from basecap.data.tokenizer import Tokenizer
from basecap.errors import ConfigError, DataError
from basecap.evals import _needles
from basecap.evals._contract import (
    Context,
    Decoding,
    EvaluationConfig,
    Measurement,
    Outcome,
    SharedEvaluation,
    evaluation,
)
from basecap.evals._deployed import deployed, refuse_positions
from basecap.evals._needles import Dialect, Prompts, Sample
from basecap.evals._statistics import answers_error
from basecap.models.generate import generate, generate_each
from basecap.models.language_model import LanguageModel
from basecap.records.evaluation_points import At
from basecap.records.measured import ANSWERS

#: The task, as RULER's paper calls it.
TASK = "S-NIAH"
#: Lengths where a study gives none, as far as models are trained on them.
LENGTHS = (4096, 8192, 16_384, 32_768, 65_536, 102_400)
#: Parts of the text that accuracy by depth is measured in where a study gives none.
PARTS = 10
#: New tokens after which an answer is read, and ends where no further token can change whether it is right.
LOOKS = 8


@evaluation("passkey", unit=ANSWERS, better="higher", axes=("length",))
class PasskeyRetrieval(SharedEvaluation[PreparedData]):
    """Share of prompts of RULER's S-NIAH whose hidden number is in the answer, by length and by depth.

    Each prompt says "One of the special magic numbers for NAME is: 1234567." between many equal lines and asks for the
    number at its end. It counts as found if it is in the greedy answer. The answer is part of the length. `depth` is
    the part of the text, from its beginning, in which the number stands.
    """

    class Config(EvaluationConfig):
        """Options of passkey."""

        at: At = Field("end", description="evaluation points to run at: every, end, or a list of tokens")
        dialect: Dialect = Field(
            "ruler",
            description="whose prompts: those of NVIDIA/RULER, or those of niah_single_1 of lm-evaluation-harness, "
            "which are shorter and do not count the beginning of the answer",
        )
        lengths: tuple[Annotated[Count, Field(ge=1)], ...] | None = Field(
            None,
            min_length=1,
            description="maximum tokens of a prompt and its answer (default: 4,096 to 65,536, doubled, and 102,400, up "
            "to the training length)",
        )
        samples: Count = Field(500, ge=2, le=2**20, description="prompts of each length")
        answer: Count = Field(128, ge=1, le=2**16, description="tokens of an answer")
        depths: Count | None = Field(
            None,
            ge=1,
            le=100,
            description="put the numbers into so many equal parts of the text in turn (default: anywhere, as both "
            "dialects do, and accuracy by depth in tenths)",
        )
        seed: int | None = Field(
            None, ge=0, lt=2**60, description="seed of names, numbers and places (default: that of the dialect)"
        )
        batch: Count = Field(
            8,
            ge=1,
            le=2**16,
            description="answers that are written at once at the greatest length; at the others as many as have no "
            "more tokens with their prompts",
        )
        tokens_per_batch: Count = Field(131_072, ge=1, le=2**30, description="tokens of prompts per forward pass")

        @model_validator(mode="after")
        def _answers_fit(self) -> "PasskeyRetrieval.Config":
            if self.lengths is not None and min(self.lengths) <= self.answer:
                raise ConfigError(
                    f"passkey: {min(self.lengths):,} tokens have no room for a prompt and an answer of "
                    f"{self.answer:,}; raise lengths, or lower answer."
                )
            return self

        @field_validator("lengths")
        @classmethod
        def _differ(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
            if value is not None and len({*value}) < len(value):
                raise ValueError("should name each length once")
            return value

    config: Config
    needs = "text"
    reduced_by = "samples or lengths of passkey"

    def __init__(self, config: Config):
        """Take the options; prompts are made at the first evaluation point and kept in memory."""
        super().__init__(config)
        self._made: dict[tuple[str, int], dict[int, list[Sample]]] = {}

    def missing(self) -> Sequence[str]:
        """Say that the word list is not installed."""
        return () if _needles.has_words() else (_needles.LACKS,)

    def refuse_missing(self) -> None:
        """Raise ConfigError without the word list."""
        _needles.words()

    def check(self, data: PreparedData, length: int) -> None:
        """Raise DataError if a length has no room for the shortest prompt, or models are shorter than any length."""
        self.refuse_missing()
        self.check_tokens(data.tokenizer, length)

    def check_tokens(self, tokenizer: Tokenizer | None, length: int) -> None:
        """Raise DataError as `check`; where the words of prompts are missing, `refuse_missing` says so."""
        lengths = self._lengths(length)
        if tokenizer is not None and _needles.has_words():
            for longest in lengths:
                self._prompts(tokenizer).refuse_short(longest)

    def most_tokens(self, length: int) -> int:
        """Return how many tokens prompts and answers have at most."""
        return self.config.samples * sum(self._lengths(length))

    def run(self, model: LanguageModel, context: Context[PreparedData]) -> Outcome:
        """Return the accuracies on this process's share of the prompts of each length."""
        self._refuse_positions(model, context.data.tokenizer)
        writer, samples = deployed(model, context), {}
        prompts = self._samples(context.data.tokenizer, model.config.max_length)
        whole = [sample for made in prompts.values() for sample in made]
        data = f"{self.config.dialect} prompts {_needles.fingerprint(whole)}, {_needles.source()}"
        for length, made in prompts.items():
            own = [made[index] for index in context.share(len(made))]
            parts = [int(sample.depth * self._parts) for sample in own]
            answers = self._answers(length, max(prompts))
            samples[data, length] = np.stack([self._right(writer, own, answers, context), parts], axis=1)
        # A share of the answers is no accuracy yet.
        measurements = [] if context.world > 1 else [*_measure(samples, self._parts)]
        return Outcome(measurements=measurements, samples=samples)

    def join(self, parts: Sequence[Outcome]) -> Outcome:
        """Compute the accuracies of the prompts of all processes."""
        samples = {key: np.concatenate([part.samples[key] for part in parts]) for key in parts[0].samples}
        return Outcome(measurements=[*_measure(samples, self._parts)], samples=samples)

    def trial(self, model: LanguageModel, context: Context[PreparedData]) -> None:
        """Read the longest prompts of a batch, and write two tokens; raises ConfigError for too few positions."""
        self._refuse_positions(model, context.data.tokenizer)
        longest = max(self._lengths(model.config.max_length))
        answers = self._answers(longest, longest)
        prompts = torch.zeros(answers, longest - 1, dtype=torch.int64, device=context.device)
        generate(deployed(model, context), prompts, 2, rows=self._rows(model, longest))

    def decoding(self, model: LanguageModel) -> Decoding:
        """Return the largest decoding states that are in memory, and the tokens that are read at once."""
        lengths = self._lengths(model.config.max_length)
        answers = {length: self._answers(length, max(lengths)) for length in lengths}
        length = max(lengths, key=lambda length: (answers[length] * model.state_bytes(length), length))
        read = max(self._rows(model, length) * model.reads(length) for length in lengths)
        return Decoding(sequences=answers[length], length=length, read=read)

    def _lengths(self, longest: int) -> Sequence[int]:
        """Return the lengths for models of `longest` tokens; raises DataError if there are none."""
        found = self.config.lengths or tuple(length for length in LENGTHS if length <= longest)
        if not found:
            raise DataError(
                f"passkey: models read {longest:,} tokens, fewer than the {LENGTHS[0]:,} of its shortest prompts; "
                "give lengths, or raise data.seq_len."
            )
        return found

    @property
    def _parts(self) -> int:
        """The parts of the text that accuracy by depth is measured in."""
        return self.config.depths or PARTS

    def _prompts(self, tokenizer: Tokenizer) -> Prompts:
        c = self.config
        return Prompts(dialect=c.dialect, tokenizer=tokenizer, answer=c.answer, depths=c.depths)

    def _answers(self, length: int, longest: int) -> int:
        """Return how many answers are written at once."""
        return min(self.config.samples, self.config.batch * longest // length)

    def _rows(self, model: LanguageModel, length: int) -> int:
        """Return how many prompts are read at once, of the greatest length or a smaller one."""
        answers = self._answers(length, max(self._lengths(model.config.max_length)))
        return max(1, min(answers, self.config.tokens_per_batch // model.reads(length)))

    def _refuse_positions(self, model: LanguageModel, tokenizer: Tokenizer) -> None:
        """Raise ConfigError if the model has parameters for each position, and fewer than it has to read."""
        longest = self._prompts(tokenizer).longest(max(self._lengths(model.config.max_length)))
        refuse_positions(self.declaration.name, model, longest)

    def _samples(self, tokenizer: Tokenizer, longest: int) -> dict[int, list[Sample]]:
        """Return the prompts of each length for models of `longest` tokens."""
        key = tokenizer.fingerprint, longest
        if key not in self._made:
            c, lengths = self.config, self._lengths(longest)
            seed = _needles.SEEDS[c.dialect] if c.seed is None else c.seed
            made = self._prompts(tokenizer).of_lengths(lengths, c.samples, seed)
            self._made[key] = dict(zip(lengths, made, strict=True))
        return self._made[key]

    def _right(
        self, model: LanguageModel, samples: Sequence[Sample], answers: int, context: Context[PreparedData]
    ) -> np.ndarray:
        """Return which samples have their number in the answer, bool [N], `answers` of which are written at once."""
        right, done, c, tokenizer = np.zeros(len(samples), bool), 0, self.config, context.data.tokenizer
        order = sorted(range(len(samples)), key=lambda index: len(samples[index].tokens))  # similar lengths together
        while done < len(order):
            part = order[done : done + answers]
            prompts = [torch.from_numpy(samples[index].tokens.astype(np.int64)) for index in part]
            ends = [partial(_settled, tokenizer, samples[index].number) for index in part]
            new = generate_each(model, prompts, c.answer, ends=ends, at_once=c.tokens_per_batch)
            for index, tokens in zip(part, new, strict=True):
                right[index] = _found(tokenizer, samples[index].number, tokens)
            done += len(part)
            longest = len(prompts[-1])
            context.note(f"evaluating {self.declaration.name}: {done:,} of {len(order):,} at {longest:,} tokens")
        return right


def _found(tokenizer: Tokenizer, number: str, new: list[int]) -> bool:
    """Return whether a number is in the text of the new tokens, as far as that goes before end-of-text."""
    end = new.index(tokenizer.end_of_text) if tokenizer.end_of_text in new else len(new)
    return number in tokenizer.decode(new[:end])


def _settled(tokenizer: Tokenizer, number: str, new: list[int]) -> bool:
    """Return whether no further token changes if an answer is right; looks at some lengths only."""
    return len(new) % LOOKS == 0 and (tokenizer.end_of_text in new or _found(tokenizer, number, new))


def _measure(samples: Mapping[tuple[str, int], np.ndarray], parts: int) -> Iterator[Measurement]:
    """Yield the accuracy at each length, and at each length and depth: of answers [N, 2], right or not and part."""
    for (data, length), answers in samples.items():
        where = {"length": float(length)}
        yield _accuracy(TASK, answers[:, 0], where, data)
        for part in np.unique(answers[:, 1]).astype(int).tolist():
            low, high = (100 * edge / parts for edge in (part, part + 1))
            own, place = answers[answers[:, 1] == part, 0], where | {"depth": (low + high) / 200}
            yield _accuracy(f"depth {low:.3g} to {high:.3g} %", own, place)


def _accuracy(subset: str, right: np.ndarray, place: dict[str, float], data: str | None = None) -> Measurement:
    value, n = float(right.mean()), len(right)
    error = answers_error(value, n)
    return Measurement(subset=subset, metric="accuracy", value=value, n=n, stderr=error, axis=place, data=data)
