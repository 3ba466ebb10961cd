"""YAML text to values: fast, with duplicate keys and huge expansions refused."""

import contextlib
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

#: Largest number of values in a YAML text, with every alias expanded.
LARGEST_YAML = 100_000


class _Checks(Composer):
    """Refuses two things that PyYAML accepts: duplicate keys, and aliases that expand to millions of values."""

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            self._size(node, {})
        return node

    def _size(self, node: yaml.Node, known: dict[int, int]) -> int:
        """Return the number of values in a node; raises MarkedYAMLError for too many, and for a node inside itself."""
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) not in known:
            known[id(node)] = LARGEST_YAML + 1  # until it is counted, so that a node inside itself is too large
            children = [child for pair in node.value for child in (pair if isinstance(pair, tuple) else (pair,))]
            size = 1 + sum(self._size(child, known) for child in children)
            if size > LARGEST_YAML:
                problem = f"it has more than {LARGEST_YAML:,} values, aliases expanded"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
            known[id(node)] = size
        return known[id(node)]

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node


class _Merges(SafeConstructor):
    """Merges mappings (`<<`) so that a key that replaces a merged one is passed on when its mapping is merged in turn.

    PyYAML 6.0.4 passes on the replaced one where the two are the same string object.
    """

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        last = {
            (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key): (key, value)
            for key, value in node.value
        }
        node.value = list(last.values())


class _Loader(_Checks, _Merges, yaml.SafeLoader):
    """Reads text in Python."""


_Fast: Any = None

if yaml.__with_libyaml__:
    from yaml.cyaml import CParser

    class _FastLoader(_Checks, CParser, _Merges, Resolver):
        """Parses with libyaml, which is five times as fast, and composes in Python.

        yaml.CSafeLoader also composes in C, where deep nesting ends the process.
        """

        def __init__(self, stream: str):
            CParser.__init__(self, stream)
            Composer.__init__(self)
            _Merges.__init__(self)
            Resolver.__init__(self)

    _Fast = _FastLoader


def read_number(value: Any) -> Any:
    """Convert text such as "1e9", which YAML reads as text, to a number; ValueError for booleans; others stay."""
    if isinstance(value, bool):
        raise ValueError("should be a number, not true or false")
    if isinstance(value, str):
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(value)
    return value


def parse_yaml(text: str | bytes) -> Any:
    """Return the content of a YAML text; raises ValueError with the end of a sentence, such as "is not valid YAML"."""
    try:
        content = text if isinstance(text, str) else text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("is not text in UTF-8") from error
    if _Fast is not None:
        with contextlib.suppress(Exception):  # the Python loader says what is wrong, more clearly than libyaml
            return yaml.load(content, _Fast)
    try:
        return yaml.load(content, _Loader)
    except Exception as error:  # an invalid date raises ValueError
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        deep = "values are nested too deeply" if isinstance(error, RecursionError) else None
        reason = str(deep or getattr(error, "problem", None) or error).partition("\n")[0].partition(";")[0]
        raise ValueError(f"is not valid YAML{where} ({reason})") from error
