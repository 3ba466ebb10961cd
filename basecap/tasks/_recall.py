"""Shared by the families of associative recall: positions of queries, size checks, and the lookup of answers."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from basecap.errors import ConfigError
from basecap.tasks._contract import Answers, TaskConfig
from basecap.tasks._draws import ExampleDraws, Ints
from basecap.tasks._instances import Canvas, Role


class RecallConfig(TaskConfig):
    """Options of every task with key-value pairs and queries."""

    pairs: int = Field(4, ge=1, le=2**19, description="key-value pairs of an example; each key is queried once")
    vocab: int = Field(
        20_000, ge=4, le=2**24, description="number of keys and values: the lower part are keys, the upper part values"
    )
    power: float = Field(
        0.01, gt=0, le=4, description="exponent a of the query gaps, p(g) proportional to g**(a-1); 1: uniform"
    )


class FilledConfig(RecallConfig):
    """Options of tasks with a choice of filler."""

    empty: Literal["random", "zeros"] = Field("random", description="filler between pairs and queries")


def power_law(slots: int, power: float) -> NDArray[np.float64]:
    """Return the relative probabilities of query slots 1, 2, ...: float64 [slots]."""
    return np.arange(1, slots + 1, dtype=np.float64) ** (power - 1)


def need_room(pairs: int, fit: int, length: int) -> None:
    """Raise ConfigError if only `fit` pairs and their queries fit into `length` tokens."""
    if pairs > fit:
        raise ConfigError(
            f"a length of {length} has room for {max(fit, 0)} of {pairs} pairs; lower pairs or raise length."
        )


def need_tokens(pairs: int, words: int, what: str, vocab: int) -> None:
    """Raise ConfigError if a vocabulary of `vocab` has only `words` < `pairs` different `what`."""
    if pairs > words:
        raise ConfigError(
            f"a vocabulary of {vocab} has {max(words, 0)} of the {pairs} {what} needed; raise vocab or lower pairs."
        )


def followers(inputs: Ints, asked: Ints, width: int = 1) -> Answers:
    """Return the tokens after each earlier occurrence of the `width` tokens that end at a scored position.

    Occurrences in queries are left out, because no answer follows them in the input.
    """
    tokens, queries = inputs.tolist(), set(asked.tolist())
    found: dict[tuple[int, ...], list[int]] = {}
    for end in range(width - 1, len(tokens)):
        found.setdefault(tuple(tokens[end - width + 1 : end + 1]), []).append(end)
    return {
        place: frozenset(
            tokens[end + 1]
            for end in found[tuple(tokens[place - width + 1 : place + 1])]
            if end < place and end not in queries
        )
        for place in sorted(queries)
    }


def query_places(draws: ExampleDraws, config: RecallConfig, context: int, width: int) -> Ints:
    """Return the start of each query, in slots of `width` tokens after the context: int64 [N, P]."""
    slots = (config.length - context) // width
    return context + width * draws.slots("queries", config.pairs, slots, power_law(slots, config.power))


def write_filler(draws: ExampleDraws, canvas: Canvas, config: FilledConfig, tokens: range, keys: Ints) -> None:
    """Write filler to all positions: zeros, or random ones of `tokens`, in clean mode without the example's keys."""
    if config.empty == "zeros":
        canvas.inputs.fill(0)
    else:
        avoid = keys if config.mode == "clean" else None
        canvas.inputs[:] = draws.tokens("filler", canvas.inputs.shape[1], tokens.start, tokens.stop, avoid)


def write_pairs(canvas: Canvas, starts: Ints, keys: Ints, values: Ints) -> None:
    """Write keys at `starts` and values after them, each [N, P]."""
    numbers = np.arange(keys.shape[1])
    canvas.write(starts, keys, Role.KEY, numbers)
    canvas.write(starts + 1, values, Role.VALUE, numbers)


def queries(draws: ExampleDraws, canvas: Canvas, config: RecallConfig, context: int, keys: Ints, values: Ints) -> None:
    """Write a query for each key, in a slot of two tokens after the context, with its value as the target."""
    places = query_places(draws, config, context, 2)
    numbers = np.arange(config.pairs)
    canvas.write(places, keys, Role.QUERY, numbers)
    canvas.ask(places, values, numbers)
