"""The prepared text of a study, without what trains on it."""

from pathlib import Path

from basecap.data import PreparedData, prepare
from basecap.study.config import StudyConfig


def data_of(study: StudyConfig, out: Path) -> PreparedData:
    """Return the prepared data of the study in `out`, preparing what is missing; raises DataError."""
    return prepare(study.data, cache_of(study, out))


def cache_of(study: StudyConfig, out: Path) -> Path:
    """Return where the prepared data of the study in `out` stands."""
    return Path(study.data.cache) if study.data.cache else out / "data"
