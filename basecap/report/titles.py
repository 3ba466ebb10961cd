"""The titles of the studies in a report."""

from collections.abc import Sequence
from pathlib import Path

from basecap.analysis.results import StudyResults
from basecap.names import at_scale


def titles(studies: Sequence[StudyResults], paths: Sequence[Path]) -> list[str]:
    """Return each study's name with its scale, and its directory too where another has the same name."""
    names = [at_scale(study.name, study.scale) for study in studies]
    named = zip(names, paths, strict=True)
    return [name if names.count(name) == 1 else f"{name} ({path})" for name, path in named]
