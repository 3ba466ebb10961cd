"""At which evaluation points of a run an evaluation runs: the option `at` of evaluations and `--at`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from basecap.errors import ConfigError
from basecap.system.yaml_text import parse_yaml, read_number


def _at(value: Any) -> Any:
    """Validate the option `at`: return "every", "end" or a tuple of tokens, else raise ValueError."""
    if value in ("every", "end"):
        return value
    counts = [read_number(count) for count in (value if isinstance(value, list | tuple) else [value])]
    if counts and all(isinstance(count, int | float) and count > 0 and count % 1 == 0 for count in counts):
        return tuple(map(int, counts))
    raise ValueError("should be every, end or a list of tokens, such as [1000000]")


#: The evaluation points at which an evaluation runs: every one, the end of a run, or the nearest to numbers of tokens.
At = Annotated[Literal["every", "end"] | tuple[int, ...], BeforeValidator(_at)]


def includes(at: At, tokens: int, points: Sequence[int]) -> bool:
    """Whether an evaluation runs at the evaluation point after `tokens` tokens, one of `points`, ascending.

    >>> [tokens for tokens in (100, 200, 300) if includes((180, 210, 1000), tokens, (100, 200, 300))]
    [200, 300]
    """
    if isinstance(at, str):
        return at == "every" or tokens == points[-1]
    return tokens in [nearest_point(count, points) for count in at]


def nearest_point(tokens: int, points: Sequence[int]) -> int:
    """Return the evaluation point of `points` that is nearest to `tokens`, the earlier of two."""
    return min(points, key=lambda point: (abs(point - tokens), point))


def parse_at(text: str) -> At:
    """Return the evaluation points that `--at` names; raises ConfigError.

    >>> parse_at("end"), parse_at("1e6")
    ('end', (1000000,))
    """
    try:
        at: At = _at(parse_yaml(text))
    except ValueError as error:
        raise ConfigError(f"--at {text!r} should be every, end or a number of tokens.") from error
    return at
