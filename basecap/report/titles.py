"""What studies are called that stand in one report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from basecap.names import at_scale


def titles(studies: Sequence[dict[str, Any]], paths: Sequence[Path]) -> list[str]:
    """Return each study's name with its scale, and its directory too where another is called the same.

    >>> alone = {"name": "zoo", "scale": None}
    >>> titles([alone, alone], [Path("runs/first"), Path("runs/second")])
    ['zoo (runs/first)', 'zoo (runs/second)']
    >>> titles([alone, {"name": "zoo", "scale": "laptop"}], [Path("runs/first"), Path("runs/second")])
    ['zoo', 'zoo at scale laptop']
    """
    names = [at_scale(study["name"], study["scale"]) for study in studies]
    named = zip(names, paths, strict=True)
    return [name if names.count(name) == 1 else f"{name} ({path})" for name, path in named]
