"""At which points an evaluation runs."""

import pytest

from basecap.errors import ConfigError
from basecap.records.evaluation_points import includes, parse_at


@pytest.mark.parametrize(
    ("text", "at"),
    [("every", "every"), ("end", "end"), ("1e6", (1_000_000,)), ("[10, 2.0e3]", (10, 2000)), ("512", (512,))],
)
def test_points_are_words_or_tokens(text: str, at: object):
    assert parse_at(text) == at


@pytest.mark.parametrize("text", ["never", "0", "-5", "1.5", "[]", "[10, end]", "true", "{a: 1}", "[", ""])
def test_other_points_are_refused(text: str):
    with pytest.raises(ConfigError, match=r"^--at .* should be every, end or a number of tokens\.$"):
        parse_at(text)


@pytest.mark.parametrize(
    ("at", "included"),
    [
        ("every", [True, True, True]),
        ("end", [False, False, True]),
        ((20,), [False, True, False]),
        ((7,), [True, False, False]),
    ],
)
def test_an_evaluation_runs_where_it_says(at, included: list[bool]):
    assert [includes(at, tokens, (10, 20, 30)) for tokens in (10, 20, 30)] == included
