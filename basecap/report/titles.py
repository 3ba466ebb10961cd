"""What studies are called that stand in one report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def titles(studies: Sequence[dict[str, Any]], paths: Sequence[Path]) -> list[str]:
    """Return each study's name, and its directory too where another has the same name.

    >>> titles([{"name": "zoo"}, {"name": "zoo"}], [Path("runs/first"), Path("runs/second")])
    ['zoo (runs/first)', 'zoo (runs/second)']
    """
    names = [study["name"] for study in studies]
    named = zip(names, paths, strict=True)
    return [name if names.count(name) == 1 else f"{name} ({path})" for name, path in named]
